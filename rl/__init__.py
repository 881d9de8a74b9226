"""The training loop, the rollout engine and the commands, on `models`, `spec` and `sched`."""

import importlib.util
import os
import re
import signal
import sys
from pathlib import Path
from types import FrameType

import sched

__version__ = "0.1.0"

_HOME = Path(__file__).resolve().parents[1]
# The standard library has a module of this name, which comes first unless a checkout is on the
# path before it. It keeps all of its names, and its submodules come from our folder.
sched.__path__ = [str(_HOME / "sched")]


def _check_packages() -> None:
    """Raise ImportError if another project's `models` or `spec` comes first on the path."""
    for name in ("models", "spec"):
        spec = importlib.util.find_spec(name)
        folders = [] if spec is None else spec.submodule_search_locations or []
        if _HOME / name not in (Path(folder).resolve() for folder in folders):
            got = "none" if spec is None else spec.origin or ", ".join(folders)
            raise ImportError(
                f"expected Reprise's package {name!r} in {_HOME}, got {got}, which comes first on "
                "the import path; mend: run from another folder, or with "
                "`python -P -m rl.train …`, which leaves the current folder off the path",
                name="rl",  # `python -m` then prints one line
            )


def _stop(number: int, frame: FrameType | None) -> None:
    """End a command in one line; libraries would swallow a KeyboardInterrupt of their callbacks."""
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"stopped\n")
    os._exit(128 + number)


def _is_command() -> bool:
    """Return whether `python -m rl.COMMAND` is starting, which locates this package first."""
    return sys.argv[:1] == ["-m"] and any(re.fullmatch(r"rl\.\w+", x) for x in sys.orig_argv)


if _is_command():
    signal.signal(signal.SIGINT, _stop)
_check_packages()
