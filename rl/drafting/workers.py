"""The drafting workers of a run: engines that draft for those that verify.

A rollout's drafters on verifying workers get links to all drafting workers; what these draft with
is made in their threads, on their devices, once a rollout. A worker that raises, or hangs for
`hang_limit_s` with something to do, is replaced: requests are told anew, and nobody waits for it.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Hashable, Iterator, MutableSequence, Sequence

import jax
import numpy as np

from rl.drafting.plans import Planner
from rl.drafting.worker import DraftingWorker, WorkerLink
from rl.engine.engine import Engine
from rl.engine.rollout_spec import DrafterContext, RolloutSpec
from rl.runtime.waits import HANG_LIMIT_S
from rl.speculation.draft_model import DraftModel
from spec.config import SamplingConfig
from spec.decoupled.ahead import DraftingAhead, Enumerating, FreeRunning
from spec.decoupled.drafter import DecoupledDrafter
from spec.decoupled.messages import Commit, DraftPlan
from spec.draft_model.drafter import AheadDraftModel, EnumeratingDraftModel
from spec.drafter import Program, Source
from spec.sampling import step_key

REPEATS = 3  # of what is timed
LEAST_SECONDS = 1e-7
MOST_RESTARTS = 3  # of one worker: what fails more often will not heal
LEAVING_S = 5.0  # that threads have to end


class DraftingWorkers:
    """Drafting workers on engines of a run, which share the requests of all verifying workers.

    There are none until `take`. A context manager: the threads end on exit. `told` is called with a
    line about each loss. `longest_tokens` are those of prompt and response.
    """

    def __init__(
        self,
        model: DraftModel | None,
        planner: Planner,
        longest_tokens: int,
        *,
        clock: Callable[[], float],
        told: Callable[[str], None],
        hang_limit_s: float = HANG_LIMIT_S,
    ) -> None:
        self.model, self.planner, self.longest_tokens = model, planner, longest_tokens
        self._clock, self._told, self._hang_limit_s = clock, told, hang_limit_s
        self._lock = threading.Lock()
        self._looked_s = 0.0
        self._said = clock(), 0, 0.0  # when metrics were asked for last, steps and busy seconds
        self._engines: list[Engine] = []
        self._verifying: list[int] = []  # numbers of the engines that verify
        self.workers: list[DraftingWorker] = []

    def take(self, engines: MutableSequence[Engine], count: int) -> None:
        """Take the last `count` engines from those that verify, and start drafting on them."""
        assert not self.workers and 0 < count < len(engines), "once, and some are left"
        taken = [engines.pop() for _ in range(count)][::-1]
        longest = self.longest_tokens + 2 * self.planner.most_window
        singles = [one for engine in taken for one in _of_each_device(engine)]
        rows = -(-self.planner.num_requests // min(len(singles), len(engines)))
        self._engines = [_drafting_engine(engine, rows, longest) for engine in singles]
        self._verifying = [engine.number for engine in engines]
        self.planner.drafting_workers = count
        self.workers = [DraftingWorker(e, Source.MODEL, self._clock) for e in self._engines]

    def __enter__(self) -> DraftingWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.close(LEAVING_S)

    def drafter_for(self, context: DrafterContext) -> DecoupledDrafter:
        """Return the drafter of one verifying worker for one rollout."""
        spec = context.spec
        rollout: Hashable = np.asarray(jax.random.key_data(spec.key)).tobytes(), spec.sampling

        key, sampling = spec.key, spec.sampling  # and not the weights: words are kept for a while

        def make(engine: Engine) -> DraftingAhead:
            return self.ahead(engine, key, sampling)

        links = [WorkerLink(w, rollout, make, self._look) for w in self._of(context.runner.number)]
        return DecoupledDrafter(links, self.planner.plans(), spec.sampling)

    def _of(self, number: int) -> Sequence[DraftingWorker]:
        """Return who drafts for a verifying worker: some devices of its own, or a shared one."""
        place, count = self._verifying.index(number), len(self._verifying)
        return self.workers[place::count] or [self.workers[place % len(self.workers)]]

    def ahead(self, engine: Engine, key: jax.Array, sampling: SamplingConfig) -> DraftingAhead:
        """Return what drafts for one rollout on a drafting worker."""
        size, drafter = (
            (engine.config.slots, engine.longest_tokens),
            self._drafter(engine, sampling, key),
        )
        if isinstance(drafter, EnumeratingDraftModel):
            window, fan_out = self.planner.most_window, self.planner.config.fan_out
            return Enumerating(drafter, *size, most_window=window, fan_out=fan_out)
        return FreeRunning(drafter, *size)

    def _drafter(
        self, engine: Engine, sampling: SamplingConfig, key: jax.Array | None = None
    ) -> AheadDraftModel:
        spec = RolloutSpec((), sampling, step_key(0, 0) if key is None else key)  # type: ignore[arg-type]
        kind = EnumeratingDraftModel if self._enumerates else AheadDraftModel
        context = engine.drafter_context(spec)  # it reads no weights of the policy
        assert self.model is not None, "a draft model drafts"
        return self.model.made(kind, context, self.planner.most_window)

    @property
    def _enumerates(self) -> bool:
        return self.planner.config.ahead == "enumeration"

    def programs(self, sampling: SamplingConfig) -> Iterator[tuple[Engine, list[Program]]]:
        """Yield what drafting workers run, with the engine that it is for."""
        for engine in self._engines:
            rows, found = engine.config.slots, list[Program]()
            with engine.mesh_context():
                for S in engine.position_sizes(rows):
                    drafter, window = self._drafter(engine, sampling), self.planner.most_window
                    if isinstance(drafter, EnumeratingDraftModel):
                        found += drafter.enumerating(rows, S, window, self.planner.config.fan_out)
                    else:
                        found += drafter.programs(rows, S)
            yield engine, found

    def draft_seconds(self, sampling: SamplingConfig) -> float:
        """Measure the seconds of a draft token for all requests of a drafting worker, if there is
        one.

        Those of a whole block by its window: rows at rest take as long as others.
        """
        if not self._engines:
            return 0.0
        engine, window = self._engines[0], self.planner.most_window
        rows, prompt = engine.config.slots, np.zeros(1, np.int32)
        plan, none = DraftPlan(window), np.zeros(0, np.int32)
        with engine.mesh_context():
            ahead = self.ahead(engine, step_key(0, 0), sampling)
            tries = []
            for n in range(REPEATS + 1):
                said = n, prompt, 1, 2 * window, none, plan, (1.0, 0.0, 1.0)
                ahead.hear([Commit(r, 1 + n, *said) for r in range(rows)], ())
                began_s = self._clock()
                ahead.step()
                tries.append(self._clock() - began_s)
        return max(float(np.median(tries[1:])), LEAST_SECONDS) / window

    def model_seconds(self) -> float:
        """Measure the seconds of putting the draft model on another worker (model scale)."""
        return 0.0 if self.model is None else self.model.seconds_to_place(self._clock)

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
                    worker.give_up()

    def _why_lost(self, worker: DraftingWorker) -> str | None:
        if worker.error is not None:
            return f"failed: {type(worker.error).__name__}: {worker.error}"
        alive_s = worker.alive_s
        if alive_s is not None and (silent_s := self._clock() - alive_s) > self._hang_limit_s:
            return f"hangs: no sign of life for {silent_s:.1f} s"
        return None

    def metrics(self) -> dict[str, float]:
        """Return what the workers have done since the last call; nothing where there are none."""
        if not self.workers:
            return {}
        now_s, steps = self._clock(), sum(w.steps for w in self.workers)
        busy_s = sum(w.busy_s for w in self.workers)
        (then_s, steps_then, busy_then_s), self._said = self._said, (now_s, steps, busy_s)
        share = (busy_s - busy_then_s) / max((now_s - then_s) * len(self.workers), 1e-9)
        observed = self.planner.observed
        return {
            "drafting/steps": float(steps - steps_then),
            "drafting/busy_fraction": share,
            "drafting/accept_probability": observed.p,
            "drafting/rounds_with_draft": observed.hits,
        }


def _of_each_device(engine: Engine) -> list[Engine]:
    """Return an engine for each device of one: a draft model is small."""
    if engine.mesh is None:
        return [engine]
    devices = engine.mesh.devices.flat
    return [dataclasses.replace(engine, mesh=None, device=device) for device in devices]


def _drafting_engine(engine: Engine, num_rows: int, longest_tokens: int) -> Engine:
    """Return an engine on the same device whose caches hold every request that it may draft for.

    One bucket of rows, so that nothing compiles as requests come and go.
    """
    rows = 1 << (num_rows - 1).bit_length()
    config = dataclasses.replace(engine.config, slots=rows, min_slots=rows)
    drafting = dataclasses.replace(engine, config=config, feature_layers=None)
    drafting.expect(rows, longest_tokens)
    return drafting
