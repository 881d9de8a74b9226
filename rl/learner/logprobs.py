"""Log-probabilities of given tokens under a policy, without a batch × length × vocabulary array.

The distribution is as in sampling (after temperature, top-k and top-p), by
`spec.verification.sampling`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from reprise.models.config import Adapted, LowRank
from reprise.models.decoder import transformer
from reprise.models.decoder.training import rounded_master
from reprise.models.decoder.transformer import Params
from reprise.models.layout import RULES, logits_axes
from reprise.models.sharding import constrain, replicated, sizes_in_use, ways_in_use, ways_outside
from reprise.rl.batches import micro_batches
from reprise.rl.batches.micro_batches import MicroBatch, Packed, TrainSample
from reprise.rl.learner.config import TrainSpec
from reprise.rl.records.packing import Shape
from reprise.rl.runtime.devices import in_turn
from reprise.spec.verification.sampling import NORMALIZER, Processing, log_probs


def cast(params: Params, dtype: Any) -> Params:
    """Return the parameters in `dtype`; the same arrays if they already have that dtype."""
    return jax.tree.map(lambda p: p.astype(dtype), params)


def logprobs_and_entropy(
    params: Params, batch: MicroBatch, recipe: TrainSpec
) -> tuple[jax.Array, jax.Array]:
    """Return log-probabilities and entropies at the response tokens; float32 [E, M] twice.

    Logits exist for `Trainer.logprob_chunk_tokens` positions at a time. Gradients flow through the
    log-probabilities, and with `Algorithm.entropy_coefficient` through the entropies.
    """
    dtype = recipe.trainer.dtype
    hidden_BTD = transformer.hidden(
        recipe.model,
        params,
        batch.tokens_BT,
        batch.packing,
        remat=recipe.trainer.remat_policy,
        dtype=dtype,
    )
    sizes = sizes_in_use()
    rows_axis, vocab_axis = logits_axes(sizes, recipe.model.vocab_size)
    head = _head(params, vocab_axis)
    rounded = jax.lax.stop_gradient(cast(head, dtype))

    def chunk(x: tuple[jax.Array, jax.Array, Processing]) -> tuple[jax.Array, jax.Array]:
        hidden_BCD, targets_BC, processing = x
        hidden_BCD = constrain(hidden_BCD, rows_axis, None, None)
        axes = rows_axis, vocab_axis
        weights = jax.tree.map(partial(rounded_master, head.embedding_VD.dtype), rounded, head)
        logits_BCV = transformer.head(recipe.model, weights, hidden_BCD, axes)
        logits_BCV = constrain(logits_BCV, rows_axis, None, vocab_axis)
        temperature_BC, top_k_BC, top_p_BC = processing.broadcast(targets_BC.shape)
        logprobs_BC, entropy_BC = log_probs(
            logits_BCV,
            targets_BC,
            temperature_BC,
            top_k_BC if recipe.may_cut else None,
            top_p_BC if recipe.may_cut else None,
            axes=axes,
        )
        if not recipe.algorithm.entropy_coefficient:
            entropy_BC = jax.lax.stop_gradient(entropy_BC)
        return logprobs_BC, entropy_BC

    chunk_tokens = recipe.trainer.logprob_chunk_tokens // ways_outside()
    rows = hidden_BTD, batch.targets_BT, batch.processing_BT
    logprobs_BT, entropy_BT = _map_chunks(chunk, rows, chunk_tokens)
    return at_responses(logprobs_BT, batch), at_responses(entropy_BT, batch)


def at_responses(x_BT: jax.Array, batch: MicroBatch) -> jax.Array:
    """Return the values at the positions that predict response tokens; [E, M]."""
    if (copies := ways_in_use("copies")) == 1:
        return x_BT.reshape(-1)[batch.index_EM]
    index_CEM = batch.index_EM.reshape(copies, -1, batch.index_EM.shape[1])
    x_CEM = jax.vmap(lambda x, index: x[index])(x_BT.reshape(copies, -1), index_CEM)
    return x_CEM.reshape(batch.index_EM.shape)


def _head(params: Params, vocab_axis: str) -> Params:
    """Return the weights that compute logits, as a tied head, sharded by the axis of the logits."""
    embed_axis = None if vocab_axis == "logits" else "embed"
    head_VD = transformer.head_weight(params)
    adapter = None
    if isinstance(head_VD, Adapted):
        low = head_VD.low
        low = LowRank(low.down_RI, constrain(low.up_OR, vocab_axis, None))
        head_VD, adapter = head_VD.weight_OI, Adapted(None, low, head_VD.scale)
    head_VD = constrain(head_VD, vocab_axis, embed_axis)
    return dataclasses.replace(params, layers=(), embedding_VD=head_VD, head_VD=adapter)


def _map_chunks(
    chunk: Any, rows: tuple[jax.Array, jax.Array, Processing], chunk_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """Apply `chunk` to equal slices of the T axis in sequence; rows stay on their devices."""
    B, T = rows[1].shape
    count = -(-T // max(1, chunk_tokens // B))
    size = -(-T // count)
    over = count * size - T

    def slices(x_BT: jax.Array) -> jax.Array:
        x_BT = jnp.pad(x_BT, ((0, 0), (0, over), *[(0, 0)] * (x_BT.ndim - 2)))
        return x_BT.reshape(B, count, size, *x_BT.shape[2:]).swapaxes(0, 1)

    # backward, a chunk computes its logits again, but no sum over them; the loop keeps XLA from
    # sharing them with forward, so that barriers against it would only keep it from hoisting casts
    kept = jax.checkpoint_policies.save_only_these_names(NORMALIZER)
    chunk = jax.checkpoint(chunk, prevent_cse=False, policy=kept)
    results = jax.lax.map(chunk, jax.tree.map(slices, rows))
    logprobs_BT, entropy_BT = (x.swapaxes(0, 1).reshape(B, -1)[:, :T] for x in results)
    return logprobs_BT, entropy_BT


@partial(jax.jit, static_argnames=("recipe",))
def token_logprobs(
    params: Params, batch: MicroBatch, *, recipe: TrainSpec
) -> tuple[jax.Array, jax.Array]:
    """Return `logprobs_and_entropy` without gradients, whole on every device; compiled once."""
    return replicated(logprobs_and_entropy(params, batch, recipe))


def unwatched() -> None:
    """Do nothing after a pass."""


def keep_pace(passes: Sequence[Any], on_pass: Callable[[], None]) -> None:
    """Wait for the pass before the last, so that devices stay busy; then call `on_pass`."""
    jax.block_until_ready(passes[-2:-1])
    on_pass()


def batch_ways() -> int:
    """Return the number of parts into which the mesh in use splits a batch; 1 without a mesh."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return int(np.prod([sizes.get(axis, 1) for axis in RULES["batch"] or ()]))


