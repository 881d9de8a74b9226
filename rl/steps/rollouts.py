"""The stages of a step of rollouts, and a step of `Sched.mode = "sync"`, one stage after the other.

    prompts_at → requests_of, drafter_factory → spec_of → run → finish_step → prepare
                 └─────── again with dynamic sampling ───────┘

The modes collect a step at different times:

    sync      here                answer step s with v(s − 1)
    ahead     rl.steps.ahead      the same; idle workers prefetch step s + 1, also during the update
    pipeline  rl.steps.pipeline   submit step s + 1 with v(s − 1), and collect step s of v(s − 2)

Dynamic sampling drops groups with rewards that are all equal, and generates other groups in further
passes of the step. Everything is a function of (configuration, data cursor, step, state), so
checkpoints keep the cursor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from reprise.models.decoder.transformer import Params
from reprise.rl.assembly.system import System
from reprise.rl.data.prompts import MAX_PASSED_OVER, UnreadableExample, prompts_for_step
from reprise.rl.data.tasks import Example
from reprise.rl.engine.rollout_spec import DrafterFactory, RolloutSpec
from reprise.rl.exchange.responses import Responses
from reprise.rl.learner.optimizer import TrainState
from reprise.rl.metrics.writer import Timings
from reprise.rl.records.stats import EngineStats
from reprise.rl.records.trajectory import Prompt, Request, Trajectory
from reprise.rl.rewards.scores import Score
from reprise.rl.sessions.ahead_engine import Prefetched
from reprise.spec.retrieval.history import HistoryIndex
from reprise.spec.reuse.prefix_rule import PrefixRule
from reprise.spec.reuse.rollout_cache import RolloutCache


@dataclasses.dataclass(frozen=True, eq=False)
class Prompts:
    """Prompts in the data order: examples, tokens, and numbers in the data.

    `start` and `end` are the positions of the first prompt and after the last prompt. The prompts
    of a step may come in several passes; `num_left_out` prompts in between were too long.
    """

    examples: tuple[Example, ...] = ()
    tokens: tuple[Prompt, ...] = ()
    numbers: tuple[int, ...] = ()
    start: int = 0
    end: int = 0
    num_passes: int = 1
    num_left_out: int = 0

    def __len__(self) -> int:
        return len(self.examples)

    def __add__(self, more: Prompts) -> Prompts:
        """Return the prompts of a step with another pass."""
        return Prompts(
            self.examples + more.examples,
            self.tokens + more.tokens,
            self.numbers + more.numbers,
            self.start,
            more.end,
            self.num_passes + more.num_passes,
            self.num_left_out + more.num_left_out,
        )

    def take(self, indices: Sequence[int]) -> Prompts:
        return dataclasses.replace(
            self,
            examples=tuple(self.examples[i] for i in indices),
            tokens=tuple(self.tokens[i] for i in indices),
            numbers=tuple(self.numbers[i] for i in indices),
        )

    @property
    def keys(self) -> list[str]:
        return [example.example_id for example in self.examples]


def prompts_at(system: System, cursor: int, count: int) -> Prompts:
    """Return the next `count` prompts from position `cursor` of the data order on.

    Prompts of more than `Rollout.max_prompt_tokens` are skipped; only data too large to be checked
    before the run has such prompts. Raises UnreadableExample.
    """
    inputs = system.inputs
    limit = system.config.rollout.max_prompt_tokens
    fitting = list[tuple[Example, Prompt, int]]()
    end = cursor
    passed_over = 0  # in a row
    try:
        while (missing := count - len(fitting)) > 0:
            examples = prompts_for_step(inputs.task, system.order, end, missing)
            tokens = [inputs.encode(example, system.config.task) for example in examples]
            numbers = system.order.indices(end, missing).tolist()
            end = end + missing
            rows = zip(examples, tokens, numbers, strict=True)
            new = [row for row in rows if len(row[1]) <= limit]
            fitting += new
            passed_over = 0 if new else passed_over + missing
            if passed_over >= MAX_PASSED_OVER:
                raise ValueError(
                    f"{passed_over} prompts in a row, up to {examples[-1].example_id}, are longer "
                    f"than Rollout.max_prompt_tokens={limit}: raise the limit"
                )
    except (ValueError, OSError) as error:
        raise UnreadableExample(str(error)) from error
    return Prompts(
        tuple(example for example, _, _ in fitting),
        tuple(ids for _, ids, _ in fitting),
        tuple(number for _, _, number in fitting),
        cursor,
        end,
        num_left_out=end - cursor - len(fitting),
    )


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
    """A source of step responses; a step is collected as soon as it is submitted."""

    def __call__(
        self, system: System, params: Params, cursor: int, step: int, timings: Timings
    ) -> Rollouts:
        """Return the responses of `step`, which starts at `cursor` of the data order."""
        return generate(system, params, cursor, step, timings)

    def stale_params(self, state: TrainState, step: int) -> Params | None:
        """Return any older weights that answer the step after `step`, for its checkpoint."""
        return None

    def state(self) -> dict[str, Any]:
        """Return the state for a resumed run."""
        return {}


def generate(
    system: System,
    params: Params,
    cursor: int,
    step: int,
    timings: Timings,
    prefetched: Prefetched | None = None,
) -> Rollouts:
    """Return the responses of the step that starts at `cursor` of the data order.

    With dynamic sampling, further passes sample new prompts (`groups_to_sample`) until no group is
    missing or `max_extra_phases` passes are done. The choice uses rewards before any length or KL
    penalty. Surplus groups are trained on in this step: in the next step their policy would be an
    update old.
    """
    wanted = system.config.rollout.prompts_per_step
    extra = system.config.algorithm.resolved.max_extra_phases or 0
    weights = system.weights(params)
    prompts = prompts_at(system, cursor, wanted)
    responses = _sample(system, weights, prompts, (), step, timings, prefetched)
    while prompts.num_passes <= extra and (
        missing := groups_to_sample(wanted, len(prompts), len(responses.informative))
    ):
        new = prompts_at(system, prompts.end, missing)
        responses += _sample(system, weights, new, prompts.keys, step, timings, prefetched)
        prompts += new
    rollouts = finish_step(
        system,
        prompts,
        responses,
        step,
        cursor=prompts.end,
        cache=system.cache,
        num_tokens=sum(t.num_tokens for t in responses.trajectories),
    )
    rollouts.metrics.update(prepare(system, prompts.end, step + 1))
    return rollouts


def groups_to_sample(wanted: int, generated: int, used: int) -> int:
    """Return the group count of the next pass: missing / (share used so far), 0 if none is missing.

    The count is at most `wanted`, as in the first pass, which bounds a step to 1 + max_extra_phases
    times `wanted`.
    """
    missing = max(0, wanted - used)
    return min(wanted, -(-missing * generated // max(used, 1)))


def _sample(
    system: System,
    weights: Params,
    new: Prompts,
    before: Sequence[str],
    step: int,
    timings: Timings,
    prefetched: Prefetched | None,
) -> Responses:
    """Return the responses of `weights` to `new`; each response is scored once it finishes.

    `before` has the keys of the prompts of earlier passes.
    """
    first = len(before)
    system.speculation.settle()  # the cache has one reader at a time
    every = requests_of(system, new, step, before)
    if prefetched is not None:
        every = prefetched.resumed(every)
    requests = [r for r in every if system.partition.answers(r.group_id)]
    drafts = drafter_factory(system, new, requests, first)
    scorer = system.scorer(system.config.rollout.group_size)
    scorer.examples.update(enumerate(new.examples, first))

    def watch(finished: int, tokens: int) -> None:
        system.show.rollout(finished, len(requests), tokens)
        system.leave_rollout_if_stopped()

    name = f"step {step}, from prompt {first} on" if first else f"step {step}"
    key = system.engine.do(partial(system.reuse.key, step))

    def answer() -> Responses:
        with timings.section("rollout"):
            rule = system.reuse.rule(step)
            spec = spec_of(system, weights, key, step, drafts, rule, version=step - 1)
            done, stats = scorer.run(system.engine, spec, requests, watch, name)
        for listener in system.listeners:
            listener.after_rollout(system.engine, weights, timings)
        with timings.section("reward"):  # the remaining scoring after the last response
            return scorer.responses(done, stats)

    return system.partition.exchange(name, every, answer, system.is_stop_requested)


def requests_of(
    system: System, new: Prompts, step: int, before: Sequence[str] = ()
) -> list[Request]:
    """Return the requests of a step for new prompts; `before` has the keys of earlier passes.

    First samples come first, so that siblings that start later have text to draft from. Groups and
    noise are numbered as if all passes were one pass.
    """
    config = system.config
    requests = system.reuse.requests(
        new.keys,
        new.tokens,
        new.numbers,
        config.rollout.group_size,
        step=step,
        before=before,
        samplings=[config.sampling.of(example.task) for example in new.examples],
    )
    if not before:
        return requests
    return [dataclasses.replace(r, group_id=len(before) + r.group_id) for r in requests]


def drafter_factory(
    system: System,
    prompts: Prompts,
    requests: Sequence[Request],
    first_group: int = 0,
    index: HistoryIndex | None = None,
) -> DrafterFactory:
    """Return the drafters of the requests; group `first_group` + g answers prompt g.

    A request drafts from its prefetched tokens, or from the cached response. With `index` the
    history of the prompts is not looked up.
    """
    last = {r.request_id: r.cached.tokens for r in requests if r.cached is not None}
    last |= {r.request_id: np.array(r.begun, np.int32) for r in requests if r.begun}
    return system.speculation.drafter_factory(
        prompts.keys,
        prompts.tokens,
        last,
        first_group=first_group,
        # each turn of an episode is a request, so that no number of requests completes a group
        group_size=0 if system.config.environment.enabled else system.config.rollout.group_size,
        answers=lambda place: system.partition.answers(first_group + place),
        index=index,
    )


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


def finish_step(
    system: System,
    prompts: Prompts,
    responses: Responses,
    step: int,
    *,
    cursor: int,
    cache: RolloutCache,
    num_tokens: int,
    rule: PrefixRule | None = None,
    carried: Prompts | None = None,
) -> Rollouts:
    """Return the responses to all prompts of a step, and store them in `cache` for the next epoch.

    `cursor` is the position in the data order after the step. The metrics of reuse, by the `rule`
    that answered the step, are shares of `num_tokens`. The last groups may answer prompts `carried`
    from the step before.
    """
    every = prompts if carried is None else prompts + carried
    stats = responses.stats
    metrics = system.reuse.metrics(stats, num_tokens, step, rule)
    if system.speculation.keeps_history or system.reuse.mode.repeats:
        metrics |= system.reuse.remember(every.keys, responses.trajectories, step, cache)
    if system.inputs.left_out is None:  # steps may skip prompts
        metrics["rollout/left_out_prompts"] = float(prompts.num_left_out)
    for listener in system.listeners:
        metrics |= listener.metrics(stats)
    used = frozenset(range(len(every)))
    if system.config.algorithm.resolved.max_extra_phases is not None:
        used = frozenset(responses.informative)
        metrics |= {
            "dynamic_sampling/phases": float(prompts.num_passes),
            "dynamic_sampling/generated_groups": float(len(prompts)),
            "dynamic_sampling/used_groups": float(len(used)),
        }
    return Rollouts(
        responses.trajectories,
        responses.scores,
        responses.texts,
        stats,
        every,
        used,
        metrics,
        cursor,
    )


def prepare(system: System, cursor: int, step: int, first_group: int = 0) -> dict[str, float]:
    """Start to index the history of a coming step; return metrics of history and budgets.

    The step starts at `cursor` of the data order, if the run has such a step, and its first group
    is `first_group`.
    """
    speculation = system.speculation
    metrics = speculation.history_metrics() | speculation.bandit_metrics()
    for problem in [*system.cache.new_problems(), *system.reuse.new_problems()]:
        system.show.message(f"warning: {problem}")
    if speculation.keeps_history and step <= system.config.run.steps:
        prompts = prompts_at(system, cursor, system.config.rollout.prompts_per_step)
        pairs = enumerate(zip(prompts.keys, prompts.tokens, strict=True), first_group)
        own = {key: ids for group, (key, ids) in pairs if system.partition.answers(group)}
        speculation.prepare(own)
    return metrics
