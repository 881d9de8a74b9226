"""Configuration of rollout workers and their scheduler (section `Sched`)."""

from __future__ import annotations

import dataclasses
import typing
from typing import Literal

from reprise.rl.runtime.user_files import UserName, check_name

Mode = Literal["sync", "pipeline", "ahead"]
Policy = Literal["group_fifo", "divided_fifo", "seer", "histopipe"]  # not oracle: it looks ahead
OnError = Literal["stop", "restart"]
Allocation = Literal["measured", "even"]


@dataclasses.dataclass(frozen=True)
class SchedConfig:
    """Rollout workers and their scheduler, which never change the tokens that a policy generates.

    In `sync` mode with one worker, rollouts run on the trainer's devices. Otherwise each worker has
    separate devices; `ahead` and `pipeline` use the last devices. Single-device workers share
    devices if there are too few.
    """

    mode: Mode = "sync"
    """`sync` (the policy that generates a response also learns from it), `ahead` (like `sync`, but
    idle workers start the next step early, and its weights verify the early tokens), or `pipeline`
    (workers generate a step while the trainer learns from the previous step, with weights one
    update old)."""
    policy: Policy | UserName = "seer"
    """The scheduler: `group_fifo`, `divided_fifo`, `seer`, `histopipe` (with `mode = "pipeline"`)
    or `PATH.py:NAME` (docs/add_a_scheduler.md)."""
    workers: int = 1
    """The number of rollout workers."""
    devices_per_worker: int = 1
    """The number of devices of each worker."""
    chunk_tokens: int = 512
    """Tokens that a request generates before the scheduler may move it."""
    kv_tokens: int | None = None
    """The maximum number of cache positions of the requests on a worker; None: enough for all
    slots."""
    pool_bytes: int = 2**33
    """Host memory for keys and values between chunks."""
    ranking_groups: int = 8
    """With `histopipe`: the number of groups of prompts, ranked by the lengths of the last epoch.
    Workers that finish a step start the next without waiting."""
    allocation: Allocation = "measured"
    """With `histopipe` and more workers than groups: assign workers to groups by `measured` round
    times, or in `even` shares."""
    on_error: OnError = "stop"
    """If a worker fails or hangs, `stop` the run, or `restart` its requests on other workers."""

    def __post_init__(self) -> None:
        check_name("policy", self.policy, typing.get_args(Policy))
        hints = {"mode": Mode, "allocation": Allocation, "on_error": OnError}
        for field, hint in hints.items():
            known = typing.get_args(hint)
            value = getattr(self, field)
            if value not in known:
                raise ValueError(f"expected {field} of {', '.join(known)}, got {value!r}")
        if self.policy == "histopipe" and self.mode != "pipeline":
            raise ValueError(
                "policy 'histopipe' lets workers run into the next step: set Sched.mode = "
                f'"pipeline", got {self.mode!r}'
            )
        if min(self.workers, self.devices_per_worker, self.chunk_tokens, self.ranking_groups) < 1:
            raise ValueError(
                "expected at least one worker, device, token of a chunk and ranking group, got "
                f"{self.workers}, {self.devices_per_worker}, {self.chunk_tokens} and "
                f"{self.ranking_groups}"
            )

    @property
    def beside_training(self) -> bool:
        """True if workers run during updates, on separate devices if there are enough."""
        return self.mode != "sync"

    @property
    def has_trainer_devices(self) -> bool:
        """True if one worker of this program runs between updates, on the trainer's devices."""
        return self.mode == "sync" and self.workers == 1

    @property
    def measures_rounds(self) -> bool:
        """True if measured round times decide how many workers each ranking group has."""
        histopipe = self.policy == "histopipe" and self.allocation == "measured"
        return histopipe and self.workers > self.ranking_groups
