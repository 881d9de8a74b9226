"""Calls to rollout workers in Ray actors (`rl.ray_workers.actor`), and their messages."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import jax
import numpy as np

from reprise.models.decoder.transformer import Params
from reprise.rl.cluster.actors import Actor
from reprise.rl.drafting.workers import DraftsApart
from reprise.rl.engine.rollout_spec import RolloutSpec, no_drafts
from reprise.rl.records.stats import EngineStats
from reprise.rl.runtime.waits import ProgramLost
from reprise.rl.speculation.bandits import Bandits
from reprise.rl.speculation.config import DraftModelConfig, SpeculationConfig
from reprise.rl.speculation.device_drafters import LearnedDrafter
from reprise.rl.speculation.sources import StepDrafts
from reprise.rl.warm_up.rollout_programs import Reach
from reprise.rl.weights.versions import Offer, Published
from reprise.rl.workers.engines import EngineSettings
from reprise.rl.workers.messages import Command, Prepare, Report, WorkerLimits
from reprise.rl.workers.pool import DaemonThread, IdleWork
from reprise.spec.budget.config import TunerConfig
from reprise.spec.config import SamplingConfig
from reprise.spec.eagle.config import DrafterTrainingConfig, EagleConfig, TreeConfig
from reprise.spec.eagle.model import EagleParams
from reprise.spec.eagle_training.training_data import (
    DrafterBatch,
    HiddenStates,
    HiddenStateSink,
    RequestSample,
)

T = TypeVar("T")
U = TypeVar("U")
ROUNDS_S = 0.02  # a call returns after this time; new commands wait until then


# --- settings and messages --------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class LearnedSettings:
    """Everything a worker needs to build and train the learned drafter, except its weights.

    Training uses tokens sampled at `temperature`.
    """

    config: EagleConfig
    tree: TreeConfig
    training: DrafterTrainingConfig
    draft_ids_U: np.ndarray | None
    temperature: float


@dataclasses.dataclass(frozen=True, eq=False)
class WorkerSettings:
    """The settings of a worker in an actor.

    With `model_here`, the draft model also runs on this worker, not only on drafting workers.
    """

    number: int
    engine: EngineSettings
    num_devices: int
    speculation: SpeculationConfig
    tuner: TunerConfig
    seed: int
    draft_model: DraftModelConfig | None
    model_here: bool
    model_apart: bool
    methods_of_copies: tuple[str, ...]
    learned: LearnedSettings | None
    fetch_s: float  # timeout for values from Ray's store
    folder: str  # of the run's program; paths of user files are relative to it


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The bounds of future rollouts, with functions that can be sent.

    `batch` is (rows, tokens) of micro-batches of drafter training, if the worker may train.
    """

    sampling: SamplingConfig
    reach: Reach
    batch: tuple[int, int] | None


@dataclasses.dataclass(frozen=True)
class Measured:
    """The files that `rl.warm_up.measured_run` writes, and the worker clock after measuring."""

    rounds: str
    moves: str
    clock_s: float


@dataclasses.dataclass(frozen=True, eq=False)
class RolloutMessage:
    """A rollout for a worker in another program; `spec` has no weights, no key and no sink.

    `name` is the same for all workers of a rollout. `sample` selects the requests with hidden
    states for the sink of number `sink`. `apart` contains the drafting workers of the worker, and
    `bandit` its tuner state, for a program that has just started.
    """

    spec: RolloutSpec
    weights: Offer
    key: np.ndarray
    name: str
    sink: int
    sample: RequestSample | None
    apart: DraftsApart | None
    bandit: dict[str, Any] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Reply:
    """The `Report` of a worker, with only new rounds in `stats` and only new responses in `states`.

    `states` have the numbers of their sinks; `rollout` counts the rollouts that were opened;
    `bandit` is the tuner state of an idle worker.
    """

    report: Report
    rollout: int
    states: list[tuple[int, HiddenStates]]
    remarks: list[str]
    bandit: dict[str, Any] | None


# --- program of the run -----------------------------------------------------------------