def place(batch: Any) -> Any:
    """Put host arrays onto the devices, split by rows under the mesh in use.

    On a mesh over several processes, each process has the same arrays and places a part of the
    rows.
    """
    sharding = _rows_split()
    if sharding is None:
        return jax.device_put(batch)
    if sharding.is_fully_addressable:
        return jax.device_put(batch, sharding)
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, x, x.shape), batch
    )


def placed_shapes(batch: Any) -> Any:
    """Return the shapes of the result of `place`."""
    sharding = _rows_split()
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), batch)


def _rows_split() -> NamedSharding | None:
    """Return the sharding of rows on the mesh in use; None without a mesh."""
    mesh = jax.sharding.get_mesh()
    return None if mesh.empty else NamedSharding(mesh, PartitionSpec(RULES["batch"]))


def sample_logprobs(
    params: Params,
    samples: Sequence[TrainSample],
    shape: Shape,
    recipe: TrainSpec,
    on_pass: Callable[[], None] = unwatched,
) -> list[np.ndarray]:
    """Return log-probabilities of response tokens, float32 [num_tokens] per sample."""

    def run(batch: MicroBatch) -> jax.Array:
        return token_logprobs(params, batch, recipe=recipe)[0]

    return by_sample(run, samples, shape, on_pass)


def by_sample(
    run: Callable[[MicroBatch], jax.Array],
    samples: Sequence[TrainSample],
    shape: Shape,
    on_pass: Callable[[], None],
) -> list[np.ndarray]:
    """Return the values of `run` for response tokens, [num_tokens] per sample, with one fetch."""
    packed = micro_batches.micro_batches(samples, shape)
    lengths = [sample.trajectory.num_tokens for sample in samples]
    return fetched(run, packed, lengths, shape, on_pass)


def fetched(
    run: Callable[[MicroBatch], jax.Array],
    packed: Sequence[Packed],
    lengths: Sequence[int],
    shape: Shape,
    on_pass: Callable[[], None] = unwatched,
) -> list[np.ndarray]:
    """Return the values of `run` for each response of micro-batches, with one fetch."""
    assert shape.copies == ways_in_use("copies"), "micro-batches of another mesh"
    passes: list[jax.Array] = []
    for p in packed:
        passes.append(in_turn(run(place(p.batch))))
        keep_pace(passes, on_pass)
    return micro_batches.unpacked(packed, jax.device_get(passes), lengths)
