"""A step's responses: prompts → rollouts → rewards, in one pass or in as many as it takes.

Dynamic sampling drops groups whose rewards are all equal, and generates others in
further passes of the same step. Everything is a function of (configuration, data
cursor, step, state), so the cursor is part of what a checkpoint keeps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import numpy as np

from models.transformer import Params
from rl.cluster.processes import Processes
from rl.config import Inputs, TrainConfig
from rl.data.prompts import MOST_PASSED_OVER, DataOrder, prompts_for_step
from rl.data.tasks import Example
from rl.drafter_elsewhere import AnyDrafter
from rl.drafting.workers import DraftingWorkers
from rl.engine.engine import OnRound, RolloutEngine
from rl.engine.rollout_spec import RolloutSpec
from rl.engine.stats import EngineStats, joined
from rl.exchange import Responses, Shares
from rl.learner import trainer
from rl.learner.advantages import informative_groups
from rl.learner.gathering import (
    host_copy,
    laid_out,
    local_weights,
    on_host,
    own_devices,
    own_part,
)
from rl.learner.trainer import Learner
from rl.metrics.writer import Timings
from rl.rewards.scores import Rewards, Score
from rl.runtime.progress import Progress
from rl.runtime.signals import Stopped, Watch
from rl.scoring import Scorer
from rl.speculation import reuse
from rl.speculation.reuse import Reuse
from rl.speculation.sources import Speculation
from rl.trajectory import Prompt, Request, Trajectory
from rl.warm_up.longer_buckets import LongerBuckets
from rl.workers.ahead_engine import AheadEngine, Begun
from spec.reuse.rollout_cache import RolloutCache

NOT_BEGUN = Begun()


@dataclasses.dataclass(frozen=True, eq=False)
class System:
    """The parts of a run that live as long as it does.

    `eval_engine` is the engine, where it does not run ahead of training. `longer` is the part of
    the warm-up that waits for the first step, if any does.
    """

    config: TrainConfig
    inputs: Inputs
    learner: Learner
    engine: RolloutEngine
    eval_engine: RolloutEngine
    cache: RolloutCache
    speculation: Speculation
    reuse: Reuse
    rewards: Rewards
    order: DataOrder
    drafter: AnyDrafter | None
    longer: LongerBuckets | None
    shares: Shares
    drafting: DraftingWorkers | None
    show: Progress
    watch: Watch

    @property
    def processes(self) -> Processes:
        return self.shares.processes

    def weights(self, params: Params) -> Params:
        """Return the policy for rollouts (`rollout_weights`).

        It is on the host where workers go on with it while an update consumes the trainer's.
        """
        weights = rollout_weights(params, self.engine, self.shares)
        return on_host(weights) if isinstance(self.engine, AheadEngine) else weights

    def evaluated(self, params: Params) -> Params:
        """Return the policy for evaluations, on the devices of an engine that is theirs alone."""
        one = self.eval_engine
        if one is self.engine:
            return self.weights(params)
        weights = rollout_weights(params, one, self.shares)
        return one.do(lambda: one.engines[0].place(weights))


def rollout_weights(params: Params, engine: RolloutEngine, shares: Shares) -> Params:
    """Return the policy in the engine's dtype, and in its layout if it has the trainer's devices.

    It is rounded before it moves. Where processes have engines of their own, it is on this
    process's devices of the trainer's mesh; where process 0 speaks for workers elsewhere, on its
    host, and elsewhere a tree of None. All processes call it together.
    """
    one, *more = engine.engines
    if shares.processes.alone or not shares.splits:
        rounded = trainer.cast_params(params, engine.dtype)
        return rounded if one.mesh is None else laid_out(rounded, one.model, one.mesh)
    if shares.by_first:
        rounded = trainer.cast_params(params, engine.dtype)
        copy: Params = host_copy(rounded, keep=shares.processes.is_first)
        return copy
    place, mesh = one.mesh or one.device, jax.tree.leaves(params)[0].sharding.mesh
    theirs = [one.device] if one.mesh is None else one.mesh.devices.flat
    if more or not set(theirs) <= set(own_devices(mesh)):
        place = own_part(mesh)  # from where each takes it to its devices
    return local_weights(params, one.model, place, engine.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Prompts:
    """Consecutive prompts of the data order: examples, their tokens, their numbers in the data.

    `end` is the position behind the last one; prompts that are too long were passed over.
    """

    examples: tuple[Example, ...] = ()
    tokens: tuple[Prompt, ...] = ()
    numbers: tuple[int, ...] = ()
    end: int = 0

    def __len__(self) -> int:
        return len(self.examples)

    def __add__(self, more: Prompts) -> Prompts:
        return Prompts(
            self.examples + more.examples,
            self.tokens + more.tokens,
            self.numbers + more.numbers,
            more.end,
        )

    def take(self, indices: Sequence[int]) -> Prompts:
        return Prompts(
            tuple(self.examples[i] for i in indices),
            tuple(self.tokens[i] for i in indices),
            tuple(self.numbers[i] for i in indices),
            self.end,
        )

    @property
    def keys(self) -> list[str]:
        return [example.example_id for example in self.examples]


@dataclasses.dataclass(frozen=True, eq=False)
class SamplingPass:
    """One pass of sampling: responses and their scores; lists in the order of the samples."""

    trajectories: list[Trajectory]
    scores: list[Score]
    completions: list[str]
    stats: EngineStats


@dataclasses.dataclass(frozen=True, eq=False)
class Rollouts(SamplingPass):
    """All passes of one step together; group g answers `prompts.examples[g]`.

    `used_groups` are those to train on: all of them without dynamic sampling.
    """

    prompts: Prompts
    used_groups: frozenset[int]
    metrics: dict[str, float]
    cursor: int  # of the data order, behind the prompts that this step asked
    siblings: Sequence[Trajectory] = ()  # of the step before, in the groups of the prompts behind

    @property
    def used(self) -> np.ndarray:
        """Which of the trajectories are trained on; bool [n]."""
        return np.array([t.group_id in self.used_groups for t in self.trajectories])


def generate(
    system: System,
    params: Params,
    cursor: int,
    step: int,
    timings: Timings,
    begun: Begun = NOT_BEGUN,
) -> Rollouts:
    """The responses of the step whose first prompt stands at `cursor` of the data order.

    They start from what was `begun` of them ahead of the step.

    With dynamic sampling each further pass asks as many new prompts as groups are
    missing, until none is or `max_extra_phases` are done. What a group is judged by is
    its rewards as scored, before any length penalty.
    """
    wanted = system.config.rollout.prompts_per_step
    extra = system.config.algorithm.resolved.max_extra_phases
    prompts, passes = Prompts(end=cursor), list[SamplingPass]()
    weights = system.weights(params)
    missing, used = wanted, frozenset(range(wanted))
    while missing and len(passes) <= (extra or 0):
        new = prompts_at(system, prompts.end, missing)
        given = system, weights, prompts, new, step, timings
        passes.append(generate_and_score(*given, begun))
        prompts += new
        missing = 0
        if extra is not None:
            used = frozenset(_informative(passes))
            missing = wanted - len(used)
    trajectories = [t for p in passes for t in p.trajectories]
    stats = joined([p.stats for p in passes])
    metrics = system.reuse.metrics(stats, sum(t.num_tokens for t in trajectories), step)
    coming = prompts.end if step < system.config.run.steps else None
    metrics |= remember(system, prompts.keys, trajectories, coming)
    metrics |= left_out(system, prompts.end - cursor - len(prompts))
    if system.drafting is not None:
        metrics |= system.drafting.metrics()
        newest = max((part.version for part in stats.parts), default=0)
        stats.parts = [*stats.parts, *system.drafting.parts(newest)]
    if extra is not None:
        metrics |= {
            "dynamic_sampling/phases": float(len(passes)),
            "dynamic_sampling/generated_groups": float(len(prompts)),
            "dynamic_sampling/used_groups": float(len(used)),
        }
    return Rollouts(
        trajectories,
        [s for p in passes for s in p.scores],
        [c for p in passes for c in p.completions],
        stats,
        prompts,
        used,
        metrics,
        prompts.end,
    )


def _informative(passes: Sequence[SamplingPass]) -> set[int]:
    """The groups so far whose rewards are not all equal."""
    rewards = [t.reward for p in passes for t in p.trajectories]
    return informative_groups(rewards, [t.group_id for p in passes for t in p.trajectories])


def generate_and_score(
    system: System,
    weights: Params,
    before: Prompts,
    new: Prompts,
    step: int,
    timings: Timings,
    begun: Begun = NOT_BEGUN,
) -> SamplingPass:
    """The responses of `weights` to `new`; each goes to the reward workers the moment it ends.

    `before` are the prompts that the step has had in earlier passes: groups are numbered,
    and noise is named, as if all had been asked at once.
    """
    config, first = system.config, len(before)
    system.speculation.settle()  # the cache has one reader at a time
    asked = begun.resumed(requests_of(system, new, before.keys))
    requests = [r for r in asked if system.shares.answers(r.group_id)]
    last = last_responses(requests)
    drafts = system.speculation.drafter_factory(
        *(new.keys, new.tokens, last),
        group_size=config.rollout.group_size,
        answers=system.shares.answers,
    )
    scorer = open_scorer(system)
    scorer.examples.update(enumerate(new.examples))

    def watch(finished: int, tokens: int) -> None:
        system.show.rollout(finished, len(requests), tokens)
        leave_rollout_if_asked(system)

    drafter = system.drafter
    key = system.engine.do(partial(system.reuse.key, step))
    if drafter is not None:
        drafter.began(weights, step)

    def answer() -> Responses:
        with timings.section("rollout"):
            spec = RolloutSpec(
                weights,
                config.sampling,
                key,
                system.inputs.model.eos_token_ids,
                policy_version=step - 1,
                drafts=drafts,
                rule=system.reuse.rule(step),
                sink=None if drafter is None else drafter.sink(step),
                words=system.inputs.words_for(config.sampling),
                times=system.speculation.times,
            )
            done, stats = run(system.engine, spec, requests, scorer, watch)
        if drafter is not None:
            with timings.section("drafter"):
                drafter.after_rollout(system.engine, weights)
        with timings.section("reward"):  # what is left of it once the last response has ended
            return scorer.responses(done, stats)

    where = f"step {step}, from prompt {first} on" if first else f"step {step}"
    found = system.shares.exchange(where, asked, answer, partial(asked_to_stop, system))
    moved = [dataclasses.replace(t, group_id=t.group_id + first) for t in found.trajectories]
    return SamplingPass(moved, found.scores, found.texts, found.stats)


def requests_of(system: System, new: Prompts, before: Sequence[str] = ()) -> list[Request]:
    """Return the requests of a step to new prompts; `before` are the keys of its earlier passes.

    First samples come first: siblings that start apart have something to draft from.
    """
    config = system.config
    return system.reuse.requests(
        *(new.keys, new.tokens, new.numbers, config.rollout.group_size),
        before=before,
        samplings=[config.sampling.of(example.task) for example in new.examples],
    )


def last_responses(requests: Sequence[Request]) -> dict[int, np.ndarray]:
    """Return what requests draft from as their own: what was begun, or last epoch's response."""
    last = {r.request_id: r.cached.tokens for r in requests if r.cached is not None}
    return last | {r.request_id: np.array(r.begun, np.int32) for r in requests if r.begun}


