"""Training of a drafter without rollouts, on recorded sequences, on the default device.

The buffer holds one chunk of the trace at a time in place of rollouts. The hidden states of the
policy come from packed rows: sequences of similar lengths share rows, and responses to one prompt
share the prompt (rl.records.packing).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np

from reprise.models.attention.attention import Packing
from reprise.models.config import ModelConfig
from reprise.models.decoder import transformer
from reprise.models.decoder.transformer import Params
from reprise.rl.drafter_training.config import DrafterConfig
from reprise.rl.drafter_training.traces import num_tokens
from reprise.rl.drafter_training.trainer import SUMS, DrafterTrainer
from reprise.rl.records import packing
from reprise.rl.records.packing import Response, Row, Shape
from reprise.rl.slot_memory.model_runner import ModelRunner
from reprise.rl.speculation.device_drafters import LearnedDrafter
from reprise.spec.buckets import bucket
from reprise.spec.eagle.config import DataBufferConfig, DrafterTrainingConfig, EagleConfig
from reprise.spec.eagle.model import EagleParams, EagleWeights, SharedParams
from reprise.spec.eagle_training import training as drafter_training
from reprise.spec.eagle_training.training_data import DataBuffer, DrafterBatch, HiddenStates, pack

T = TypeVar("T")
PASS_TOKENS = 8192  # of a forward pass, unless a sequence is longer
LEAST_ROW_TOKENS = 256  # rows have this many tokens, or twice, four times, ...
PLANNED_PASSES = 8  # sequences are laid out for this many passes at a time


@partial(jax.jit, static_argnames=("config", "feature_layers", "dtype"))
def packed_states(
    params: Params,
    tokens_BT: jax.Array,
    packed: Packing,
    *,
    config: ModelConfig,
    feature_layers: tuple[int, ...],
    dtype: np.dtype,
) -> jax.Array:
    """Return the hidden states that EAGLE reads, at all positions of packed rows, [B · T, W]."""
    states_BTW = transformer.features(config, params, tokens_BT, packed, feature_layers)
    return states_BTW.reshape(-1, states_BTW.shape[-1]).astype(dtype)


def hidden_of(
    responses: Sequence[Response],
    params: Params,
    model: ModelConfig,
    drafter: EagleConfig,
    dtype: Any,
) -> Iterator[HiddenStates]:
    """Yield each sequence once with its hidden states in `dtype`, in the order of the passes."""
    options = {"config": model, "feature_layers": drafter.feature_layers, "dtype": np.dtype(dtype)}
    for some, rows, shape in _passes(responses):
        layout = packing.lay_out(some, rows, shape)
        states = packed_states(params, layout.tokens_BT, layout.packing, **options)
        states_XW = np.asarray(jax.device_get(states))
        columns = layout.order, layout.starts, layout.prompt_starts
        for i, start, prompt_start in zip(*(c.tolist() for c in columns), strict=True):
            prompt_ids = some[i].prompt_ids
            tokens = some[i].tokens
            # the last prompt token opens the response
            own = states_XW[start : start + len(tokens)]
            shared = states_XW[shape.prompt_places(some[i], prompt_start, start)]
            states_TW = np.concatenate([shared, own])
            whole_T = np.concatenate([prompt_ids, tokens])
            yield HiddenStates(whole_T, len(prompt_ids), states_TW, 0)


def num_bytes(response: Response, drafter: EagleConfig, value_bytes: int) -> int:
    """Return the size of a sequence in a buffer, with `value_bytes` per value of its states."""
    n = num_tokens(response)
    return 4 * n + (n - 1) * drafter.hidden_width * value_bytes


def check_room(sizes_bytes: Sequence[int], max_bytes: int) -> None:
    """Raise ValueError if a single sequence does not fit into the buffer."""
    if (largest := max(sizes_bytes)) > max_bytes:
        raise ValueError(
            f"expected DataBuffer.max_bytes of at least {largest:,}, which the longest sequence "
            f"takes with its hidden states, got {max_bytes:,}: raise it"
        )


def chunks(
    responses: Sequence[Response], sizes_bytes: Sequence[int], max_bytes: int, seed: int, epoch: int
) -> Iterator[list[Response]]:
    """Yield all sequences once, in the order of the epoch, in parts of at most `max_bytes`."""
    check_room(sizes_bytes, max_bytes)
    chunk = list[Response]()
    filled = 0
    for i in np.random.default_rng([seed, epoch]).permutation(len(responses)).tolist():
        if filled + sizes_bytes[i] > max_bytes:
            yield chunk
            chunk = []
            filled = 0
        chunk.append(responses[i])
        filled += sizes_bytes[i]
    yield chunk


def _passes(responses: Sequence[Response]) -> Iterator[tuple[list[Response], list[Row], Shape]]:
    """Yield the rows of each pass, with the sequences that the rows refer to."""

    def row_tokens(response: Response) -> int:
        return bucket(num_tokens(response) - 1, LEAST_ROW_TOKENS)

    ordered = sorted(responses, key=lambda r: (row_tokens(r), r.group_id))
    for length, alike in itertools.groupby(ordered, key=row_tokens):
        rows = max(1, PASS_TOKENS // length)
        shape = Shape(rows, length, rows * length)
        # planning takes quadratic time
        for some in runs(alike, num_tokens, PLANNED_PASSES * rows * length):
            for planned in packing.plan(some, shape):
                yield some, planned, shape


def runs(items: Iterable[T], size: Callable[[T], int], size_limit: int) -> Iterator[list[T]]:
    """Yield runs of consecutive items that reach `size_limit`; the last run may be smaller."""
    run = list[T]()
    filled = 0
    for item in items:
        run.append(item)
        filled += size(item)
        if filled >= size_limit:
            yield run
            run = []
            filled = 0
    if run:
        yield run


HiddenOf = Callable[[Sequence[Response]], Iterator[HiddenStates]]
EVALUATED_STEPS = 8  # held-out sequences are packed in runs of the tokens of this many steps


@dataclasses.dataclass(frozen=True)
class OfflineConfig:
    """Settings of a drafter, of its training, and of the host buffer for hidden states."""

    drafter: DrafterConfig
    drafter_training: DrafterTrainingConfig
    data_buffer: DataBufferConfig

    @property
    def step_tokens(self) -> int:
        """The maximum number of tokens of a step."""
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
    """Training of `start` for a policy with the weights `params`, in the dtype of the policy."""

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
        self.config = config
        self.trainer = DrafterTrainer(
            config.drafter,
            config.drafter_training,
            LearnedDrafter(start, config.drafter.tree),
            DataBuffer(config.data_buffer),
            seed=seed,
            temperature=temperature,
        )
        self._seed = seed
        self._temperature = np.float32(temperature)
        self._start = start
        self._dtype = np.dtype(dtype)
        self._context = self.trainer.context(ModelRunner(model, dtype=dtype), params)
        self._hidden_of: HiddenOf = partial(
            hidden_of, drafter=start.config, params=params, model=model, dtype=dtype
        )

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
        """Train until step `num_steps`, or until stopped; return the number of steps trained.

        If the hidden states do not fit into `DataBuffer.max_bytes`, each chunk is trained on for
        the number of steps that its tokens fill.
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
        sums = collections.Counter[str]()
        num_entries = 0.0
        options = self.config.drafter
        static = {"config": self._start.config, "training": self.config.drafter_training}
        limit = EVALUATED_STEPS * self.config.step_tokens
        for some in runs(self._hidden_of(responses), lambda s: len(s.tokens_T), limit):
            for batch in pack(some, options.batch_rows, options.row_tokens):
                metrics = evaluated(
                    self.trainer.state.params,
                    self._context.frozen,
                    batch,
                    self._temperature,
                    **static,
                )
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
        """Replace the contents of the buffer by a chunk; return False if stopped."""
        buffer = self.trainer.buffer
        buffer.drop_before(visit)
        self.trainer.begin(visit)
        for sequence in self._hidden_of(chunk):
            if should_stop():
                return False
            buffer.add(sequence, visit)
        assert not buffer.dropped, "a chunk fits the buffer"
        return True
