"""Training of a drafter without rollouts, on recorded sequences, on the default device.

The buffer has one chunk of the trace at a time in place of rollouts.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from models.config import ModelConfig
from models.transformer import Params
from rl.drafter_training.config import DrafterConfig
from rl.drafter_training.hidden_states import chunks, hidden_of, num_bytes, runs
from rl.drafter_training.traces import num_tokens
from rl.drafter_training.trainer import SUMS, DrafterTrainer
from rl.engine.model_runner import ModelRunner
from rl.packing import Response
from rl.speculation.device_drafters import LearnedDrafter
from spec.eagle import training as drafter_training
from spec.eagle.batch import DrafterBatch, HiddenStates, pack
from spec.eagle.config import DataBufferConfig, DrafterTrainingConfig, EagleConfig
from spec.eagle.data_buffer import DataBuffer
from spec.eagle.model import EagleParams, EagleWeights, SharedParams

HiddenOf = Callable[[Sequence[Response]], Iterator[HiddenStates]]
EVALUATED_STEPS = 8  # held-out sequences are packed for this many steps' tokens at a time


@dataclasses.dataclass(frozen=True)
class OfflineConfig:
    """A drafter, its training, and how much of the trace's hidden states the host keeps."""

    drafter: DrafterConfig
    drafter_training: DrafterTrainingConfig
    data_buffer: DataBufferConfig

    @property
    def step_tokens(self) -> int:
        """Most tokens of a step."""
        return self.drafter.micro_batches * self.drafter.batch_rows * self.drafter.row_tokens


@partial(jax.jit, static_argnames=("config", "training"))
def evaluated(
    params: EagleParams,
    frozen: SharedParams,
    batch: DrafterBatch,
    temperature: jax.Array,
    *,
    config: EagleConfig,
    training: DrafterTrainingConfig,
) -> drafter_training.Metrics:
    """Return the metrics of `drafter_training.loss`, without gradients."""
    return drafter_training.loss(config, training, params, frozen, batch, temperature)[1]


class OfflineTraining:
    """Training of `start` for a policy with the weights `params`, in the policy's dtype."""

    def __init__(
        self,
        config: OfflineConfig,
        model: ModelConfig,
        params: Params,
        start: EagleWeights,
        *,
        seed: int,
        temperature: float,
        dtype: Any,
    ) -> None:
        self.config, self._seed, self._temperature = config, seed, np.float32(temperature)
        learned, buffer = LearnedDrafter(start, config.drafter.tree), DataBuffer(config.data_buffer)
        sections = config.drafter, config.drafter_training, learned, buffer
        self.trainer = DrafterTrainer(*sections, seed=seed, temperature=temperature)
        self._start, self._dtype = start, np.dtype(dtype)
        self._context = self.trainer.context(ModelRunner(model, dtype=dtype), params)
        policy = {"params": params, "model": model, "dtype": dtype}
        self._hidden_of: HiddenOf = partial(hidden_of, drafter=start.config, **policy)

    @property
    def drafter(self) -> EagleWeights:
        """The drafter with its current weights."""
        return dataclasses.replace(self._start, params=self.trainer.state.params)

    def train(
        self,
        responses: Sequence[Response],
        num_steps: int,
        should_stop: Callable[[], bool],
        on_step: Callable[[int, dict[str, float]], None],
    ) -> int:
        """Train up to `num_steps` in all, fewer if stopped; return the steps trained.

        If hidden states do not fit `DataBuffer.max_bytes`, a chunk is trained on for its tokens'
        steps.
        """
        trainer = self.trainer
        for visit, chunk in enumerate(self._visits(responses)):
            filled = self._fill(chunk, visit, should_stop)
            until = num_steps
            if len(chunk) < len(responses):
                due = -(-sum(map(num_tokens, chunk)) // self.config.step_tokens)
                until = min(num_steps, trainer.step + due)
            while filled and trainer.step < until and not should_stop():
                trained = trainer.run_steps(1, self._context)
                assert trained, "every sequence has an entry that counts"
                [row] = trainer.take_history()
                on_step(trainer.step, row)
            if trainer.step >= num_steps or should_stop():
                break
        return trainer.step

    def evaluate(self, responses: Sequence[Response]) -> dict[str, float]:
        """Return loss, accuracies and agreement over all entries of held-out sequences."""
        sums, num_entries, options = collections.Counter[str](), 0.0, self.config.drafter
        static = {"config": self._start.config, "training": self.config.drafter_training}
        weights = self.trainer.state.params, self._context.frozen
        limit = EVALUATED_STEPS * self.config.step_tokens
        for some in runs(self._hidden_of(responses), lambda s: len(s.tokens_T), limit):
            for batch in pack(some, options.batch_rows, options.row_tokens):
                metrics = evaluated(*weights, batch, self._temperature, **static)
                numbers = {name: float(x) for name, x in jax.device_get(metrics).items()}
                num_entries += numbers["num_entries"]
                sums.update({name: numbers["num_entries"] * numbers[name] for name in SUMS})
        return {name: sums[name] / num_entries for name in SUMS}

    def _visits(self, responses: Sequence[Response]) -> Iterator[list[Response]]:
        sizes = [num_bytes(r, self._start.config, self._dtype.itemsize) for r in responses]
        max_bytes = self.config.data_buffer.max_bytes
        for epoch in itertools.count():
            yield from chunks(responses, sizes, max_bytes, self._seed, epoch)

    def _fill(self, chunk: Sequence[Response], visit: int, should_stop: Callable[[], bool]) -> bool:
        """Replace the buffer's contents by a chunk; return False if stopped."""
        buffer = self.trainer.buffer
        buffer.drop_before(visit)
        self.trainer.begin(visit)
        for sequence in self._hidden_of(chunk):
            if should_stop():
                return False
            buffer.add(sequence, visit)
        assert not buffer.dropped, "a chunk fits the buffer"
        return True
