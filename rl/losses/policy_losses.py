"""The policy losses of the algorithms and of users, PPO's value loss, and importance weights.

Arrays are [B, T]: B sequences of T response tokens. Advantages are [B, T] or [B, 1].
"""

from __future__ import annotations

import math
from typing import Protocol

import jax
import jax.numpy as jnp

from reprise.rl.losses.algorithms import Algorithm, Correction
from reprise.rl.runtime.user_files import open_named


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


class PolicyLoss(Protocol):
    """A loss of each token, and the ratio that it clips; both float [B, T], traced by jax.

    `algorithm` has the clip bounds. Log-probs are 0 where `mask_BT` is False.
    """

    def __call__(
        self,
        algorithm: Algorithm,
        logprobs_BT: jax.Array,
        old_logprobs_BT: jax.Array,
        advantages_BT: jax.Array,
        mask_BT: jax.Array,
    ) -> tuple[jax.Array, jax.Array]: ...


def clipped(
    algorithm: Algorithm,
    logprobs_BT: jax.Array,
    old_logprobs_BT: jax.Array,
    advantages_BT: jax.Array,
    mask_BT: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return −min(ρ·A, clip(ρ, 1 − low, 1 + high)·A), and ρ = exp(logp − old).

    Sources: PPO, arXiv 1707.06347; two bounds: DAPO, 2503.14476.
    """
    ratio_BT = jnp.exp(logprobs_BT - old_logprobs_BT)
    return _clipped(algorithm, ratio_BT, advantages_BT), ratio_BT


def sequence_clipped(
    algorithm: Algorithm,
    logprobs_BT: jax.Array,
    old_logprobs_BT: jax.Array,
    advantages_BT: jax.Array,
    mask_BT: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return the loss of `clipped` with s = exp(mean over t of (logp − old)) at each token, and s.

    Source: GSPO, arXiv 2507.18071, equations 5 to 7.
    """
    ratio_BT = sequence_ratio(logprobs_BT, old_logprobs_BT, mask_BT)
    return _clipped(algorithm, ratio_BT, advantages_BT), ratio_BT


def clipped_weight(
    algorithm: Algorithm,
    logprobs_BT: jax.Array,
    old_logprobs_BT: jax.Array,
    advantages_BT: jax.Array,
    mask_BT: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return −clip(ρ, 1 − low, 1 + high)·A·logp, with the clipped ratio as a constant, and ρ.

    A clipped token keeps its gradient. Source: CISPO, arXiv 2506.13585, equations 4 and 5.
    """
    ratio_BT = jnp.exp(logprobs_BT - old_logprobs_BT)
    weight_BT = jnp.clip(ratio_BT, 1 - algorithm.clip_low, 1 + algorithm.clip_high)
    return -jax.lax.stop_gradient(weight_BT) * advantages_BT * logprobs_BT, ratio_BT


def reinforce(
    algorithm: Algorithm,
    logprobs_BT: jax.Array,
    old_logprobs_BT: jax.Array,
    advantages_BT: jax.Array,
    mask_BT: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return −A·logp, whose sum over a sequence is −A·log p(sequence), and ρ, which has no effect.

    Source: RLOO, arXiv 2402.14740.
    """
    return -advantages_BT * logprobs_BT, jnp.exp(logprobs_BT - old_logprobs_BT)


def _clipped(algorithm: Algorithm, ratio_BT: jax.Array, advantages_BT: jax.Array) -> jax.Array:
    clipped_BT = jnp.clip(ratio_BT, 1 - algorithm.clip_low, 1 + algorithm.clip_high)
    return -jnp.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)


LOSSES: dict[str, PolicyLoss] = {
    "clipped": clipped,
    "sequence_clipped": sequence_clipped,
    "clipped_weight": clipped_weight,
    "reinforce": reinforce,
}


def open_policy_loss(name: str) -> PolicyLoss:
    """Return a loss of the table, or the function that a user's `PATH.py:function` names.

    Raises ValueError or FileNotFoundError.
    """
    return open_named("Algorithm.policy_loss", name, LOSSES, PolicyLoss)


def policy_loss(
    algorithm: Algorithm,
    logprobs_BT: jax.Array,
    old_logprobs_BT: jax.Array,
    advantages_BT: jax.Array,
    mask_BT: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return the loss of each token by `Algorithm.policy_loss`, and its ratio.

    Raises ValueError unless a user function returns two float arrays [B, T].
    """
    name = algorithm.policy_loss
    function = LOSSES.get(name)
    if function is not None:
        return function(algorithm, logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT)
    result = open_policy_loss(name)(algorithm, logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT)
    arrays = result if isinstance(result, tuple) else (result,)
    found = [f"{jnp.result_type(x)} {list(jnp.shape(x))}" for x in arrays]
    wanted = f"float32 {list(mask_BT.shape)}"
    if found != [wanted, wanted]:
        raise ValueError(
            f"Algorithm.policy_loss: expected {name} to return the loss of each token and the "
            f"ratio, both {wanted}, got {' and '.join(found)}"
        )
    return result


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
        weight_BT = jnp.exp(jnp.minimum(log_BT, high))
        cut_BT = log_BT > high
    else:
        cut_BT = (log_BT < low) | (log_BT > high)
        weight_BT = jnp.where(cut_BT, 0.0, 1.0)
    return jax.lax.stop_gradient((weight_BT, cut_BT))
