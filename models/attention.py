"""Attention, in one function: whole sequences (training) and trees over a cache (rollouts).

Shape legend in docs/architecture.md. Scores and softmax are float32 whatever the
inputs are. `attend` is the one place where an accelerator kernel may be put in; the
code here is the portable path.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

NEGATIVE = -1e30  # finite, so that a row that may attend to nothing stays finite


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packing:
    """Several prompts in a row, each followed by responses that do not see one another.

    `positions_BT` are rotary positions; `prompt_BT` numbers the prompts of a row
    (0: padding), `branch_BT` is 0 for tokens that all responses to the prompt share
    and else numbers the response. All int32.
    """

    positions_BT: jax.Array
    prompt_BT: jax.Array
    branch_BT: jax.Array


def causal_mask(num_tokens: int) -> jax.Array:
    """mask[0, t, s]: s ≤ t; for one sequence a row, starting at column 0. Bool [1, T, T]."""
    return jnp.tril(jnp.ones((1, num_tokens, num_tokens), bool))


def packed_mask(
    packing: Packing, start: jax.Array | int = 0, count: int | None = None
) -> jax.Array:
    """mask[b, t, s]: s ≤ t, of the same prompt, and shared or of the same response; [B, T, T].

    With `count`, the rows t from `start` on alone: [B, count, T].
    """
    T = packing.prompt_BT.shape[1]
    C = T if count is None else count

    def rows(x_BT: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x_BT, start, C, axis=1)[:, :, None]

    before_CT = jnp.arange(T) <= start + jnp.arange(C)[:, None]
    same_BCT = rows(packing.prompt_BT) == packing.prompt_BT[:, None]
    branch_BT = packing.branch_BT
    seen_BCT = (branch_BT[:, None] == 0) | (rows(branch_BT) == branch_BT[:, None])
    return before_CT & same_BCT & seen_BCT


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
        "bkmh,bkhs->bkms", q_BKMh, k_BKhS, preferred_element_type=jnp.float32
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
        preferred_element_type=jnp.float32,
    )
    out_BKMh = (out_BKMh / total_BKM1).astype(v_BKSh.dtype)
    return out_BKMh.reshape(B, K, T, H // K, h).transpose(0, 2, 1, 3, 4).reshape(B, T, H, h)
