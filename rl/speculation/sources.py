"""Speculative rollouts of a training run: which drafters, which budget, and their history.

One step:  phase (drafter and budget for its rollouts)  →  its responses enter the rollout
cache (`rl.speculation.reuse.remember`)  →  prepare (the index of the next step's prompts is built
in a thread while the update runs). Drafts never change a token (in bfloat16: none but by
rounding, docs/architecture.md), so nothing here can change what is learnt.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from rl.engine.rollout_spec import DrafterContext, DrafterFactory, no_drafts
from rl.runtime.waits import Hang, Patience, result_of
from rl.speculation.config import SpeculationConfig
from rl.speculation.device_drafters import NO_DRAFTERS, DeviceDrafters
from rl.trajectory import Prompt
from spec.budget.bandit import BegMab
from spec.budget.bandit_budget import BanditBudget, make_bandit
from spec.budget.budget import Budget
from spec.budget.by_name import make_budget
from spec.budget.config import BANDIT, LEARNED, MODEL, TunerConfig
from spec.budget.union import DrafterUnion
from spec.drafter import Drafter
from spec.retrieval import history
from spec.retrieval.group import DraftServer, GroupDrafter
from spec.retrieval.history import HistoryDrafter, HistoryIndex, build_index
from spec.retrieval.last_response import LastResponseDrafter
from spec.retrieval.ngram import NgramDrafter
from spec.reuse.rollout_cache import RolloutCache
from spec.round_times import RoundTimes

MOST_WORKERS = 2**16


@dataclasses.dataclass(frozen=True, eq=False)
class _Built:
    index: HistoryIndex
    keys: frozenset[str]
    seconds: float


class Speculation:
    """What a run remembers between the phases of its rollouts. Use it as a context manager."""

    def __init__(
        self,
        config: SpeculationConfig,
        cache: RolloutCache,
        drafters: DeviceDrafters = NO_DRAFTERS,
        tuner: TunerConfig | None = None,
        *,
        seed: int = 0,
        patience: Patience | None = None,
    ) -> None:
        asked = {LEARNED: config.learns, MODEL: config.asks_model}
        assert drafters.by_name.keys() == {n for n in asked if asked[n]}, "those that are asked"
        self.config, self.drafters = config, drafters
        self.times: RoundTimes | None = None  # to be set once it is measured
        self._cache, self._patience = cache, patience or Patience()
        self._rule = history.PAPER_RULE if config.history_rule == "histospec" else history.RULE
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="history")
        self._building: Future[_Built] | None = None
        self._used: _Built | None = None  # by the phase that runs, or the last one
        self._tuner, self._seed = tuner or TunerConfig(), seed
        self._bandits: dict[int, BegMab] = {}  # by worker
        self._lock = threading.Lock()

    def phase(
        self,
        keys: Sequence[str],
        prompts: Sequence[Prompt],
        last: Mapping[int, np.ndarray] | None = None,
        *,
        first_group: int = 0,
    ) -> DrafterFactory:
        """A maker of drafters and budgets for one phase: each worker has its own.

        Group first_group + g answers `prompts[g]`, named `keys[g]`. `last` are last epoch's
        responses by request id, where requests may reuse them. All that is built here is shared
        by the drafters: the index of the prompts' history, and what siblings tell one another.
        """
        if not self.config.enabled:
            return no_drafts
        history = None
        if self.keeps_history:
            history = self._history(dict(zip(keys, prompts, strict=True)))
        names = dict(enumerate(keys, first_group))
        return partial(self._drafts, names, last or {}, history, DraftServer())

    def _drafts(
        self,
        names: Mapping[int, str],
        last: Mapping[int, np.ndarray],
        history: _Built | None,
        server: DraftServer,
        context: DrafterContext,
    ) -> tuple[Drafter | None, Budget | None]:
        parts: dict[str, Drafter] = {}
        for source in self.config.sources:
            if source == "last":
                if last:
                    parts[source] = LastResponseDrafter(last)
            elif source == "history":
                assert history is not None
                parts[source] = HistoryDrafter(history.index, names, self._rule)
            elif source == "group":
                tokens = self.config.group_update_tokens
                parts[source] = GroupDrafter(update_tokens=tokens, server=server)
            elif source == "own":
                parts[source] = NgramDrafter()
            else:
                parts[source] = self.drafters.by_name[source].drafter_for(context)
        if not parts:
            return None, None
        union = DrafterUnion(list(parts.values()), list(parts))
        if self.config.budget == BANDIT:
            assert self.times is not None, "a bandit needs the measured seconds of a round"
            return union, BanditBudget(self.bandit(context.runner.number), self.times, union)
        return union, make_budget(self.config.budget, self.times)

    def bandit(self, worker: int) -> BegMab:
        """A worker's tuner."""
        with self._lock:
            if worker not in self._bandits:
                learned = self.drafters.learned
                top_k = 0 if learned is None else learned.tree.top_k
                seed = self._seed * MOST_WORKERS + worker
                self._bandits[worker] = make_bandit(self._tuner, self.config.sources, top_k, seed)
            return self._bandits[worker]

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: what the workers' tuners have learnt."""
        return {"bandits": {str(w): bandit.state() for w, bandit in self._bandits.items()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for worker, learnt in state.get("bandits", {}).items():
            if self.config.budget == BANDIT:
                # older checkpoints hold an arm that there is no more
                kept = [w for w in learnt["windows"] if not w["strategy"].startswith("lookup × ")]
                self.bandit(int(worker)).load_state({**learnt, "windows": kept})

    def history_metrics(self) -> dict[str, float]:
        """What the phase drafted from, and what the cache holds by now."""
        if not self.keeps_history:
            return {}
        assert self._used is not None, "a phase has been"
        return {
            "spec/history_bytes": float(self._cache.num_bytes),
            "spec/history_index_tokens": float(self._used.index.num_tokens),
            "spec/history_index_seconds": self._used.seconds,
        }

    def prepare(self, next_prompts: Mapping[str, Prompt]) -> None:
        """Start on the index of the next step, whose prompts are given by key."""
        self._building = self._thread.submit(self._build, dict(next_prompts))

    def settle(self) -> None:
        """Wait until nothing reads the cache any more."""
        self._built()

    def __enter__(self) -> Speculation:
        return self

    def __exit__(self, *_: object) -> None:
        # what is being built is of no use any more; a process that ends does not wait for it
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def keeps_history(self) -> bool:
        return self.config.enabled and "history" in self.config.sources

    def _history(self, prompts: Mapping[str, Prompt]) -> _Built:
        built = self._built()
        if built is None or built.keys != frozenset(prompts):  # the first step, or a resumed one
            built = self._build(prompts)
        self._building, self._used = None, built
        return built

    def _built(self) -> _Built | None:
        if self._building is None:
            return None
        try:
            return result_of(self._building, "the index of the prompts' history", self._patience)
        except Hang:
            self._building = None  # given up: what is saved after this does not wait for it again
            raise

    def _build(self, prompts: Mapping[str, Prompt]) -> _Built:
        began_s = time.perf_counter()
        arrays = {key: np.asarray(ids, np.int32) for key, ids in prompts.items()}
        index = build_index(self._cache, arrays, self._rule)
        return _Built(index, frozenset(prompts), time.perf_counter() - began_s)
