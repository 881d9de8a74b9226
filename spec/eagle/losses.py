"""Losses of a drafter's outputs against the policy's states and tokens, by steps of the unroll.

Entry t's output o_t (spec.eagle.model) is compared with the policy's last hidden state f_{t+1}:

    feature    mean over D of SmoothL1(o_t − f_{t+1})
    token      −Σ_u p(u) log q(u)

with p = softmax(head(f_{t+1}) / temperature) and q = softmax(head'(o_t) / temperature) over the
draft tokens, so that of a reduced vocabulary p is the policy's distribution restricted to it. The
head is the policy's; head' is the drafter's own where it has one. J = steps, U = draft tokens.
Source: EAGLE arXiv 2401.15077.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from models.layers import linear
from spec.eagle import model as eagle
from spec.eagle.config import EagleConfig
from spec.eagle.model import EagleParams, SharedParams


def feature_sums(
    outputs_JBTD: jax.Array, targets_BTD: jax.Array, counts_JBT: jax.Array
) -> jax.Array:
    """Return Σ over entries that count of mean_D SmoothL1(o − f), float32 [J].

    SmoothL1(x) = x²/2 where |x| < 1, else |x| − 1/2.
    """
    x = jnp.abs(outputs_JBTD.astype(jnp.float32) - targets_BTD.astype(jnp.float32))
    loss_JBT = jnp.mean(jnp.where(x < 1, 0.5 * x * x, x - 0.5), axis=-1)
    return _sum_counted(loss_JBT, counts_JBT)


def token_sums(
    config: EagleConfig,
    params: EagleParams,
    frozen: SharedParams,
    outputs_JBTD: jax.Array,
    targets_BTD: jax.Array,
    tokens_BT: jax.Array,
    counts_JBT: jax.Array,
    temperature: jax.Array,
    *,
    chunk_tokens: int,
) -> dict[str, jax.Array]:
    """Return sums over the entries that count, each float32 [J].

    `tokens_BT` are the tokens that entries draft. `loss` is the token loss; `top1` and `top3` count
    entries whose token is among the first draft tokens (never one outside the draft vocabulary);
    `agreement` is Σ_u min(p, q), the probability that draws of p and q from a maximal coupling
    agree. Temperature 0 counts as 1. At most `chunk_tokens` entries have their logits in memory at
    a time, in the backward pass too.
    """
    scale = 1 / jnp.where(temperature > 0, temperature, 1.0).astype(jnp.float32)
    own_head_UD = frozen.head_UD if params.head_UD is None else params.head_UD

    def chunk(part: tuple[jax.Array, ...]) -> dict[str, jax.Array]:
        outputs_JBCD, targets_BCD, drafted_BC, counts_JBC = part
        log_p_BCU = jax.nn.log_softmax(_policy_logits(frozen, targets_BCD) * scale)

        def one(step: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
            outputs_BCD, counts_BC = step
            logits_BCU = eagle.logits(config, params, own_head_UD, outputs_BCD)
            log_q_BCU = jax.nn.log_softmax(logits_BCU * scale)
            each = _hits(jax.lax.stop_gradient(log_q_BCU), log_p_BCU, drafted_BC)
            each["loss"] = -jnp.sum(jnp.exp(log_p_BCU) * log_q_BCU, axis=-1)
            return {name: _sum_counted(x_BC, counts_BC) for name, x_BC in each.items()}

        return jax.lax.map(jax.checkpoint(one), (outputs_JBCD, counts_JBC))

    B, T = tokens_BT.shape
    num_chunks = -(-T // max(1, chunk_tokens // B))
    parts = (outputs_JBTD, targets_BTD, draft_ids_of(frozen, tokens_BT), counts_JBT)
    parts = tuple(_sliced(x, axis, num_chunks) for x, axis in zip(parts, (2, 1, 1, 2), strict=True))
    sums = jax.lax.map(jax.checkpoint(chunk), parts)
    return {name: jnp.sum(x, axis=0) for name, x in sums.items()}


def draft_ids_of(frozen: SharedParams, tokens_BT: jax.Array) -> jax.Array:
    """Return the rows of the policy's tokens in the draft vocabulary, −1 for tokens outside."""
    if frozen.draft_ids_U is None:
        return tokens_BT
    V, U = frozen.embedding_VD.shape[0], frozen.head_UD.shape[0]
    ids_V = jnp.full(V, -1, jnp.int32).at[frozen.draft_ids_U].set(jnp.arange(U, dtype=jnp.int32))
    return jnp.take(ids_V, jnp.maximum(tokens_BT, 0), mode="clip")


def _policy_logits(frozen: SharedParams, last_hidden_BTD: jax.Array) -> jax.Array:
    head_UD = frozen.head_UD
    x_BTD = last_hidden_BTD.astype(head_UD.dtype)
    return linear(x_BTD, head_UD, jnp.float32)


def _hits(
    log_q_BTU: jax.Array, log_p_BTU: jax.Array, drafted_BT: jax.Array
) -> dict[str, jax.Array]:
    """Return metrics of each entry; of equally likely tokens the first ranks higher."""
    here = jnp.maximum(drafted_BT, 0)[..., None]
    prob_BT1 = jnp.take_along_axis(log_q_BTU, here, axis=-1)
    first_BTU = jnp.arange(log_q_BTU.shape[-1]) < here
    better_BTU = (log_q_BTU > prob_BT1) | ((log_q_BTU == prob_BT1) & first_BTU)
    rank_BT = jnp.where(drafted_BT < 0, jnp.iinfo(jnp.int32).max, jnp.sum(better_BTU, axis=-1))
    return {
        "top1": (rank_BT < 1).astype(jnp.float32),
        "top3": (rank_BT < 3).astype(jnp.float32),
        "agreement": jnp.sum(jnp.exp(jnp.minimum(log_q_BTU, log_p_BTU)), axis=-1),
    }


def _sum_counted(x_BT: jax.Array, counts_BT: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(counts_BT, x_BT, 0.0), axis=(-2, -1))


def _sliced(x: jax.Array, axis: int, num_chunks: int) -> jax.Array:
    """Cut an axis in equal slices, padded with zeros; rows stay whole, on their devices."""
    size = -(-x.shape[axis] // num_chunks)
    over = [(0, num_chunks * size - n if i == axis else 0) for i, n in enumerate(x.shape)]
    shape = (*x.shape[:axis], num_chunks, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(jnp.pad(x, over).reshape(shape), axis, 0)
