"""Schedulers by name: the policies of `sched`, or a user's `PATH.py:NAME`."""

from __future__ import annotations

from typing import Protocol

from reprise.rl.runtime.user_files import make_once, open_named
from reprise.sched.policies import divided
from reprise.sched.policies.divided import POLICIES, PreferPool
from reprise.sched.protocol import Scheduler

SETTING = "Sched.policy"


class MakeScheduler(Protocol):
    """A class of schedulers, or a function that makes one, for a rollout.

    `prefer_pool` returns whether to copy a number of tokens rather than compute them again.
    """

    def __call__(self, *, seed: int, chunk_tokens: int, prefer_pool: PreferPool) -> Scheduler: ...


NO_SCHEDULERS: dict[str, MakeScheduler] = {}


def make_scheduler(
    name: str,
    *,
    seed: int,
    chunk_tokens: int,
    prefer_pool: PreferPool,
    ranks_per_instance: int = 1,
    setting: str = SETTING,
) -> Scheduler:
    """Return a new scheduler for one rollout. Raises ValueError or FileNotFoundError.

    `setting` is named in errors; `ranks_per_instance` is for `group_fifo`, in simulations.
    """
    if name in POLICIES:
        return divided.make_scheduler(
            name,
            seed=seed,
            chunk_tokens=chunk_tokens,
            prefer_pool=prefer_pool,
            ranks_per_instance=ranks_per_instance,
        )
    make = open_named(setting, name, NO_SCHEDULERS, MakeScheduler)
    return make(seed=seed, chunk_tokens=chunk_tokens, prefer_pool=prefer_pool)


def check_scheduler(name: str, setting: str = SETTING) -> None:
    """Make a scheduler of a user, and check that it has the methods of `Scheduler`.

    Raises ValueError or FileNotFoundError.
    """
    make = open_named(setting, name, NO_SCHEDULERS, MakeScheduler)
    make_once(
        setting, name, make, Scheduler, seed=0, chunk_tokens=1, prefer_pool=lambda tokens: True
    )
