"""Attention over whole sequences (training) and over a cache (rollouts).

Shape legend in docs/architecture.md. Scores and softmax are float32 whatever
the inputs are. Both functions are the one place where an accelerator kernel may
be put in; the code here is the portable path.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

NEGATIVE = -1e30  # finite, so that a row that may attend to nothing stays finite


def attend_causal(q_BTHh: jax.Array, k_BTKh: jax.Array, v_BTKh: jax.Array) -> jax.Array:
    """softmax(q·kᵀ/√h + causal mask)·v over one sequence a row; [B, T, H, h].

    Sequences start at column 0 and are padded on the right: a causal mask is
    all that is needed, what the padding computes is never read.
    """
    return jax.nn.dot_product_attention(q_BTHh, k_BTKh, v_BTKh, is_causal=True)


def attend_cache(
    q_BNHh: jax.Array, k_BKhS: jax.Array, v_BKSh: jax.Array, mask_BNS: jax.Array
) -> jax.Array:
    """softmax(q·kᵀ/√h + mask)·v of N tree nodes over their slot's cache row; [B, N, H, h]."""
    B, N, H, h = q_BNHh.shape
    K = k_BKhS.shape[1]
    q_BKMh = q_BNHh.reshape(B, N, K, H // K, h).transpose(0, 2, 1, 3, 4).reshape(B, K, -1, h)
    scores_BKMS = jnp.einsum(
        "bkmh,bkhs->bkms", q_BKMh, k_BKhS, preferred_element_type=jnp.float32
    ) * (h**-0.5)
    mask_BKMS = jnp.repeat(mask_BNS, H // K, axis=1)[:, None]
    scores_BKMS = jnp.where(mask_BKMS, scores_BKMS, NEGATIVE)
    weights_BKMS = jax.nn.softmax(scores_BKMS, axis=-1).astype(v_BKSh.dtype)
    out_BKMh = jnp.einsum("bkms,bksh->bkmh", weights_BKMS, v_BKSh)
    return out_BKMh.reshape(B, K, N, H // K, h).transpose(0, 2, 1, 3, 4).reshape(B, N, H, h)
