"""Spot training: in the long tail of a rollout, idle workers train the drafter on their devices.

    worker has no request left ─→ idle ─→ sched.policies.spot_training: lead, follow, or wait
                                            │
                          units of rl.drafter_training.trainer, one at a time
                                            │
    a request comes, or the rollout is over ─→ busy, after the current unit

Source: TLT section 4.2.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

from reprise.models.decoder.transformer import Params
from reprise.rl.drafter_training.trainer import DrafterTrainer, TrainContext
from reprise.rl.slot_memory.model_runner import ModelRunner
from reprise.rl.speculation.device_drafters import PerRunner
from reprise.sched.policies.spot_training import SpotCoordinator


@dataclasses.dataclass(frozen=True)
class Span:
    """A unit of spot training, by the clock of the run."""

    worker_id: int
    kind: str  # gradient or update
    step: int
    began_s: float
    ended_s: float


# the context of units on the devices of a worker, with the policy weights of the rollout
MakeContext = Callable[[ModelRunner, Params], TrainContext]


class SpotTrainer:
    """Spot training of one drafter by the workers of a run. Any thread may call it.

    `contexts` returns the context of units; the default is for engines in this program.
    """

    def __init__(
        self,
        trainer: DrafterTrainer,
        min_idle_workers: int,
        clock: Callable[[], float],
        contexts: MakeContext | None = None,
    ) -> None:
        self.trainer = trainer
        self._make_context = contexts or self._placed
        self.spans: list[Span] = []
        self._clock = clock
        self._lock = threading.Lock()
        self._states = SpotCoordinator(min_idle_workers)
        self._params: Params | None = None
        self._contexts = PerRunner[TrainContext]()

    def prepare(self, params: Params, rl_step: int) -> None:
        """Set the weights and the RL step of the next rollout."""
        with self._lock:
            self.trainer.begin(rl_step)
            self._params = params
            self._contexts.clear()

    def rollout_began(self) -> None:
        """Start a rollout, once its requests are assigned, unless the last rollout still runs."""
        with self._lock:
            self._states.rollout_began()

    def rollout_ended(self) -> None:
        """Stop training; workers finish their current unit."""
        with self._lock:
            self._states.rollout_ended()

    def joined(self, worker_id: int) -> None:
        with self._lock:
            self._states.joined(worker_id)

    def lost(self, worker_id: int, *, hangs: bool = False) -> None:
        """Remove a worker; if it `hangs`, it may hold a micro-batch of the current step."""
        with self._lock:
            if hangs and self._states.leads(worker_id) is not None:
                self.trainer.abandon()
            self._states.lost(worker_id)

    def spare(self, worker_id: int, runner: ModelRunner) -> bool:
        """Run one unit on a worker without requests; return False if it has no unit to run."""
        with self._lock:
            if not self._states.is_idle(worker_id):
                self._states.idle(worker_id)
            self._states.data_ready(self.trainer.buffer.num_sequences > 0)
            leads = self._states.leads(worker_id)
        if leads is None:
            return False
        start_s = self._clock()
        step = self.trainer.step
        with runner.mesh_context():
            context = self._context(runner)
        with context.runner.mesh_context():
            kind = self.trainer.work(context, leads=leads)
        if kind is None:
            return False
        with self._lock:
            self.spans.append(Span(worker_id, kind, step, start_s, self._clock()))
        return True

    def dismiss(self) -> None:
        """Remove all workers after their threads have exited."""
        for worker_id in self._states.workers:
            self.lost(worker_id)

    def busy(self, worker_id: int) -> None:
        """Record that a worker, which may have been idle, has requests again."""
        with self._lock:
            if self._states.is_idle(worker_id):
                self._states.work_arrived(worker_id)

    def take_spans(self) -> list[Span]:
        """Return the spans since the last call."""
        with self._lock:
            spans = self.spans
            self.spans = []
        return spans

    def _context(self, runner: ModelRunner) -> TrainContext:
        params = self._params
        assert params is not None, "prepare comes first"
        return self._contexts.get(runner, lambda: self._make_context(runner, params))

    def _placed(self, runner: ModelRunner, params: Params) -> TrainContext:
        return self.trainer.context(runner, runner.place(params))
