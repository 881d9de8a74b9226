"""Schedulers as pure state machines: which request runs on which worker, and when.

No jax, no clock, no I/O, no threads: the time is an argument, decisions are return values, so
that a simulator and a real rollout drive the same objects.

The standard library has a module of this name. An installed Reprise extends that module by
this folder (`_reprise_sched.py`), and this file is not run. In a checkout that is not installed
this folder comes first on the import path: then the standard module is executed here, so that
every name of it is there as well, and pickles as `sched.…`.
"""

import sys
from importlib.machinery import PathFinder
from sysconfig import get_path

_standard = PathFinder.find_spec("sched", [get_path("stdlib")])
if _standard is None or _standard.loader is None:
    raise ImportError(
        f"expected the standard module sched in {get_path('stdlib')}, got none; "
        "mend: use a Python with a complete standard library"
    )
_standard.loader.exec_module(sys.modules[__name__])
