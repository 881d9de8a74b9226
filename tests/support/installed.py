"""Virtual environments that hold a wheel of this project, and programs run in them."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path


def install_into(folder: Path, wheel: Path, python: str = sys.executable) -> Path:
    """Return the Python of a fresh virtual environment that holds `wheel` and nothing else."""
    subprocess.run([python, "-m", "venv", "--without-pip", "--symlinks", folder], check=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site_packages(folder))
    return folder / "bin" / "python"


def site_packages(folder: Path) -> Path:
    (found,) = folder.glob("lib/python*/site-packages")
    return found


def execute(command: list[str | Path], cwd: Path) -> str:
    """Return the standard output of a command that must succeed and complain of nothing."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST"))}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr, done.stderr
    return done.stdout.strip()
