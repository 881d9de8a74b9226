"""Rollouts of `Sched.mode = "pipeline"`: a step is generated during the previous update.

    update s−1 → weights v(s−1) → step s+1 is submitted with them → step s is collected → update s

The responses of a step come from weights one update old (RhymeRL, section 4.2). Step numbers and
rewards fix the weights of a step, the responses it reuses, its lenience and its place in the data
order, so tokens do not depend on the speed of a worker. A request that HistoPipe defers continues
with newer weights; its tokens record their version. A further pass of dynamic sampling is submitted
as a part of the next step, because the workers already have the weights of that step. Several
processes submit their shares of the groups, which may be empty, and exchange the responses of a
step once it is collected (`rl.exchange`).
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from reprise.models.transformer import Params
from reprise.rl.assembly.system import HostWeights, System
from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.engine.stats import EngineStats
from reprise.rl.exchange.responses import Responses
from reprise.rl.learner.optimizer import TrainState
from reprise.rl.metrics.writer import Timings
from reprise.rl.records.trajectory import Request
from reprise.rl.runtime.signals import Stopped
from reprise.rl.steps.result_collector import (
    ResultCollector,
    Scored,
    StepPrompts,
    StepResponses,
    held_state,
    load_held,
)
from reprise.rl.steps.rollouts import (
    Prompts,
    Rollouts,
    left_out,
    prepare,
    prompts_at,
    remember,
    requests_of,
    spec_of,
)
from reprise.rl.workers.multi_engine import MultiEngine
from reprise.sched.policies.histopipe import HistoPipe, HistoPipeConfig, Pace, Tau, tau_of
from reprise.sched.policies.steps import StepOrder
from reprise.sched.protocol import Scheduler
from reprise.sched.simulator.roofline import Costs
from reprise.spec.reuse.prefix_rule import PrefixRule
from reprise.spec.reuse.rollout_cache import RolloutCache
from reprise.spec.sampling import NOISE_NAMES, step_key

ALL_STEPS = 0  # requests are numbered over all steps, so one noise key serves all steps
MAX_NUMBERS = 2**26  # of requests with repeating noise; two steps have fewer requests


@dataclasses.dataclass(frozen=True, eq=False)
class _Policy:
    """The policy that answers a step, on the host, and its rule for cached responses."""

    weights: HostWeights
    rule: PrefixRule | None


class PipelineRollouts:
    """A context manager that is called once per step, like `rl.steps.rollouts.StepRollouts`."""

    def __init__(self, system: System, first_step: int, stale_params: Params | None) -> None:
        engine = system.engine
        config = system.config
        assert isinstance(engine, MultiEngine)
        self._system = system
        self._engine = engine
        self._first = first_step
        self._next = first_step
        self._cursor = 0  # step to collect; end of all submitted prompts
        self._extra = config.algorithm.resolved.max_extra_phases
        self._policies: dict[int, _Policy] = {}
        if stale_params is not None:
            weights = system.host_weights(stale_params)
            self._policies[first_step] = _Policy(weights, system.reuse.rule(first_step))
        self._pacing = None if engine.costs is None else Pacing(engine.costs)
        self._scheduler = scheduler = step_scheduler(
            engine,
            num_steps=config.run.steps - first_step + 1,
            epoch_prompts=len(system.inputs.task),
            pacing=self._pacing,
        )
        self._scorer = system.scorer(config.rollout.group_size)
        self._collector = ResultCollector(system, self._scorer)
        num_groups = system.partition.max_groups(config.rollout.prompts_per_step)
        self._session = engine.session(
            scheduler,
            num_groups * config.rollout.group_size,
            config.longest_tokens,
            spot=engine.spot,
            deliver=self._collector.enter,
        )
        self._key = engine.do(partial(step_key, config.run.seed, ALL_STEPS))
        self._prompts: dict[int, StepPrompts] = {}
        self._open: dict[int, dict[int, Request]] = {}  # requests of all processes, by step and id
        self._num_moved = 0  # number of moved requests at the last metrics row
        self._submitted: set[int] = set()  # steps submitted to the workers of this process
        # responses of the last step, which enter the cache once the next step is submitted
        self._late = RolloutCache(
            policy=system.cache.policy, vocab_size=system.cache.vocab_size, memory_bytes=2**62
        )
        self._lengths: dict[str, tuple[int, ...]] = {}  # lengths of the latest responses, by prompt
        self._held: dict[int, list[Scored]] = {}  # the finished siblings of deferred responses
        self._returned_s = time.monotonic()  # when the last step was returned to the trainer

    def __enter__(self) -> PipelineRollouts:
        self._session.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        # requests ahead of the last step are abandoned
        self._session.__exit__(Stopped)

    def __call__(
        self, system: System, params: Params, cursor: int, step: int, timings: Timings
    ) -> Rollouts:
        """Return the responses of `step`; submit the next step with `params`."""
        weights = system.host_weights(params)
        for coming in (step, step + 1):
            if coming not in self._policies:
                self._policies[coming] = _Policy(weights, system.reuse.rule(coming))
        system.speculation.settle()  # the cache has one reader at a time
        if step not in self._prompts:
            self._submit_first(step, cursor)
        system.cache.take_over(self._late)
        if step > self._first:
            train_s = time.monotonic() - self._returned_s
            self._session.trained(step - 1 - self._first, train_s)
        if step < system.config.run.steps:
            self._submit_first(step + 1, self._cursor)
        own = self._prompts[step]
        size = system.config.rollout.prompts_per_step
        held = [row for rows in self._held.values() for row in rows]
        collected = StepResponses(own, system.config.rollout.group_size, held)
        stats = collected.add(self._collect(step, timings))
        while own.phases <= (self._extra or 0) and (num_groups := collected.num_to_ask(size)):
            self._submit_further(step, num_groups)
            stats = collected.add(self._collect(step, timings))
        for listener in system.listeners:
            listener.after_rollout(self._engine, self._policies[step].weights.whole, timings)
        if system.drafter is not None and system.drafter.waits_for_training:
            with timings.section("drafter"):
                # the update, which comes next, could not wait this long
                system.processes.barrier(f"drafter of step {step}", system.watch.heartbeat)
        after = self._prompts.get(step + 1)
        dynamic = self._extra is not None
        rollouts = collected.rollouts(
            self._prompts.get(step - 1),
            stats,
            self._cursor if after is None else after.begins,
            dynamic=dynamic,
        )
        self._keep(collected, rollouts, step)
        self._next = step + 1
        self._returned_s = time.monotonic()
        return rollouts

    def stale_params(self, state: TrainState, step: int) -> Params:
        """Return the weights that answer the step after `step`, for its checkpoint."""
        return self._policies[step + 1].weights.put_as(state.params)

    # -- submission ----------------------------------------------------------------

    def _first_group(self, step: int) -> int:
        """Return the first group of a step; group, request and noise numbers span all steps."""
        return (step - 1) * self._system.config.rollout.prompts_per_step * (1 + (self._extra or 0))

    def _submit_first(self, step: int, cursor: int) -> None:
        """Submit the first pass of a step, from `cursor` of the data order on."""
        system = self._system
        prompts = prompts_at(system, cursor, system.config.rollout.prompts_per_step)
        passed_over = prompts.end - cursor - len(prompts)
        own = StepPrompts(cursor, self._first_group(step), prompts, passed_over=passed_over)
        self._prompts[step] = own
        self._cursor = max(self._cursor, prompts.end)
        if self._pacing is not None:
            self._pacing.plans(prompts)
        requests = self._requests(step, prompts, ())
        self._submit(step, step, prompts, own.first_group, requests)
        if step == self._first and self._held:
            before = self._prompts[step - 1]
            deferred = self._deferred()
            self._submit(step, step, before.prompts, before.first_group, deferred)

    def _submit_further(self, step: int, num_groups: int) -> None:
        """Submit new prompts of a step as a part of the next step, after its earlier passes."""
        own = self._prompts[step]
        start = self._cursor
        new = prompts_at(self._system, start, num_groups)
        before = own.prompts
        self._cursor = new.end
        requests = self._requests(step, new, before.keys)
        own.add(start, new)
        self._submit(step, step + 1, new, own.first_group + len(before), requests)

    def _requests(self, step: int, new: Prompts, before: Sequence[str]) -> list[Request]:
        """Return the requests of a step for `new`; `before` has the keys of its earlier passes."""
        system = self._system
        config = self._system.config
        size = config.rollout.group_size
        first = self._first_group(step)
        first_group = first + len(before)

        def numbered(r: Request) -> Request:
            request_id = r.request_id + first * size
            if system.reuse.mode.couples_noise:
                # repeating noise is named by the example, so two requests may share a name
                number = (r.group_id + first_group) * size + r.sample_index
                request_id = number % MAX_NUMBERS * NOISE_NAMES + r.request_id % NOISE_NAMES
            return dataclasses.replace(r, request_id=request_id, group_id=r.group_id + first_group)

        requests = requests_of(system, new, step, before)
        self._scorer.examples.update(enumerate(new.examples, first_group))
        return [numbered(r) for r in requests]

    def _submit(
        self, step: int, place: int, prompts: Prompts, first: int, requests: Sequence[Request]
    ) -> None:
        """Submit requests of `step` to the workers, as a part of the step `place`.

        A process submits only its share, for a new place even if the share is empty.
        """
        self._engine.engines[0].check(requests, self._system.config.sampling)
        self._open.setdefault(step, {}).update({r.request_id: r for r in requests})
        own = [r for r in requests if self._system.partition.answers(r.group_id)]
        self._collector.expect(step, own)
        past = {first + g: self._lengths.get(key, ()) for g, key in enumerate(prompts.keys)}
        number = place - self._first
        if place not in self._submitted:
            self._submitted.add(place)
            self._session.submit(number, self._spec(place, prompts, first, own), own, past)
        elif own:
            self._session.submit(number, None, own, past)

    def _spec(
        self, step: int, prompts: Prompts, first: int, requests: Sequence[Request]
    ) -> RolloutSpec:
        system = self._system
        config = self._system.config
        policy = self._policies[step]
        last = {r.request_id: r.cached.tokens for r in requests if r.cached is not None}
        drafts = system.speculation.drafter_factory(
            prompts.keys,
            prompts.tokens,
            last,
            first_group=first,
            group_size=config.rollout.group_size,
            answers=lambda place: system.partition.answers(first + place),
        )
        return spec_of(
            system,
            policy.weights.whole,
            self._key,
            step,
            drafts,
            policy.rule,
            version=max(step - 2, 0),
        )

    def _deferred(self) -> list[Request]:
        """Return the requests that HistoPipe deferred into this step before the run stopped."""
        before = self._first - 1
        rows = [row for rows in self._held.values() for row in rows]
        ended = {(t.group_id, t.sample_index) for t, _, _ in rows}
        return [
            r
            for r in self._requests(before, self._prompts[before].prompts, ())
            if r.group_id in self._held and (r.group_id, r.sample_index) not in ended
        ]

    # -- collection --------------------------------------------------------------

    def _collect(self, step: int, timings: Timings) -> Responses:
        """Wait for the submitted responses of a step and their scores, from all processes."""
        system = self._system
        own = self._prompts[step]
        requests = self._open.pop(step)

        number = step - self._first

        def num_tokens() -> int:
            self._session.look_for_hang()
            return self._session.num_tokens(number)

        def answer() -> Responses:
            with timings.section("wait"):
                done = self._collector.take(step, num_tokens)
            stats = self._session.stats(number)
            stats.events = self._session.new_events()
            stats.pool = self._session.new_pool_counts()
            with timings.section("reward"):
                return self._scorer.responses(done, stats)

        where = f"step {step}" if own.phases == 1 else f"step {step}, pass {own.phases}"
        result = system.partition.exchange(
            where,
            list(requests.values()),
            answer,
            system.is_stop_requested,
            # workers may move requests of this step into the next step, which then answers them
            may_go_on=()
            if own.phases > 1
            else [r.request_id for r in requests.values() if r.group_id >= own.first_group],
        )
        for t in result.trajectories:
            del requests[t.request_id]
        self._open.setdefault(step + 1, {}).update(requests)
        return result

    # -- state for later steps ---------------------------------------------------

    def _keep(self, collected: StepResponses, rollouts: Rollouts, step: int) -> None:
        """Record the state that later steps need, and add to the metrics of the step."""
        system = self._system
        own = collected.step_prompts
        stats = rollouts.stats
        responses = rollouts.trajectories
        repetition = remember(system, rollouts.prompts.keys, responses, step, self._late)
        rollouts.metrics.update(repetition)
        self._held = collected.held()
        lengths: dict[str, list[int]] = {}
        for t in responses:
            lengths.setdefault(rollouts.prompts.keys[t.group_id], []).append(t.num_tokens)
        self._lengths.update({key: tuple(numbers) for key, numbers in lengths.items()})
        if self._pacing is not None:
            self._pacing.played(stats)
        if isinstance(self._scheduler, HistoPipe):
            moved = self._scheduler.num_moved
            rollouts.metrics["rollout/moved"] = float(moved - self._num_moved)
            self._num_moved = moved
        rule = self._policies[step].rule
        after = self._cursor if step + 2 <= system.config.run.steps else None
        rollouts.metrics.update(system.reuse.metrics(stats, stats.tokens, step, rule))
        first_group = self._first_group(step + 2)
        rollouts.metrics.update(prepare(system, after, first_group))
        rollouts.metrics.update(left_out(system, own.passed_over))
        for listener in system.listeners:
            rollouts.metrics.update(listener.metrics(stats))
        for past in [s for s in self._prompts if s < step]:
            del self._prompts[past]
            self._policies.pop(past, None)
        self._submitted = {place for place in self._submitted if place >= step}
        self._scorer.forget(before=own.first_group)

    def state(self) -> dict[str, Any]:
        """Return the state for a resumed run, which submits the steps ahead again."""
        policy = self._policies.get(self._next)
        before = self._prompts.get(self._next - 1)
        rule = None if policy is None else policy.rule
        return {
            "lengths": {key: list(lengths) for key, lengths in self._lengths.items()},
            "cursor": self._cursor,
            "log_lenience": None if rule is None else rule.log_lenience,
            "late": self._late.state(),
            "begins": None if before is None else before.begins,
            "held": held_state(self._held),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`, which is empty if the run used another mode so far."""
        if not state:
            return
        system = self._system
        before = self._first - 1
        self._lengths = {key: tuple(lengths) for key, lengths in state["lengths"].items()}
        self._cursor = int(state["cursor"])
        self._late.load_state(state["late"])
        lenience = state["log_lenience"]
        now = self._policies.get(self._first)
        if lenience is not None and now is not None and now.rule is not None:
            rule = dataclasses.replace(now.rule, log_lenience=float(lenience))
            self._policies[self._first] = dataclasses.replace(now, rule=rule)
        if (begins := state["begins"]) is not None and state["held"]["groups"]:
            prompts = prompts_at(system, begins, system.config.rollout.prompts_per_step)
            own = StepPrompts(begins, self._first_group(before), prompts)
            tasks = [example.task for example in prompts.examples]
            sampling = system.config.sampling
            self._held = load_held(
                state["held"], lambda group: sampling.of(tasks[group - own.first_group])
            )
            self._prompts[before] = own


