"""The responses of a step: prompts → rollouts and rewards, in `Sched.mode` `sync` and `ahead`.

    sync    answer step s with v(s − 1)
    ahead   recall the prefetched tokens of s → answer step s with v(s − 1), these tokens as drafts
            plan step s + 1 → prefetched with v(s − 1) by idle workers, also during the update

Both modes return the same responses. `rl.steps.pipeline` answers a step with v(s − 2). Dynamic
sampling drops groups with rewards that are all equal, and generates other groups in further passes
of the step. Everything is a function of (configuration, data cursor, step, state), so checkpoints
keep the cursor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from reprise.models.transformer import Params
from reprise.rl.assembly.system import System
from reprise.rl.data.prompts import MAX_PASSED_OVER, UnreadableExample, prompts_for_step
from reprise.rl.data.tasks import Example
from reprise.rl.engine.engine import OnRound, RolloutEngine
from reprise.rl.engine.rollout_spec import DrafterFactory, RolloutSpec
from reprise.rl.engine.stats import EngineStats, joined
from reprise.rl.exchange.responses import Responses, Scorer, scored_rewards
from reprise.rl.learner.advantages import informative_groups
from reprise.rl.learner.optimizer import TrainState
from reprise.rl.metrics.writer import Timings
from reprise.rl.records.trajectory import NonFiniteLogits, Prompt, Request, Trajectory
from reprise.rl.rewards.scores import Score
from reprise.rl.workers.ahead_engine import AheadEngine, ComingStep, Prefetched
from reprise.spec.reuse.prefix_rule import PrefixRule
from reprise.spec.reuse.rollout_cache import RolloutCache


@dataclasses.dataclass(frozen=True, eq=False)
class Prompts:
    """Consecutive prompts of the data order: examples, tokens, and numbers in the data.

    `end` is the position after the last prompt; prompts that are too long were skipped.
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


def prompts_at(system: System, cursor: int, count: int) -> Prompts:
    """Return the next `count` prompts from position `cursor` of the data order on.

    Prompts of more than `Rollout.max_prompt_tokens` are skipped; only data too large to be checked
    before the run has such prompts. Raises UnreadableExample.
    """
    try:
        return _prompts_at(system, cursor, count)
    except (ValueError, OSError) as error:
        raise UnreadableExample(str(error)) from error


def _prompts_at(system: System, cursor: int, count: int) -> Prompts:
    inputs = system.inputs
    limit = system.config.rollout.max_prompt_tokens
    prompts = Prompts(end=cursor)
    passed_over = 0
    while (missing := count - len(prompts)) > 0:
        examples = prompts_for_step(inputs.task, system.order, prompts.end, missing)
        tokens = tuple(inputs.encode(example, system.config.task) for example in examples)
        numbers = tuple(system.order.indices(prompts.end, missing).tolist())
        end = prompts.end + missing
        fits = [i for i, ids in enumerate(tokens) if len(ids) <= limit]
        prompts += Prompts(examples, tokens, numbers, end).take(fits)
        passed_over = 0 if fits else passed_over + missing
        if passed_over >= MAX_PASSED_OVER:
            raise ValueError(
                f"{passed_over} prompts in a row, up to {examples[-1].example_id}, are longer than "
                f"Rollout.max_prompt_tokens={limit}: raise the limit"
            )
    return prompts


@dataclasses.dataclass(frozen=True, eq=False)
class Rollouts:
    """The scored responses of a step, in the order of the samples.

    Group g answers `prompts.examples[g]`. `used_groups` are trained on: without dynamic sampling,
    every group. `cursor` is the position in the data order after the prompts of the step.
    """

    trajectories: list[Trajectory]
    scores: list[Score]
    completions: list[str]
    stats: EngineStats
    prompts: Prompts
    used_groups: frozenset[int]
    metrics: dict[str, float]
    cursor: int

    @property
    def used(self) -> np.ndarray:
        """Return a mask of the trajectories that are trained on; bool [n]."""
        return np.array([t.group_id in self.used_groups for t in self.trajectories], bool)


class StepRollouts:
    """A source of step responses; with an `ahead` engine, idle workers prefetch the next step.

    A checkpoint holds no prefetched tokens, so a resumed run prefetches them again.
    """

    def __init__(self, ahead: AheadEngine | None = None) -> None:
        self._ahead = ahead
        self._planned = 0  # expected position in the data order at the prefetched step
        self._num_dropped = 0  # prefetched requests dropped since the last step

    def __call__(
        self, system: System, params: Params, cursor: int, step: int, timings: Timings
    ) -> Rollouts:
        """Return the responses of `step`, which starts at `cursor` of the data order."""
        engine = self._ahead
        if engine is None:
            return generate(system, params, cursor, step, timings)
        with timings.section("recall"):
            prefetched = engine.recall(system.leave_if_stopped)
        size = system.config.rollout.prompts_per_step
        self._plan(engine, system, prompts_at(system, cursor, size).end, step + 1)
        rollouts = generate(system, params, cursor, step, timings, prefetched)
        rollouts.metrics.update(
            prefetch_metrics(prefetched, rollouts.trajectories, self._num_dropped)
        )
        self._num_dropped = 0
        if rollouts.cursor != self._planned and step < system.config.run.steps:
            # dynamic sampling has used the prompts that were prefetched for the next step
            self._num_dropped = len(engine.recall(system.leave_if_stopped).tokens)
            self._plan(engine, system, rollouts.cursor, step + 1)
            engine.begin()
        return rollouts

    def stale_params(self, state: TrainState, step: int) -> None:
        """Return None, since older weights answer no step."""

    def state(self) -> dict[str, Any]:
        return {}

    def _plan(self, engine: AheadEngine, system: System, cursor: int, step: int) -> None:
        """Plan the step that starts at `cursor`, unless the run has no such step."""
        self._planned = cursor
        if step <= system.config.run.steps:
            engine.plan(coming_step(system, cursor, step))


