"""Rollouts that run ahead of training: a step is answered while the one before is learnt from.

    update s−1 → weights v(s−1) → step s+1 is submitted with them → step s is collected → update s

so that a step's responses come from weights one update behind (RhymeRL, section 4.2). Weights
go to the host, by version; a worker pulls those of a step when it begins with it. Which weights
answer which request is fixed beforehand, so that tokens do not depend on who is how fast. Only a
request that HistoPipe moves into the next step resumes with newer weights; its tokens say so.

Of several processes each asks its own workers, for its share of the groups, which may be none (with
workers on Ray process 0 asks them all); a step's responses are exchanged once it is collected
(`rl.exchange`). What is decided afterwards is the same in all.

What else a step is asked with is fixed by step numbers and rewards too (docs/architecture.md):
what it reuses, its lenience, and its place in the data order. A further pass of dynamic sampling is
asked as a part of the next step, whose weights the workers have by then.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from models.sharding import put
from models.transformer import Params
from rl.collected import Asked, Collected, load_unfinished, unfinished_state, whole_groups
from rl.engine.rollout_spec import RolloutSpec
from rl.exchange import Responses
from rl.learner import trainer
from rl.learner.gathering import from_shards, host_copy, on_host, own_shards
from rl.learner.optimizer import TrainState
from rl.metrics.writer import Timings
from rl.receiving import Receiver
from rl.rollouts import (
    Prompts,
    Rollouts,
    System,
    asked_to_stop,
    leave_if_asked,
    left_out,
    prompts_at,
    remember,
    requests_of,
)
from rl.runtime.signals import Stopped
from rl.scoring import Scorer
from rl.speculation import reuse
from rl.step_scheduler import Pacing, step_scheduler
from rl.trajectory import Request, Trajectory
from rl.workers.multi_engine import MultiEngine
from sched.policies.histopipe import HistoPipe
from spec.reuse.prefix_rule import PrefixRule
from spec.reuse.rollout_cache import RolloutCache
from spec.sampling import NOISE_NAMES, step_key

ALL_STEPS = 0  # requests are numbered over all steps: one noise key serves them


@dataclasses.dataclass(frozen=True, eq=False)
class _Answering:
    """The policy that answers a step, on the host, and what it keeps of cached responses."""

    weights: HostWeights
    rule: PrefixRule | None


class PipelineRollouts:
    """Called as `rl.rollouts.generate` is, once a step; a context manager."""

    def __init__(self, system: System, first_step: int, stale_params: Params | None) -> None:
        engine, config = system.engine, system.config
        assert isinstance(engine, MultiEngine)
        self._system, self._engine, self._first = system, engine, first_step
        self._next, self._cursor = first_step, 0  # to be collected; behind all that was asked
        self._extra = config.algorithm.resolved.max_extra_phases
        self._answering: dict[int, _Answering] = {}
        if stale_params is not None:
            weights = copied(system, stale_params)
            self._answering[first_step] = _Answering(weights, system.reuse.rule(first_step))
        self._pacing = None if engine.costs is None else Pacing(engine.costs)
        self._scheduler = scheduler = step_scheduler(
            engine,
            num_steps=config.run.steps - first_step + 1,
            epoch_prompts=len(system.inputs.task),
            pacing=self._pacing,
        )
        self._scorer = Scorer(
            system.inputs.tokenizer, system.rewards, partial(leave_if_asked, system), system.shares
        )
        self._receiver = Receiver(system, self._scorer)
        most = system.shares.most_groups(config.rollout.prompts_per_step)
        self._session = engine.session(
            scheduler,
            most * config.rollout.group_size,
            config.longest_tokens,
            spot=engine.spot,
            deliver=self._receiver.enter,
        )
        self._key = engine.do(partial(step_key, config.run.seed, ALL_STEPS))
        self._asked: dict[int, Asked] = {}
        self._open: dict[int, dict[int, Request]] = {}  # of all processes, by step and id
        self._num_moved = 0  # of requests, as of the last row
        self._submitted: set[int] = set()  # steps that this process's workers have been given
        # what the last step answered: it enters the cache once the next one is asked
        self._late = RolloutCache(
            policy=system.cache.policy, vocab_size=system.cache.vocab_size, memory_bytes=2**62
        )
        self._lengths: dict[str, tuple[int, ...]] = {}  # of the last responses, by prompt
        self._unfinished: dict[int, list[Trajectory]] = {}  # siblings of what went on, by group
        self._returned_s = time.monotonic()  # when the last step was given to the trainer

    def __enter__(self) -> PipelineRollouts:
        self._session.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        # what runs ahead of the last step is given up
        self._session.__exit__(Stopped)

    def __call__(
        self, system: System, params: Params, cursor: int, step: int, timings: Timings
    ) -> Rollouts:
        """The responses of `step`; the one after it is submitted with `params`."""
        weights = copied(system, params)
        for coming in (step, step + 1):
            if coming not in self._answering:
                self._answering[coming] = _Answering(weights, system.reuse.rule(coming))
        system.speculation.settle()  # the cache has one reader at a time
        if step not in self._asked:
            self._ask(step, cursor)
        system.cache.take_over(self._late)
        if step > self._first:
            train_s = time.monotonic() - self._returned_s
            self._session.trained(step - 1 - self._first, train_s)
        if step < system.config.run.steps:
            self._ask(step + 1, self._cursor)
        asked, size = self._asked[step], system.config.rollout.prompts_per_step
        collected = Collected(asked, self._unfinished, [])
        stats = collected.add(self._collect(step, timings))
        while asked.phases <= (self._extra or 0) and (missing := collected.num_missing(size)):
            self._ask_further(step, missing)
            stats = collected.add(self._collect(step, timings))
        if system.drafter is not None and system.drafter.waits_for_training:
            with timings.section("drafter"):
                system.drafter.after_rollout(self._engine, self._answering[step].weights.whole)
                # in an update, which comes next, nobody may wait for that long
                system.processes.barrier(f"drafter of step {step}", system.watch.alive)
        after, dynamic = self._asked.get(step + 1), self._extra is not None
        rollouts = collected.rollouts(
            self._asked.get(step - 1),
            stats,
            self._cursor if after is None else after.begins,
            dynamic=dynamic,
        )
        self._keep(collected, rollouts, step)
        self._next, self._returned_s = step + 1, time.monotonic()
        return rollouts

    def stale_params(self, state: TrainState, step: int) -> Params:
        """The weights that answer the step after this one, for its checkpoint."""
        return self._answering[step + 1].weights.put_as(state.params)

    # -- what goes out ----------------------------------------------------------------

    def _first_group(self, step: int) -> int:
        """Groups, and with them requests and their noise, are numbered over all steps."""
        return (step - 1) * self._system.config.rollout.prompts_per_step * (1 + (self._extra or 0))

    def _ask(self, step: int, cursor: int) -> None:
        """Ask for the first pass of a step, from `cursor` of the data order on."""
        system = self._system
        prompts = prompts_at(system, cursor, system.config.rollout.prompts_per_step)
        passed_over = prompts.end - cursor - len(prompts)
        asked = Asked(cursor, self._first_group(step), prompts, passed_over=passed_over)
        self._asked[step] = asked
        self._cursor = max(self._cursor, prompts.end)
        if self._pacing is not None:
            self._pacing.asked(prompts)
        requests = self._requests(step, prompts, ())
        self._submit(step, step, prompts, asked.first_group, requests)
        if step == self._first and self._unfinished:
            before = self._asked[step - 1]
            anew = self._asked_anew()
            self._submit(step, step, before.prompts, before.first_group, anew)

    def _ask_further(self, step: int, missing: int) -> None:
        """Ask new prompts for a step whose others are done, as a part of the next step."""
        asked, start = self._asked[step], self._cursor
        new, before = prompts_at(self._system, start, missing), asked.prompts
        self._cursor = new.end
        requests = self._requests(step, new, before.keys)
        asked.add(start, new)
        self._submit(step, step + 1, new, asked.first_group + len(before), requests)

    def _requests(self, step: int, new: Prompts, before: Sequence[str]) -> list[Request]:
        """The requests of a step for `new`; `before` are the keys of its earlier passes."""
        system, config = self._system, self._system.config
        size, first = config.rollout.group_size, self._first_group(step)
        # noise that repeats is named by the example, so that a name may be in use twice
        named = step * NOISE_NAMES if system.reuse.mode.couples_noise else first * size
        requests = requests_of(system, new, before)
        self._scorer.examples.update(enumerate(new.examples, first + len(before)))
        return [
            dataclasses.replace(
                r, request_id=r.request_id + named, group_id=r.group_id + first + len(before)
            )
            for r in requests
        ]

    def _submit(
        self, step: int, place: int, prompts: Prompts, first: int, requests: Sequence[Request]
    ) -> None:
        """Submit requests of `step` to the workers, as a part of the step `place`.

        A process submits its own, of a new place also none.
        """
        self._engine.engines[0].check(requests, self._system.config.sampling)
        self._open.setdefault(step, {}).update({r.request_id: r for r in requests})
        own = [r for r in requests if self._system.shares.answers(r.group_id)]
        self._receiver.expect(step, own)
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
        system, config, answering = self._system, self._system.config, self._answering[step]
        if system.drafter is not None:
            system.drafter.began(answering.weights.whole, step)
        last = {r.request_id: r.cached.tokens for r in requests if r.cached is not None}
        return RolloutSpec(
            answering.weights.whole,
            config.sampling,
            self._key,
            system.inputs.model.eos_token_ids,
            policy_version=max(step - 2, 0),
            drafts=system.speculation.drafter_factory(
                *(prompts.keys, prompts.tokens, last),
                first_group=first,
                group_size=config.rollout.group_size,
                answers=lambda place: system.shares.answers(first + place),
            ),
            rule=answering.rule,
            sink=None if system.drafter is None else system.drafter.sink(step),
            words=system.inputs.words_for(config.sampling),
            times=system.speculation.times,
        )

    def _asked_anew(self) -> list[Request]:
        """The requests that had gone on into this step when the run was stopped."""
        before = self._first - 1
        ended = {(t.group_id, t.sample_index) for ts in self._unfinished.values() for t in ts}
        return [
            r
            for r in self._requests(before, self._asked[before].prompts, ())
            if r.group_id in self._unfinished and (r.group_id, r.sample_index) not in ended
        ]

    # -- what comes back --------------------------------------------------------------

    def _collect(self, step: int, timings: Timings) -> Responses:
        """Wait for what was asked of a step, and for its scores; all processes' come to all."""
        system, asked, requests = self._system, self._asked[step], self._open.pop(step)

        number = step - self._first

        def num_tokens() -> int:
            self._session.look_for_hang()
            return self._session.num_tokens(number)

        def answer() -> Responses:
            with timings.section("wait"):
                done = self._receiver.take(step, num_tokens)
            stats = self._session.stats(number)
            stats.events = self._session.new_events()
            with timings.section("reward"):
                return self._scorer.responses(done, stats)

        where = f"step {step}" if asked.phases == 1 else f"step {step}, pass {asked.phases}"
        found = system.shares.exchange(
            where,
            list(requests.values()),
            answer,
            partial(asked_to_stop, system),
            # workers may move a step's own requests into the next one; those are answered there
            may_go_on=()
            if asked.phases > 1
            else [r.request_id for r in requests.values() if r.group_id >= asked.first_group],
        )
        for t in found.trajectories:
            del requests[t.request_id]
        self._open.setdefault(step + 1, {}).update(requests)
        return found

    # -- what is kept for later steps ---------------------------------------------------

    def _keep(self, collected: Collected, rollouts: Rollouts, step: int) -> None:
        """Record what later steps need of this one, and add to its metrics."""
        system, asked, stats = self._system, collected.asked, rollouts.stats
        whole, scored = system.config.rollout.group_size, system.reuse.mode.enabled
        if system.speculation.keeps_history or scored:
            kept = whole_groups(rollouts, whole)
            reuse.remember(self._late, rollouts.prompts.keys, kept, scored=scored)
        self._unfinished = collected.unfinished(whole)
        lengths: dict[str, list[int]] = {}
        for t in rollouts.trajectories:
            if t.group_id < len(asked.prompts):
                lengths.setdefault(asked.prompts.keys[t.group_id], []).append(t.num_tokens)
        self._lengths.update({key: tuple(numbers) for key, numbers in lengths.items()})
        if self._pacing is not None:
            self._pacing.played(stats)
        if isinstance(self._scheduler, HistoPipe):
            moved = self._scheduler.num_moved
            rollouts.metrics["rollout/moved"] = float(moved - self._num_moved)
            self._num_moved = moved
        rule = self._answering[step].rule
        after = self._cursor if step + 2 <= system.config.run.steps else None
        rollouts.metrics.update(system.reuse.metrics(stats, stats.tokens, step, rule))
        first_group = self._first_group(step + 2)
        rollouts.metrics.update(remember(system, (), (), after, first_group))
        rollouts.metrics.update(left_out(system, asked.passed_over))
        for past in [s for s in self._asked if s < step]:
            del self._asked[past]
            self._answering.pop(past, None)
        self._submitted = {place for place in self._submitted if place >= step}
        self._scorer.forget(before=asked.first_group)

    def state(self) -> dict[str, Any]:
        """Return the state for a resumed run; what runs ahead is asked anew."""
        answering, before = self._answering.get(self._next), self._asked.get(self._next - 1)
        rule = None if answering is None else answering.rule
        return {
            "lengths": {key: list(lengths) for key, lengths in self._lengths.items()},
            "cursor": self._cursor,
            "log_lenience": None if rule is None else rule.log_lenience,
            "late": self._late.state(),
            "begins": None if before is None else before.begins,
            "unfinished": unfinished_state(self._unfinished),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`; it is empty if the run had another mode so far."""
        if not state:
            return
        system, before = self._system, self._first - 1
        self._lengths = {key: tuple(lengths) for key, lengths in state["lengths"].items()}
        self._cursor = int(state["cursor"])
        self._late.load_state(state["late"])
        lenience, now = state["log_lenience"], self._answering.get(self._first)
        if lenience is not None and now is not None and now.rule is not None:
            rule = dataclasses.replace(now.rule, log_lenience=float(lenience))
            self._answering[self._first] = dataclasses.replace(now, rule=rule)
        if (begins := state["begins"]) is not None and state["unfinished"]["groups"]:
            self._unfinished = load_unfinished(state["unfinished"])
            prompts = prompts_at(system, begins, system.config.rollout.prompts_per_step)
            self._asked[before] = Asked(begins, self._first_group(before), prompts)


@dataclasses.dataclass(frozen=True, eq=False)
class HostWeights:
    """A version in the engine's dtype; the update that comes consumes the device's buffers.

    `whole` is what this process's workers are given. Where another process speaks with them it is
    a tree of None, and `shards` are what this process's devices had of it.
    """

    whole: Params
    shards: Any = None

    def put_as(self, params: Params) -> Params:
        """Return the weights laid out on devices as `params` are."""
        if self.shards is None:
            return jax.tree.map(lambda x, p: put(x, p.sharding), self.whole, params)
        return from_shards(self.shards, params)


def copied(system: System, params: Params) -> HostWeights:
    """Return a version on the host of every process; all of a run's call it together."""
    shares = system.shares
    if shares.processes.alone or not shares.by_first:
        return HostWeights(on_host(system.weights(params)))
    rounded, keep = trainer.cast_params(params, system.engine.dtype), shares.processes.is_first

    def one(x: jax.Array) -> np.ndarray | None:
        copy = host_copy(x, keep=keep)
        return None if copy is None else np.array(copy)

    return HostWeights(jax.tree.map(one, rounded), None if keep else own_shards(rounded))
