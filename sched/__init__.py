"""Schedulers as pure state machines: they assign requests to workers over time.

The time is an argument and decisions are return values, so that a simulator and a real rollout
drive the same objects. The standard library has a module of this name, and `import rl` adds our
submodules to it. This file runs only in a checkout, and executes the standard module.
"""

import sys
from importlib.machinery import PathFinder
from sysconfig import get_path

_standard = PathFinder.find_spec("sched", [get_path("stdlib")])
assert _standard is not None and _standard.loader is not None, "the standard library has no sched"
_standard.loader.exec_module(sys.modules[__name__])
