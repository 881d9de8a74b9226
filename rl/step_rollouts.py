"""The responses of a step that is learnt from at once: `Sched.mode` of `sync` and `ahead`.

    sync    answer step s with v(s − 1)
    ahead   recall what was begun of step s → answer step s with v(s − 1), begun tokens as drafts
            plan step s + 1 → begun with v(s − 1) by idle workers, also while s is learnt from

The responses are the same: what was begun only drafts for them. Nothing that was begun is kept in a
checkpoint: a resumed run begins it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from models.transformer import Params
from rl.learner.optimizer import TrainState
from rl.metrics.writer import Timings
from rl.pipeline import PipelineRollouts
from rl.rollouts import (
    Rollouts,
    System,
    generate,
    last_responses,
    leave_if_asked,
    prompts_at,
    requests_of,
)
from rl.trajectory import Trajectory
from rl.workers.ahead_engine import AheadEngine, Begun, ComingStep


class StepRollouts:
    """Called once a step; with an `ahead` engine idle workers begin the step after it."""

    def __init__(self, ahead: AheadEngine | None = None) -> None:
        self._ahead = ahead
        self._planned = 0  # the data order's expected position at the step that is begun
        self._num_dropped = 0  # requests that were begun for nothing since the last step

    def __call__(
        self, system: System, params: Params, cursor: int, step: int, timings: Timings
    ) -> Rollouts:
        """Return the responses of `step`, whose first prompt is at `cursor`."""
        engine = self._ahead
        if engine is None:
            return generate(system, params, cursor, step, timings)
        check = partial(leave_if_asked, system)
        with timings.section("recall"):
            begun = engine.recall(check)
        size = system.config.rollout.prompts_per_step
        self._plan(engine, system, prompts_at(system, cursor, size).end, step + 1)
        rollouts = generate(system, params, cursor, step, timings, begun)
        rollouts.metrics.update(metrics(begun, rollouts.trajectories, self._num_dropped))
        self._num_dropped = 0
        if rollouts.cursor != self._planned and step < system.config.run.steps:
            # dynamic sampling has used the prompts that were begun as those of the next step
            self._num_dropped = len(engine.recall(check).tokens)
            self._plan(engine, system, rollouts.cursor, step + 1)
            engine.begin()
        return rollouts

    def stale_params(self, state: TrainState, step: int) -> None:
        """No older weights answer anything."""

    def state(self) -> dict[str, Any]:
        return {}

    def _plan(self, engine: AheadEngine, system: System, cursor: int, step: int) -> None:
        """Plan the step whose first prompt is at `cursor`; the last step has none after it."""
        self._planned = cursor
        if step <= system.config.run.steps:
            engine.plan(coming_step(system, cursor, step))


@contextlib.contextmanager
def open_rollouts(
    system: System, first_step: int, stale_params: Params | None, state: Mapping[str, Any]
) -> Iterator[StepRollouts | PipelineRollouts]:
    """Yield the rollouts of a run by its mode; checkpoints keep their state.

    `first_step` is the next one to be trained; of a resumed run, `stale_params` are the weights
    before the last update, and `state` is what was saved.
    """
    config, engine = system.config, system.engine
    if config.sched.mode == "pipeline":
        with PipelineRollouts(system, first_step, stale_params) as pipeline:
            pipeline.load_state(state)
            yield pipeline
    elif isinstance(engine, AheadEngine):
        most = system.shares.most_groups(config.rollout.prompts_per_step)
        with engine.open(most * config.rollout.group_size, config.longest_tokens):
            yield StepRollouts(engine)
    else:  # also a process whose workers belong to another one
        yield StepRollouts()


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
