"""Rollouts that run ahead of training: a step is answered while the one before is learnt from.

    update s−1 → weights v(s−1) → step s+1 is submitted with them → step s is collected → update s

so that a step's responses come from weights one update behind (RhymeRL, section 4.2). Weights
go to the host, by version; a worker pulls those of a step when it begins with it. Which weights
answer which request is fixed beforehand, so that tokens do not depend on who is how fast. Only a
request that HistoPipe moves into the next step resumes with newer weights; its tokens say so.
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
from rl.metrics.writer import Timings
from rl.runtime.signals import Stopped
from rl.runtime.waits import POLL_S, Hang, code_line
from rl.trajectory import Trajectory
from rl.workers.coordinator import Deferred
from rl.workers.multi_engine import MultiEngine
from rl.workers.worker_group import LEAVING_S
from sched.policies.histopipe import HistoPipe, HistoPipeConfig
from sched.policies.step_order import StepOrder
from sched.protocol import Scheduler
from spec.sampling import step_key

ALL_STEPS = 0  # requests are numbered over all steps: one noise key serves them


def step_scheduler(workers: MultiEngine, *, num_steps: int, epoch_prompts: int) -> Scheduler:
    """The scheduler of a run's steps: HistoPipe, or another policy step by step."""
    config = workers.config
    if config.policy == "histopipe":
        return HistoPipe(
            HistoPipeConfig(
                num_steps,
                config.ranking_groups,
                epoch_prompts=epoch_prompts,
                check_tokens=config.chunk_tokens,
            )
        )
    return StepOrder(workers.make_scheduler(), "one_step_off")


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


