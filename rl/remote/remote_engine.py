"""An engine whose rounds run in another program: a worker's thread here speaks for it.

    scheduler ⇄ coordinator ⇄ WorkerSource ⇄ RemoteEngine.drive ⇄ link ⇄ WorkerProgram ⇄ engine

The thread waits for starts and for answers at once, and sends nothing where nothing has happened.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from models.config import ModelConfig
from models.transformer import Params
from rl.engine.config import EngineConfig
from rl.engine.engine import Engine, OnFinish, OnRound
from rl.engine.rollout_spec import RolloutSpec
from rl.engine.stats import EngineStats
from rl.remote.caught_states import CaughtStates
from rl.remote.conversation import Conversation
from rl.remote.drafter_messages import Gradient, Gradients, Tuner, params_of
from rl.remote.jobs import Jobs
from rl.remote.link import Link, RemoteError
from rl.remote.messages import (
    Abort,
    Begin,
    Done,
)
from rl.remote.worker import LEAVING_S, MOST_VERSIONS
from rl.runtime.waits import ProgramLost
from rl.weights.offers import VersionId
from rl.workers.worker_source import WorkerSource
from spec.eagle.batch import DrafterBatch
from spec.eagle.model import EagleParams


class RemoteEngine(Engine):
    """A worker of another program, as a scheduler's workers have engines.

    `connect` reaches or starts the program, tells it who it is and has it compile: in a thread,
    again after each loss. Its weights are published by `jobs`, which the engines of a run share.
    A program that has requests and whose engine has no round for `hang_limit_s` hangs.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        *,
        dtype: Any,
        number: int,
        jobs: Jobs,
        hang_limit_s: float,
        feature_layers: tuple[int, ...] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        options: dict[str, Any] = {"dtype": dtype, "feature_layers": feature_layers}
        super().__init__(model, config, number=number, clock=clock, **options)
        self._jobs, self.hang_limit_s = jobs, hang_limit_s
        self._lock = threading.Lock()
        self._link: Link | None = None
        self.later_s = 0.0  # this program's clock less the other's
        self._versions: list[int] = []  # of the weights that are there
        self._have: VersionId | None = None  # the base of the next deltas
        self._drafter: int | None = None  # the version that the program drafts with
        self._training: int | None = None  # the step whose weights it has
        self.run_number = 0  # of the last run
        self.pid, self.host = 0, ""  # of the program
        self.runs = False
        self.given_up, self._why = False, f"worker program {number} has not started"
        self.has_worked = False  # since it was connected

    # -- the program ---------------------------------------------------------------------

    @property
    def link(self) -> Link | None:
        """The link to the program; None where there is none, or it is lost."""
        link = self._link
        return None if link is None or link.lost is not None else link

    @property
    def where(self) -> str:
        return f"{self.host}, process {self.pid}"

    @property
    def is_ready(self) -> bool:
        return self.link is not None

    @property
    def may_return(self) -> bool:
        return not self.given_up

    def connected(self, link: Link, later_s: float, have: VersionId | None = None) -> None:
        """Run over `link` from now on, whose program has these weights."""
        with self._lock:
            self.later_s, self.has_worked = later_s, False
            self._have, self._versions = have, [] if have is None else [have.version]
            self._drafter = self._training = None
            self._link = link

    def failed_to_start(self, why: str) -> None:
        """Note why there is no program."""
        with self._lock:
            self._why, self._link = why, None

    def why_lost(self) -> str:
        """Return why there is no link."""
        link = self._link
        return str(link.lost) if link is not None and link.lost is not None else self._why

    @property
    def last_name(self) -> str:
        """The name of the link that there was last; empty where there was none."""
        return "" if self._link is None else self._link.name

    def abandoned(self) -> Engine:
        """End the program, which hangs; the engine stays, and comes back with another one."""
        if self._link is not None:
            self._link.lose("it hangs, and is ended", silent=True)
        return self

    def place(self, params: Params, model: ModelConfig | None = None) -> Params:
        """Publish weights, which `drive` has fetched where they are needed."""
        assert model is None, "weights of other models do not leave this program"
        self._jobs.weights.publish(params)
        return params

    # -- the rollout -----------------------------------------------------------------------

    def rollout(self, *given: Any, **options: Any) -> Any:
        """No round runs in this program."""
        raise AssertionError("its worker group calls `drive`")

    def drive(
        self,
        spec: RolloutSpec,
        source: WorkerSource,
        *,
        stats: EngineStats | None = None,
        on_finish: OnFinish | None = None,
        on_round: OnRound | None = None,
    ) -> None:
        """See `rl.workers.drive.drive`, whose loop runs in the other program.

        Raises ProgramLost where the program is lost, and RemoteError for what it has raised.
        """
        link, self.stats = self.link, stats or EngineStats()
        if link is None:
            raise ProgramLost(f"worker program {self.number} is not there")
        self.run_number += 1
        self.runs, begun = True, False
        try:
            job = self._jobs.job(spec, source, self.number)
            self._bring_weights(link, spec.params)
            self.bring_drafter(link)
            link.ask(Begin(self.run_number, job, self._jobs.tuner(self.number)), Done)
            begun = True
            sink = None if job.caught is None else CaughtStates(self, spec, job.caught)
            Conversation(self, link, source, sink, on_finish, on_round).run()
        except (ProgramLost, RemoteError):
            raise
        except BaseException:
            if begun:
                self._abort(link)
            raise
        finally:
            self.runs = False

    def gradients(
        self, policy: Params, step: int, params: EagleParams, batch: DrafterBatch
    ) -> tuple[EagleParams, Mapping[str, float]]:
        """Return the gradient of a micro-batch of drafter training, which the program computes.

        `params` are the drafter's before `step`. Raises ProgramLost, also where it cannot.
        """
        link = self.link
        if link is None:
            raise ProgramLost(f"worker program {self.number} is not there")
        limit_s = self.hang_limit_s
        try:
            version = self._bring_weights(link, policy)
            if self._training != step:
                link.ask(self._jobs.drafter.training(step, params), Done, limit_s)
                self._training = step
            arrays = {f.name: np.asarray(getattr(batch, f.name)) for f in fields(batch)}
            got = link.ask(Gradient(step, version, **arrays), Gradients, limit_s)
            config = self._jobs.drafter.config
            return params_of(config, got.arrays), got.metrics
        except (RemoteError, ValueError) as error:
            link.lose(str(error))
            raise link.lost or AssertionError from error

    def bring_drafter(self, link: Link) -> None:
        """Bring the learned drafter's weights, where they are not the newest there."""
        if self._jobs.drafter.version != self._drafter:
            version, message = self._jobs.drafter.drafts()
            link.ask(message, Done, self.hang_limit_s)
            self._drafter = version

    def tuned(self, told: Tuner) -> None:
        """Keep what the program's bandit has learnt. Raises ValueError for another bandit's."""
        self._jobs.tuned(self.number, told)

    def _bring_weights(self, link: Link, params: Params) -> int:
        weights = self._jobs.weights
        version = weights.publish(params)
        if version not in self._versions:
            self._have = weights.bring(link, self._have, version, params, self.hang_limit_s)
            new = {version} if self._have is None else {version, self._have.version}
            self._versions = sorted({*self._versions, *new})[-MOST_VERSIONS:]
        return version

    def _abort(self, link: Link) -> None:
        """Have the program end its run; end the program where it does not."""
        try:
            link.ask(Abort(self.run_number), Done, 2 * LEAVING_S)
        except RemoteError as error:
            link.lose(str(error))
        except ProgramLost:
            return
