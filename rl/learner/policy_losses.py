"""The policy losses of the algorithms, PPO's value loss, and importance weights.

Arrays are [B, T]: B sequences of T response tokens. Advantages are [B, T] or [B, 1].
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from reprise.rl.learner.algorithms import Algorithm, Correction


def sequence_ratio(
    logprobs_BT: jax.Array, old_logprobs_BT: jax.Array, mask_BT: jax.Array
) -> jax.Array:
    """Return exp(Σ mask·(logp − old) / Σ mask) of each row, at all its positions; [B, T]."""
    d_BT = jnp.where(mask_BT, logprobs_BT - old_logprobs_BT, 0.0)
    tokens_B1 = jnp.maximum(jnp.sum(mask_BT, axis=1, keepdims=True), 1)
    ratio_B1 = jnp.exp(jnp.sum(d_BT, axis=1, keepdims=True) / tokens_B1)
    return jnp.broadcast_to(ratio_B1, d_BT.shape)


def clipped_value_loss(
    values_BT: jax.Array, old_values_BT: jax.Array, returns_BT: jax.Array, clip: float
) -> tuple[jax.Array, jax.Array]:
    """Return ½·max((v − R)², (clip(v, old − c, old + c) − R)²), and the clipped tokens; [B, T].

    Source: openai/baselines, by "The 37 Implementation Details of PPO", detail 9.
    """
    clipped_BT = jnp.clip(values_BT, old_values_BT - clip, old_values_BT + clip)
    loss_BT, clipped_loss_BT = (jnp.square(v - returns_BT) for v in (values_BT, clipped_BT))
    return 0.5 * jnp.maximum(loss_BT, clipped_loss_BT), clipped_loss_BT > loss_BT


def policy_loss(
    algorithm: Algorithm,
    logprobs_BT: jax.Array,
    old_logprobs_BT: jax.Array,
    advantages_BT: jax.Array,
    mask_BT: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return the loss of each token by `Algorithm.policy_loss`, and the ratio that it clips.

    clipped            −min(ρ·A, clip(ρ, 1 − low, 1 + high)·A), ρ = exp(logp − old)
    sequence_clipped   the same with s = exp(mean over t of (logp − old)) at each token
    reinforce          −A·logp; its sum over a sequence is −A·log p(sequence)

    Both are [B, T]. Sources: PPO, arXiv 1707.06347, two bounds: DAPO, 2503.14476; GSPO, 2507.18071,
    equations 5 to 7; RLOO, 2402.14740.
    """
    ratio_BT = jnp.exp(logprobs_BT - old_logprobs_BT)
    if algorithm.policy_loss == "reinforce":
        return -advantages_BT * logprobs_BT, ratio_BT
    if algorithm.policy_loss == "sequence_clipped":
        ratio_BT = sequence_ratio(logprobs_BT, old_logprobs_BT, mask_BT)
    clipped_BT = jnp.clip(ratio_BT, 1 - algorithm.clip_low, 1 + algorithm.clip_high)
    return -jnp.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT), ratio_BT


def importance_weights(
    correction: Correction, trainer_BT: jax.Array, emission_BT: jax.Array, mask_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return weights from w = p_trainer / p_emission, and a bool mask of cut weights; [B, T].

    Both are constants. log w = trainer − emission per token; for a sequence it is the sum over the
    mask. tis: min(w, high), cut if w > high. mask: 1 for low ≤ w ≤ high, else 0 and cut. Source:
    verl, "Rollout Correction".
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