def open_scorer(system: System) -> Scorer:
    """Return the scorer of a rollout's responses, which leaves its waits where asked to stop."""
    check = partial(leave_if_asked, system)
    return Scorer(system.inputs.tokenizer, system.rewards, check, system.shares)


def leave_if_asked(system: System, may_leave: bool = True) -> None:
    """A sign of life. Raises Stopped where the run is to stop and the step can leave no trace.

    Not once the drafter has learnt from it, nor where it may not leave for other reasons: in what
    several processes do together none leaves by itself.
    """
    trained = system.drafter is not None and system.drafter.trained_this_step
    together = not (system.processes.alone or system.shares.splits)
    if asked_to_stop(system) and may_leave and not (trained or together):
        raise Stopped


def leave_rollout_if_asked(system: System) -> None:
    """As `leave_if_asked`, in a rollout; where one engine spans processes they agree on it."""
    if system.processes.alone or system.shares.splits:
        return leave_if_asked(system)
    if system.shares.agrees_now() and system.processes.any("stop", asked_to_stop(system)):
        raise Stopped


def leave_update_if_asked(system: System, may_leave: bool) -> None:
    """As `leave_if_asked`, in an update; several processes leave after it, together."""
    leave_if_asked(system, may_leave and system.processes.alone)


def asked_to_stop(system: System) -> bool:
    """Return whether this process, or another one of the run, is asked to stop; a sign of life."""
    asked = system.watch.asked()
    if asked:
        system.processes.ask_to_stop()
    return asked or system.processes.asked


