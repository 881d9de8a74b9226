"""Who runs where and when: schedulers as pure state machines.

No jax, no clock, no I/O, no threads: the time is an argument, decisions are
return values, so a simulator and a real rollout can drive the same objects.

The standard library has a module of this name. `_reprise_sched.py` makes this
package win; code that wanted the other one finds its public names here too.
"""

__all__ = ["Event", "scheduler"]


def __getattr__(name: str) -> object:
    """`scheduler` and `Event` of the standard module, loaded when first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Executed under its own name but not registered: what it defines pickles as `sched.…`.
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec
    from sysconfig import get_path

    spec = PathFinder.find_spec("sched", [get_path("stdlib")])
    if spec is None or spec.loader is None:
        raise AttributeError(
            f"sched.{name}: expected the standard module sched in {get_path('stdlib')}, got none; "
            "mend: use a Python with a complete standard library"
        )
    standard = module_from_spec(spec)
    spec.loader.exec_module(standard)
    globals().update(scheduler=standard.scheduler, Event=standard.Event)
    return globals()[name]
