"""The data of a loss: token sequences with a target for each token, packed into micro-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import numpy as np
from flax import struct

from reprise.models.config import ModelConfig
from reprise.rl.batches import micro_batches
from reprise.rl.batches.drawn import DrawnResponses
from reprise.rl.batches.micro_batches import MicroBatch, Packed
from reprise.rl.records.packing import Response, Shape
from reprise.spec.config import SamplingConfig

FLOATS = "weights", "logprobs", "advantages", "low", "high"


@dataclasses.dataclass(frozen=True, eq=False)
class Datum:
    """A sequence: `tokens` [T], the token to predict at each place, and the inputs of its loss.

    float32 [T]: `weights` of the places (default 1), `logprobs` of the targets under the policy
    that drew them, `advantages`, and bounds of the ratio, `low` and `high` (default: the settings
    of the loss). `sampling` is the distribution of the log-probs. Without `sampling`, log-probs of
    responses of this policy have the distribution that drew the response; all other log-probs have
    temperature 1, without top-k and top-p.
    """

    tokens: Any
    targets: Any
    weights: Any = None
    logprobs: Any = None
    advantages: Any = None
    sampling: SamplingConfig | None = None
    low: Any = None
    high: Any = None

    @classmethod
    def of(cls, sample: Any, advantage: float = 0.0) -> Self:
        """Return the datum of a response and its prompt; prompt tokens have weight 0."""
        before = len(sample.prompt_ids) - 1
        ids = [*sample.prompt_ids, *sample.token_ids]

        def after_prompt(values: Any) -> np.ndarray:
            return np.concatenate([np.zeros(before), values]).astype(np.float32)

        ones = np.ones(len(sample.token_ids))
        return cls(
            ids[:-1],
            ids[1:],
            after_prompt(ones),
            after_prompt(sample.logprobs),
            after_prompt(advantage * ones),
            sampling=sample.sampling,
        )

    def __len__(self) -> int:
        return len(self.tokens)


@dataclasses.dataclass(frozen=True, eq=False)
class Output:
    """The result of a pass: the sum of the loss, and the log-probs of each datum, float32 [T]."""

    loss: float
    logprobs: list[np.ndarray]


@struct.dataclass
class DatumInputs:
    """The inputs of the loss at the places of E data; [E, M], float32 and a bool mask.

    The bounds of the ratio are None if no datum has bounds.
    """

    mask_EM: Any
    weights_EM: Any
    logprobs_EM: Any
    advantages_EM: Any
    low_EM: Any = None
    high_EM: Any = None


def _check(data: Sequence[Datum], model: ModelConfig, max_tokens: int) -> None:
    """Raise ValueError for data that cannot be processed."""
    if not data:
        raise ValueError("expected at least one datum, got none")
    for i, datum in enumerate(data):
        _check_one(f"datum {i}", datum, model, max_tokens)


def _check_one(name: str, datum: Datum, model: ModelConfig, max_tokens: int) -> None:
    length = len(datum)
    if not 1 <= length <= max_tokens:
        raise ValueError(
            f"{name}: expected 1 to {max_tokens} tokens, got {length}: raise "
            "Rollout.max_prompt_tokens or Sampling.max_new_tokens"
        )
    for field in ("tokens", "targets"):
        ids = np.asarray(getattr(datum, field))
        if ids.shape != (length,) or ids.dtype.kind not in "iu":
            raise ValueError(
                f"{name}: expected {length} integers as {field}, got {ids.dtype} {ids.shape}"
            )
        if ids.min() < 0 or ids.max() >= model.vocab_size:
            raise ValueError(
                f"{name}: expected {field} of the policy's vocabulary, 0 to "
                f"{model.vocab_size - 1}, got {ids.min() if ids.min() < 0 else ids.max()}"
            )
    for field in FLOATS:
        values = getattr(datum, field)
        if values is None:
            continue
        array = np.asarray(values, np.float32)
        if array.shape != (length,) or not np.isfinite(array).all():
            raise ValueError(f"{name}: expected {length} finite numbers as {field}")


def pack(
    data: Sequence[Datum],
    model: ModelConfig,
    shape: Shape,
    drawn: DrawnResponses,
    bounds: tuple[float, float] | None = None,
) -> list[Packed]:
    """Return micro-batches of the data, each datum in one row.

    `bounds` of the ratio apply to places without bounds; they are None if the loss has no bounds.
    Raises ValueError if a datum does not fit into a row.
    """
    _check(data, model, shape.length)
    if all(datum.low is None and datum.high is None for datum in data):
        bounds = None

    def fill(batch: MicroBatch, e: int, i: int, places: np.ndarray) -> None:
        datum = data[i]
        batch.targets_BT.reshape(-1)[places] = datum.targets
        batch.processing_BT.put(places, datum.sampling or SamplingConfig())
        if datum.sampling is None and datum.logprobs is not None:
            for part, sampling in drawn.find(datum.tokens, datum.targets, datum.logprobs):
                batch.processing_BT.put(places[part], sampling)
        inputs = _inputs_of(datum, bounds)
        if bounds is not None and np.any(inputs.low_EM > inputs.high_EM):
            raise ValueError(f"datum {i}: expected low <= high at all places")
        for name, values in vars(inputs).items():
            if values is not None:
                getattr(batch.inputs, name)[e, : len(datum)] = values

    responses = [_response(i, datum) for i, datum in enumerate(data)]
    blank = partial(_empty, shape, has_bounds=bounds is not None)
    return micro_batches.pack(responses, shape, blank, fill)


def _response(number: int, datum: Datum) -> Response:
    """Return the datum as a response to its first token."""
    tokens = np.asarray(datum.tokens, np.int32)
    targets = np.asarray(datum.targets, np.int32)
    return Response(f"datum {number}", number, tokens[:1], np.append(tokens[1:], targets[-1:]))


def _empty(shape: Shape, *, has_bounds: bool) -> MicroBatch:
    """Return a micro-batch without data."""
    batch = micro_batches.empty(shape)

    def floats_EM() -> np.ndarray:
        return np.zeros((shape.samples, shape.length), np.float32)

    inputs: Any = DatumInputs(
        mask_EM=np.zeros((shape.samples, shape.length), bool),
        weights_EM=floats_EM(),
        logprobs_EM=floats_EM(),
        advantages_EM=floats_EM(),
        low_EM=floats_EM() if has_bounds else None,
        high_EM=floats_EM() if has_bounds else None,
    )
    return dataclasses.replace(batch, inputs=inputs)


def _inputs_of(datum: Datum, bounds: tuple[float, float] | None) -> DatumInputs:
    """Return the loss inputs of one datum, [T]."""

    def values(given: Any, default: float) -> np.ndarray:
        return np.full(len(datum), default, np.float32) if given is None else np.asarray(given)

    return DatumInputs(
        mask_EM=np.ones(len(datum), bool),
        weights_EM=values(datum.weights, 1.0),
        logprobs_EM=values(datum.logprobs, 0.0),
        advantages_EM=values(datum.advantages, 0.0),
        low_EM=None if bounds is None else values(datum.low, bounds[0]),
        high_EM=None if bounds is None else values(datum.high, bounds[1]),
    )