def run(
    engine: RolloutEngine,
    spec: RolloutSpec,
    requests: Sequence[Request],
    scorer: Scorer,
    on_round: OnRound | None,
) -> tuple[list[Trajectory], EngineStats]:
    """Return the responses to a process's requests, which may be none, and the engine's counts."""
    if not requests:
        return [], EngineStats()
    return engine.run(spec, requests, on_finish=scorer, on_round=on_round), engine.stats


def remember(
    system: System,
    keys: Sequence[str],
    trajectories: Sequence[Trajectory],
    coming: int | None,
    first_group: int = 0,
) -> dict[str, float]:
    """Keep a step's responses for the next epoch, and start on the history of a step to come.

    That is the next one whose prompts are asked, from position `coming` of the data order; its
    groups are numbered from `first_group` on.
    """
    speculation, scored = system.speculation, system.reuse.mode.enabled
    if speculation.keeps_history or scored:
        reuse.remember(system.cache, keys, trajectories, scored=scored)
    metrics = speculation.history_metrics() | speculation.bandit_metrics()
    for problem in [*system.cache.new_problems(), *system.reuse.new_problems()]:
        system.show.message(f"warning: {problem}")
    if speculation.keeps_history and coming is not None:
        prompts = prompts_at(system, coming, system.config.rollout.prompts_per_step)
        pairs = enumerate(zip(prompts.keys, prompts.tokens, strict=True), first_group)
        own = {key: ids for group, (key, ids) in pairs if system.shares.answers(group)}
        speculation.prepare(own)
    return metrics if system.drafter is None else metrics | system.drafter.metrics()


