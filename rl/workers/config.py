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

    `mode` is `sync` (the policy that generates a response also learns from it), `ahead` (like
    `sync`, but idle workers start the next step early, and its weights verify the early tokens), or
    `pipeline` (workers generate a step while the trainer learns from the previous step, with
    weights one update old).

    In `sync` mode with one worker, rollouts run on the trainer's devices. Otherwise each worker has
    `devices_per_worker` devices; `ahead` and `pipeline` use the last devices. Single-device workers
    share devices if there are too few. The requests on a worker take at most `kv_tokens` positions
    (None: enough for all slots). Between chunks, the host keeps at most `pool_bytes` of keys and
    values.

    `policy` is `group_fifo`, `divided_fifo`, `seer`, `histopipe` (with mode = "pipeline") or
    `PATH.py:NAME` (docs/add_a_scheduler.md). With `histopipe`, workers serve `ranking_groups`
    groups of prompts, ranked by the lengths of the last epoch, and start the next step without
    waiting. With more workers than groups, `allocation` assigns workers to groups by `measured`
    round times, or in `even` shares.
    """

    mode: Mode = "sync"
    policy: Policy | UserName = "seer"
    workers: int = 1
    devices_per_worker: int = 1
    chunk_tokens: int = 512
    kv_tokens: int | None = None
    pool_bytes: int = 2**33
    ranking_groups: int = 8
    allocation: Allocation = "measured"
    on_error: OnError = "stop"  # or restart: requests of a failed or hung worker move to others

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
