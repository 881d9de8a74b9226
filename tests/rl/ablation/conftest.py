"""A grid of two variants and two seeds of the smallest run."""

import pytest

from tests.support import tiny_run

GRID = """
Ablation.variants = (
    ("plain", ()),
    ("lenient 1", ("Reuse.mode = 'lenient:1'",)),
)
Ablation.seeds = (0, 3)
"""


@pytest.fixture
def grid(tmp_path):
    base = tiny_run.make_inputs(tmp_path)
    path = tmp_path / "grid.gin"
    path.write_text(f"include '{base}'\n{GRID}")
    return path