def generate(
    system: System,
    params: Params,
    cursor: int,
    step: int,
    timings: Timings,
    prefetched: Prefetched | None = None,
) -> Rollouts:
    """Return the responses of the step that starts at `cursor` of the data order.

    With dynamic sampling, further passes sample new prompts (`groups_to_ask`) until no group is
    missing or `max_extra_phases` passes are done. The choice uses rewards before any length or KL
    penalty. Surplus groups are trained on in this step: in the next step their policy would be an
    update old.
    """
    wanted = system.config.rollout.prompts_per_step
    extra = system.config.algorithm.resolved.max_extra_phases
    prompts = Prompts(end=cursor)
    passes = list[Responses]()
    weights = system.weights(params)
    num_groups = wanted
    used = frozenset(range(wanted))
    while num_groups and len(passes) <= (extra or 0):
        new = prompts_at(system, prompts.end, num_groups)
        passes.append(_sample(system, weights, prompts, new, step, timings, prefetched))
        prompts += new
        num_groups = 0
        if extra is not None:
            used = frozenset(_informative(passes))
            num_groups = groups_to_ask(wanted, len(prompts), len(used))
    trajectories = [t for p in passes for t in p.trajectories]
    stats = joined([p.stats for p in passes])
    metrics = system.reuse.metrics(stats, sum(t.num_tokens for t in trajectories), step)
    coming = prompts.end if step < system.config.run.steps else None
    metrics |= remember(system, prompts.keys, trajectories, step, system.cache)
    metrics |= prepare(system, coming)
    metrics |= left_out(system, prompts.end - cursor - len(prompts))
    for listener in system.listeners:
        metrics |= listener.metrics(stats)
    if extra is not None:
        metrics |= sampling_metrics(len(passes), len(prompts), len(used))
    scores = [s for p in passes for s in p.scores]
    texts = [text for p in passes for text in p.texts]
    return Rollouts(trajectories, scores, texts, stats, prompts, used, metrics, prompts.end)


def _informative(passes: Sequence[Responses]) -> set[int]:
    """Return the groups so far with rewards that are not all equal, ignoring failed rewards."""
    rewards = [r for p in passes for r in scored_rewards(p.trajectories, p.scores)]
    return informative_groups(rewards, [t.group_id for p in passes for t in p.trajectories])


