"""Training, its engine and its commands, on `models`, `spec` and `sched` of the same folder."""

import importlib.util
from pathlib import Path

import _reprise_sched  # noqa: F401  extends `sched` where the start-up files were not run

__version__ = "0.1.0"


def _check_packages() -> None:
    """Raise ImportError where another project's package stands before one of ours.

    The names are short, and `python -m` puts the current folder first.
    """
    home = Path(__file__).resolve().parents[1]
    for name in ("models", "spec", "sched"):
        spec = importlib.util.find_spec(name)
        folders = [] if spec is None else spec.submodule_search_locations or []
        if home / name not in (Path(folder).resolve() for folder in folders):
            got = "none" if spec is None else spec.origin or ", ".join(folders)
            raise ImportError(
                f"expected Reprise's package {name!r} in {home}, got {got}, which comes first on "
                "the import path; mend: run from another folder, or with "
                "`python -P -m rl.train …`, which leaves the current folder off the path",
                name="rl",  # `python -m` then says this in one line
            )


_check_packages()
