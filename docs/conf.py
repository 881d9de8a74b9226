"""Settings of the documentation site; `make docs` builds it, and every warning is an error."""

project = "Reprise"
author = "The Reprise authors"
copyright = author

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "Reprise"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
myst_heading_anchors = 3  # links to #headings are checked down to this depth
nitpicky = True
