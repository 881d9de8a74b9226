"""Where a run's responses come from, by `Sched.mode`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from models.transformer import Params
from rl.learner.optimizer import TrainState
from rl.loop.ahead_rollouts import AheadRollouts
from rl.loop.async_rollouts import AsyncRollouts
from rl.loop.generation import Rollouts, System, generate
from rl.metrics.writer import Timings
from rl.workers.ahead_engine import AheadEngine


class SyncRollouts:
    """A step's responses are of the policy that learns from them: nothing is kept for the next."""

    def __init__(self, answer: Callable[..., Rollouts] = generate) -> None:
        self._answer = answer

    def __call__(
        self, system: System, params: Params, cursor: int, step: int, timings: Timings
    ) -> Rollouts:
        return self._answer(system, params, cursor, step, timings)

    def stale_params(self, state: TrainState, step: int) -> None:
        """No older weights answer anything."""

    def state(self) -> dict[str, Any]:
        return {}


@contextlib.contextmanager
def open_source(
    system: System, first_step: int, stale_params: Params | None, state: Mapping[str, Any]
) -> Iterator[SyncRollouts | AsyncRollouts]:
    """Yield the source of a run's responses; checkpoints keep its state.

    `first_step` is the next one to be trained; of a resumed run, `stale_params` are the weights
    before the last update, and `state` is what the source said before.
    """
    config, engine = system.config, system.engine
    if config.sched.mode == "pipeline":
        with AsyncRollouts(system, first_step, stale_params) as pipeline:
            pipeline.load_state(state)
            yield pipeline
    elif isinstance(engine, AheadEngine):
        most = system.shares.most_groups(config.rollout.prompts_per_step)
        with engine.open(most * config.rollout.group_size, config.longest_tokens):
            yield SyncRollouts(AheadRollouts(engine))
    else:  # also a process whose workers another one speaks for
        yield SyncRollouts()