class AsyncRollouts:
    """Called as `rl.loop.generation.generate` is, once a step; a context manager."""

    def __init__(self, system: System, first_step: int, stale_params: Params | None) -> None:
        engine, config = system.engine, system.config
        assert isinstance(engine, MultiEngine)
        self._system, self._engine, self._first = system, engine, first_step
        self._weights: dict[int, Params] = {}  # by the step that they answer
        if stale_params is not None:
            self._weights[first_step] = jax.tree.map(np.array, stale_params)
        scheduler = step_scheduler(
            engine,
            num_steps=config.run.steps - first_step + 1,
            epoch_prompts=len(system.inputs.task),
        )
        most = config.rollout.num_requests, config.longest_tokens
        self._session = engine.session(scheduler, *most, keeps_decisions=False)
        self._scorer = Scorer(
            system.inputs.tokenizer, system.rewards, partial(leave_if_asked, system)
        )
        self._prompts: dict[int, Prompts] = {}
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
        size, last = system.config.rollout.prompts_per_step, system.config.run.steps
        for coming in (step, step + 1):
            if coming not in self._weights:
                self._weights[coming] = self._copied(params)
        if step not in self._prompts:
            self._submit(step, cursor)
        if step > self._first:
            self._session.trained(step - 1 - self._first)
        if step < last:
            self._submit(step + 1, self._prompts[step].end)
        with timings.section("wait"):
            self._wait(step)
        with timings.section("reward"):
            rollouts = self._rollouts(step)
        own = [t for t in rollouts.trajectories if t.group_id < size]
        keys = rollouts.prompts.keys[:size]
        after = self._prompts[step + 1].end if step + 2 <= last else None
        rollouts.metrics.update(remember(system, keys, own, after))
        rollouts.metrics.update(left_out(system, rollouts.cursor - cursor - size))
        return rollouts

    def stale_params(self, state: TrainState, step: int) -> Params:
        """The weights that answer the step after this one, for its checkpoint."""
        stale = self._weights[step + 1]
        return jax.tree.map(lambda x, p: jax.device_put(x, p.sharding), stale, state.params)

    # -- what goes out ----------------------------------------------------------------

    def _copied(self, params: Params) -> Params:
        """Weights on the host; the update that comes consumes the device's buffers."""
        weights = trainer.cast_params(params, self._engine.dtype)
        return jax.tree.map(lambda x: np.array(jax.device_get(x)), weights)

    def _submit(self, step: int, cursor: int) -> None:
        """Ask for the responses of a step."""
        system, config = self._system, self._system.config
        size = config.rollout.prompts_per_step
        prompts = self._prompts[step] = prompts_at(system, cursor, size)
        first = (step - 1) * size
        system.speculation.settle()
        requests = [
            dataclasses.replace(
                r,
                request_id=r.request_id + first * config.rollout.group_size,
                group_id=r.group_id + first,
            )
            for r in system.reuse.requests(
                *(prompts.keys, prompts.tokens, prompts.numbers, config.rollout.group_size),
                samplings=[config.sampling.of(example.task) for example in prompts.examples],
            )
        ]
        self._engine.engines[0].check(requests, config.sampling)
        spec = RolloutSpec(
            self._weights[step],
            config.sampling,
            step_key(config.run.seed, ALL_STEPS),
            system.inputs.model.eos_token_ids,
            policy_version=max(step - 2, 0),
            drafts=system.speculation.drafter_factory(
                *(prompts.keys, prompts.tokens),
                first_group=first,
                group_size=config.rollout.group_size,
            ),
            sink=None if system.drafter is None else system.drafter.sink(step),
            words=system.inputs.words_for(config.sampling),
        )
        if system.drafter is not None:
            system.drafter.began(self._weights[step], step)
        self._scorer.examples.update(enumerate(prompts.examples, first))
        with self._changed:
            self._step_of.update({r.request_id: step for r in requests})
            self._expected[step] += len(requests)
        past = {first + g: self._lengths.get(key, ()) for g, key in enumerate(prompts.keys)}
        self._session.submit(step - self._first, spec, requests, past)

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

    def _rollouts(self, step: int) -> Rollouts:
        """Collect the step's responses; those that the step before deferred are groups at the
        end.
        """
        size = self._system.config.rollout.prompts_per_step
        first = (step - 1) * size
        prompts, before = self._prompts[step], self._prompts.get(step - 1)
        end = prompts.end
        done = self._finished.pop(step)
        carried = sorted({t.group_id for t in done if t.group_id < first})
        place = {first + g: g for g in range(size)}
        place |= {group: size + i for i, group in enumerate(carried)}
        done.sort(key=lambda t: (place[t.group_id], t.sample_index))
        siblings = [t for group in carried for t in self._unfinished.get(group, ())]
        if carried:
            assert before is not None
            prompts = prompts + before.take([group - first + size for group in carried])
        scored = [(t, *self._scorer.result(t)) for t in done]
        trajectories = [dataclasses.replace(t, reward=s.total) for t, s, _ in scored]
        self._keep(step, [t for t in trajectories if t.group_id >= first])
        return Rollouts(
            [_moved(t, place) for t in trajectories],
            [s for _, s, _ in scored],
            [text for _, _, text in scored],
            self._session.stats(step - self._first),
            prompts,
            frozenset(place.values()),
            {"rollout/carried": float(sum(t.group_id < first for t in done))},
            cursor=end,
            siblings=[_moved(t, place) for t in siblings],
        )

    def _keep(self, step: int, own: Sequence[Trajectory]) -> None:
        """Record what later steps need of this one: lengths, and groups that are not whole."""
        groups: dict[int, list[Trajectory]] = {}
        for t in own:
            groups.setdefault(t.group_id, []).append(t)
        whole = self._system.config.rollout.group_size
        self._unfinished = {g: ts for g, ts in groups.items() if len(ts) < whole}
        first = (step - 1) * self._system.config.rollout.prompts_per_step
        for group, ts in groups.items():
            key = self._prompts[step].keys[group - first]
            self._lengths[key] = tuple(t.num_tokens for t in ts)
        for past in [s for s in self._prompts if s < step]:
            del self._prompts[past], self._weights[past], self._expected[past]
        self._scorer.forget(before=first)

    def state(self) -> dict[str, Any]:
        """Return the state for a resumed run; requests between two steps are forgotten."""
        return {"lengths": {key: list(lengths) for key, lengths in self._lengths.items()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._lengths = {key: tuple(lengths) for key, lengths in state.get("lengths", {}).items()}


def _moved(t: Trajectory, place: Mapping[int, int]) -> Trajectory:
    return dataclasses.replace(t, group_id=place[t.group_id])
