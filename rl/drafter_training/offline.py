"""Training of a drafter without rollouts, on recorded sequences.

The steps are those of a run's drafter (rl.drafter_training.trainer), on the default device; the
buffer is filled with one chunk of the trace at a time in place of rollouts.
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
from rl.speculation.learned_drafter import LearnedDrafter
from spec.eagle import training as drafter_training
from spec.eagle.batch import DrafterBatch
from spec.eagle.config import DataBufferConfig, DrafterTrainingConfig, EagleConfig
from spec.eagle.data_buffer import DataBuffer
from spec.eagle.model import EagleParams, EagleWeights, SharedParams
from spec.eagle.packing import pack

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
        self.trainer = DrafterTrainer(
            config.drafter,
            config.drafter_training,
            LearnedDrafter(start, config.drafter.tree),
            DataBuffer(config.data_buffer),
            seed=seed,
            temperature=temperature,
        )
        self._start, self._dtype = start, np.dtype(dtype)
        self._context = self.trainer.context(ModelRunner(model, dtype=dtype), params)
        self._hidden_of = partial(
            hidden_of, params=params, model=model, drafter=start.config, dtype=dtype
        )

    @property
    def drafter(self) -> EagleWeights:
        """The drafter with its present weights."""
        return dataclasses.replace(self._start, params=self.trainer.state.params)

    def train(
        self,
        responses: Sequence[Response],
        num_steps: int,
        should_stop: Callable[[], bool],
        on_step: Callable[[int, dict[str, float]], None],
    ) -> int:
        """Train up to `num_steps` in all, fewer if asked to stop; return the steps trained.

        Hidden states are computed once if all fit `DataBuffer.max_bytes`; otherwise chunk by chunk,
        with as many steps on each as it has tokens for. Raises as `chunks` does.
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
        for some in runs(
            self._hidden_of(responses),
            lambda sequence: len(sequence.tokens_T),
            EVALUATED_STEPS * self.config.step_tokens,
        ):
            for batch in pack(some, options.batch_rows, options.row_tokens):
                metrics = evaluated(
                    self.trainer.state.params,
                    self._context.frozen,
                    batch,
                    self._temperature,
                    config=self._start.config,
                    training=self.config.drafter_training,
                )
                found = {name: float(x) for name, x in jax.device_get(metrics).items()}
                num_entries += found["num_entries"]
                sums.update({name: found["num_entries"] * found[name] for name in SUMS})
        return {name: sums[name] / num_entries for name in SUMS}

    def _visits(self, responses: Sequence[Response]) -> Iterator[list[Response]]:
        sizes = [num_bytes(r, self._start.config, self._dtype.itemsize) for r in responses]
        for epoch in itertools.count():
            yield from chunks(
                responses, sizes, self.config.data_buffer.max_bytes, self._seed, epoch
            )

    def _fill(self, chunk: Sequence[Response], visit: int, should_stop: Callable[[], bool]) -> bool:
        """Replace the buffer's contents by a chunk; return False if asked to stop."""
        buffer = self.trainer.buffer
        buffer.drop_before(visit)
        self.trainer.begin(visit)
        for sequence in self._hidden_of(chunk):
            if should_stop():
                return False
            buffer.add(sequence, visit)
        assert not buffer.dropped, "a chunk fits the buffer"
        return True