class Shared:
    """Values that all workers of a run on Ray share; thread-safe.

    `share` puts a value into Ray's store; `learned` is the learned drafter of the run, and
    `bandits` are the bandits of its budget. `apart` returns the drafting workers of a worker.
    """

    def __init__(
        self,
        share: Callable[[Any], Any],
        *,
        learned: LearnedDrafter | None = None,
        bandits: Bandits | None = None,
        apart: Callable[[int], DraftsApart] | None = None,
    ) -> None:
        self._share = share
        self._learned = learned
        self._bandits = bandits
        self._apart = apart
        self.weights = Published(share)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._names = weakref.WeakKeyDictionary[Any, str]()  # of rollouts, by their drafts
        self._references: dict[str, tuple[int, Any]] = {}  # to weights of the learned drafter

    def message(self, spec: RolloutSpec, worker: int, sink: int) -> RolloutMessage:
        """Return the message of a rollout to a worker; `sink` is the number of the sink."""
        drafts = spec.drafts if isinstance(spec.drafts, StepDrafts) else None
        assert drafts is not None or spec.drafts is no_drafts, "other drafters cannot be sent"
        sent: dict[str, Any] = {"params": None, "key": None, "sink": None, "times": None}
        if drafts is not None:
            sent["drafts"] = dataclasses.replace(drafts, make=no_drafts)
        return RolloutMessage(
            dataclasses.replace(spec, **sent),
            self.weights.publish(spec.params),
            np.asarray(jax.random.key_data(spec.key)),
            self._name(spec.drafts),
            sink,
            getattr(spec.sink, "sample", None),
            None if self._apart is None or drafts is None else self._apart(worker),
            None if self._bandits is None else self._bandits.of(worker).state(),
        )

    def _name(self, drafts: Any) -> str:
        with self._lock:
            return self._names.setdefault(drafts, f"rollout {next(self._numbers)}")

    def tuned(self, worker: int, state: dict[str, Any]) -> None:
        assert self._bandits is not None, "its worker has one"
        self._bandits.of(worker).load_state(state)

    def drafter(self, have: int | None) -> tuple[int, Any] | None:
        """Return the newest (version, weights) of the learned drafter; None if `have` is newest."""
        if self._learned is None or self._learned.version == have:
            return None
        return self._shared_once("drafting", *self._learned.newest)

    def training(self, step: int, params: EagleParams) -> tuple[int, Any]:
        """Return (step, weights) of the learned drafter before a step of its training."""
        return self._shared_once("training", step, params)

    def _shared_once(self, use: str, version: int, params: EagleParams) -> tuple[int, Any]:
        with self._lock:
            if self._references.get(use, (None,))[0] != version:
                self._references[use] = version, self._share(jax.device_get(params))
            return self._references[use]


