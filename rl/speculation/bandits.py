"""The bandits of a run with `Speculation.budget = "bandit"`, one for each worker."""

from __future__ import annotations

import collections
import re
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from reprise.rl.speculation.device_drafters import DeviceDrafters, LearnedDrafter
from reprise.sched.request import copy_of
from reprise.spec.budget.bandit import BanditBudget, BegMab, make_bandit
from reprise.spec.budget.config import LEARNED, TunerConfig
from reprise.spec.budget.union import DrafterUnion
from reprise.spec.round_times import RoundTimes

MAX_WORKERS = 2**16


class Bandits:
    """A bandit for each worker. Any thread may call it.

    `drafters` run on the devices of the verifying workers.
    """

    def __init__(
        self, sources: tuple[str, ...], drafters: DeviceDrafters, tuner: TunerConfig, seed: int
    ) -> None:
        self._deepest = {name: drafter.max_depth for name, drafter in drafters.items()}
        learned = drafters.get(LEARNED)
        self._top_k = learned.tree.top_k if isinstance(learned, LearnedDrafter) else 0
        self._sources = sources
        self._tuner = tuner
        self._seed = seed
        self._by_worker: dict[int, BegMab] = {}
        self._lock = threading.Lock()

    def of(self, worker: int) -> BegMab:
        """Return the bandit of a worker."""
        with self._lock:
            if worker not in self._by_worker:
                seed = self._seed * MAX_WORKERS + worker
                self._by_worker[worker] = make_bandit(
                    self._tuner, self._sources, self._top_k, self._deepest, seed
                )
            return self._by_worker[worker]

    def budget(self, worker: int, times: RoundTimes, drafters: DrafterUnion) -> BanditBudget:
        """Return the budget of one worker for one rollout."""
        bandit = self.of(worker)
        return BanditBudget(
            bandit, times, drafters, self._deepest, is_copy=lambda r: copy_of(r)[1] > 0
        )

    def state(self) -> dict[str, Any]:
        """Return the state of all bandits, for a checkpoint."""
        return {str(worker): bandit.state() for worker, bandit in self._by_worker.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for worker, saved in state.items():
            self.of(int(worker)).load_state(saved)

    def metrics(self) -> dict[str, float]:
        """Return the choices of bandits since the last call, and their median rewards."""
        chosen = collections.Counter[str]()
        rewards = dict[str, list[float]]()
        for bandit in self._by_worker.values():
            chosen += bandit.take_chosen()
            for arm, values in bandit.rewards().items():
                rewards.setdefault(arm, []).extend(values)
        shares = {f"bandit/{_tag(a)}/share": n / chosen.total() for a, n in chosen.items()}
        medians = {f"bandit/{_tag(a)}/tokens_per_s": np.median(v) for a, v in rewards.items()}
        return shares | {name: float(value) for name, value in medians.items()}


def _tag(arm: str) -> str:
    """Return the name of an arm as part of a metric name, without the paths of user files."""
    return re.sub(r"[^+ ]*\.py:", "", arm).replace(" ", "_")
