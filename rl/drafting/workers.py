"""The drafting workers of a run: engines that draft for those that verify.

A rollout's drafters on verifying workers get links to all drafting workers; what these draft with
is made in their threads, on their devices, once a rollout. A worker that raises, or hangs for
`hang_limit_s` with something to do, is replaced: requests are told anew, and nobody waits for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence

import jax
import numpy as np

from rl.drafting.config import SpecActorConfig
from rl.drafting.worker import DraftingWorker, WorkerLink
from rl.engine.engine import Engine
from rl.engine.rollout_spec import DrafterContext, RolloutSpec
from rl.runtime.waits import HANG_LIMIT_S
from rl.speculation.draft_model import DraftModel
from spec.config import SamplingConfig
from spec.decoupled.ahead import DraftingAhead, Enumerating, FreeRunning
from spec.decoupled.drafter import DecoupledDrafter, RequestPlans
from spec.draft_model.drafter import AheadDraftModel, EnumeratingDraftModel
from spec.drafter import Program, Source
from spec.sampling import step_key

MOST_RESTARTS = 3  # of one worker: what fails more often will not heal
LEAVING_S = 5.0  # that threads have to end


@dataclasses.dataclass(frozen=True)
class DraftingBounds:
    """What drafting workers hold: requests at once, their longest, and draft tokens ahead."""

    max_requests: int
    longest_tokens: int
    most_window: int


class DraftingWorkers:
    """Drafting workers on `engines`, which share the requests of all verifying workers.

    A context manager: the threads end on exit. `told` is called with a line about each loss.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        model: DraftModel,
        config: SpecActorConfig,
        bounds: DraftingBounds,
        plans: Callable[[], RequestPlans],
        *,
        clock: Callable[[], float],
        told: Callable[[str], None],
        hang_limit_s: float = HANG_LIMIT_S,
    ) -> None:
        self.model, self.config, self.bounds, self._plans = model, config, bounds, plans
        self._clock, self._told, self._hang_limit_s = clock, told, hang_limit_s
        self._engines = [_drafting_engine(engine, bounds, len(engines)) for engine in engines]
        self._lock = threading.Lock()
        self._looked_s = 0.0
        self.workers: list[DraftingWorker] = []

    def __enter__(self) -> DraftingWorkers:
        self.workers = [DraftingWorker(e, Source.MODEL, self._clock) for e in self._engines]
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.close(LEAVING_S)

    def drafter_for(self, context: DrafterContext) -> DecoupledDrafter:
        """Return the drafter of one verifying worker for one rollout."""
        spec = context.spec
        rollout: Hashable = np.asarray(jax.random.key_data(spec.key)).tobytes(), spec.sampling

        def make(engine: Engine) -> DraftingAhead:
            return self.ahead(engine, spec.key, spec.sampling)

        links = [WorkerLink(worker, rollout, make, self._look) for worker in self.workers]
        return DecoupledDrafter(links, self._plans(), spec.sampling)

    def ahead(self, engine: Engine, key: jax.Array, sampling: SamplingConfig) -> DraftingAhead:
        """Return what drafts for one rollout on a drafting worker."""
        size, window = (engine.config.slots, engine.longest_tokens), self.bounds.most_window
        spec = RolloutSpec((), sampling, key)  # type: ignore[arg-type]  # it reads no weights of it
        context = engine.drafter_context(spec)
        if self.config.ahead == "free_running":
            return FreeRunning(self.model.made(AheadDraftModel, context, window), *size)
        drafter = self.model.made(EnumeratingDraftModel, context, window)
        fan_out = self.config.fan_out
        return Enumerating(drafter, *size, most_window=window, fan_out=fan_out)

    def programs(self, sampling: SamplingConfig) -> Iterator[tuple[Engine, Program]]:
        """Yield what drafting workers run, with the engine that it is for."""
        key, window = step_key(0, 0), self.bounds.most_window
        for engine in self._engines:
            context = engine.drafter_context(RolloutSpec((), sampling, key))  # type: ignore[arg-type]
            for S in engine.position_sizes(engine.config.slots):
                drafter = self.model.made(EnumeratingDraftModel, context, window)
                if self.config.ahead == "enumeration":
                    fan_out = self.config.fan_out
                    programs = drafter.enumerating(engine.config.slots, S, window, fan_out)
                else:
                    programs = drafter.programs(engine.config.slots, S)
                for program in programs:
                    yield engine, program

    def _look(self) -> None:
        """Replace workers that have raised or hang; called by verifying workers, any of them."""
        if not any(worker.error for worker in self.workers):
            now_s = self._clock()
            if now_s - self._looked_s < self._hang_limit_s / 4:
                return
            self._looked_s = now_s
        with self._lock:
            for k, worker in enumerate(self.workers):
                lost = self._why_lost(worker)
                if lost is None or worker.generation > MOST_RESTARTS:
                    continue
                again = worker.generation < MOST_RESTARTS
                self._told(
                    f"warning: drafting worker {k} {lost}; "
                    + ("it is replaced" if again else "verifying workers go on without it")
                )
                if again:
                    worker.restart()
                else:
                    worker.generation += 1

    def _why_lost(self, worker: DraftingWorker) -> str | None:
        if worker.error is not None:
            return f"failed: {type(worker.error).__name__}: {worker.error}"
        alive_s = worker.alive_s
        if alive_s is not None and (silent_s := self._clock() - alive_s) > self._hang_limit_s:
            return f"hangs: no sign of life for {silent_s:.1f} s"
        return None

    @contextlib.contextmanager
    def measured(self) -> Iterator[dict[str, float]]:
        """Yield metrics of what the workers do inside: they are there once it is left."""
        before = [(w.steps, w.busy_s) for w in self.workers]
        began_s, metrics = self._clock(), dict[str, float]()
        yield metrics
        pairs = list(zip(self.workers, before, strict=True))
        taken_s = max(self._clock() - began_s, 1e-9) * max(len(pairs), 1)
        metrics["drafting/steps"] = float(sum(w.steps - steps for w, (steps, _) in pairs))
        metrics["drafting/busy_fraction"] = sum(w.busy_s - s for w, (_, s) in pairs) / taken_s


def _drafting_engine(engine: Engine, bounds: DraftingBounds, num_workers: int) -> Engine:
    """Return an engine on the same device whose caches hold every request that it may draft for.

    One bucket of rows, so that nothing compiles as requests come and go.
    """
    rows = 1 << (-(-bounds.max_requests // num_workers) - 1).bit_length()
    config = dataclasses.replace(engine.config, slots=rows, min_slots=rows)
    drafting = dataclasses.replace(engine, config=config, feature_layers=None)
    drafting.expect(rows, bounds.longest_tokens + 2 * bounds.most_window)
    return drafting