def prompts_at(system: System, cursor: int, count: int) -> Prompts:
    """Return the next `count` prompts from position `cursor` of the data order on.

    Those of more than `Rollout.max_prompt_tokens` are passed over; there are none but in data
    that is too large to be looked through beforehand.
    """
    inputs, limit = system.inputs, system.config.rollout.max_prompt_tokens
    prompts, passed_over = Prompts(end=cursor), 0
    while (missing := count - len(prompts)) > 0:
        examples = prompts_for_step(inputs.task, system.order, prompts.end, missing)
        tokens = tuple(inputs.encode(example, system.config.task) for example in examples)
        numbers = tuple(system.order.indices(prompts.end, missing).tolist())
        end = prompts.end + missing
        fits = [i for i, ids in enumerate(tokens) if len(ids) <= limit]
        prompts += Prompts(examples, tokens, numbers, end).take(fits)
        passed_over = 0 if fits else passed_over + missing
        if passed_over >= MOST_PASSED_OVER:
            raise ValueError(
                f"{passed_over} prompts in a row, up to {examples[-1].example_id}, are longer than "
                f"Rollout.max_prompt_tokens={limit}: raise the limit"
            )
    return prompts


def left_out(system: System, prompts: int) -> dict[str, float]:
    """The metric of the prompts that a step passed over, where any may be."""
    return {"rollout/left_out_prompts": float(prompts)} if system.inputs.left_out is None else {}