class Pacing:
    """The τ of a ranking group from the round seconds of workers, at the pace of the last step.

    The tokens that a round gains per request, and the nodes that it verifies for them, are taken
    from the last step: HistoPipe's cooperation with HistoSpec (RhymeRL, figure 12).
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._pace = Pace()
        self._prompt_tokens = 0.0

    def plans(self, prompts: Prompts) -> None:
        """Record the prompts of the next step to plan."""
        self._prompt_tokens = statistics.fmean(len(ids) for ids in prompts.tokens)

    def played(self, stats: EngineStats) -> None:
        """Record the rounds of a step."""
        self._pace = pace_of(stats)

    def tau(self) -> Tau:
        """Return the current τ."""
        costs = self._costs
        return tau_of(costs.round_seconds, costs.kv_tokens, self._prompt_tokens, self._pace)


def pace_of(stats: EngineStats) -> Pace:
    """Return mean nodes and tokens per request in a round, or the plain pace without rounds."""
    requests = 0
    tokens = 0
    slots = 0
    nodes = 0
    for record in stats.timeline:
        rounds = int(record.rounds_A.max(initial=0))
        slots = slots + rounds * record.num_slots
        nodes = nodes + rounds * record.num_nodes
        requests += int(record.rounds_A.sum())
        tokens += int(record.emitted_A.sum())
    return Pace(nodes / slots, tokens / requests) if requests and tokens else Pace()


def step_scheduler(
    workers: MultiEngine, *, num_steps: int, epoch_prompts: int, pacing: Pacing | None = None
) -> Scheduler:
    """Return the scheduler of the steps: HistoPipe, or another policy step by step."""
    config = workers.config
    if config.policy == "histopipe":
        return HistoPipe(
            HistoPipeConfig(
                num_steps,
                config.ranking_groups,
                epoch_prompts=epoch_prompts,
                check_tokens=config.chunk_tokens,
                tau=None if pacing is None else pacing.tau,
            )
        )
    return StepOrder(workers.make_scheduler(), "one_step_off")
