"""Training, its engine and its commands, on `models`, `spec` and `sched` of the same checkout."""

import importlib.util
from pathlib import Path


def _check_packages() -> None:
    """Raise ImportError where another project's package stands before one of ours.

    The names are short, and `python -m` puts the current folder first.
    """
    home = Path(__file__).resolve().parents[1]
    for name in ("models", "spec", "sched"):
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:
            raise ImportError(f"expected Reprise's package {name} in {home}, got none", name="rl")
        if Path(found.origin).resolve() != home / name / "__init__.py":
            raise ImportError(
                f"expected Reprise's package {name!r} in {home}, got {found.origin}, which comes "
                "first on the import path; mend: run the command from another folder",
                name="rl",  # `python -m` then says this in one line
            )


_check_packages()