class RayPlace:
    """The place of a worker in an actor, which is restarted and prepared again when lost.

    Missing heartbeats reveal a lost or stopped program, so a call may take `call_limit_s`.
    """

    makes_shapes = False
    hang_limit_s = math.inf  # the actor has deadlines

    def __init__(
        self,
        number: int,
        actor: Actor,
        shared: Shared,
        *,
        call_limit_s: float,
        compile_s: float,
        report: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.number = number
        self.name = f"worker {number}"
        self.actor = actor
        self._shared = shared
        self._call_limit_s = call_limit_s
        self._compile_s = compile_s
        self._report = report
        self._clock = clock
        self.later_s = 0.0
        self._thread = DaemonThread(f"idle work of worker {number}")
        self._bounds: Bounds | None = None
        self._rounds: str | None = None  # the measured times of rounds, as text
        self._prepared_start = 0
        self._preparing: Future[Any] | None = None
        self._is_unfit = False  # preparation raised
        self._drafter_version: int | None = None
        self._sinks: dict[int, HiddenStateSink] = {}  # the last sinks, by number
        self._num_sinks = 0

    @property
    def where(self) -> str:
        return self.actor.where

    @property
    def may_return(self) -> bool:
        return self.actor.fatal_error is None and not self._is_unfit

    @property
    def is_ready(self) -> bool:
        """Return whether the worker is prepared; start to prepare a restarted actor."""
        actor = self.actor
        preparing = self._preparing
        if not actor.is_there or self._is_unfit:
            return False
        if self._bounds is None or self._prepared_start == actor.num_starts:
            return True
        if preparing is None or preparing.done():
            error = None if preparing is None else preparing.exception()
            if error is None or isinstance(error, ProgramLost):
                self.prepare(self._bounds, self._rounds)
            else:
                self._is_unfit = True
                why = f"{type(error).__name__}: {error}"
                self._report(f"{self.name} cannot prepare, and is given up: {why}")
        return False

    def compile(self, bounds: Bounds) -> Future[None]:
        """Compile in the actor, while another worker also measures."""
        offer = self._shared.weights.newest
        return self.actor.call("compile", offer, bounds, limit_s=self._compile_s, is_work=False)

    def prepare(self, bounds: Bounds, rounds: str | None) -> Future[Measured]:
        """Compile and measure in the actor; `rounds` were measured before, if given."""
        self._bounds = bounds
        start = self.actor.num_starts
        offer = self._shared.weights.newest
        prepared = self.actor.call(
            "prepare", offer, bounds, rounds, limit_s=self._compile_s, is_work=False
        )

        def note(measured: Measured) -> Measured:
            self._rounds, self.later_s = measured.rounds, self._clock() - measured.clock_s
            self._prepared_start = max(start, 1)
            return measured

        self._preparing = then(prepared, note)
        return self._preparing

    # -- worker of a session -------------------------------------------------------------------

    def announce(self, spec: RolloutSpec) -> None:
        """Publish the weights of a rollout, once for all places, outside the driver thread."""
        self._shared.weights.publish(spec.params)

    def join(self, limits: WorkerLimits) -> None:
        self._stats = EngineStats()
        self._rollout = 0
        self._start = self.actor.num_starts
        self._drafter_version = None
        self._request("join", limits, is_work=False)

    def call(self, commands: Sequence[Command]) -> Future[Report]:
        sent = [self._sent(command) for command in commands]
        drafter = self._shared.drafter(self._drafter_version)
        if drafter is not None:
            self._drafter_version = drafter[0]
        reply = self._request("step", sent, ROUNDS_S, drafter, is_work=bool(commands))
        return then(reply, self._settle)

    def _request(self, method: str, *args: Any, is_work: bool) -> Future[Any]:
        """Call the program that has joined; a call to its successor would wait for the restart."""
        actor = self.actor
        if actor.is_there and actor.num_starts == self._start:
            return actor.call(method, *args, limit_s=self._call_limit_s, is_work=is_work)
        lost = Future[Any]()
        lost.set_exception(ProgramLost(f"{self.name} was lost between two calls"))
        return lost

    def nudge(self) -> None:
        """Do nothing, since calls are short."""

    def spare(self, work: IdleWork, worker_id: int) -> Future[bool]:
        return self._thread.submit(lambda: work.spare(worker_id, self))  # type: ignore[arg-type]

    def leave(self, *, abort: bool) -> Future[Report]:
        return then(self._request("leave", abort, is_work=False), self._settle)

    def abandon(self) -> None:
        """Do nothing, since `Actor` stops lost programs by itself."""

    def _sent(self, command: Command) -> Command:
        if not isinstance(command, Prepare):
            return command
        spec: RolloutSpec = command.spec
        if spec.sink is not None:
            self._num_sinks += 1
            self._sinks = dict([*self._sinks.items()][-2:]) | {self._num_sinks: spec.sink}
        message = self._shared.message(spec, self.number, self._num_sinks)
        return command._replace(spec=message)

    def _settle(self, reply: Reply) -> Report:
        """Add the new statistics of a reply, with times on the clock of this program."""
        report = reply.report
        new = reply.report.stats
        if reply.rollout != self._rollout:
            self._rollout = reply.rollout
            self._stats = EngineStats()
        self._stats.timeline += [r.moved(self.later_s) for r in new.timeline]
        for field in dataclasses.fields(new):
            if field.name != "timeline":
                setattr(self._stats, field.name, getattr(new, field.name))
        for number, states in reply.states:
            self._sinks[number].add(states)
        for remark in reply.remarks:
            self._report(f"{self.name}: {remark}")
        if reply.bandit is not None:
            self._shared.tuned(self.number, reply.bandit)
        return report._replace(stats=self._stats)

    # -- as a runner of idle work --------------------------------------------------------------

    def mesh_context(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def gradients(
        self, policy: Params, step: int, params: EagleParams, batch: DrafterBatch
    ) -> tuple[EagleParams, Mapping[str, float]]:
        """Return the gradient and metrics of a micro-batch. Raises ProgramLost."""
        offer = self._shared.weights.publish(policy)
        drafter = self._shared.training(step, params)
        rows = jax.tree.map(np.asarray, batch)
        reply = self._request("gradients", offer, drafter, rows, is_work=True)
        try:
            result: tuple[EagleParams, Mapping[str, float]] = reply.result()
        except ProgramLost:
            raise
        except Exception as error:
            raise ProgramLost(f"{self.name}: {error}") from error
        return result


def then(future: Future[T], work: Callable[[T], U]) -> Future[U]:
    """Return a future for `work` called with the result of `future`."""
    result: Future[U] = Future()

    def done(ended: Future[T]) -> None:
        try:
            result.set_result(work(ended.result()))
        except BaseException as error:
            result.set_exception(error)

    future.add_done_callback(done)
    return result
