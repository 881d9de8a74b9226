"""A step's responses: prompts → rollouts → rewards, in one phase or in as many as it takes.

Dynamic sampling drops groups whose rewards are all equal, and generates others in
further phases of the same step. Everything is a function of (configuration, data
cursor, step, state), so the cursor is part of what a checkpoint keeps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from models.transformer import Params
from rl import trainer
from rl.advantages import informative_groups
from rl.data import DataOrder, prompts_for_step
from rl.engine import Engine
from rl.experiment import Inputs, Prompt, TrainConfig
from rl.guessing import Guesses
from rl.metrics import Timings
from rl.packing import Shape
from rl.progress import Progress
from rl.recipe import Recipe
from rl.reuse import Reuse, remember
from rl.rewards.pool import Job, RewardPool, Score
from rl.speculation import Speculation
from rl.tasks import Example
from rl.timeline import EngineStats, joined
from rl.trajectory import Trajectory
from rl.workers import Workers
from spec.rollout_cache import RolloutCache


class Stopped(Exception):
    """The run was asked to stop; everything up to the last whole step is saved."""


@dataclasses.dataclass(frozen=True, eq=False)
class System:
    """The parts of a run that live as long as it does."""

    config: TrainConfig
    inputs: Inputs
    recipe: Recipe
    shape: Shape
    engine: Engine | Workers
    cache: RolloutCache
    speculation: Speculation
    reuse: Reuse
    rewards: RewardPool
    order: DataOrder
    reference: Params | None
    show: Progress
    should_stop: Callable[[], bool]


@dataclasses.dataclass(frozen=True, eq=False)
class Prompts:
    """Consecutive prompts of the data order: examples, their tokens, their numbers in the data."""

    examples: tuple[Example, ...] = ()
    tokens: tuple[Prompt, ...] = ()
    numbers: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.examples)

    def __add__(self, more: Prompts) -> Prompts:
        return Prompts(
            self.examples + more.examples, self.tokens + more.tokens, self.numbers + more.numbers
        )

    @property
    def keys(self) -> list[str]:
        return [example.example_id for example in self.examples]


@dataclasses.dataclass(frozen=True, eq=False)
class Phase:
    """What one phase generated, and what was thought of it; lists in the order of the samples."""

    trajectories: list[Trajectory]
    scores: list[Score]
    completions: list[str]
    stats: EngineStats


@dataclasses.dataclass(frozen=True, eq=False)
class Rollouts(Phase):
    """What one step generated in all its phases; group g answers `prompts.examples[g]`.

    `used_groups` are those to train on: all of them without dynamic sampling.
    """

    prompts: Prompts
    used_groups: frozenset[int]
    metrics: dict[str, float]

    @property
    def used(self) -> np.ndarray:
        """Which of the trajectories are trained on; bool [n]."""
        return np.array([t.group_id in self.used_groups for t in self.trajectories])


def generate(system: System, params: Params, cursor: int, step: int, timings: Timings) -> Rollouts:
    """The responses of the step whose first prompt stands at `cursor` of the data order.

    With dynamic sampling each further phase asks as many new prompts as groups are
    missing, until none is or `max_extra_phases` are done. What a group is judged by is
    its rewards as scored, before any length penalty.
    """
    wanted = system.config.rollout.prompts_per_step
    extra = system.config.algorithm.resolved.max_extra_phases
    prompts, phases = Prompts(), list[Phase]()
    missing, used = wanted, frozenset(range(wanted))
    while missing and len(phases) <= (extra or 0):
        new = prompts_at(system, cursor + len(prompts), missing)
        phases.append(generate_and_score(system, params, prompts, new, step, timings))
        prompts += new
        missing = 0
        if extra is not None:
            used = frozenset(_informative(phases))
            missing = wanted - len(used)
    trajectories = [t for p in phases for t in p.trajectories]
    stats = joined([p.stats for p in phases])
    metrics = system.reuse.metrics(stats, sum(t.num_tokens for t in trajectories), step)
    metrics |= _remember(system, prompts.keys, trajectories, cursor + len(prompts), step)
    if extra is not None:
        metrics |= {
            "dynamic_sampling/phases": float(len(phases)),
            "dynamic_sampling/generated_groups": float(len(prompts)),
            "dynamic_sampling/used_groups": float(len(used)),
        }
    return Rollouts(
        trajectories,
        [s for p in phases for s in p.scores],
        [c for p in phases for c in p.completions],
        stats,
        prompts,
        used,
        metrics,
    )


def _informative(phases: Sequence[Phase]) -> set[int]:
    """The groups so far whose rewards are not all equal."""
    rewards = [t.reward for p in phases for t in p.trajectories]
    return informative_groups(rewards, [t.group_id for p in phases for t in p.trajectories])


def generate_and_score(
    system: System, params: Params, before: Prompts, new: Prompts, step: int, timings: Timings
) -> Phase:
    """The responses to `new`; each goes to the reward workers the moment it ends.

    `before` are the prompts that the step has had in earlier phases: groups are numbered,
    and noise is named, as if all had been asked at once.
    """
    config, inputs, first = system.config, system.inputs, len(before)
    system.speculation.settle()  # the cache has one reader at a time
    # first samples first: siblings that start apart have something to draft from
    requests = system.reuse.requests(
        new.keys, new.tokens, new.numbers, config.rollout.group_size, before=before.keys
    )
    last = {r.request_id: r.cached.tokens for r in requests if r.cached is not None}
    guesses = system.speculation.phase(new.keys, new.tokens, last)
    completions: dict[int, str] = {}
    scores: dict[int, Future[Score]] = {}

    def score(t: Trajectory) -> None:
        text = inputs.tokenizer.decode(t.response_ids.tolist())
        completions[t.request_id] = text
        job = Job(new.examples[t.group_id], text, tuple(t.response_ids.tolist()))
        scores[t.request_id] = system.rewards.submit(job)

    def watch(finished: int, tokens: int) -> None:
        system.show.rollout(finished, len(requests), tokens)
        if system.should_stop():
            raise Stopped

    with timings.section("rollout"):
        done = system.engine.run(
            trainer.cast_params(params, system.engine.dtype),
            requests,
            config.sampling,
            system.reuse.key(step),
            stop_token_ids=inputs.model.eos_token_ids,
            policy_version=step - 1,
            **_as_taken_by(system.engine, guesses),
            rule=system.reuse.rule(step),
            on_finish=score,
            on_round=watch,
        )
    with timings.section("reward"):  # what is left of it once the last response has ended
        done.sort(key=lambda t: (t.group_id, t.sample_index))
        results = [scores[t.request_id].result() for t in done]
    trajectories = [
        dataclasses.replace(t, reward=s.total, group_id=t.group_id + first)
        for t, s in zip(done, results, strict=True)
    ]
    texts = [completions[t.request_id] for t in done]
    return Phase(trajectories, results, texts, system.engine.stats)


def _as_taken_by(engine: Engine | Workers, guesses: Guesses) -> dict[str, Any]:
    """One engine takes guesses, several workers their maker."""
    if isinstance(engine, Workers):
        return {"guesses": guesses}
    drafter, budget = guesses()
    return {"drafter": drafter, "budget": budget}


def _remember(
    system: System,
    keys: Sequence[str],
    trajectories: Sequence[Trajectory],
    next_cursor: int,
    step: int,
) -> dict[str, float]:
    """Keep the step's responses for the next epoch, and start on the next step's history."""
    speculation, scored = system.speculation, system.reuse.mode.enabled
    if speculation.keeps_history or scored:
        remember(system.cache, keys, trajectories, scored=scored)
    metrics = speculation.history_metrics()
    for problem in [*system.cache.new_problems(), *system.reuse.new_problems()]:
        system.show.message(f"warning: {problem}")
    if speculation.keeps_history and step < system.config.run.steps:
        coming = prompts_at(system, next_cursor, system.config.rollout.prompts_per_step)
        speculation.prepare(dict(zip(coming.keys, coming.tokens, strict=True)))
    return metrics


def prompts_at(system: System, cursor: int, count: int) -> Prompts:
    """The prompts at places cursor … cursor+count−1 of the data order."""
    examples = prompts_for_step(system.inputs.task, system.order, cursor, count)
    tokens = tuple(system.inputs.encode(e, system.config.task) for e in examples)
    return Prompts(examples, tokens, tuple(system.order.indices(cursor, count).tolist()))
