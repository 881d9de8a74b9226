"""The part of a rollout that all workers are told alike: its weights, by version, and the rest."""

from __future__ import annotations

import collections
import itertools
import secrets
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from rl.cluster import ray_session
from rl.drafter_training.trainer import BufferSink
from rl.engine.rollout_spec import RolloutSpec, no_drafts
from rl.remote.drafter_messages import Tuner, of_tuner, tuner_state
from rl.remote.messages import Drafting, Job, Text
from rl.remote.weights import DrafterMessages, PublishedWeights
from rl.speculation.learned_drafter import LearnedDrafter
from rl.speculation.sources import Speculation, StepDrafts
from rl.workers.worker_source import WorkerSource
from spec.budget.config import BANDIT, LEARNED
from spec.eagle.data_buffer import RequestSample

MOST_ROLLOUTS = 4


class Jobs:
    """Names rollouts and publishes their weights; the engines of a run share one.

    `apart` announces the drafting workers of a worker; it returns False if there are none.
    `speculation` has the learned drafter, if one drafts, and the workers' bandits: a worker is told
    them, and tells them at the end of a run. Any thread may call it.
    """

    def __init__(
        self,
        speculation: Speculation | None = None,
        apart: Callable[[int], bool] = lambda worker: False,
    ) -> None:
        self._speculation, self._apart = speculation, apart
        self.drafter = DrafterMessages(_learned(speculation))
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self.weights = PublishedWeights()
        self._names: collections.OrderedDict[int, tuple[Any, str]] = collections.OrderedDict()
        self._run = secrets.token_hex(8)

    def tuner(self, worker: int) -> Tuner | None:
        """Return the state of a worker's bandit; None where no bandit decides."""
        speculation = self._speculation
        if speculation is None or speculation.config.budget != BANDIT:
            return None
        return of_tuner(speculation.bandit(worker).state())

    def tuned(self, worker: int, told: Tuner) -> None:
        """Keep what a worker's bandit has learnt. Raises ValueError where it is another one."""
        if self._speculation is None or self._speculation.config.budget != BANDIT:
            raise ValueError("expected no bandit")
        self._speculation.bandit(worker).load_state(tuner_state(told))

    def job(self, spec: RolloutSpec, source: WorkerSource, worker: int) -> Job:
        """Return the static part of a rollout, with the bounds of one worker.

        Raises ValueError for drafters that cannot be told.
        """
        caught = None
        if spec.sink is not None:
            assert isinstance(spec.sink, BufferSink), "a run's drafter learns from its responses"
            caught = spec.sink.sample or RequestSample(0, 0, 1.0)
        words = None
        if spec.words is not None:
            words = Text(spec.words.bytes_N, spec.words.starts)
        return Job(
            self._name(spec.drafts),
            self.weights.publish(spec.params),
            spec.sampling,
            np.asarray(jax.random.key_data(spec.key)),
            tuple(int(i) for i in spec.stop_token_ids),
            spec.policy_version,
            source.most_requests,
            source.longest_tokens,
            source.kv_tokens,
            drafting_of(spec),
            spec.rule,
            words,
            caught,
            spec.begun,
            self._apart(worker),
        )

    def _name(self, drafts: Any) -> str:
        with self._lock:
            found = self._names.get(id(drafts))
            if found is None:
                found = self._names[id(drafts)] = drafts, f"{self._run}-{next(self._numbers)}"
                while len(self._names) > MOST_ROLLOUTS:
                    self._names.popitem(last=False)
            return found[1]


def _learned(speculation: Speculation | None) -> LearnedDrafter | None:
    found = None if speculation is None else speculation.drafters.get(LEARNED)
    return found if isinstance(found, LearnedDrafter) else None


def drafting_of(spec: RolloutSpec) -> Drafting | None:
    """Return how a rollout drafts, as it can be told. Raises ValueError where it cannot."""
    drafts = spec.drafts
    if drafts is no_drafts:
        return None
    if not isinstance(drafts, StepDrafts):
        raise ValueError(
            "expected drafters of rl.speculation.sources.Speculation for workers of other "
            f"programs, got {type(drafts).__name__}"
        )
    return Drafting(
        tuple(drafts.keys),
        tuple(tuple(int(i) for i in ids) for ids in drafts.prompts),
        {i: np.asarray(tokens, np.int32) for i, tokens in drafts.last.items()},
        drafts.first_group,
        drafts.group_size,
        drafts.history,
        ray_session.dumps(drafts.shards) if drafts.shards else b"",
        drafts.methods,
    )
