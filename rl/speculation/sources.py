"""Speculative rollouts of a training run: their drafters, budgets and history.

In each step `drafter_factory` makes drafters and budgets for its rollouts. The responses then enter
the rollout cache (`rl.speculation.reuse.remember`), and `prepare` builds the index of the prompts
of the next step in a thread while the update runs. Drafts never change a token (except by rounding
on accelerators, docs/architecture.md), so nothing here can change the training.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from reprise.rl.engine.rollout_spec import DrafterContext, DrafterFactory, no_drafts
from reprise.rl.records.trajectory import Prompt
from reprise.rl.runtime.waits import Deadline, Hang, result_of
from reprise.rl.speculation.config import SOURCES, USER, SpeculationConfig
from reprise.rl.speculation.device_drafters import NO_DRAFTERS, DeviceDrafters, DrafterSource
from reprise.rl.speculation.history_workers import HistoryWorkers, Shard
from reprise.sched.request import copy_of
from reprise.spec.budget.budget import Budget
from reprise.spec.budget.config import BANDIT, LEARNED, MODEL, OWN, TunerConfig
from reprise.spec.budget.goodput import make_budget
from reprise.spec.budget.union import DrafterUnion
from reprise.spec.decoupled.copies import CopiesDrafter, Progress
from reprise.spec.drafter import Drafter
from reprise.spec.retrieval import history
from reprise.spec.retrieval.group import DraftServer, GroupDrafter
from reprise.spec.retrieval.history import (
    GrowingHistory,
    HistoryDrafter,
    HistoryIndex,
    LastResponseDrafter,
    build_index,
)
from reprise.spec.retrieval.suffix_drafter import NgramDrafter
from reprise.spec.retrieval.suffix_queries import ProposalRule
from reprise.spec.reuse.rollout_cache import CachedGroup, RolloutCache
from reprise.spec.round_times import RoundTimes, RunSeconds

if TYPE_CHECKING:
    from reprise.rl.speculation.bandits import Bandits

HISTORY_RULES = {"history": history.RULE, "histospec": history.PAPER_RULE}
NOWHERE: Mapping[str, DrafterSource] = {}


def history_rule(config: SpeculationConfig) -> ProposalRule:
    """Return the rule that the history source of a configuration drafts by."""
    assert config.history_source is not None
    return HISTORY_RULES[config.history_source]


@dataclasses.dataclass(frozen=True, eq=False)
class _Built:
    """The history of the prompts of a step: a local `index`, or `groups` and worker `shards`."""

    index: HistoryIndex | None
    keys: frozenset[str]
    seconds: float
    groups: Mapping[str, CachedGroup] = dataclasses.field(default_factory=dict)
    shards: tuple[Shard, ...] = ()

    @property
    def num_tokens(self) -> int:
        if self.index is not None:
            return self.index.num_tokens
        groups = sum(group.num_tokens for group in self.groups.values())
        return groups + sum(shard.num_tokens for shard in self.shards)


@dataclasses.dataclass(frozen=True, eq=False)
class StepDrafts:
    """A factory of drafters and budget for each worker of a rollout.

    The other fields are arguments of `Speculation.drafter_factory`, the `history` of the prompts,
    and references to `shards` of its index. Another program can make the same drafters from these
    fields.
    """

    make: DrafterFactory
    keys: Sequence[str]
    prompts: Sequence[Prompt]
    last: Mapping[int, np.ndarray]
    first_group: int
    group_size: int
    history: Mapping[str, CachedGroup]
    shards: tuple[Any, ...] = ()

    def __call__(self, context: DrafterContext) -> tuple[Drafter | None, Budget | None]:
        return self.make(context)


class Speculation:
    """The drafters of a run, and their state between rollouts. A context manager.

    Budgets decide by the measured seconds `times`, corrected by the rounds of the run (`seconds`).
    Drafting workers draft the sources in `apart`, and `methods_of_copies` are the sources for
    copies of requests. With `for_others`, workers of other programs index the history themselves,
    or `history_workers` do. `has_history` says whether prompts have earlier responses before
    `drafter_factory` finds out.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        cache: RolloutCache,
        drafters: DeviceDrafters = NO_DRAFTERS,
        *,
        times: RoundTimes | None = None,
        bandits: Bandits | None = None,
        apart: Mapping[str, DrafterSource] = NOWHERE,
        methods_of_copies: tuple[str, ...] = (),
        for_others: bool = False,
        history_workers: HistoryWorkers | None = None,
        has_history: bool = False,
        deadline: Deadline | None = None,
    ) -> None:
        wanted = {LEARNED: config.learns, MODEL: config.asks_model}
        assert drafters.keys() == {n for n in wanted if wanted[n]}, "those that the sources name"
        self.config = config
        self.times = times
        self.seconds = RunSeconds(config.losing_steps)  # of all steps so far
        self.bandits = bandits
        self.has_history = has_history
        self._drafters = drafters
        self._user_drafters = _user_drafters(config)
        self._user_budget = _user_budget(config)
        self._apart = apart
        self._methods_of_copies = methods_of_copies
        self._cache = cache
        self._for_others = for_others
        self._history_workers = history_workers
        self._deadline = deadline or Deadline()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="history")
        self._building: Future[_Built] | None = None
        self._used: _Built | None = None  # by the current or the last rollout

    def drafter_factory(
        self,
        keys: Sequence[str],
        prompts: Sequence[Prompt],
        last: Mapping[int, np.ndarray] | None = None,
        *,
        first_group: int = 0,
        group_size: int = 0,
        server: DraftServer | None = None,
        answers: Callable[[int], bool] = lambda place: True,
        index: HistoryIndex | GrowingHistory | None = None,
    ) -> DrafterFactory:
        """Return a factory of drafters and budgets for one rollout, separate for each worker.

        Group first_group + g answers `prompts[g]`, with key `keys[g]`. `last` are last epoch's
        responses by request id, if requests may reuse them. The drafters share the history index
        of the prompts, and the `server` through which siblings exchange tokens; the server forgets
        a group once `group_size` responses have finished (0: never). `answers` marks the prompts
        with requests in this process. With `index` the history is not looked up here.
        """
        if not self.config.enabled:
            return no_drafts
        built = None
        if self.keeps_history and index is None:
            pairs = enumerate(zip(keys, prompts, strict=True))
            built = self._history({key: ids for g, (key, ids) in pairs if answers(g)})
        if index is None:
            self.has_history = bool(last) or (built is not None and built.num_tokens > 0)
        if self.is_off:
            return no_drafts
        names = dict(enumerate(keys, first_group))
        index = built.index if built else index
        make = partial(
            self._drafts,
            names,
            last or {},
            index,
            server or DraftServer(group_size),
            Progress() if self._methods_of_copies else None,
            self.times_now,
        )
        groups, shards = (built.groups, built.shards) if built else ({}, ())
        trees = tuple(shard.trees for shard in shards)
        return StepDrafts(
            make,
            keys,
            prompts,
            last or {},
            first_group,
            group_size,
            groups,
            trees,
        )

    def _drafts(
        self,
        names: Mapping[int, str],
        last: Mapping[int, np.ndarray],
        index: HistoryIndex | GrowingHistory | None,
        server: DraftServer,
        progress: Progress | None,
        times: RoundTimes | None,
        context: DrafterContext,
    ) -> tuple[Drafter | None, Budget | None]:
        def make(source: str) -> Drafter:
            if source in HISTORY_RULES:
                assert index is not None
                return HistoryDrafter(index, names, history_rule(self.config))
            if source == "last":
                return LastResponseDrafter(last)
            if source == "group":
                return GroupDrafter(server=server)
            if source == OWN:
                return NgramDrafter()
            if source in self._drafters:
                return self._drafters[source].drafter_for(context)
            return self._user_drafters[source](context)

        parts: dict[str, Drafter] = {}
        for source in self.config.sources:
            if source in self._apart:
                parts[source] = self._apart[source].drafter_for(context)
            elif source != "last" or last:
                parts[source] = make(source)
        if not parts:
            return None, None
        union = DrafterUnion(list(parts.values()), list(parts))
        if self.config.budget == BANDIT:
            assert times is not None, "a bandit needs the measured seconds of a round"
            assert self.bandits is not None
            budget: Budget | None = self.bandits.budget(context.runner.number, times, union)
        elif self._user_budget is not None:
            assert times is not None, "a budget of a user gets the measured seconds of a round"
            budget = self._user_budget(times)
        else:
            budget = make_budget(self.config.budget, times)
        if not self._methods_of_copies:
            return union, budget
        assert progress is not None, "requests with copies"
        methods = [make(source) for source in self._methods_of_copies]
        return CopiesDrafter(union, methods, copy_of, progress), budget

    @property
    def times_now(self) -> RoundTimes | None:
        """The table of seconds, corrected by the rounds of the run so far."""
        return None if self.times is None else self.seconds.corrected(self.times)

    @property
    def is_off(self) -> bool:
        """True if losing drafts have been turned off, for the run or until it has history.

        Drafts stay on with drafting workers or with a fixed budget.
        """
        return self._can_be_off and self.seconds.is_off(self.has_history)

    @property
    def _can_be_off(self) -> bool:
        return self.config.budget_kind[0] != "fixed" and not self._apart

    def state(self) -> dict[str, Any]:
        """Return the state of all bandits, for a checkpoint."""
        return {"bandits": {} if self.bandits is None else self.bandits.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if self.bandits is not None:
            self.bandits.load_state(state["bandits"])

    def bandit_metrics(self) -> dict[str, float]:
        """Return the choices of bandits since the last call, and their median rewards."""
        return {} if self.bandits is None else self.bandits.metrics()

    def history_metrics(self) -> dict[str, float]:
        """Return metrics of the history of the rollout, and of the cache."""
        if not self.keeps_history:
            return {}
        assert self._used is not None, "drafter_factory comes first"
        return {
            "spec/history_bytes": float(self._cache.num_bytes),
            "spec/history_index_tokens": float(self._used.num_tokens),
            "spec/history_index_seconds": self._used.seconds,
        }

    def prepare(self, next_prompts: Mapping[str, Prompt]) -> None:
        """Start to build the index of the next step, with `next_prompts` by key."""
        self._building = self._thread.submit(self._build, dict(next_prompts))

    def settle(self) -> None:
        """Wait until nothing reads the cache."""
        self._built()

    def __enter__(self) -> Speculation:
        return self

    def __exit__(self, *_: object) -> None:
        # an exiting process does not wait for an unused index
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def keeps_history(self) -> bool:
        is_off = self._can_be_off and self.seconds.is_off(True)
        return self.config.history_source is not None and not is_off

    @property
    def no_history(self) -> HistoryIndex | None:
        """An empty index; None if no source drafts from history."""
        source = self.config.history_source
        return None if source is None else build_index({}, {}, history_rule(self.config))

    def _history(self, prompts: Mapping[str, Prompt]) -> _Built:
        built = self._built()
        if built is None or built.keys != frozenset(prompts):  # first or resumed step
            built = self._build(prompts)
        self._building = None
        self._used = built = self._without_lost(built)
        return built

    def _without_lost(self, built: _Built) -> _Built:
        """Replace shards that were lost since they were built by groups from the cache."""
        workers = self._history_workers
        lost = [s for s in built.shards if workers is None or not workers.has(s)]
        groups = self._groups([key for shard in lost for key in shard.keys])
        shards = tuple(shard for shard in built.shards if shard not in lost)
        return dataclasses.replace(built, groups={**built.groups, **groups}, shards=shards)

    def _groups(self, keys: Iterable[str]) -> dict[str, CachedGroup]:
        cached = {key: self._cache.get(key) for key in keys}
        return {key: group for key, group in cached.items() if group is not None}

    def _built(self) -> _Built | None:
        if self._building is None:
            return None
        try:
            return result_of(self._building, "the index of the prompts' history", self._deadline)
        except Hang:
            self._building = None  # so that a later save does not wait for it again
            raise

    def _build(self, prompts: Mapping[str, Prompt]) -> _Built:
        start_s = time.perf_counter()
        source = self.config.history_source
        assert source is not None
        if self._for_others:
            workers = self._history_workers
            shards = () if workers is None else workers.build(prompts, self._cache)
            sharded = {key for shard in shards for key in shard.keys if key not in shard.damaged}
            groups = self._groups(prompts.keys() - sharded)
            seconds = time.perf_counter() - start_s
            return _Built(None, frozenset(prompts), seconds, groups, shards)
        arrays = {key: np.asarray(ids, np.int32) for key, ids in prompts.items()}
        index = build_index(self._cache, arrays, history_rule(self.config))
        return _Built(index, frozenset(prompts), time.perf_counter() - start_s)


def make_bandits(
    config: SpeculationConfig, drafters: DeviceDrafters, tuner: TunerConfig, seed: int
) -> Bandits | None:
    """Return the bandits of a run, or None with another budget.

    `drafters` run on the devices of the verifying workers.
    """
    if config.budget != BANDIT:
        return None
    from reprise.rl.speculation.bandits import Bandits

    return Bandits(config.sources, drafters, tuner, seed)


def _user_drafters(config: SpeculationConfig) -> dict[str, Callable[[DrafterContext], Drafter]]:
    """Return makers of the drafters of a user, by source. Raises ValueError or OSError."""
    names = [source for source in config.sources if source not in SOURCES]
    if not (config.enabled and names):
        return {}
    from reprise.rl.speculation.user_drafts import drafter_maker

    return {name: drafter_maker(name) for name in names}


def _user_budget(config: SpeculationConfig) -> Callable[[RoundTimes], Budget] | None:
    """Return a maker of budgets of a user, or None. Raises ValueError or OSError."""
    if config.budget_kind[0] != USER:
        return None
    from reprise.rl.speculation.user_drafts import budget_maker

    return budget_maker(config.budget)