def groups_to_ask(wanted: int, generated: int, used: int) -> int:
    """Return the group count of the next pass: missing / (share used so far), 0 if none is missing.

    The count is at most `wanted`, as in the first pass, which bounds a step to 1 + max_extra_phases
    times `wanted`.
    """
    missing = max(0, wanted - used)
    return min(wanted, -(-missing * generated // max(used, 1)))


def sampling_metrics(passes: int, groups: int, used: int) -> dict[str, float]:
    """Return the metrics of dynamic sampling."""
    return {
        "dynamic_sampling/phases": float(passes),
        "dynamic_sampling/generated_groups": float(groups),
        "dynamic_sampling/used_groups": float(used),
    }


def _sample(
    system: System,
    weights: Params,
    before: Prompts,
    new: Prompts,
    step: int,
    timings: Timings,
    prefetched: Prefetched | None,
) -> Responses:
    """Return the responses of `weights` to `new`; each response is scored once it finishes.

    `before` are the prompts of earlier passes of the step: groups and noise are numbered as if all
    passes were one pass.
    """
    config = system.config
    first = len(before)
    system.speculation.settle()  # the cache has one reader at a time
    every = requests_of(system, new, step, before.keys)
    if prefetched is not None:
        every = prefetched.resumed(every)
    requests = [r for r in every if system.partition.answers(r.group_id)]
    drafts = system.speculation.drafter_factory(
        new.keys,
        new.tokens,
        own_drafts(requests),
        group_size=config.rollout.group_size,
        answers=system.partition.answers,
    )
    scorer = system.scorer(config.rollout.group_size)
    scorer.examples.update(enumerate(new.examples))

    def watch(finished: int, tokens: int) -> None:
        system.show.rollout(finished, len(requests), tokens)
        system.leave_rollout_if_stopped()

    name = f"step {step}, from prompt {first} on" if first else f"step {step}"
    key = system.engine.do(partial(system.reuse.key, step))

    def answer() -> Responses:
        with timings.section("rollout"):
            rule = system.reuse.rule(step)
            spec = spec_of(system, weights, key, step, drafts, rule, version=step - 1)
            done, stats = run(system.engine, spec, requests, scorer, watch, name)
        for listener in system.listeners:
            listener.after_rollout(system.engine, weights, timings)
        with timings.section("reward"):  # the remaining scoring after the last response
            return scorer.responses(done, stats)

    result = system.partition.exchange(name, every, answer, system.is_stop_requested)
    moved = [dataclasses.replace(t, group_id=t.group_id + first) for t in result.trajectories]
    return dataclasses.replace(result, trajectories=moved)


def spec_of(
    system: System,
    weights: Params,
    key: jax.Array,
    step: int,
    drafts: DrafterFactory,
    rule: PrefixRule | None,
    *,
    version: int,
) -> RolloutSpec:
    """Return the settings that all requests of a rollout share."""
    spec = RolloutSpec(
        weights,
        system.config.sampling,
        key,
        system.inputs.model.eos_token_ids,
        policy_version=version,
        drafts=drafts,
        rule=rule,
        words=system.inputs.token_bytes_for(system.config.sampling),
        times=system.speculation.times_now,
    )
    for listener in system.listeners:
        spec = listener.before_rollout(spec, step)
    return spec


def requests_of(
    system: System, new: Prompts, step: int, before: Sequence[str] = ()
) -> list[Request]:
    """Return the requests of a step for new prompts; `before` has the keys of earlier passes.

    First samples come first, so that siblings that start later have text to draft from.
    """
    config = system.config
    return system.reuse.requests(
        new.keys,
        new.tokens,
        new.numbers,
        config.rollout.group_size,
        step=step,
        before=before,
        samplings=[config.sampling.of(example.task) for example in new.examples],
    )


def own_drafts(requests: Sequence[Request]) -> dict[int, np.ndarray]:
    """Return the tokens that each request drafts from: prefetched, or the cached response."""
    last = {r.request_id: r.cached.tokens for r in requests if r.cached is not None}
    return last | {r.request_id: np.array(r.begun, np.int32) for r in requests if r.begun}


def run(
    engine: RolloutEngine,
    spec: RolloutSpec,
    requests: Sequence[Request],
    scorer: Scorer,
    on_round: OnRound | None,
    what: str,
) -> tuple[list[Trajectory], EngineStats]:
    """Return the responses to the requests of a process, if any, and the counts of the engine.

    `what` names the rollout in errors.
    """
    if not requests:
        return [], EngineStats()
    try:
        return engine.run(spec, requests, on_finish=scorer, on_round=on_round), engine.stats
    except NonFiniteLogits as error:
        raise NonFiniteLogits(f"{what}: {error}") from None


def remember(
    system: System,
    keys: Sequence[str],
    trajectories: Sequence[Trajectory],
    step: int,
    cache: RolloutCache,
) -> dict[str, float]:
    """Store the responses of a step in `cache` for the next epoch, if anything needs them."""
    if not system.speculation.keeps_history and not system.reuse.mode.repeats:
        return {}
    return system.reuse.remember(keys, trajectories, step, cache)


def prepare(system: System, coming: int | None, first_group: int = 0) -> dict[str, float]:
    """Start to index the history of a coming step; return metrics of history and budgets.

    The step starts at `coming` of the data order, and its first group is `first_group`.
    """
    speculation = system.speculation
    metrics = speculation.history_metrics() | speculation.bandit_metrics()
    for problem in [*system.cache.new_problems(), *system.reuse.new_problems()]:
        system.show.message(f"warning: {problem}")
    if speculation.keeps_history and coming is not None:
        prompts = prompts_at(system, coming, system.config.rollout.prompts_per_step)
        pairs = enumerate(zip(prompts.keys, prompts.tokens, strict=True), first_group)
        own = {key: ids for group, (key, ids) in pairs if system.partition.answers(group)}
        speculation.prepare(own)
    return metrics


def left_out(system: System, prompts: int) -> dict[str, float]:
    """Return the metric of the prompts that a step skipped, if steps may skip prompts."""
    return {"rollout/left_out_prompts": float(prompts)} if system.inputs.left_out is None else {}


def coming_step(system: System, cursor: int, step: int) -> ComingStep:
    """Return the step that starts at `cursor`, as this process may prefetch it.

    Its drafts leave out the history of the prompts, which is not indexed yet.
    """
    config = system.config
    answers = system.partition.answers
    system.speculation.settle()  # the cache has one reader at a time
    prompts = prompts_at(system, cursor, config.rollout.prompts_per_step)
    requests = [r for r in requests_of(system, prompts, step) if answers(r.group_id)]
    drafts = system.speculation.drafter_factory(
        prompts.keys,
        prompts.tokens,
        own_drafts(requests),
        group_size=config.rollout.group_size,
        answers=answers,
        index=system.speculation.no_history,
    )
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
