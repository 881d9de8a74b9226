"""Trajectories become micro-batches of a few fixed shapes.

Invariants: a token is trained at the position that predicts it (`mask_BT[b, t]`
speaks of `tokens_BT[b, t+1]`), the end token included; padding never has weight;
every shape comes from `bucket_shapes`, so that all can be compiled before the
first step. Plain numpy on the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from rl.losses import LossInputs
from rl.trajectory import Trajectory

Shape = tuple[int, int]  # (rows, tokens a row)


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """A trajectory with what training adds to it; log-probs are float32 [num_tokens].

    `old_logprobs` of None stands for those of emission, `reference_logprobs` of
    None for no reference.
    """

    trajectory: Trajectory
    advantage: float
    old_logprobs: np.ndarray | None = None
    reference_logprobs: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        """Length of prompt and response together."""
        return len(self.trajectory.prompt_ids) + self.trajectory.num_tokens

    @property
    def name(self) -> str:
        t = self.trajectory
        return f"request {t.request_id} (group {t.group_id}, sample {t.sample_index})"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """What the device gets: int32 `tokens_BT` [prompt | response | padding], the loss's inputs."""

    tokens_BT: jax.Array
    inputs: LossInputs


@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """A micro-batch of numpy arrays, and which sample is in which of its first rows."""

    batch: MicroBatch
    sample_indices: np.ndarray

    @property
    def shape(self) -> Shape:
        return self.batch.tokens_BT.shape


