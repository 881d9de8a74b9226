"""Commands started in a folder with packages of the same names: one sentence, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MEND = "run from another folder, or with `python -P -m rl.train …`"


def started_in(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("file", ["spec/__init__.py", "models.py"])
def test_a_foreign_package_is_named_in_one_sentence(file, tmp_path):
    foreign = tmp_path / file
    foreign.parent.mkdir(exist_ok=True)
    foreign.touch()
    done = started_in(tmp_path, "-m", "rl.train", "--list", "Run")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert f"got {foreign}, which comes first" in done.stderr and str(ROOT) in done.stderr
    assert MEND in done.stderr
    done = started_in(tmp_path, "-c", "import rl.trajectory")
    assert "ImportError: expected Reprise's package" in done.stderr
    assert started_in(tmp_path, "-P", "-m", "rl.train", "--list", "Run").returncode == 0, "the mend"


def test_folders_that_are_no_packages_are_in_nobodys_way(tmp_path):
    (tmp_path / "models").mkdir()
    assert started_in(tmp_path, "-m", "rl.train", "--list", "Run").returncode == 0
