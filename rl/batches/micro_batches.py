"""Micro-batches of one fixed shape (`rl.records.packing`) from trajectories, in plain numpy.

Every response token is trained on once, the end token included. Padding, and tokens that an
environment inserted, have no place in the arrays of a loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import jax
import numpy as np
from flax import struct

from reprise.models.attention.attention import Packing
from reprise.rl.losses.losses import CriticInputs, LossInputs
from reprise.rl.records import packing
from reprise.rl.records.packing import Response, Row, Shape
from reprise.rl.records.trajectory import Trajectory
from reprise.spec.config import SamplingConfig
from reprise.spec.verification.sampling import Processing


@dataclasses.dataclass(frozen=True, eq=False)
class CriticTargets:
    """Return and value of each response token, by a critic; float32 [num_tokens]."""

    returns: np.ndarray
    values: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class TrainSample:
    """A trajectory with the values that training adds; values of tokens are float32 [num_tokens].

    `token_advantages` replace `advantage`.
    If `old_logprobs` is None, the log-probs of the rollout apply; other fields that are None are
    not needed.
    """

    trajectory: Trajectory
    advantage: float
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
    old_logprobs: np.ndarray | None = None
    reference_logprobs: np.ndarray | None = None
    token_advantages: np.ndarray | None = None
    critic_targets: CriticTargets | None = None

    @property
    def name(self) -> str:
        t = self.trajectory
        return f"request {t.request_id} (group {t.group_id}, sample {t.sample_index})"

    @property
    def response(self) -> Response:
        t = self.trajectory
        if t.episode is None:
            return Response(self.name, t.group_id, t.prompt_ids, t.response_ids)
        return Response(self.name, t.group_id, t.prompt_ids, t.episode.tokens, t.episode.drawn)


@struct.dataclass
class MicroBatch:
    """A micro-batch on the device: rows b of T positions, samples e with tokens m < T.

    `targets_BT` are the tokens that the positions predict. `index_EM` is the place in the flattened
    [B · T] that predicts each response token, counted within the rows of each copy of the weights
    (`Shape.copies`). The loss works on [E, M].
    """

    tokens_BT: jax.Array
    targets_BT: jax.Array
    packing: Packing
    index_EM: jax.Array
    inputs: LossInputs
    processing_BT: Processing


@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """A micro-batch of numpy arrays, its samples, their places e in [E], and the used positions."""

    batch: MicroBatch
    sample_indices: np.ndarray
    places: np.ndarray
    used_positions: int


Fill = Callable[[MicroBatch, int, int, np.ndarray], None]  # batch, row e, response i, places


def select(
    trajectories: Sequence[Trajectory],
    advantages: np.ndarray,
    sampling: SamplingConfig | None = None,
    *,
    mask_truncated: bool = False,
) -> list[TrainSample]:
    """Return the samples of the loss; `sampling` applies to trajectories without a sampling.

    Responses without a reward are left out, truncated responses if `mask_truncated`, and episodes
    without a turn. Raises ValueError for unequal lengths, and for an empty prompt or response.
    """
    if len(trajectories) != len(advantages):
        raise ValueError(
            f"expected an advantage per trajectory, got {len(advantages)} for {len(trajectories)}"
        )
    samples = []
    for trajectory, advantage in zip(trajectories, advantages, strict=True):
        drawn_by = trajectory.sampling or sampling or SamplingConfig()
        sample = TrainSample(trajectory, float(advantage), drawn_by)
        if trajectory.episode is not None and not trajectory.num_tokens:
            continue
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
    """Return the sample indices of each optimizer step of an epoch.

    A step has whole groups, in a seeded order.
    """
    ids = np.asarray(group_ids)
    if num_minibatches == 1:
        return [np.arange(len(ids))] if len(ids) else []
    groups = np.random.default_rng(list(seed)).permutation(np.unique(ids))
    parts = np.array_split(groups, num_minibatches)
    return [np.flatnonzero(np.isin(ids, part)) for part in parts if len(part)]


def micro_batches(samples: Sequence[TrainSample], shape: Shape) -> list[Packed]:
    """Pack samples into few rows, and rows into micro-batches.

    Raises ValueError if a sample does not fit into a row.
    """
    by_token = any([sample.token_advantages is not None for sample in samples])
    with_critic = any([sample.critic_targets is not None for sample in samples])
    responses = [sample.response for sample in samples]
    blank = partial(empty, shape, by_token=by_token, with_critic=with_critic)
    return pack(responses, shape, blank, partial(_fill, samples))


def pack(
    responses: Sequence[Response], shape: Shape, blank: Callable[[], MicroBatch], fill: Fill
) -> list[Packed]:
    """Pack responses into the micro-batches that `blank` makes.

    `fill` is called for row e of the loss inputs with the number of its response, and the flattened
    places that predict its tokens. Raises ValueError if a response does not fit into a row.
    """
    parts = packing.plan(responses, shape.of_copy)
    n = shape.copies
    groups = [parts[i : i + n] for i in range(0, len(parts), n)]
    return [_pack(responses, group, shape, blank(), fill) for group in groups]


def unpacked(
    packed: Sequence[Packed], values: Sequence[np.ndarray], lengths: Sequence[int]
) -> list[np.ndarray]:
    """Return the values of each response, [length], from the values of micro-batches, [E, M].

    The values of micro-batches may be split by copy.
    """
    result: list[np.ndarray] = [np.empty(0, np.float32)] * len(lengths)
    for p, value_EM in zip(packed, values, strict=True):
        value_EM = value_EM.reshape(-1, value_EM.shape[-1])
        for e, i in zip(p.places, p.sample_indices, strict=True):
            result[i] = value_EM[e, : lengths[i]]
    return result


def empty(shape: Shape, *, by_token: bool = False, with_critic: bool = False) -> MicroBatch:
    """Return a micro-batch without samples, `by_token` with room for advantages of tokens.

    `with_critic` adds room for the targets of a critic.
    """
    B = shape.rows
    T = shape.length
    E = shape.samples

    ints_BT = partial(np.zeros, (B, T), np.int32)
    floats_EM = partial(np.zeros, (E, T), np.float32)
    inputs = LossInputs(
        mask_BT=np.zeros((E, T), bool),
        advantages_B=np.zeros(E, np.float32),
        rollout_logprobs_BT=floats_EM(),
        old_logprobs_BT=floats_EM(),
        reference_logprobs_BT=floats_EM(),
        emission_logprobs_BT=floats_EM(),
        origins_BT=np.zeros((E, T), np.int32),
        token_advantages_BT=floats_EM() if by_token else None,
        critic=CriticInputs(floats_EM(), floats_EM()) if with_critic else None,
    )
    rows = Packing(ints_BT(), ints_BT(), ints_BT())
    plain_BT = Processing.filled(SamplingConfig(), (B, T))
    return MicroBatch(ints_BT(), ints_BT(), rows, np.zeros((E, T), np.int32), inputs, plain_BT)


def _pack(
    responses: Sequence[Response],
    parts: Sequence[Sequence[Row]],
    shape: Shape,
    blank: MicroBatch,
    fill: Fill,
) -> Packed:
    """Return one micro-batch from the rows of each copy; rows of missing copies stay empty."""
    part = shape.of_copy
    over = shape.copies - len(parts)
    layouts = [packing.lay_out(responses, rows, part) for rows in [*parts, *[[]] * over]]
    batch = dataclasses.replace(
        blank,
        tokens_BT=np.concatenate([layout.tokens_BT for layout in layouts]),
        targets_BT=np.concatenate([layout.targets_BT for layout in layouts]),
        packing=jax.tree.map(lambda *x: np.concatenate(x), *(x.packing for x in layouts)),
    )
    places = list[int]()
    for c, layout in enumerate(layouts):
        pairs = zip(layout.order.tolist(), layout.starts.tolist(), strict=True)
        for e, (i, start) in enumerate(pairs, start=c * part.samples):
            drawn = responses[i].drawn
            index = start + (np.arange(len(responses[i].tokens)) if drawn is None else drawn)
            batch.index_EM[e, : len(index)] = index  # within the rows of its copy
            fill(batch, e, i, c * part.rows * part.length + index)
            places.append(e)
    order = np.concatenate([layout.order for layout in layouts])
    return Packed(batch, order, np.array(places), sum([x.used_positions for x in layouts]))


def _fill(
    samples: Sequence[TrainSample], batch: MicroBatch, e: int, i: int, places: np.ndarray
) -> None:
    """Fill row e of the loss inputs with sample i."""
    sample = samples[i]
    t = sample.trajectory
    n = len(places)
    batch.processing_BT.put(places, sample.sampling)
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
    if sample.token_advantages is not None:
        assert inputs.token_advantages_BT is not None, "all samples have them, or none"
        inputs.token_advantages_BT[e, :n] = sample.token_advantages
    if sample.critic_targets is not None:
        assert inputs.critic is not None, "all samples have targets of the critic, or none"
        inputs.critic.returns_BT[e, :n] = sample.critic_targets.returns
        inputs.critic.values_BT[e, :n] = sample.critic_targets.values


def padding_fraction(packed: Sequence[Packed]) -> float:
    """Return the share of positions on the device that hold no token."""
    positions = sum([p.batch.tokens_BT.size for p in packed])
    return 1.0 - sum([p.used_positions for p in packed]) / positions if positions else 0.0