def bucket_lengths(min_tokens: int, max_tokens: int) -> tuple[int, ...]:
    """Powers of two and the halves between, from `min_tokens` (rounded up) to `max_tokens` or more.

    64, 96, 128, 192, 256, …: a row is at most a third padding, past the first bucket.
    """
    length = 1 << max(1, min_tokens - 1).bit_length()
    lengths = [length]
    while lengths[-1] < max_tokens:
        last = lengths[-1]
        lengths.append(last * 3 // 2 if last & (last - 1) == 0 else last * 4 // 3)
    return tuple(lengths)


def bucket_shapes(
    micro_batch_tokens: int,
    max_tokens: int,
    *,
    max_rows: int | None = None,
    row_multiple: int = 1,
    min_tokens: int = 64,
) -> tuple[Shape, ...]:
    """One shape a length bucket, of about `micro_batch_tokens` positions; shortest first.

    `max_tokens` is the longest prompt and response together. Rows are at most
    `max_rows` and a multiple of `row_multiple` (the ways of the mesh's batch
    axes), which is also their least number: long buckets may then exceed
    `micro_batch_tokens`. Raises ValueError for sizes below 1.
    """
    for name, value in (
        ("micro_batch_tokens", micro_batch_tokens),
        ("max_tokens", max_tokens),
        ("max_rows", 1 if max_rows is None else max_rows),
        ("row_multiple", row_multiple),
        ("min_tokens", min_tokens),
    ):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")

    def rows_of(length: int) -> int:
        rows = micro_batch_tokens // length // row_multiple * row_multiple
        if max_rows is not None:
            rows = min(rows, -(-max_rows // row_multiple) * row_multiple)
        return max(rows, row_multiple)

    return tuple((rows_of(length), length) for length in bucket_lengths(min_tokens, max_tokens))


def select(
    trajectories: Sequence[Trajectory], advantages: np.ndarray, *, mask_truncated: bool = False
) -> list[Sample]:
    """The samples that are in the loss, in order.

    Left out: responses without a reward (they could not be scored), and truncated
    ones where `mask_truncated`. Raises ValueError for unequal lengths, and for an
    empty prompt or response, whose tokens nothing could predict.
    """
    if len(trajectories) != len(advantages):
        raise ValueError(
            f"expected an advantage per trajectory, got {len(advantages)} for {len(trajectories)}"
        )
    samples = []
    for trajectory, advantage in zip(trajectories, advantages, strict=True):
        sample = Sample(trajectory, float(advantage))
        if not len(trajectory.prompt_ids) or not trajectory.num_tokens:
            raise ValueError(
                f"{sample.name} has {len(trajectory.prompt_ids)} prompt and "
                f"{trajectory.num_tokens} response tokens: expected at least one of each"
            )
        if trajectory.reward is None or (mask_truncated and trajectory.truncated):
            continue
        samples.append(sample)
    return samples


def minibatch_indices(
    group_ids: Sequence[int], num_minibatches: int, seed: Sequence[int]
) -> list[np.ndarray]:
    """Samples of each optimizer step of an epoch: whole groups, in a seeded order.

    A function of its arguments alone, for resuming. Fewer groups than minibatches
    give as many minibatches as there are groups.
    """
    ids = np.asarray(group_ids)
    if num_minibatches == 1:
        return [np.arange(len(ids))] if len(ids) else []
    groups = np.random.default_rng(list(seed)).permutation(np.unique(ids))
    parts = np.array_split(groups, num_minibatches)
    return [np.flatnonzero(np.isin(ids, part)) for part in parts if len(part)]


def micro_batches(samples: Sequence[Sample], shapes: Sequence[Shape]) -> list[Packed]:
    """Pack samples, longest first: the longest left names the bucket, the next fill its rows.

    Only the last micro-batch has empty rows. Raises ValueError where a sample is
    longer than the longest bucket.
    """
    order = sorted(range(len(samples)), key=lambda i: (-samples[i].num_tokens, i))
    by_length = sorted(shapes, key=lambda shape: shape[1])
    packed, start = [], 0
    while start < len(order):
        longest = samples[order[start]]
        shape = next((s for s in by_length if s[1] >= longest.num_tokens), None)
        if shape is None:
            raise ValueError(
                f"{longest.name} has {longest.num_tokens} tokens, the longest bucket holds "
                f"{by_length[-1][1]}: make the shapes with a larger max_tokens"
            )
        indices = np.array(order[start : start + shape[0]])
        packed.append(Packed(pack([samples[i] for i in indices], shape), indices))
        start += len(indices)
    return packed


def pack(samples: Sequence[Sample], shape: Shape) -> MicroBatch:
    """One micro-batch of this shape; rows beyond the samples are empty and weigh nothing."""
    rows, length = shape
    tokens_BT = np.zeros((rows, length), np.int32)
    mask_BT = np.zeros((rows, length), bool)
    advantages_B = np.zeros(rows, np.float32)
    emission_BT, old_BT, reference_BT = (np.zeros((rows, length), np.float32) for _ in range(3))
    for row, sample in enumerate(samples):
        trajectory = sample.trajectory
        prompt_tokens = len(trajectory.prompt_ids)
        predicting = slice(prompt_tokens - 1, sample.num_tokens - 1)
        tokens_BT[row, :prompt_tokens] = trajectory.prompt_ids
        tokens_BT[row, prompt_tokens : sample.num_tokens] = trajectory.response_ids
        mask_BT[row, predicting] = True
        advantages_B[row] = sample.advantage
        emission_BT[row, predicting] = trajectory.logprobs
        old = trajectory.logprobs if sample.old_logprobs is None else sample.old_logprobs
        old_BT[row, predicting] = old
        if sample.reference_logprobs is not None:
            reference_BT[row, predicting] = sample.reference_logprobs
    inputs = LossInputs(mask_BT, advantages_B, emission_BT, old_BT, reference_BT)
    return MicroBatch(tokens_BT, inputs)


def unpack(sample: Sample, row_T: np.ndarray) -> np.ndarray:
    """A sample's response tokens' share of a row that is aligned as `mask_BT` is."""
    return row_T[len(sample.trajectory.prompt_ids) - 1 : sample.num_tokens - 1]


def padding_fraction(packed: Sequence[Packed], samples: Sequence[Sample]) -> float:
    """The share of the device's positions that holds no token."""
    positions = sum(rows * length for rows, length in (p.shape for p in packed))
    used = sum(samples[i].num_tokens for p in packed for i in p.sample_indices)
    return 1.0 - used / positions if positions else 0.0
