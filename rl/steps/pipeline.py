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
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from reprise.models.decoder.transformer import Params
from reprise.rl.assembly.system import HostWeights, System
from reprise.rl.exchange.responses import Responses, Scored, in_order
from reprise.rl.learner.optimizer import TrainState
from reprise.rl.metrics.writer import Timings
from reprise.rl.records.stats import EngineStats
from reprise.rl.records.trajectory import Request
from reprise.rl.runtime.signals import Stopped
from reprise.rl.sessions.multi_engine import MultiEngine
from reprise.rl.steps.held_groups import held_state, load_held, whole_groups
from reprise.rl.steps.pacing import Pacing
from reprise.rl.steps.result_collector import ResultCollector
from reprise.rl.steps.rollouts import (
    Prompts,
    Rollouts,
    StepRollouts,
    drafter_factory,
    finish_step,
    groups_to_sample,
    prepare,
    prompts_at,
    requests_of,
    spec_of,
)
from reprise.sched.policies.histopipe import HistoPipe, HistoPipeConfig
from reprise.sched.policies.steps import StepOrder
from reprise.sched.protocol import Scheduler
from reprise.spec.reuse.prefix_rule import PrefixRule
from reprise.spec.reuse.rollout_cache import RolloutCache
from reprise.spec.verification.sampling import NOISE_NAMES, step_key

ALL_STEPS = 0  # requests are numbered over all steps, so one noise key serves all steps
MAX_NUMBERS = 2**26  # of requests with repeating noise; two steps have fewer requests


@dataclasses.dataclass(frozen=True, eq=False)
class _Policy:
    """The policy that answers a step, on the host, and its rule for cached responses."""

    weights: HostWeights
    rule: PrefixRule | None


