"""Rollouts that run ahead of training: a step is answered while the one before is learnt from.

    update s−1 → weights v(s−1) → step s+1 is submitted with them → step s is collected → update s

so that a step's responses come from weights one update behind (RhymeRL, section 4.2). Weights
go to the host, by version; a worker pulls those of a step when it begins with it. Which weights
answer which request is fixed beforehand, so that tokens do not depend on who is how fast. Only a
request that HistoPipe moves into the next step resumes with newer weights; its tokens say so.

What else a step is asked with is fixed by step numbers and rewards too (docs/architecture.md):
what it reuses, its lenience, and its place in the data order. A further pass of dynamic sampling is
asked as a part of the next step, whose weights the workers have by then.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from models.transformer import Params
from rl.engine.rollout_spec import RolloutSpec
from rl.learner import trainer
from rl.learner.optimizer import TrainState
from rl.loop import unfinished
from rl.loop.collected import Asked, Collected, whole_groups
from rl.loop.generation import (
    Prompts,
    Rollouts,
    Scorer,
    System,
    generate,
    leave_if_asked,
    left_out,
    prompts_at,
    remember,
)
from rl.loop.step_scheduler import Pacing, step_scheduler
from rl.metrics.writer import Timings
from rl.runtime.signals import Stopped
from rl.runtime.waits import POLL_S, Hang, code_line
from rl.speculation import reuse
from rl.trajectory import Request, Trajectory
from rl.workers.coordinator import Deferred
from rl.workers.multi_engine import MultiEngine
from rl.workers.worker_group import LEAVING_S
from spec.reuse.prefix_rule import PrefixRule
from spec.reuse.rollout_cache import RolloutCache
from spec.sampling import NOISE_NAMES, step_key

ALL_STEPS = 0  # requests are numbered over all steps: one noise key serves them


class SyncRollouts:
    """A step's responses are of the policy that learns from them: nothing is kept for the next."""

    __call__ = staticmethod(generate)

    def stale_params(self, state: TrainState, step: int) -> None:
        """Nothing runs ahead."""

    def state(self) -> dict[str, Any]:
        return {}


@contextlib.contextmanager
def open_source(
    system: System, first_step: int, stale_params: Params | None, state: Mapping[str, Any]
) -> Iterator[SyncRollouts | AsyncRollouts]:
    """Yield the source of a run's responses, by `Sched.mode`; checkpoints keep its state.

    `first_step` is the next one to be trained; of a resumed run, `stale_params` are the weights
    before the last update, and `state` is what the source said before.
    """
    if system.config.sched.mode == "sync":
        yield SyncRollouts()
        return
    with AsyncRollouts(system, first_step, stale_params) as pipeline:
        pipeline.load_state(state)
        yield pipeline


@dataclasses.dataclass(frozen=True, eq=False)
class _Answering:
    """The policy that answers a step, on the host, and what it keeps of cached responses."""

    params: Params
    rule: PrefixRule | None


