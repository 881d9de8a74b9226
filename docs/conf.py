"""Settings of the documentation site; `make docs` builds it, and every warning is an error."""

import shutil
from pathlib import Path

project = "Reprise"
author = "The Reprise authors"
copyright = author

HERE = Path(__file__).parent
# pages are below the folder of this file; notebooks are shown with their stored outputs
shutil.copytree(HERE.parent / "notebooks", HERE / "_notebooks", dirs_exist_ok=True)
extensions = ["myst_nb"]
nb_execution_mode = "off"
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "Reprise"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
myst_heading_anchors = 3  # links to #headings are checked down to this depth
nitpicky = True
