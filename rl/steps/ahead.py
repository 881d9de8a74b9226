"""Rollouts of `Sched.mode = "ahead"`: idle workers prefetch the next step.

    recall the prefetched tokens of step s → answer step s with v(s − 1), these tokens as drafts
    plan step s + 1 → prefetched with v(s − 1) by idle workers, also during the update

The responses are the responses of `sync`. A checkpoint holds no prefetched tokens, so a resumed run
prefetches them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from reprise.models.decoder.transformer import Params
from reprise.rl.assembly.system import System
from reprise.rl.metrics.writer import Timings
from reprise.rl.records.trajectory import Trajectory
from reprise.rl.sessions.ahead_engine import AheadEngine, ComingStep, Prefetched
from reprise.rl.steps.rollouts import (
    Rollouts,
    StepRollouts,
    drafter_factory,
    generate,
    prompts_at,
    requests_of,
)


class AheadRollouts(StepRollouts):
    """A source of step responses whose `engine` prefetches the next step."""

    def __init__(self, engine: AheadEngine) -> None:
        self._engine = engine
        self._planned = 0  # expected position in the data order at the prefetched step
        self._num_dropped = 0  # prefetched requests dropped since the last step

    def __call__(
        self, system: System, params: Params, cursor: int, step: int, timings: Timings
    ) -> Rollouts:
        """Return the responses of `step`, which starts at `cursor` of the data order."""
        engine = self._engine
        with timings.section("recall"):
            prefetched = engine.recall(system.leave_if_stopped)
        size = system.config.rollout.prompts_per_step
        self._plan(system, prompts_at(system, cursor, size).end, step + 1)
        rollouts = generate(system, params, cursor, step, timings, prefetched)
        rollouts.metrics.update(
            prefetch_metrics(prefetched, rollouts.trajectories, self._num_dropped)
        )
        self._num_dropped = 0
        if rollouts.cursor != self._planned and step < system.config.run.steps:
            # dynamic sampling has used the prompts that were prefetched for the next step
            self._num_dropped = len(engine.recall(system.leave_if_stopped).tokens)
            self._plan(system, rollouts.cursor, step + 1)
            engine.begin()
        return rollouts

    def _plan(self, system: System, cursor: int, step: int) -> None:
        """Plan the step that starts at `cursor`, unless the run has no such step."""
        self._planned = cursor
        if step <= system.config.run.steps:
            self._engine.plan(coming_step(system, cursor, step))


def coming_step(system: System, cursor: int, step: int) -> ComingStep:
    """Return the step that starts at `cursor`, as this process may prefetch it.

    Its drafts leave out the history of the prompts, which is not indexed yet.
    """
    system.speculation.settle()  # the cache has one reader at a time
    prompts = prompts_at(system, cursor, system.config.rollout.prompts_per_step)
    every = requests_of(system, prompts, step)
    requests = [r for r in every if system.partition.answers(r.group_id)]
    drafts = drafter_factory(system, prompts, requests, index=system.speculation.no_history)
    lengths = _past_lengths(system, prompts.keys) if system.speculation.keeps_history else {}
    key = system.engine.do(partial(system.reuse.key, step))
    return ComingStep(requests, key, drafts, system.reuse.rule(step), lengths)


def _past_lengths(system: System, keys: Sequence[str]) -> dict[int, tuple[int, ...]]:
    """Return the lengths of last epoch's responses by group, for prompts with such responses."""
    cached = {group: system.cache.get(key) for group, key in enumerate(keys)}
    return {
        group: tuple(len(r.tokens) for r in result.responses)
        for group, result in cached.items()
        if result is not None
    }


def prefetch_metrics(
    prefetched: Prefetched, trajectories: Sequence[Trajectory], dropped: int = 0
) -> dict[str, float]:
    """Return metrics of prefetched tokens, which are kept up to the first difference."""
    drawn = {t.request_id: t.response_ids for t in trajectories}
    used = {i: tokens for i, tokens in prefetched.tokens.items() if i in drawn}
    agreed = {i: agreeing(np.array(tokens), drawn[i]) for i, tokens in used.items()}
    num_tokens = sum(map(len, used.values()))
    total = sum(len(ids) for ids in drawn.values())
    return {
        "ahead/begun_requests": float(len(used)),
        "ahead/begun_tokens": float(num_tokens),
        "ahead/begun_fraction": num_tokens / max(total, 1),
        "ahead/kept_tokens": float(sum(agreed.values())),
        "ahead/kept_fraction": sum(agreed.values()) / max(num_tokens, 1),
        "ahead/kept_whole": float(sum(n == len(used[i]) for i, n in agreed.items())),
        "ahead/dropped_requests": float(dropped + len(prefetched.tokens) - len(used)),
    }


def agreeing(prefetched: np.ndarray, drawn: np.ndarray) -> int:
    """Return the number of equal tokens before the first difference."""
    n = min(len(prefetched), len(drawn))
    (differ,) = np.nonzero(prefetched[:n] != drawn[:n])
    return int(differ[0]) if len(differ) else n