class AsyncRollouts:
    """Called as `rl.loop.generation.generate` is, once a step; a context manager."""

    def __init__(self, system: System, first_step: int, stale_params: Params | None) -> None:
        engine, config = system.engine, system.config
        assert isinstance(engine, MultiEngine)
        self._system, self._engine, self._first = system, engine, first_step
        self._next, self._cursor = first_step, 0  # to be collected; behind all that was asked
        self._extra = config.algorithm.resolved.max_extra_phases
        self._answering: dict[int, _Answering] = {}
        if stale_params is not None:
            params = jax.tree.map(np.array, stale_params)
            self._answering[first_step] = _Answering(params, system.reuse.rule(first_step))
        self._pacing = None if engine.costs is None else Pacing(engine.costs)
        scheduler = step_scheduler(
            engine,
            num_steps=config.run.steps - first_step + 1,
            epoch_prompts=len(system.inputs.task),
            pacing=self._pacing,
        )
        most = config.rollout.num_requests, config.longest_tokens
        self._session = engine.session(scheduler, *most)
        self._scorer = Scorer(
            system.inputs.tokenizer, system.rewards, partial(leave_if_asked, system)
        )
        self._asked: dict[int, Asked] = {}
        # what the last step answered: it enters the cache once the next one is asked
        self._late = RolloutCache(
            policy=system.cache.policy, vocab_size=system.cache.vocab_size, memory_bytes=2**62
        )
        self._lengths: dict[str, tuple[int, ...]] = {}  # of the last responses, by prompt
        self._unfinished: dict[int, list[Trajectory]] = {}  # siblings of what went on, by group
        self._step_of: dict[int, int] = {}
        self._expected: collections.Counter[int] = collections.Counter()
        self._finished: collections.defaultdict[int, list[Trajectory]] = collections.defaultdict(
            list
        )
        self._changed = threading.Condition()
        self._closed, self._error = False, list[BaseException]()
        self._received_s = time.monotonic()  # sign of life of the thread
        self._returned_s = time.monotonic()  # when the last step was given to the trainer
        self._thread = threading.Thread(target=self._receive, name="pipeline", daemon=True)

    def __enter__(self) -> AsyncRollouts:
        self._session.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._thread.join(min(LEAVING_S, self._system.config.run.hang_limit_s))
        # what runs ahead of the last step is given up
        self._session.__exit__(Stopped, None, None)

    def __call__(
        self, system: System, params: Params, cursor: int, step: int, timings: Timings
    ) -> Rollouts:
        """The responses of `step`; the one after it is submitted with `params`."""
        weights = self._copied(params)
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
        collected = self._collect(step, timings)
        asked, size = self._asked[step], system.config.rollout.prompts_per_step
        while asked.phases <= (self._extra or 0) and (missing := collected.num_missing(size)):
            self._ask_further(step, missing)
            collected.scored.extend(self._collect(step, timings).scored)
        if system.drafter is not None and system.drafter.spot is None:
            with timings.section("drafter"):
                system.drafter.after_rollout(self._engine, self._answering[step].params)
        after, dynamic = self._asked.get(step + 1), self._extra is not None
        stats = self._session.stats(step - self._first)
        stats.events = self._session.new_events()
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
        stale = self._answering[step + 1].params
        return jax.tree.map(lambda x, p: jax.device_put(x, p.sharding), stale, state.params)

    # -- what goes out ----------------------------------------------------------------

    def _copied(self, params: Params) -> Params:
        """Weights on the host; the update that comes consumes the device's buffers."""
        weights = trainer.cast_params(params, self._engine.dtype)
        return jax.tree.map(lambda x: np.array(jax.device_get(x)), weights)

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
        requests = self._requests(step, prompts, ())
        if step == self._first:
            requests += self._asked_anew()
        if self._pacing is not None:
            self._pacing.asked(prompts)
        self._submit(step, step, prompts, asked.first_group, requests)

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
        requests = system.reuse.requests(
            *(new.keys, new.tokens, new.numbers, size),
            before=before,
            samplings=[config.sampling.of(example.task) for example in new.examples],
        )
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
        """Submit requests of `step` to the workers, as a part of the step `place`."""
        self._engine.engines[0].check(requests, self._system.config.sampling)
        with self._changed:
            self._step_of.update({r.request_id: step for r in requests})
            self._expected[step] += len(requests)
        past = {first + g: self._lengths.get(key, ()) for g, key in enumerate(prompts.keys)}
        for group in {r.group_id for r in requests} - set(past):  # that had gone on into this step
            asked = self._asked[step - 1]
            key = asked.prompts.keys[group - asked.first_group]
            past[group] = self._lengths.get(key, ())
        if place == step or (place not in self._asked and self._asked[step].phases == 2):
            spec = self._spec(place, prompts, first, requests)
            self._session.submit(place - self._first, spec, requests, past)
        else:
            self._session.add(place - self._first, requests, past)

    def _spec(
        self, step: int, prompts: Prompts, first: int, requests: Sequence[Request]
    ) -> RolloutSpec:
        system, config, answering = self._system, self._system.config, self._answering[step]
        if system.drafter is not None:
            system.drafter.began(answering.params, step)
        last = {r.request_id: r.cached.tokens for r in requests if r.cached is not None}
        return RolloutSpec(
            answering.params,
            config.sampling,
            step_key(config.run.seed, ALL_STEPS),
            system.inputs.model.eos_token_ids,
            policy_version=max(step - 2, 0),
            drafts=system.speculation.drafter_factory(
                *(prompts.keys, prompts.tokens, last),
                first_group=first,
                group_size=config.rollout.group_size,
            ),
            rule=answering.rule,
            sink=None if system.drafter is None else system.drafter.sink(step),
            words=system.inputs.words_for(config.sampling),
        )

    def _asked_anew(self) -> list[Request]:
        """The requests that had gone on into this step when the run was stopped."""
        before = self._first - 1
        if not self._unfinished:
            return []
        ended = {(t.group_id, t.sample_index) for ts in self._unfinished.values() for t in ts}
        return [
            r
            for r in self._requests(before, self._asked[before].prompts, ())
            if r.group_id in self._unfinished and (r.group_id, r.sample_index) not in ended
        ]

    # -- what comes back --------------------------------------------------------------

    def _receive(self) -> None:
        """A thread of its own: responses are scored as they end, also while an update runs."""
        try:
            while not self._closed:
                self._received_s = time.monotonic()
                result = self._session.next_result(POLL_S)
                if isinstance(result, Trajectory):
                    self._scorer(result)
                if result is not None:
                    with self._changed:
                        self._enter(result)
                        self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error.append(error)
                self._changed.notify_all()

    def _enter(self, result: Trajectory | Deferred) -> None:
        step = self._step_of.pop(result.request_id)
        if isinstance(result, Trajectory):
            self._finished[step].append(result)
            return
        self._expected[step] -= 1
        self._expected[step + 1] += 1
        self._step_of[result.request_id] = step + 1

    def _wait(self, step: int) -> None:
        """Until the step's responses are there. Raises Stopped, or what a worker raised."""
        while True:
            self._system.watch.check()
            with self._changed:
                if self._error:
                    raise self._error[0]
                finished, expected = len(self._finished[step]), self._expected[step]
                if finished == expected:
                    return
                self._changed.wait(POLL_S)
            self._look_after_the_thread()
            tokens = self._session.num_tokens(step - self._first)
            self._system.show.rollout(finished, expected, tokens)

    def _look_after_the_thread(self) -> None:
        limit_s = self._system.config.run.hang_limit_s
        silent_s = time.monotonic() - self._received_s
        if silent_s > limit_s:
            where = code_line(self._thread.ident or 0)
            raise Hang(f"no sign of life for {silent_s:.1f} s from the pipeline's thread ({where})")

    def _collect(self, step: int, timings: Timings) -> Collected:
        """Wait for what was asked of a step, and for its scores."""
        with timings.section("wait"):
            self._wait(step)
        with self._changed:
            done = self._finished.pop(step, [])
            self._expected[step] -= len(done)
        with timings.section("reward"):
            scores = [self._scorer.result(t) for t in done]
        scored = [
            (dataclasses.replace(t, reward=score.total), score, text)
            for t, (score, text) in zip(done, scores, strict=True)
        ]
        return Collected(self._asked[step], self._unfinished, scored)

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
        rule = self._answering[step].rule
        after = self._cursor if step + 2 <= system.config.run.steps else None
        rollouts.metrics.update(system.reuse.metrics(stats, stats.tokens, step, rule))
        rollouts.metrics.update(remember(system, (), (), after))
        rollouts.metrics.update(left_out(system, asked.passed_over))
        for past in [s for s in self._asked if s < step]:
            del self._asked[past]
            self._answering.pop(past, None)
            del self._expected[past]
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
            "unfinished": unfinished.state_of(self._unfinished),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned, or the same of an older run, which has less."""
        system, before = self._system, self._first - 1
        self._lengths = {key: tuple(lengths) for key, lengths in state.get("lengths", {}).items()}
        self._cursor = int(state.get("cursor", 0))
        if (late := state.get("late")) is not None:
            self._late.load_state(late)
        lenience, now = state.get("log_lenience"), self._answering.get(self._first)
        if lenience is not None and now is not None and now.rule is not None:
            rule = dataclasses.replace(now.rule, log_lenience=float(lenience))
            self._answering[self._first] = dataclasses.replace(now, rule=rule)
        if (begins := state.get("begins")) is not None and state["unfinished"]["groups"]:
            self._unfinished = unfinished.load(state["unfinished"])
            prompts = prompts_at(system, begins, system.config.rollout.prompts_per_step)
            self._asked[before] = Asked(begins, self._first_group(before), prompts)
