"""Training of the drafter of a run, in units between which a worker can stop.

A step is the gradients of a few micro-batches, by any workers, then one update:

    buffer → sequences → packed micro-batches ─┬─ gradients (any worker) ─┐
                                               └─ gradients (any worker) ─┴→ update → swap, save

Gradients are weighted by their number of entries that count. Source: TLT section 4.2.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from reprise.models.decoder.transformer import Params
from reprise.rl.checkpoint.checkpointer import Checkpointer
from reprise.rl.drafter_training.config import DrafterConfig
from reprise.rl.slot_memory.model_runner import ModelRunner
from reprise.rl.speculation.device_drafters import LearnedDrafter, PerRunner
from reprise.spec.eagle import model as eagle
from reprise.spec.eagle.config import DrafterTrainingConfig, EagleConfig
from reprise.spec.eagle.model import EagleParams, SharedParams
from reprise.spec.eagle_training import training as drafter_training
from reprise.spec.eagle_training.training import DrafterState
from reprise.spec.eagle_training.training_data import (
    DataBuffer,
    DrafterBatch,
    HiddenStates,
    RequestSample,
    pack,
)

SWAP_EVERY_STEPS = 16  # for rollouts that are still running
SAVE_EVERY_STEPS = 64
SUMS = ("loss", "accuracy_top1", "accuracy_top3", "agreement")


Elsewhere = Callable[[int, EagleParams, DrafterBatch], tuple[EagleParams, Mapping[str, Any]]]


@dataclasses.dataclass(frozen=True, eq=False)
class TrainContext:
    """The devices of a worker, and the shared policy parameters there.

    `elsewhere` computes a gradient with the weights of a step on a worker in another program;
    `runner` then has the devices that sum gradients.
    """

    runner: ModelRunner
    frozen: SharedParams | None
    elsewhere: Elsewhere | None = None


@dataclasses.dataclass(eq=False)
class _Step:
    """The current step: the remaining micro-batches, and the sum of the gradients."""

    todo: collections.deque[DrafterBatch]
    missing: int
    is_updating: bool = False
    total: EagleParams | None = None
    total_at: ModelRunner | None = None
    num_entries: float = 0.0
    sums: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


@partial(jax.jit, donate_argnames="total")
def add_weighted(total: EagleParams | None, grads: EagleParams, weight: jax.Array) -> EagleParams:
    """Return total + weight · grads; a total of None counts as zero."""
    if total is None:
        return jax.tree.map(lambda g: weight * g, grads)
    return jax.tree.map(lambda t, g: t + weight * g, total, grads)


def copied(tree: Any) -> Any:
    """Return a copy on the host."""
    return jax.tree.map(np.array, tree)


def empty_batch(shape: tuple[int, int], config: EagleConfig, dtype: np.dtype) -> DrafterBatch:
    """Return a micro-batch of [rows, tokens] without sequences."""
    zeros_BT = np.zeros(shape, np.int32)
    none_BT = np.zeros(shape, bool)
    hidden_BTW = np.zeros((*shape, config.hidden_width), dtype)
    return DrafterBatch(zeros_BT, hidden_BTW, zeros_BT, zeros_BT, none_BT)


class BufferSink:
    """Adds the responses of one RL step, or of a sample of its requests, to the buffer."""

    def __init__(self, buffer: DataBuffer, step: int, sample: RequestSample | None = None) -> None:
        self._buffer = buffer
        self._step = step
        self.sample = sample

    def wants(self, request_id: int, num_tokens: int) -> bool:
        chosen = self.sample is None or request_id in self.sample
        return chosen and self._buffer.wants(num_tokens, self._step)

    def add(self, sequence: HiddenStates) -> None:
        self._buffer.add(sequence, self._step)


class DrafterTrainer:
    """Training of the weights of `learned`. Any thread may call it.

    The micro-batches of a step are a function of (seed, step, contents of the buffer).
    """

    def __init__(
        self,
        config: DrafterConfig,
        training: DrafterTrainingConfig,
        learned: LearnedDrafter,
        buffer: DataBuffer,
        *,
        seed: int,
        temperature: float,
        checkpoints: Checkpointer | None = None,
    ) -> None:
        self.config = config
        self.training = training
        self.buffer = buffer
        self.learned = learned
        self.checkpoints = checkpoints
        params = jax.tree.map(jnp.asarray, copied(learned.drafter.params))
        self.state = drafter_training.state_of(training, params)
        self.step = 0
        self.history: list[dict[str, float]] = []  # a row per step since `take_history`
        self._seed = seed
        self._temperature = np.float32(temperature)
        self._rl_step = 0
        self._saved_step: int | None = None
        self._lock = threading.Lock()
        self._now: _Step | None = None
        self._state_lock = threading.RLock()  # steps donate the state
        self._on_devices = PerRunner[EagleParams]()
        self._state_at: ModelRunner | None = None  # None: on the devices that made or restored it

    def move_to(self, runner: ModelRunner) -> None:
        """Lay the state out on the devices of a runner."""
        self.state = jax.tree.map(runner.put, copied(self.state))
        self._state_at = runner

    def begin(self, rl_step: int) -> None:
        """Set the current RL step, which has the newest sequences."""
        self._rl_step = rl_step

    def context(self, runner: ModelRunner, params: Params) -> TrainContext:
        """Return the context of units on a runner; the policy `params` are on its devices."""
        ids = self.learned.draft_ids_U
        return TrainContext(runner, eagle.frozen(params, None if ids is None else runner.put(ids)))

    def work(self, context: TrainContext, *, leads: bool) -> str | None:
        """Run one unit, and return `gradient`, `update` (if this worker `leads`), or None."""
        with self._lock:
            if self._now is None:
                self._now = self._plan()
            now = self._now
            if now is None:
                return None
            batch = now.todo.popleft() if now.todo else None
            ready = batch is None and not now.missing and leads and not now.is_updating
            now.is_updating |= ready  # a worker and training after a rollout may both lead
        if batch is not None:
            self._gradient(context, now, batch)
            return "gradient"
        if not ready:
            return None
        try:
            self._update(context.runner, now)
        except BaseException:
            now.is_updating = False  # another worker may try
            raise
        return "update"

    def abandon(self) -> None:
        """Restart the current step, since a worker with one of its micro-batches is lost."""
        with self._lock:
            self._now = None

    def run_steps(self, num_steps: int, context: TrainContext) -> int:
        """Run steps on one runner, and return their number: fewer if the buffer has no data."""
        first = self.step
        while self.step < first + num_steps and self.work(context, leads=True):
            pass
        return self.step - first

    def warm_up(self, context: TrainContext) -> None:
        """Compile the programs of units on this runner; weights do not change."""
        shape = (self.config.batch_rows, self.config.row_tokens)
        runner = context.runner
        batch = empty_batch(shape, self.learned.config, runner.dtype)
        params = _moved(self.state.params, self._state_at, runner)
        grads, _ = self._gradients(context, params, batch)
        total = add_weighted(add_weighted(None, grads, np.float32(0)), grads, np.float32(0))
        state = jax.tree.map(runner.put, copied(self.state))  # the step donates it
        state, skipped = drafter_training.apply(state, total, training=self.training)
        jax.block_until_ready((state, skipped))

    def publish(self) -> None:
        """Let rollouts draft with the newest weights from their next round on."""
        with self._state_lock:
            self.learned.swap(copied(self.state.params))

    def save(self) -> None:
        """Write the newest state in the background, unless another save is still being written."""
        if self.checkpoints is not None:
            with self._state_lock:
                if self.checkpoints.save_if_free(self.step, self.state, {"step": self.step}):
                    self._saved_step = self.step

    def save_last(self) -> None:
        """Write the newest state, unless it is already saved, and wait for it."""
        if self.checkpoints is not None:
            with self._state_lock:
                if self._saved_step != self.step:
                    self.checkpoints.save(self.step, self.state, {"step": self.step})
                    self._saved_step = self.step
            self.checkpoints.wait()

    def snapshot(self) -> tuple[DrafterState, int]:
        """Return a copy of the state, and its step."""
        with self._state_lock:
            return jax.device_put(copied(self.state)), self.step

    def load(self, state: DrafterState, step: int) -> None:
        """Continue from a saved state."""
        self.state = state
        self.step = step
        self._now = None
        self._state_at = None
        self._on_devices.clear()
        self.publish()

    def take_history(self) -> list[dict[str, float]]:
        """Return the rows of the steps since the last call."""
        with self._lock:
            history = self.history
            self.history = []
        return history

    # -- units ------------------------------------------------------------------------

    def _plan(self) -> _Step | None:
        """Return the micro-batches of the next step; None if the buffer has no data."""
        config = self.config
        rng = np.random.default_rng([self._seed, self.step])
        num_tokens = config.micro_batches * config.batch_rows * config.row_tokens
        # a little more than fits, since the emptiest rows are left out
        sequences = self.buffer.sample(num_tokens * 9 // 8, self._rl_step, rng)
        batches = pack(sequences, config.batch_rows, config.row_tokens, config.micro_batches)
        if not batches:
            return None
        return _Step(collections.deque(batches), len(batches))

    def _gradient(self, context: TrainContext, now: _Step, batch: DrafterBatch) -> None:
        try:
            if context.elsewhere is None:
                params = self._params_on(context.runner)
                grads, metrics = self._gradients(context, params, batch)
            else:
                with self._lock:
                    step = self.step
                    params = self.state.params
                grads, metrics = context.elsewhere(step, params, batch)
                grads = jax.tree.map(context.runner.put, grads)
            numbers = {name: float(x) for name, x in jax.device_get(metrics).items()}
        except BaseException:
            with self._lock:
                now.todo.append(batch)  # for another worker
            raise
        weight = numbers["num_entries"]
        with self._lock:
            if now.total is None:
                now.total_at = context.runner
            at = now.total_at
            assert at is not None
            with at.mesh_context():  # programs are compiled for the devices they run on
                grads = _moved(grads, context.runner, at)
                now.total = add_weighted(now.total, grads, np.float32(weight))
            now.num_entries += weight
            now.sums.update({name: weight * numbers[name] for name in SUMS})
            now.missing -= 1

    def _gradients(
        self, context: TrainContext, params: EagleParams, batch: DrafterBatch
    ) -> tuple[EagleParams, Any]:
        assert context.frozen is not None, "these devices have the policy"
        batch = jax.tree.map(context.runner.argument, batch)
        static = {"config": self.learned.config, "training": self.training}
        grads, metrics = drafter_training.gradients(
            params, context.frozen, batch, self._temperature, **static
        )
        return jax.tree.map(context.runner.readable, grads), metrics

    def _update(self, runner: ModelRunner, now: _Step) -> None:
        """Update the state; no other worker uses it now, since all gradients are in."""
        num_entries = max(now.num_entries, 1.0)
        total = _moved(now.total, now.total_at, runner)
        mean = add_weighted(None, total, np.float32(1 / num_entries))
        with self._state_lock:
            state = _moved(self.state, self._state_at, runner)
            state, skipped = drafter_training.apply(state, mean, training=self.training)
            row = {name: value / num_entries for name, value in now.sums.items()}
            row |= {"skipped": float(skipped), "num_entries": now.num_entries}
            with self._lock:
                self.state = state
                self._state_at = runner
                self._now = None
                self.step += 1
                self.history.append(row)
        if self.step % SWAP_EVERY_STEPS == 0:
            self.publish()
        if self.step % SAVE_EVERY_STEPS == 0:
            self.save()

    def _params_on(self, runner: ModelRunner) -> EagleParams:
        with self._lock:
            step = self.step
            params = self.state.params
            source = self._state_at
        return self._on_devices.get(runner, lambda: _moved(params, source, runner), step)


def _moved(tree: Any, source: ModelRunner | None, target: ModelRunner | None) -> Any:
    """Move arrays from the devices of one runner (None: any) to the devices of another."""
    assert target is not None
    if source is not None and (source.mesh, source.device) == (target.mesh, target.device):
        return tree
    return jax.tree.map(lambda x: target.put(np.asarray(x)), tree)
