"""Puts Reprise's package `sched` before the standard module of that name.

`reprise-sched.pth` imports this file whenever the interpreter starts, so it
must cost next to nothing and must never fail, not even when the checkout of an
editable install is gone: then nothing is found and the standard module serves.

A folder of `sys.path` is ours if this file lies beside `sched/`. The first such
folder wins, as it does for `models`, `spec` and `rl`: never half of two
checkouts.
"""

import os
import sys


def _is_ours(folder: object) -> bool:
    if not isinstance(folder, str):
        return False
    here = os.path.isfile(os.path.join(folder, "_reprise_sched.py"))
    return here and os.path.isfile(os.path.join(folder, "sched", "__init__.py"))


class SchedFinder:
    """A meta-path finder that answers for the top-level name `sched` only."""

    @staticmethod
    def find_spec(fullname, path=None, target=None):
        if fullname != "sched":
            return None
        from importlib.machinery import PathFinder

        for folder in sys.path:
            if _is_ours(folder):
                return PathFinder.find_spec("sched", [folder])
        return None


def install() -> None:
    """Registers the finder, and forgets the standard module if it was imported already."""
    sys.meta_path.insert(0, SchedFinder)
    loaded = sys.modules.get("sched")
    if loaded is not None and not hasattr(loaded, "__path__"):
        del sys.modules["sched"]


install()
