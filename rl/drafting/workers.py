"""The drafting workers of a run: engines that draft for those that verify.

A rollout's drafters on verifying workers get links to all drafting workers; what these draft with
is made in their threads, on their devices, once a rollout. A worker that raises, or hangs for
`hang_limit_s` with something to do, is replaced: requests are told anew, and nobody waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, MutableSequence, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from rl.drafting.ahead_maker import (
    DraftedRollout,
    ModelAhead,
    draft_seconds,
    drafting_engines,
    of_each_device,
)
from rl.drafting.plans import Planner
from rl.drafting.threads import DraftingThreads
from rl.drafting.worker import DraftingWorker, WorkerLink
from rl.engine.engine import Engine
from rl.engine.rollout_spec import DrafterContext
from rl.engine.worker_record import WorkerPart
from rl.runtime.waits import HANG_LIMIT_S
from rl.speculation.device_drafters import DeviceDrafters, DrafterSource
from rl.speculation.draft_model import DraftModel
from spec.budget.config import MODEL
from spec.decoupled.ahead import DraftingAhead
from spec.decoupled.drafter import DecoupledDrafter
from spec.drafter import Program

T = TypeVar("T")


class DraftingWorkers(DrafterSource):
    """Drafting workers on engines of a run, which share the requests of all verifying workers.

    There are none until `take`. A context manager: the threads end on exit. `told` is called with a
    line about each loss. `longest_tokens` are those of prompt and response.
    """

    def __init__(
        self,
        drafters: DeviceDrafters,
        planner: Planner,
        longest_tokens: int,
        *,
        clock: Callable[[], float],
        told: Callable[[str], None],
        hang_limit_s: float = HANG_LIMIT_S,
    ) -> None:
        self.planner, self.longest_tokens = planner, longest_tokens
        self._drafters = drafters
        self.makers: dict[str, ModelAhead] = {}  # by method
        if planner.config.drafts_apart:
            given = planner.config, planner.most_window
            models = zip(planner.methods, _models(drafters), strict=True)
            self.makers = {method: ModelAhead(model, *given) for method, model in models}
        self._choosing = threading.Lock()
        self._began: Hashable = None  # the rollout that began last
        self._clock, self._said = clock, (clock(), 0, 0.0)  # when metrics were asked for last
        self._options: dict[str, Any] = {"clock": clock, "told": told, "hang_limit_s": hang_limit_s}
        self._engines: list[Engine] = []
        self._verifying: list[int] = []  # numbers of the engines that verify
        self._threads = DraftingThreads((), **self._options)

    @property
    def workers(self) -> list[DraftingWorker]:
        return self._threads.workers

    def take(self, engines: MutableSequence[Engine], count: int) -> None:
        """Take the last `count` engines from those that verify, and start drafting on them."""
        assert not self.workers and 0 < count < len(engines), "once, and some are left"
        taken = [engines.pop() for _ in range(count)][::-1]
        singles = [one for engine in taken for one in of_each_device(engine)]
        rows = -(-self.planner.num_requests // min(len(singles), len(engines)))
        sizes = rows, self.longest_tokens, self.planner.most_window
        self._engines = drafting_engines(singles, *sizes)
        self._verifying = [engine.number for engine in engines]
        self.planner.drafting_workers = count
        self._threads = DraftingThreads(self._engines, **self._options)

    def __enter__(self) -> DraftingWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.close()

    def drafter_for(self, context: DrafterContext) -> DecoupledDrafter:
        """Return the drafter of one verifying worker for one rollout.

        The first call of a rollout chooses its method.
        """
        spec = context.spec
        key = np.asarray(jax.random.key_data(spec.key)).tobytes(), spec.sampling
        with self._choosing:  # workers begin in threads of their own
            if key != self._began:
                self._began = key
                self.planner.choose_method()
            method, plans = self.planner.method, self.planner.plans()
        look, maker = self._threads.look, self.makers[method]
        noise = DraftedRollout(spec.key, spec.sampling)
        rollout: Hashable = *key, method

        def make(engine: Engine) -> DraftingAhead:
            return maker.ahead(engine, noise)

        place, count = self._verifying.index(context.runner.number), len(self._verifying)
        drafting = share(self.workers, place, count)
        links = [WorkerLink(worker, rollout, make, look) for worker in drafting]
        return DecoupledDrafter(links, plans, noise.sampling)

    def programs(
        self, method: str, rollout: DraftedRollout
    ) -> Iterator[tuple[Engine, list[Program]]]:
        """Yield what drafting workers run, with the engine that it is for."""
        for engine in self._engines:
            yield engine, self.makers[method].programs(engine, rollout)

    def draft_seconds(self, method: str, rollout: DraftedRollout) -> float:
        """Measure the seconds of a draft token for all requests of a drafting worker."""
        given = self._engines[0], rollout, self.planner.most_window
        return draft_seconds(self.makers[method], *given, self._clock)

    def model_seconds(self) -> float:
        """Measure the seconds of putting the draft model on another worker (model scale).

        None are needed where no copy is drafted for by it.
        """
        model = self._drafters.get(MODEL)
        if not isinstance(model, DraftModel) or MODEL not in self.planner.config.methods:
            return 0.0
        return model.seconds_to_place(self._clock)

    def parts(self, version: int) -> list[WorkerPart]:
        """Return when each drafted since the last call, for a step with these weights."""
        pairs = enumerate(self.workers)
        return [
            WorkerPart(f"drafting {k}", w.engine.where, version, tuple(w.spans())) for k, w in pairs
        ]

    def metrics(self) -> dict[str, float]:
        """Return what the workers have done since the last call; nothing where there are none."""
        if not self.workers:
            return {}
        now_s, steps = self._clock(), sum(w.steps for w in self.workers)
        busy_s = sum(w.busy_s for w in self.workers)
        (then_s, steps_then, busy_then_s), self._said = self._said, (now_s, steps, busy_s)
        share = (busy_s - busy_then_s) / max((now_s - then_s) * len(self.workers), 1e-9)
        observed, methods = self.planner.observed, self.planner.methods
        by = {f"drafting/by_{m}": float(m == self.planner.method) for m in methods}
        return by | {
            "drafting/steps": float(steps - steps_then),
            "drafting/busy_fraction": share,
            "drafting/accept_probability": observed.p,
            "drafting/rounds_with_draft": observed.hits,
        }


def _models(drafters: DeviceDrafters) -> Sequence[DraftModel]:
    model = drafters.get(MODEL)
    return model.models if isinstance(model, DraftModel) else ()


def share(drafting: Sequence[T], place: int, count: int) -> Sequence[T]:
    """Return who drafts for the verifying worker at a place among `count`.

    Some that are its own, or one that it has in common with others.
    """
    return drafting[place::count] or [drafting[place % len(drafting)]]
