"""The drafting workers of one process: threads on engines taken from those that verify."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, MutableSequence, Sequence
from functools import partial
from typing import TypeVar

from rl.drafting.plans import Planner
from rl.drafting.worker import Draft, DraftingLink, DraftingWorker, Peer, Rollout
from rl.engine.engine import Engine
from rl.engine.rollout_spec import DrafterContext
from rl.engine.worker_record import WorkerPart
from rl.runtime.parallel_compile import OnCompiled
from rl.runtime.waits import HANG_LIMIT_S
from rl.speculation.device_drafters import DeviceDrafters, DrafterSource
from rl.speculation.draft_model import DraftModel
from spec.buckets import bucket
from spec.budget.config import MODEL
from spec.config import SamplingConfig
from spec.decoupled.drafter import DecoupledDrafter

T = TypeVar("T")


class DraftingWorkers(DrafterSource):
    """Drafting workers on engines of a run, from `take` on; a context manager, which ends them.

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
        self.planner, self.longest_tokens = planner, longest_tokens
        model = drafters.get(MODEL)
        self._model = model if isinstance(model, DraftModel) else None
        self._report, self._clock, self._hang_limit_s = report, clock, hang_limit_s
        self._choosing = threading.Lock()
        self._last: Rollout | None = None  # the rollout that began last
        self._counted = clock(), 0, 0.0  # time, steps and busy seconds at the last `metrics`
        self._verifying: list[int] = []  # numbers of the engines that verify
        self.workers: list[DraftingWorker] = []
        self.peers: list[Peer] = []

    def take(self, engines: MutableSequence[Engine], count: int) -> None:
        """Take the last `count` engines from those that verify, to draft on their devices."""
        assert not self.workers and 0 < count < len(engines), "once, and some are left"
        taken = [engines.pop() for _ in range(count)][::-1]
        singles = [one for engine in taken for one in _of_each_device(engine)]
        planner = self.planner
        num_rows = -(-planner.num_requests // min(len(singles), len(engines)))
        size = num_rows, self.longest_tokens, planner.max_window
        self._verifying = [engine.number for engine in engines]
        planner.drafting_workers = count
        self.start([drafting_engine(single, *size) for single in singles])

    def start(self, engines: Sequence[Engine]) -> None:
        """Start a worker on each of these engines."""
        self.workers = [self._worker(engine) for engine in engines]
        for k, worker in enumerate(self.workers):
            peer = Peer(
                *(f"drafting worker {k}", worker.draft, self._report),
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
        """Return a verifying worker's drafter; a rollout's first call chooses its draft model."""
        rollout = Rollout.of("", context.spec.key, context.spec.sampling)
        with self._choosing:  # workers begin in threads of their own
            if rollout != self._last:
                self._last = rollout
                self.planner.choose_method()
            rollout, plans = rollout._replace(method=self.planner.method), self.planner.plans()
        place, count = self._verifying.index(context.runner.number), len(self._verifying)
        links = [DraftingLink(peer, rollout) for peer in share(self.peers, place, count)]
        return DecoupledDrafter(links, plans, rollout.sampling)

    def prepare(self, sampling: SamplingConfig, report: OnCompiled) -> dict[str, float]:
        """Compile their programs; return the seconds of a draft token by method."""
        for worker in self.workers:
            worker.prepare(sampling, report)
        return self.workers[0].draft_seconds(sampling)

    def model_seconds(self) -> float:
        """Measure the seconds of putting the draft model on another worker; 0 if none copies."""
        if self._model is None or MODEL not in self.planner.config.methods:
            return 0.0
        return self._model.seconds_to_place(self._clock)

    def parts(self, version: int) -> list[WorkerPart]:
        """Return when each drafted since the last call, for a step with these weights."""
        return [
            WorkerPart(f"drafting {k}", worker.engine.where, version, worker.take_spans())
            for k, worker in enumerate(self.workers)
        ]

    def metrics(self) -> dict[str, float]:
        """Return metrics of the time since the last call; none without drafting workers."""
        if not self.workers:
            return {}
        now_s, steps = self._clock(), sum(w.num_steps for w in self.workers)
        busy_s = sum(w.busy_s for w in self.workers)
        (then_s, steps_then, busy_then_s), self._counted = self._counted, (now_s, steps, busy_s)
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
        """Leave a worker that hangs, and its engine; start another one, with its counts."""
        hung = self.workers[k]
        self.workers[k] = worker = self._worker(hung.engine.abandoned())
        worker.num_steps, worker.busy_s = hung.num_steps, hung.busy_s
        return worker.draft


def drafting_engine(engine: Engine, num_rows: int, longest_tokens: int, max_window: int) -> Engine:
    """Return an engine on the same device with one bucket of rows, for all requests at once."""
    rows = bucket(num_rows, 1)
    config = dataclasses.replace(engine.config, slots=rows, min_slots=rows)
    drafting = dataclasses.replace(engine, config=config, feature_layers=None)
    drafting.expect(rows, longest_tokens + 2 * max_window)
    return drafting


def share(drafting: Sequence[T], index: int, count: int) -> Sequence[T]:
    """Return verifying worker `index`'s own drafters, or one that it shares with others."""
    return drafting[index::count] or [drafting[index % len(drafting)]]


def _of_each_device(engine: Engine) -> list[Engine]:
    """Return an engine for each device of one: a drafter is small."""
    if engine.mesh is None:
        return [engine]
    devices = engine.mesh.devices.flat
    return [dataclasses.replace(engine, mesh=None, device=device) for device in devices]