class PipelineRollouts(StepRollouts):
    """A source of step responses that submits the next step before it collects a step.

    It is a context manager, as its workers run between the steps too.
    """

    def __init__(self, system: System, first_step: int, stale_params: Params | None) -> None:
        engine = system.engine
        config = system.config
        assert isinstance(engine, MultiEngine)
        self._system = system
        self._engine = engine
        self._first = first_step
        self._next = first_step  # step to collect
        self._cursor = 0  # end of all submitted prompts
        self._extra = config.algorithm.resolved.max_extra_phases or 0
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
        self._prompts: dict[int, Prompts] = {}
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
        responses = self._collect(step, timings)
        while self._prompts[step].num_passes <= self._extra and (
            missing := self._num_missing(step, responses)
        ):
            self._submit_further(step, missing)
            responses += self._collect(step, timings)
        for listener in system.listeners:
            listener.after_rollout(self._engine, self._policies[step].weights.whole, timings)
        if system.drafter is not None and system.drafter.waits_for_training:
            with timings.section("drafter"):
                # the update, which comes next, could not wait this long
                system.processes.barrier(f"drafter of step {step}", system.watch.heartbeat)
        rollouts = self._finish(step, responses)
        self._next = step + 1
        self._returned_s = time.monotonic()
        return rollouts

    def stale_params(self, state: TrainState, step: int) -> Params:
        """Return the weights that answer the step after `step`, for its checkpoint."""
        return self._policies[step + 1].weights.put_as(state.params)

    # -- submission ----------------------------------------------------------------

    def _first_group(self, step: int) -> int:
        """Return the first group of a step; group, request and noise numbers span all steps."""
        return (step - 1) * self._system.config.rollout.prompts_per_step * (1 + self._extra)

    def _submit_first(self, step: int, cursor: int) -> None:
        """Submit the first pass of a step, from `cursor` of the data order on."""
        system = self._system
        prompts = prompts_at(system, cursor, system.config.rollout.prompts_per_step)
        self._prompts[step] = prompts
        self._cursor = max(self._cursor, prompts.end)
        if self._pacing is not None:
            self._pacing.plans(prompts)
        requests = self._requests(step, prompts, ())
        self._submit(step, step, prompts, self._first_group(step), requests)
        if step == self._first and self._held:
            before = self._prompts[step - 1]
            self._submit(step, step, before, self._first_group(step - 1), self._deferred())

    def _submit_further(self, step: int, num_groups: int) -> None:
        """Submit new prompts of a step as a part of the next step, after its earlier passes."""
        before = self._prompts[step]
        new = prompts_at(self._system, self._cursor, num_groups)
        self._prompts[step] = before + new
        self._cursor = new.end
        requests = self._requests(step, new, before.keys)
        self._submit(step, step + 1, new, self._first_group(step) + len(before), requests)

    def _requests(self, step: int, new: Prompts, before: Sequence[str]) -> list[Request]:
        """Return the requests of a step for `new`; `before` has the keys of its earlier passes."""
        system = self._system
        size = system.config.rollout.group_size
        first = self._first_group(step)

        def numbered(r: Request) -> Request:
            group = first + r.group_id
            request_id = first * size + r.request_id
            if system.reuse.mode.couples_noise:
                # repeating noise is named by the example, so two requests may share a name
                number = group * size + r.sample_index
                request_id = number % MAX_NUMBERS * NOISE_NAMES + r.request_id % NOISE_NAMES
            return dataclasses.replace(r, request_id=request_id, group_id=group)

        self._scorer.examples.update(enumerate(new.examples, first + len(before)))
        return [numbered(r) for r in requests_of(system, new, step, before)]

    def _submit(
        self, step: int, place: int, prompts: Prompts, first: int, requests: Sequence[Request]
    ) -> None:
        """Submit requests of `step` to the workers, as a part of the step `place`.

        A process submits only its share, for a new place even if the share is empty.
        """
        system = self._system
        self._engine.engines[0].check(requests, system.config.sampling)
        self._open.setdefault(step, {}).update({r.request_id: r for r in requests})
        own = [r for r in requests if system.partition.answers(r.group_id)]
        self._collector.expect(step, own)
        past = {first + g: self._lengths.get(key, ()) for g, key in enumerate(prompts.keys)}
        spec = None
        if place not in self._submitted:
            self._submitted.add(place)
            policy = self._policies[place]
            spec = spec_of(
                system,
                policy.weights.whole,
                self._key,
                place,
                drafter_factory(system, prompts, own, first),
                policy.rule,
                version=max(place - 2, 0),
            )
        if spec is not None or own:
            self._session.submit(place - self._first, spec, own, past)

    def _deferred(self) -> list[Request]:
        """Return the requests that HistoPipe deferred into this step before the run stopped."""
        before = self._first - 1
        rows = [row for rows in self._held.values() for row in rows]
        ended = {(t.group_id, t.sample_index) for t, _, _ in rows}
        return [
            r
            for r in self._requests(before, self._prompts[before], ())
            if r.group_id in self._held and (r.group_id, r.sample_index) not in ended
        ]

    # -- collection --------------------------------------------------------------

    def _collect(self, step: int, timings: Timings) -> Responses:
        """Wait for the last submitted pass of a step and its scores, from all processes.

        Returns the responses of whole groups, and holds the other groups.
        """
        system = self._system
        prompts = self._prompts[step]
        is_first_pass = prompts.num_passes == 1
        requests = self._open.pop(step)
        number = step - self._first
        first = self._first_group(step)

        def num_tokens() -> int:
            self._session.look_for_hang()
            return self._session.num_tokens(number)

        def answer() -> Responses:
            with timings.section("wait"):
                done = self._collector.take(step, num_tokens)
            # the session counts further passes as a part of the next step
            stats = self._session.stats(number) if is_first_pass else EngineStats()
            stats.events = self._session.new_events()
            stats.pool = self._session.new_pool_counts()
            with timings.section("reward"):
                return self._scorer.responses(done, stats)

        name = f"step {step}" if is_first_pass else f"step {step}, pass {prompts.num_passes}"
        groups = {r.group_id for r in requests.values() if r.group_id >= first}
        # workers may move requests of the first pass into the next step, which then answers them
        may_go_on = [i for i, r in requests.items() if is_first_pass and r.group_id in groups]
        responses = system.partition.exchange(
            name,
            list(requests.values()),
            answer,
            system.is_stop_requested,
            may_go_on=may_go_on,
        )
        for t in responses.trajectories:
            del requests[t.request_id]
        self._open.setdefault(step + 1, {}).update(requests)
        size = system.config.rollout.group_size
        whole, self._held = whole_groups(responses, self._held, sorted(groups), size)
        return whole

    def _num_missing(self, step: int, responses: Responses) -> int:
        """Return the group count of another pass; groups that continue are not missing."""
        wanted = self._system.config.rollout.prompts_per_step
        num_held = len(self._held)
        num_used = sum(group >= self._first_group(step) for group in responses.informative)
        return groups_to_sample(wanted - num_held, len(self._prompts[step]) - num_held, num_used)

    def _finish(self, step: int, responses: Responses) -> Rollouts:
        """Return the step, with carried groups last, and record the state that later steps need."""
        system = self._system
        prompts = self._prompts[step]
        after = self._prompts.get(step + 1)
        first = self._first_group(step)
        carried = sorted({t.group_id for t in responses.trajectories if t.group_id < first})
        carried_prompts = None
        if carried:
            first_before = self._first_group(step - 1)
            carried_prompts = self._prompts[step - 1].take([g - first_before for g in carried])
        groups = [*range(first, first + len(prompts)), *carried]
        rollouts = finish_step(
            system,
            prompts,
            renumbered(responses, groups),
            step,
            cursor=self._cursor if after is None else after.start,
            cache=self._late,
            num_tokens=responses.stats.tokens,
            rule=self._policies[step].rule,
            carried=carried_prompts,
        )
        metrics = rollouts.metrics
        metrics.update(prepare(system, self._cursor, step + 2, self._first_group(step + 2)))
        num_carried = sum(t.group_id < first for t in responses.trajectories)
        metrics["rollout/carried"] = float(num_carried)
        if isinstance(self._scheduler, HistoPipe):
            moved = self._scheduler.num_moved
            metrics["rollout/moved"] = float(moved - self._num_moved)
            self._num_moved = moved
        if self._pacing is not None:
            self._pacing.played(rollouts.stats)
        lengths: dict[str, list[int]] = {}
        for t in rollouts.trajectories:
            lengths.setdefault(rollouts.prompts.keys[t.group_id], []).append(t.num_tokens)
        self._lengths.update({key: tuple(numbers) for key, numbers in lengths.items()})
        for past in [s for s in self._prompts if s < step]:
            del self._prompts[past]
            self._policies.pop(past, None)
        self._submitted = {place for place in self._submitted if place >= step}
        self._scorer.forget(before=first)
        return rollouts

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
            "begins": None if before is None else before.start,
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
            first = self._first_group(before)
            tasks = [example.task for example in prompts.examples]
            sampling = system.config.sampling
            self._held = load_held(state["held"], lambda group: sampling.of(tasks[group - first]))
            self._prompts[before] = prompts


def renumbered(responses: Responses, groups: Sequence[int]) -> Responses:
    """Return the responses with each group numbered by its place in `groups`, in that order."""
    place = {group: i for i, group in enumerate(groups)}
    rows = [
        (dataclasses.replace(t, group_id=place[t.group_id]), score, text)
        for t, score, text in responses.rows
    ]
    return in_order(rows, responses.stats)


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
