"""Attention, in one function: whole sequences (training) and trees over a cache (rollouts).

Scores and softmax are float32 whatever the inputs are. `attend` is the one place where an
accelerator kernel may be put in; the code here is the portable path.

Shape suffixes: B rows, T queries, S keys, H heads, K key/value heads, M = T·H/K queries of one
key/value head, h head size.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from models.layout import causal_block_tokens

NEGATIVE = -1e30  # finite, so that a row that may attend to nothing stays finite


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packing:
    """Packed rows: several prompts, each followed by responses that do not see one another.

    `positions_BT` are rotary positions; `prompt_BT` numbers the prompts of a row
    (0: padding), `branch_BT` is 0 for tokens that all responses to the prompt share
    and else numbers the response. All int32.
    """

    positions_BT: jax.Array
    prompt_BT: jax.Array
    branch_BT: jax.Array


def precision_of(x: jax.Array) -> jax.lax.Precision | None:
    """Return the precision of products of x's dtype: float32 is float32 on every backend.

    Accelerators would multiply float32 in TF32 or in passes of bfloat16 by default. Other dtypes
    keep their backend's precision (None).
    """
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def causal_mask(num_tokens: int) -> jax.Array:
    """mask[0, t, s]: s ≤ t; for one sequence a row, starting at column 0. Bool [1, T, T]."""
    return jnp.tril(jnp.ones((1, num_tokens, num_tokens), bool))


def packed_mask(packing: Packing) -> jax.Array:
    """mask[b, t, s]: s ≤ t, of the same prompt, and shared or of the same response; [B, T, T]."""
    prompt_BT, branch_BT = packing.prompt_BT, packing.branch_BT
    same_BTS = prompt_BT[:, :, None] == prompt_BT[:, None, :]
    seen_BTS = (branch_BT[:, None, :] == 0) | (branch_BT[:, :, None] == branch_BT[:, None, :])
    return causal_mask(prompt_BT.shape[1]) & same_BTS & seen_BTS


def attend(
    q_BTHh: jax.Array, k_BKhS: jax.Array, v_BKSh: jax.Array, mask_BTS: jax.Array
) -> jax.Array:
    """softmax(q·k/√h where the mask allows)·v with grouped heads; [B, T, H, h].

    The sum of the softmax divides the product, not its S weights: a pass less over them.
    """
    B, T, H, h = q_BTHh.shape
    K = k_BKhS.shape[1]
    q_BKMh = q_BTHh.reshape(B, T, K, H // K, h).transpose(0, 2, 1, 3, 4).reshape(B, K, -1, h)
    scores_BKMS = jnp.einsum(
        "bkmh,bkhs->bkms",
        q_BKMh,
        k_BKhS,
        precision=precision_of(q_BKMh),
        preferred_element_type=jnp.float32,
    ) * (h**-0.5)
    mask_BKMS = jnp.repeat(mask_BTS, H // K, axis=1)[:, None]
    scores_BKMS = jnp.where(mask_BKMS, scores_BKMS, NEGATIVE)
    top_BKM1 = jax.lax.stop_gradient(jnp.max(scores_BKMS, axis=-1, keepdims=True))
    weights_BKMS = jnp.exp(scores_BKMS - top_BKM1)
    total_BKM1 = jnp.sum(weights_BKMS, axis=-1, keepdims=True)
    out_BKMh = jnp.einsum(
        "bkms,bksh->bkmh",
        weights_BKMS.astype(v_BKSh.dtype),
        v_BKSh,
        precision=precision_of(v_BKSh),
        preferred_element_type=jnp.float32,
    )
    out_BKMh = (out_BKMh / total_BKM1).astype(v_BKSh.dtype)
    return out_BKMh.reshape(B, K, T, H // K, h).transpose(0, 2, 1, 3, 4).reshape(B, T, H, h)


def attend_causally(
    q_BTHh: jax.Array, k_BKhT: jax.Array, v_BKTh: jax.Array, mask_BTT: jax.Array
) -> jax.Array:
    """Compute `attend` where no position sees a later one, in blocks of queries; [B, T, H, h].

    A block of queries skips the keys behind it.
    """
    T = q_BTHh.shape[1]
    if (size := causal_block_tokens(T)) == T:
        return attend(q_BTHh, k_BKhT, v_BKTh, mask_BTT)

    def block(end: int) -> jax.Array:
        here = slice(end - size, end)
        return attend(
            q_BTHh[:, here], k_BKhT[..., :end], v_BKTh[:, :, :end], mask_BTT[:, here, :end]
        )

    return jnp.concatenate([block(end) for end in range(size, T + 1, size)], axis=1)
