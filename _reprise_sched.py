"""Extends the standard module `sched` by the modules of Reprise's package of that name.

Both win: `import sched` gives the standard module with every name that it has, and
`sched.protocol`, `sched.policies` and `sched.simulator` come from Reprise's folder.

`reprise-sched.pth` imports this file whenever the interpreter starts; from Python 3.15 on,
`reprise-sched.start` calls `install` (PEP 829). It must cost next to nothing and must never
fail, not even when the checkout of an editable install is gone: then there is no folder, and
the standard module is left as it is.

A folder of `sys.path` is Reprise's if this file lies there beside `sched/`. The first such
folder wins, as it does for `models`, `spec` and `rl`: never half of two checkouts.
"""

import os
import sys

PACKAGES = ("models", "spec", "sched", "rl")


def _home() -> str | None:
    """Return the first folder of the import path that is Reprise's, or None."""
    for folder in sys.path:
        if (
            isinstance(folder, str)
            and os.path.isfile(os.path.join(folder, "_reprise_sched.py"))
            and os.path.isfile(os.path.join(folder, "sched", "__init__.py"))
        ):
            return os.path.abspath(folder)
    return None


class SchedFinder:
    """A meta-path finder of one name: the standard module `sched`, with a folder of submodules."""

    @staticmethod
    def find_spec(fullname, path=None, target=None):
        home = _home() if fullname == "sched" else None
        if home is None:
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec("sched", [os.path.dirname(os.__file__)])
        if spec is not None:
            spec.submodule_search_locations = [os.path.join(home, "sched")]
        return spec


class ShadowFinder:
    """The last finder: where a module of ours was not found, it names what stands before it."""

    @staticmethod
    def find_spec(fullname, path=None, target=None):
        top, *rest = fullname.split(".")
        home = _home() if rest and top in PACKAGES else None
        if home is None:
            return None
        ours, file = os.path.join(home, top), os.path.join(home, top, *rest)
        exists = os.path.isfile(file + ".py") or os.path.isfile(os.path.join(file, "__init__.py"))
        found = [os.path.abspath(folder) for folder in path or () if isinstance(folder, str)]
        if not exists or os.path.join(ours, *rest[:-1]) in found:
            return None
        raise ModuleNotFoundError(
            f"expected Reprise's package {top!r} in {home}, got {', '.join(found)}, which comes "
            "first on the import path; mend: run from another folder, or with "
            "`python -P -m rl.train …`, which leaves the current folder off the path",
            name=top,
        )


def install() -> None:
    """Register the finders, and extend the standard module if it was imported already."""
    if SchedFinder not in sys.meta_path:
        sys.meta_path.insert(0, SchedFinder)
        sys.meta_path.append(ShadowFinder)
    loaded = sys.modules.get("sched")
    if loaded is not None and not hasattr(loaded, "__path__"):
        spec = SchedFinder.find_spec("sched")
        if spec is not None:
            loaded.__path__ = spec.submodule_search_locations
            loaded.__spec__, loaded.__package__ = spec, "sched"


install()
