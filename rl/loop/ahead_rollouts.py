"""Rollouts of the step that is learnt from, while idle workers begin those of the next one.

    recall what was begun of step s → answer step s with v(s − 1), begun tokens as draft tokens
    plan step s + 1  → begun with v(s − 1) where a worker has run dry, and while s is learnt from

The responses are those of `Sched.mode = "sync"`: `generate` makes them, and what was begun only
drafts for it. Nothing that was begun is kept in a checkpoint: a resumed run begins it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from models.transformer import Params
from rl.loop.generation import (
    Rollouts,
    System,
    generate,
    last_responses,
    leave_if_asked,
    prompts_at,
    requests_of,
)
from rl.metrics.writer import Timings
from rl.trajectory import Trajectory
from rl.workers.ahead_engine import AheadEngine, Begun, ComingStep


class AheadRollouts:
    """Called as `rl.loop.generation.generate` is, once a step."""

    def __init__(self, engine: AheadEngine) -> None:
        self._engine = engine
        self._planned = 0  # where the data order was expected to stand at the step that is begun
        self._dropped = 0  # requests that were begun for nothing since the last step

    def __call__(
        self, system: System, params: Params, cursor: int, step: int, timings: Timings
    ) -> Rollouts:
        """The responses of `step`; the one after it is begun where there is time."""
        with timings.section("recall"):
            begun = self._engine.recall(partial(leave_if_asked, system))
        size = system.config.rollout.prompts_per_step
        self._plan(system, prompts_at(system, cursor, size).end, step + 1)
        rollouts = generate(system, params, cursor, step, timings, begun)
        rollouts.metrics.update(metrics(begun, rollouts.trajectories, self._dropped))
        self._dropped = 0
        if rollouts.cursor != self._planned and step < system.config.run.steps:
            # dynamic sampling has asked the prompts that were begun as those of the next step
            self._dropped = len(self._engine.recall(partial(leave_if_asked, system)).tokens)
            self._plan(system, rollouts.cursor, step + 1)
            self._engine.begin()
        return rollouts

    def _plan(self, system: System, cursor: int, step: int) -> None:
        """Plan the step whose first prompt stands at `cursor`; the last step has none behind it."""
        self._planned = cursor
        if step <= system.config.run.steps:
            self._engine.plan(coming_step(system, cursor, step))


def coming_step(system: System, cursor: int, step: int) -> ComingStep:
    """Return the step whose first prompt stands at `cursor`, as this process may begin it.

    Drafts are those of the step but for the prompts' history, whose index is not there yet.
    """
    config, shares = system.config, system.shares
    system.speculation.settle()  # the cache has one reader at a time
    prompts = prompts_at(system, cursor, config.rollout.prompts_per_step)
    requests = [r for r in requests_of(system, prompts) if shares.answers(r.group_id)]
    drafts = system.speculation.drafter_factory(
        *(prompts.keys, prompts.tokens, last_responses(requests)),
        group_size=config.rollout.group_size,
        answers=shares.answers,
        index=system.speculation.no_history,
    )
    lengths = past_lengths(system, prompts.keys) if system.speculation.keeps_history else {}
    return ComingStep(
        requests,
        system.engine.do(partial(system.reuse.key, step)),
        drafts,
        system.reuse.rule(step),
        lengths,
    )


def past_lengths(system: System, keys: Sequence[str]) -> dict[int, tuple[int, ...]]:
    """Return the lengths of last epoch's responses, by group, of the prompts that have any."""
    cached = {group: system.cache.get(key) for group, key in enumerate(keys)}
    return {
        group: tuple(len(r.tokens) for r in found.responses)
        for group, found in cached.items()
        if found is not None
    }


def metrics(begun: Begun, trajectories: Sequence[Trajectory], dropped: int = 0) -> dict[str, float]:
    """Return how much of what was begun stands in the responses, up to the first difference."""
    drawn = {t.request_id: t.response_ids for t in trajectories}
    asked = {i: tokens for i, tokens in begun.tokens.items() if i in drawn}
    kept = {i: agreeing(np.array(tokens), drawn[i]) for i, tokens in asked.items()}
    num_tokens = sum(map(len, asked.values()))
    total = sum(len(ids) for ids in drawn.values())
    return {
        "ahead/begun_requests": float(len(asked)),
        "ahead/begun_tokens": float(num_tokens),
        "ahead/begun_fraction": num_tokens / max(total, 1),
        "ahead/kept_tokens": float(sum(kept.values())),
        "ahead/kept_fraction": sum(kept.values()) / max(num_tokens, 1),
        "ahead/kept_whole": float(sum(n == len(asked[i]) for i, n in kept.items())),
        "ahead/dropped_requests": float(dropped + len(begun.tokens) - len(asked)),
    }


def agreeing(begun: np.ndarray, drawn: np.ndarray) -> int:
    """Return how many tokens are the same, up to the first difference."""
    n = min(len(begun), len(drawn))
    (differ,) = np.nonzero(begun[:n] != drawn[:n])
    return int(differ[0]) if len(differ) else n
