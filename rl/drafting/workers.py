"""The drafting workers of a run: threads on engines taken from verifying workers, or Ray actors.

    in this process     DraftingWorkers: a thread for each device
    program of the run  DraftingActors: starts and watches actors, restarts lost actors
    a verifying worker  RemoteDrafts.use(DraftsApart) at the start of each rollout → links

Links to a lost actor stay lost until the end of the rollout.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar, cast

from reprise.models.config import ModelConfig
from reprise.rl.cluster.actors import Actor, Handle
from reprise.rl.drafting.config import DraftingConfig
from reprise.rl.drafting.plans import MeasuredSeconds, Planner
from reprise.rl.drafting.worker import Answer, Draft, DraftingLink, DraftingWorker, Peer, Rollout
from reprise.rl.engine.engine import Engine
from reprise.rl.engine.rollout_spec import DrafterContext
from reprise.rl.records.worker_record import WorkerPart
from reprise.rl.runtime.parallel_compile import OnCompiled, keep_programs
from reprise.rl.runtime.waits import HANG_LIMIT_S
from reprise.rl.slots.config import EngineConfig
from reprise.rl.speculation.config import DraftModelConfig
from reprise.rl.speculation.device_drafters import DeviceDrafters, DrafterSource, DraftModel
from reprise.sched.simulator.measured_costs import MeasuredCosts
from reprise.spec.buckets import bucket
from reprise.spec.budget.config import MODEL
from reprise.spec.config import SamplingConfig
from reprise.spec.decoupled.drafter import DecoupledDrafter, OnePlan
from reprise.spec.decoupled.messages import DraftPlan
from reprise.spec.round_times import RoundTimes

T = TypeVar("T")
BEAT_S = 2.0  # between two calls that detect a hang or a loss
CONCURRENCY = 64  # links that may wait for a step concurrently
NO_MOVES = {1: (0.0, 0.0)}  # seconds of moves between workers, which no window depends on


class DraftingWorkers(DrafterSource):
    """Drafting workers on engines of a run, started by `take`, stopped by this context manager.

    `report` is called with a line about each failure.
    """

    def __init__(
        self,
        drafters: DeviceDrafters,
        planner: Planner,
        longest_tokens: int,
        *,
        report: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
        hang_limit_s: float = HANG_LIMIT_S,
    ) -> None:
        self.planner = planner
        self.longest_tokens = longest_tokens
        model = drafters.get(MODEL)
        self._model = model if isinstance(model, DraftModel) else None
        self._report = report
        self._clock = clock
        self._hang_limit_s = hang_limit_s
        self._choosing = threading.Lock()
        self._last: Rollout | None = None  # the last rollout to start
        self._counted = clock(), 0, 0.0  # time, steps and busy seconds at the last `metrics`
        self._verifying: list[int] = []  # numbers of the verifying engines
        self.workers: list[DraftingWorker] = []
        self.peers: list[Peer] = []

    @property
    def sources(self) -> Mapping[str, DrafterSource]:
        """The sources of a run that draft here; none before `take`."""
        return {MODEL: self} if self.workers else {}

    def take(self, engines: MutableSequence[Engine], count: int) -> None:
        """Take the last `count` of the verifying engines, to draft on their devices."""
        assert not self.workers and 0 < count < len(engines), "once, and some are left"
        taken = [engines.pop() for _ in range(count)][::-1]
        singles = [one for engine in taken for one in _of_each_device(engine)]
        planner = self.planner
        num_rows = -(-planner.num_requests // min(len(singles), len(engines)))
        self._verifying = [engine.number for engine in engines]
        planner.drafting_workers = count
        self.start(
            [
                drafting_engine(single, num_rows, self.longest_tokens, planner.max_window)
                for single in singles
            ]
        )

    def start(self, engines: Sequence[Engine]) -> None:
        """Start a worker on each of these engines."""
        self.workers = [self._worker(engine) for engine in engines]
        for k, worker in enumerate(self.workers):
            peer = Peer(
                f"drafting worker {k}",
                worker.draft,
                self._report,
                clock=self._clock,
                hang_limit_s=self._hang_limit_s,
                replace=partial(self._replace, k),
            )
            self.peers.append(peer)

    def __enter__(self) -> DraftingWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.close()

    def drafter_for(self, context: DrafterContext) -> DecoupledDrafter:
        """Return the drafter of a verifying worker; choose the draft model once per rollout."""
        rollout = Rollout.of("", context.spec.key, context.spec.sampling)
        with self._choosing:  # workers start in separate threads
            if rollout != self._last:
                self._last = rollout
                self.planner.choose_method()
            rollout = rollout._replace(method=self.planner.method)
            plans = self.planner.plans()
        place = self._verifying.index(context.runner.number)
        count = len(self._verifying)
        links = [DraftingLink(peer, rollout) for peer in share(self.peers, place, count)]
        return DecoupledDrafter(links, plans, rollout.sampling)

    def prepare(self, sampling: SamplingConfig, report: OnCompiled) -> dict[str, float]:
        """Compile the programs of all workers; return the seconds of a draft token by method."""
        for worker in self.workers:
            worker.prepare(sampling, report)
        return self.workers[0].draft_seconds(sampling)

    def model_seconds(self) -> float:
        """Measure the seconds to place the draft model on a worker; 0 if no copy drafts with it."""
        if self._model is None or MODEL not in self.planner.config.methods:
            return 0.0
        return self._model.seconds_to_place(self._clock)

    def parts(self, version: int) -> list[WorkerPart]:
        """Return the busy spans of each worker since the last call, with the weight version."""
        return [
            WorkerPart(f"drafting {k}", worker.engine.where, version, worker.take_spans())
            for k, worker in enumerate(self.workers)
        ]

    def metrics(self) -> dict[str, float]:
        """Return metrics of the time since the last call; empty without drafting workers."""
        if not self.workers:
            return {}
        now_s = self._clock()
        steps = sum(w.num_steps for w in self.workers)
        busy_s = sum(w.busy_s for w in self.workers)
        then_s, steps_then, busy_then_s = self._counted
        self._counted = (now_s, steps, busy_s)
        available_s = max((now_s - then_s) * len(self.workers), 1e-9)
        planner = self.planner
        by = {f"drafting/by_{m}": float(m == planner.method) for m in planner.methods}
        return by | {
            "drafting/steps": float(steps - steps_then),
            "drafting/busy_fraction": (busy_s - busy_then_s) / available_s,
            "drafting/accept_probability": planner.observed.p,
            "drafting/rounds_with_draft": planner.observed.hits,
        }

    def _worker(self, engine: Engine) -> DraftingWorker:
        models = () if self._model is None else self._model.models
        planner = self.planner
        return DraftingWorker(engine, models, planner.config, planner.max_window, self._clock)

    def _replace(self, k: int) -> Draft:
        """Replace a hung worker and its engine, keeping the counts; return the new method."""
        hung = self.workers[k]
        self.workers[k] = worker = self._worker(hung.engine.abandoned())
        worker.num_steps = hung.num_steps
        worker.busy_s = hung.busy_s
        return worker.draft


def drafting_engine(engine: Engine, num_rows: int, longest_tokens: int, max_window: int) -> Engine:
    """Return an engine on the same device with one bucket of rows and pages for all requests.

    `Engine.pages` counts pages of the policy, whose requests are shorter than texts drafted ahead.
    """
    rows = bucket(num_rows, 1)
    config = dataclasses.replace(engine.config, slots=rows, min_slots=rows, pages=0)
    drafting = dataclasses.replace(engine, config=config, feature_layers=None)
    drafting.expect(rows, longest_tokens + 2 * max_window)
    return drafting


def share(drafting: Sequence[T], index: int, count: int) -> Sequence[T]:
    """Return the drafters of verifying worker `index`, or one drafter shared with other workers."""
    return drafting[index::count] or [drafting[index % len(drafting)]]


def _of_each_device(engine: Engine) -> list[Engine]:
    """Return one engine for each device of an engine, since a drafter is small."""
    if engine.mesh is None:
        return [engine]
    devices = engine.mesh.devices.flat
    return [dataclasses.replace(engine, mesh=None, device=device) for device in devices]


# --- actors -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DraftingSettings:
    """Everything an actor needs to draft on one device, for `num_rows` concurrent requests."""

    policy: ModelConfig
    engine: EngineConfig
    dtype: str
    model: DraftModelConfig
    drafting: DraftingConfig
    max_window: int
    num_rows: int
    longest_tokens: int
    sampling: SamplingConfig


class DraftingActor(DraftingWorker):
    """A drafting worker in a separate program, which loads a draft model and compiles at start."""

    def __init__(self, settings: DraftingSettings) -> None:
        keep_programs()
        window = settings.max_window
        engine = Engine(settings.policy, settings.engine, dtype=settings.dtype)
        engine = drafting_engine(engine, settings.num_rows, settings.longest_tokens, window)
        models = DraftModel.load(settings.model).models
        super().__init__(engine, models, settings.drafting, window)
        self.prepare(settings.sampling)
        self._draft_s = self.draft_seconds(settings.sampling)[MODEL]

    def get_draft_s(self) -> float:
        """Return the measured seconds of a draft token for all requests."""
        return self._draft_s

    def count_steps(self) -> int:
        """Return the number of steps, once the running step has finished."""
        with self._stepping:
            return self.num_steps


@dataclasses.dataclass(frozen=True, eq=False)
class DraftsApart:
    """The drafting workers of one verifying worker: handles by number, and arguments of plans.

    `planned` are the arguments of `Planner`; `draft_s` is as in `MeasuredSeconds`.
    """

    places: Mapping[int, Handle]
    planned: tuple[DraftingConfig, int, int, int]
    draft_s: float


class DraftingActors:
    """The drafting workers of a run in separate programs, stopped by this context manager.

    `start` starts the `DraftingActor` of a number. A step may take at most `hang_limit_s`.
    """

    def __init__(
        self, planner: Planner, count: int, start: Callable[[int], Actor], *, hang_limit_s: float
    ) -> None:
        self.planner = planner
        self.draft_s = 0.0
        self._count = count
        self._start = start
        self._hang_limit_s = hang_limit_s
        self.actors = list[Actor]()
        self._over = threading.Event()

    def __enter__(self) -> DraftingActors:
        """Start all actors, which compile while nothing waits for them."""
        self.actors = [self._start(number) for number in range(self._count)]
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for actor in self.actors:
            actor.close()

    def wait_ready(self) -> None:
        """Wait until all actors have compiled. Raises ProgramLost if an actor cannot draft."""
        answers = [actor.call("get_draft_s", is_work=False) for actor in self.actors]
        self.draft_s = max(answer.result() for answer in answers)
        threading.Thread(target=self._watch, name="drafting workers", daemon=True).start()

    def apart(self, verifying: int) -> DraftsApart:
        """Return the available drafting workers of the verifying worker with this number."""
        planner = self.planner
        count = planner.num_workers - planner.drafting_workers
        numbers = share(range(self._count), verifying % count, count)
        handles = {k: self.actors[k].handle for k in numbers if self.actors[k].is_there}
        places = {k: handle for k, handle in handles.items() if handle is not None}
        sizes = planner.num_workers, planner.num_requests, planner.max_window
        return DraftsApart(places, (planner.config, *sizes), self.draft_s)

    def _watch(self) -> None:
        """Poll all actors, so that an actor with a hung step counts as lost and restarts."""
        beats = [Future[int]() for _ in self.actors]
        for beat in beats:
            beat.set_result(0)
        while not self._over.wait(BEAT_S):
            for k, actor in enumerate(self.actors):
                if beats[k].done():
                    has_worked = beats[k].exception() is None and beats[k].result() > 0
                    limit_s = self._hang_limit_s
                    beats[k] = actor.call("count_steps", limit_s=limit_s, is_work=has_worked)


class RemoteDrafts(DrafterSource):
    """The source of drafters for a verifying worker with drafting actors, kept for the whole run.

    The planner learns acceptance from all rollouts. `report` is called with a line about each
    failure. Before `use`, the drafters get no drafts and only serve to compile their host code.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._planner: Planner | None = None
        self._peers = list[Peer]()

    def use(self, apart: DraftsApart, times: RoundTimes | None) -> None:
        """Start a rollout; `times` are the measured rounds of this worker, or None."""
        if self._planner is None:
            self._planner = Planner(*apart.planned)
            self._planner.drafting_workers = self._planner.config.workers or 0
        if times is not None:
            costs = MeasuredCosts(times.rounds, NO_MOVES)
            self._planner.seconds = MeasuredSeconds.of(costs, times, draft_s=apart.draft_s)
        self._peers = [
            Peer(f"drafting worker {number}", _calls(handle), self._report)
            for number, handle in apart.places.items()
        ]

    def drafter_for(self, context: DrafterContext) -> DecoupledDrafter:
        spec = context.spec
        rollout = Rollout.of(MODEL, spec.key, spec.sampling)
        peers = self._peers or [Peer("no drafting worker", None, self._report)]
        links = [DraftingLink(peer, rollout) for peer in peers]
        plans = OnePlan(DraftPlan(1)) if self._planner is None else self._planner.plans()
        return DecoupledDrafter(links, plans, spec.sampling)


def _calls(handle: Handle) -> Draft:
    return lambda *args: cast(Answer, handle.submit("call", "draft", *args).result())
