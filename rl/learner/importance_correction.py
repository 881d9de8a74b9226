"""Importance weights for tokens that another policy emitted, or the same one rounded otherwise.

The ratio is w = p_trainer / p_emission: the policy at the start of the update, as the
trainer scores it, over the one that drew the token. The weights are constants of the
loss. As in verl's rollout correction (verl.readthedocs.io, "Rollout Correction").
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from rl.learner.algorithms import Correction


def importance_weights(
    correction: Correction, trainer_BT: jax.Array, emission_BT: jax.Array, mask_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Weights, and where they were cut (bool); [B, T] twice, without gradients.

    log w = trainer − emission per token; a sequence's is its sum over the mask. tis:
    min(w, high), cut where w > high. mask: 1 where low ≤ w ≤ high, else 0 and cut.
    Source: verl, "Rollout Correction"; truncated weights: Ionides 2008.
    """
    log_BT = jnp.where(mask_BT, trainer_BT - emission_BT, 0.0)
    if correction.level == "sequence":
        log_BT = jnp.broadcast_to(jnp.sum(log_BT, axis=1, keepdims=True), log_BT.shape)
    low = math.log(correction.low) if correction.low else -math.inf
    high = math.log(correction.high)
    if correction.kind == "tis":
        weight_BT, cut_BT = jnp.exp(jnp.minimum(log_BT, high)), log_BT > high
    else:
        cut_BT = (log_BT < low) | (log_BT > high)
        weight_BT = jnp.where(cut_BT, 0.0, 1.0)
    return jax.lax.stop_gradient((weight_BT, cut_BT))
