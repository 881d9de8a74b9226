"""The policy's hidden states over recorded sequences, for offline training of drafters.

Sequences of similar lengths share rows, and responses to one prompt share it (rl.packing).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np

from models import transformer
from models.attention import Packing
from models.config import ModelConfig
from models.transformer import Params
from rl import packing
from rl.drafter_training.traces import num_tokens
from rl.packing import Response, Row, Shape
from spec.buckets import bucket
from spec.eagle.batch import HiddenStates
from spec.eagle.config import EagleConfig

T = TypeVar("T")
PASS_TOKENS = 8192  # of a forward pass, or one sequence
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
    _, cache = transformer.hidden_and_cache(
        config, params, tokens_BT, packed, dtype, feature_layers
    )
    [states_11XW] = cache.features
    return states_11XW[0, 0]


def hidden_of(
    responses: Sequence[Response],
    params: Params,
    model: ModelConfig,
    drafter: EagleConfig,
    dtype: Any,
) -> Iterator[HiddenStates]:
    """Yield each sequence once with its states in `dtype`, in the order of the passes."""
    options = {"config": model, "feature_layers": drafter.feature_layers, "dtype": np.dtype(dtype)}
    for some, rows, shape in _passes(responses):
        layout = packing.lay_out(some, rows, shape)
        states = packed_states(params, layout.tokens_BT, layout.packing, **options)
        states_XW = np.asarray(jax.device_get(states))
        columns = layout.order, layout.starts, layout.prompt_starts
        for i, start, prompt_start in zip(*(c.tolist() for c in columns), strict=True):
            prompt_ids, tokens = some[i].prompt_ids, some[i].tokens
            # the last prompt token opens the response
            shared = states_XW[prompt_start : prompt_start + len(prompt_ids) - 1]
            own = states_XW[start : start + len(tokens)]
            whole_T, states_TW = np.concatenate([prompt_ids, tokens]), np.concatenate([shared, own])
            yield HiddenStates(whole_T, len(prompt_ids), states_TW, 0)


def num_bytes(response: Response, drafter: EagleConfig, value_bytes: int) -> int:
    """Return a sequence's size in a buffer, with states of `value_bytes` a value."""
    n = num_tokens(response)
    return 4 * n + (n - 1) * drafter.hidden_width * value_bytes


def check_room(sizes_bytes: Sequence[int], max_bytes: int) -> None:
    """Raise ValueError if a sequence does not fit the buffer by itself."""
    if (largest := max(sizes_bytes)) > max_bytes:
        raise ValueError(
            f"expected DataBuffer.max_bytes of at least {largest:,}, which the longest sequence "
            f"takes with its hidden states, got {max_bytes:,}: raise it"
        )


def chunks(
    responses: Sequence[Response], sizes_bytes: Sequence[int], max_bytes: int, seed: int, epoch: int
) -> Iterator[list[Response]]:
    """Yield all sequences once, in the epoch's order, in parts of at most `max_bytes`."""
    check_room(sizes_bytes, max_bytes)
    chunk, filled = list[Response](), 0
    for i in np.random.default_rng([seed, epoch]).permutation(len(responses)).tolist():
        if filled + sizes_bytes[i] > max_bytes:
            yield chunk
            chunk, filled = [], 0
        chunk.append(responses[i])
        filled += sizes_bytes[i]
    yield chunk


def _passes(responses: Sequence[Response]) -> Iterator[tuple[list[Response], list[Row], Shape]]:
    """Yield each pass's rows, with the sequences that they refer to."""

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
    """Yield runs of consecutive items whose sizes come to `size_limit`; the last may be smaller."""
    run, filled = list[T](), 0
    for item in items:
        run.append(item)
        filled += size(item)
        if filled >= size_limit:
            yield run
            run, filled = [], 0
    if run:
        yield run
