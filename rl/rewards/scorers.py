"""Scoring in actors: jobs go to the scorer with the fewest jobs, and to another if it is lost."""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from reprise.rl.cluster.actors import Actor, ActorDied, ActorSettings, Starts
from reprise.rl.rewards.config import RewardConfig, validate
from reprise.rl.rewards.pool import STARTUP_S, RewardPool, sample_limit_s
from reprise.rl.rewards.process import RewardWorkerError
from reprise.rl.rewards.scores import MARGIN_S, MAX_ATTEMPTS, Outcomes, Rewards
from reprise.rl.runtime.user_files import files_of, is_user_name
from reprise.rl.runtime.waits import ProgramLost

T = TypeVar("T")


class ScoringActor:
    """An actor with reward workers, in the folder of the run if this host has it."""

    def __init__(self, config: RewardConfig, tasks: Sequence[str], folder: str) -> None:
        if os.path.isdir(folder):  # files in the configuration are relative to it
            os.chdir(folder)
        self._pool = RewardPool(config, tasks)
        self._pool.__enter__()

    def ready(self) -> None:
        """Return immediately, since the reward workers have started."""

    def score(self, body: bytes, size: int) -> list[Outcomes]:
        try:
            return self._pool.outcomes(body, size).result()
        except RewardWorkerError as error:  # no workers can be started here any more
            raise ActorDied(str(error)) from error

    def close(self) -> None:
        self._pool.close()


class Scorers(Rewards):
    """Scores samples in `count` actors, each with `Reward.workers` processes."""

    def __init__(
        self,
        config: RewardConfig,
        tasks: Sequence[str],
        count: int,
        room: Starts,
        settings: ActorSettings,
    ) -> None:
        """Start the actors. Raises the errors of `validate(config)` before any actor is started."""
        validate(config)
        start_s = settings.start_s + STARTUP_S + MARGIN_S
        files = files_of(filter(is_user_name, config.functions))
        settings = dataclasses.replace(settings, files=files, start_s=start_s)
        again_s = 2 * start_s + settings.deadline_s
        super().__init__(config, sample_limit_s(config) + MAX_ATTEMPTS * again_s)
        args = (config, tuple(tasks), os.getcwd())
        self._is_closed = False
        target = f"{__name__}:{ScoringActor.__name__}"
        concurrency = 2 * config.workers
        self.actors = [
            Actor(f"scorer {i}", target, args, settings, room, i, concurrency=concurrency)
            for i in range(count)
        ]
        self._num_jobs = collections.Counter[Actor]()

    def start(self) -> None:
        """Do nothing: the actors have already started."""

    def wait_started(self) -> None:
        try:
            for ready in [actor.call("ready", is_work=False) for actor in self.actors]:
                ready.result()
        except BaseException as error:
            self.close()
            if isinstance(error, ProgramLost):
                raise RewardWorkerError(str(error)) from error
            raise

    def _send(self, body: bytes, size: int, finish: Callable[[list[Outcomes]], T]) -> Future[T]:
        if self._is_closed:
            raise RuntimeError("the scorers are closed")
        scored = Future[T]()
        scored.set_running_or_notify_cancel()
        self._place((body, size), lambda outcomes: scored.set_result(finish(outcomes)), scored, 0)
        return scored

    def close(self) -> None:
        self._is_closed = True
        for actor in self.actors:
            actor.close()

    def _place(
        self,
        job: tuple[bytes, int],
        on_outcomes: Callable[[list[Outcomes]], None],
        scored: Future[Any],
        num_losses: int,
    ) -> None:
        with self._lock:
            usable = [actor for actor in self.actors if actor.fatal_error is None] or self.actors
            actor = min(usable, key=lambda a: (not a.is_there, self._num_jobs[a]))
            self._num_jobs[actor] += 1

        def finish(sent: Future[list[Outcomes]]) -> None:
            with self._lock:
                self._num_jobs[actor] -= 1
            if (error := sent.exception()) is None:
                self._answered_s = time.monotonic()
                on_outcomes(sent.result())
            elif self._is_closed:
                scored.set_exception(RuntimeError("closed before this sample was scored"))
            elif not isinstance(error, ProgramLost):
                scored.set_exception(error)
            elif num_losses + 1 < MAX_ATTEMPTS:
                self._place(job, on_outcomes, scored, num_losses + 1)
            else:
                text = f"{MAX_ATTEMPTS} scorers were lost while they had one sample: {error}"
                self._error = RewardWorkerError(text)
                scored.set_exception(self._error)

        # no limit, since its pool has deadlines
        actor.call("score", *job, limit_s=math.inf).add_done_callback(finish)
