"""Commands that error messages suggest, to install a package or to download a folder."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

DISTRIBUTION = "reprise-rl"  # not on any package index
_ROOT = Path(__file__).resolve().parents[1]
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)  # OWNER/NAME


def program(name: str, root: Path = _ROOT) -> str:
    """Return the command for a program: `python -m rl.NAME` in a checkout, else `reprise NAME`."""
    if (root / "pyproject.toml").is_file():
        return f"python -m rl.{name}"
    return f"reprise {name}"


def install_hint(extra: str, root: Path = _ROOT) -> str:
    """Return the command that installs the packages of an extra, in a checkout or from a wheel."""
    if not (root / "pyproject.toml").is_file():  # a wheel names the packages of its extras
        try:
            lines = importlib.metadata.requires(DISTRIBUTION) or ()
        except importlib.metadata.PackageNotFoundError:
            lines = ()
        named = re.compile(rf"""extra == ['"]{extra}['"]""")
        if needs := [line.partition(";")[0].strip() for line in lines if named.search(line)]:
            return f"pip install {' '.join(map(repr, needs))}"
    return f"pip install -e '.[{extra}]'"


def download_hint(path: str | Path, *, is_dataset: bool = False) -> str:
    """Return the command that downloads OWNER/NAME from the hub of Hugging Face, else ""."""
    name = str(path)
    if not _HUB_NAME.fullmatch(name) or Path(name).parent.is_dir():
        return ""
    kind = "--repo-type dataset " * is_dataset
    return f"hf download {name} {kind}--local-dir downloads/{Path(name).name}"
