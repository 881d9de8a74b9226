"""Trajectories become micro-batches of one fixed shape, with little padding.

A row holds several prompts, each computed once, followed by the responses to it,
which do not see one another (`models.attention.Packing`). The last prompt token
opens every response anew, since it predicts the first token of each: so a response
of n tokens takes n positions, its prompt of P takes P − 1 more, once per row.

Invariants: every response token is trained once, the end token included; padding
never has weight; every micro-batch has the same shape, so that one compilation
serves them all. Plain numpy on the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from models.attention import Packing
from rl.losses import CriticInputs, LossInputs
from rl.trajectory import Trajectory

SAMPLES_PER_ROW = 16  # a micro-batch holds at most this many samples for each of its rows
ROW_MULTIPLE_TOKENS = 64  # rows are a multiple of this long


@dataclasses.dataclass(frozen=True, eq=False)
class Judgement:
    """What a critic makes of each token of a response; float32 [num_tokens]."""

    advantages: np.ndarray
    returns: np.ndarray
    values: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """A trajectory with what training adds to it; log-probs are float32 [num_tokens].

    `old_logprobs` of None stands for those of the rollout, `reference_logprobs` of
    None for no reference, `judgement` of None for no critic.
    """

    trajectory: Trajectory
    advantage: float
    old_logprobs: np.ndarray | None = None
    reference_logprobs: np.ndarray | None = None
    judgement: Judgement | None = None

    @property
    def num_tokens(self) -> int:
        """Length of prompt and response together."""
        return len(self.trajectory.prompt_ids) + self.trajectory.num_tokens

    @property
    def name(self) -> str:
        t = self.trajectory
        return f"request {t.request_id} (group {t.group_id}, sample {t.sample_index})"


@dataclasses.dataclass(frozen=True)
class Shape:
    """Rows of a micro-batch, positions of a row, and how many samples they may hold."""

    rows: int
    length: int
    samples: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """What the device gets. Rows b of T positions; samples e with response tokens m < T.

    `targets_BT` are the tokens that the positions predict; `index_EM` says where in
    the flattened [B · T] each sample's response tokens are predicted (0 beyond its
    end); the loss works on [E, M].
    """

    tokens_BT: jax.Array
    targets_BT: jax.Array
    packing: Packing
    index_EM: jax.Array
    inputs: LossInputs


@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """A micro-batch of numpy arrays, the samples in its first rows, the positions in use."""

    batch: MicroBatch
    sample_indices: np.ndarray
    used_positions: int


@dataclasses.dataclass(eq=False)
class _Row:
    """What goes into one row: (prompt's shared positions, its samples), in order."""

    free: int
    parts: list[tuple[int, list[int]]] = dataclasses.field(default_factory=list)

    @property
    def num_samples(self) -> int:
        return sum(len(indices) for _, indices in self.parts)


def batch_shape(micro_batch_tokens: int, max_tokens: int, *, row_multiple: int = 1) -> Shape:
    """Rows that hold the longest prompt and response, about `micro_batch_tokens` positions in all.

    `row_multiple` is the ways of the mesh's batch axes: rows are a multiple of it,
    and at least that many. Raises ValueError for sizes below 1.
    """
    for name, value in (
        ("micro_batch_tokens", micro_batch_tokens),
        ("max_tokens", max_tokens),
        ("row_multiple", row_multiple),
    ):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    length = -(-max_tokens // ROW_MULTIPLE_TOKENS) * ROW_MULTIPLE_TOKENS
    rows = max(micro_batch_tokens // length // row_multiple, 1) * row_multiple
    return Shape(rows, length, SAMPLES_PER_ROW * rows)


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


def micro_batches(samples: Sequence[Sample], shape: Shape) -> list[Packed]:
    """Pack samples into as few rows as a greedy search finds, rows into micro-batches.

    Raises ValueError where a prompt and response do not fit a row.
    """
    batches: list[list[_Row]] = []
    for row in _fill_rows(samples, shape):
        for rows in batches:
            num_samples = sum(r.num_samples for r in rows) + row.num_samples
            if len(rows) < shape.rows and num_samples <= shape.samples:
                rows.append(row)
                break
        else:
            batches.append([row])
    return [_pack(samples, rows, shape) for rows in batches]


def _fill_rows(samples: Sequence[Sample], shape: Shape) -> list[_Row]:
    """Whole groups where they fit, largest first, into the fullest row that has the room.

    A group that no single row holds is split, and its prompt computed once in each.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, sample in enumerate(samples):
        t = sample.trajectory
        if len(t.prompt_ids) - 1 + t.num_tokens > shape.length:
            raise ValueError(
                f"{sample.name} has {sample.num_tokens} tokens, a row holds {shape.length + 1}: "
                "make the shape with a larger max_tokens"
            )
        groups.setdefault((t.group_id, *t.prompt_ids.tolist()), []).append(i)

    def shared(indices: Sequence[int]) -> int:
        return len(samples[indices[0]].trajectory.prompt_ids) - 1

    def size(indices: Sequence[int]) -> int:
        return shared(indices) + sum(samples[i].trajectory.num_tokens for i in indices)

    chunks: list[list[int]] = []
    for indices in groups.values():
        parts: list[list[int]] = []
        for i in sorted(indices, key=lambda i: -samples[i].trajectory.num_tokens):
            for part in parts:
                if len(part) < shape.samples and size([*part, i]) <= shape.length:
                    part.append(i)
                    break
            else:
                parts.append([i])
        chunks += parts

    rows: list[_Row] = []
    for chunk in sorted(chunks, key=lambda c: (-size(c), c[0])):
        needed = size(chunk)
        fitting = [
            r for r in rows if r.free >= needed and r.num_samples + len(chunk) <= shape.samples
        ]
        row = min(fitting, key=lambda r: r.free, default=None)
        if row is None:
            row = _Row(shape.length)
            rows.append(row)
        row.parts.append((shared(chunk), chunk))
        row.free -= needed
    return rows


def empty(shape: Shape, *, judged: bool = False) -> MicroBatch:
    """A micro-batch without samples; `judged` has room for what a critic says."""
    B, T, E = shape.rows, shape.length, shape.samples

    def ints_BT() -> np.ndarray:
        return np.zeros((B, T), np.int32)

    def floats_EM() -> np.ndarray:
        return np.zeros((E, T), np.float32)

    inputs = LossInputs(
        mask_BT=np.zeros((E, T), bool),
        advantages_B=np.zeros(E, np.float32),
        rollout_logprobs_BT=floats_EM(),
        old_logprobs_BT=floats_EM(),
        reference_logprobs_BT=floats_EM(),
        emission_logprobs_BT=floats_EM(),
        origins_BT=np.zeros((E, T), np.int32),
        critic=CriticInputs(floats_EM(), floats_EM(), floats_EM()) if judged else None,
    )
    packing = Packing(ints_BT(), ints_BT(), ints_BT())
    return MicroBatch(ints_BT(), ints_BT(), packing, np.zeros((E, T), np.int32), inputs)


def _pack(samples: Sequence[Sample], rows: Sequence[_Row], shape: Shape) -> Packed:
    batch = empty(shape, judged=samples[rows[0].parts[0][1][0]].judgement is not None)
    order: list[int] = []
    for b, row in enumerate(rows):
        start = 0
        for number, (shared, indices) in enumerate(row.parts, start=1):
            prompt_ids = samples[indices[0]].trajectory.prompt_ids
            here = slice(start, start + shared)
            _place(batch, b, here, prompt_ids[:-1], np.arange(shared), number, branch=0)
            start += shared
            for branch, i in enumerate(indices, start=1):
                t = samples[i].trajectory
                here = slice(start, start + t.num_tokens)
                inputs = np.concatenate([prompt_ids[-1:], t.response_ids[:-1]])
                positions = np.arange(shared, shared + t.num_tokens)
                _place(batch, b, here, inputs, positions, number, branch)
                batch.targets_BT[b, here] = t.response_ids
                index = b * shape.length + np.arange(here.start, here.stop)
                _state(batch, len(order), samples[i], index)
                order.append(i)
                start = here.stop
    used = sum(shape.length - row.free for row in rows)
    return Packed(batch, np.array(order), used)


def _place(
    batch: MicroBatch,
    b: int,
    here: slice,
    tokens: np.ndarray,
    positions: np.ndarray,
    prompt: int,
    branch: int,
) -> None:
    batch.tokens_BT[b, here] = tokens
    batch.packing.positions_BT[b, here] = positions
    batch.packing.prompt_BT[b, here] = prompt
    batch.packing.branch_BT[b, here] = branch


def _state(batch: MicroBatch, e: int, sample: Sample, index: np.ndarray) -> None:
    """Row e of what the loss needs; `index` says where the sample's tokens are predicted."""
    t, n = sample.trajectory, len(index)
    batch.index_EM[e, :n] = index
    inputs = batch.inputs
    inputs.mask_BT[e, :n] = True
    inputs.advantages_B[e] = sample.advantage
    inputs.rollout_logprobs_BT[e, :n] = t.logprobs
    old = t.logprobs if sample.old_logprobs is None else sample.old_logprobs
    inputs.old_logprobs_BT[e, :n] = old
    inputs.emission_logprobs_BT[e, :n] = t.emission_logprobs
    inputs.origins_BT[e, :n] = t.origins
    if sample.reference_logprobs is not None:
        inputs.reference_logprobs_BT[e, :n] = sample.reference_logprobs
    if sample.judgement is not None:
        assert inputs.critic is not None, "all samples are judged, or none"
        inputs.critic.advantages_BT[e, :n] = sample.judgement.advantages
        inputs.critic.returns_BT[e, :n] = sample.judgement.returns
        inputs.critic.values_BT[e, :n] = sample.judgement.values


def padding_fraction(packed: Sequence[Packed]) -> float:
    """The share of the device's positions that holds no token."""
    positions = sum(p.batch.tokens_BT.size for p in packed)
    return 1.0 - sum(p.used_positions for p in packed) / positions if positions else 0.0
