"""The policy-gradient objective as functions of per-token arrays [B, T].

Here B counts samples and T their response tokens, end token included (the [E, M]
of `rl.batching`). What is summed is divided by a normaliser that the caller takes
over the whole optimizer step, so that micro-batches add up to the full batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp

from rl.advantages import Normalisation

KLEstimator = Literal["k1", "k2", "k3"]
Aggregation = Literal["token", "sequence"]


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig:
    """What is optimised.

    `old_logprobs` are the denominators of the ratio: `rollout` takes what the engine
    recorded of the policy at hand, `emission` what the policy that drew each token
    gave it (an older one where tokens are reused), `recomputed` scores the responses
    anew before the first update. `aggregation` averages over all tokens of an optimizer
    step, or over sequences of their token means. `mask_truncated` leaves responses that
    met the length limit out of the loss (their rewards still count in the group's mean).
    """

    name: Literal["grpo"] = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coefficient: float = 0.0
    kl_estimator: KLEstimator = "k3"
    advantage_normalisation: Normalisation = "std"
    aggregation: Aggregation = "token"
    old_logprobs: Literal["rollout", "emission", "recomputed"] = "rollout"
    mask_truncated: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low <= 1:
            raise ValueError(f"clip_low must be in [0, 1] (1 is no clipping), got {self.clip_low}")
        if not self.clip_high >= 0:
            raise ValueError(f"clip_high must be 0 or more, got {self.clip_high}")
        if not (self.kl_coefficient >= 0 and math.isfinite(self.kl_coefficient)):
            raise ValueError(f"kl_coefficient must be 0 or positive, got {self.kl_coefficient}")
        _choose(self, "name", "grpo")
        _choose(self, "kl_estimator", "k1", "k2", "k3")
        _choose(self, "advantage_normalisation", "std", "none")
        _choose(self, "aggregation", "token", "sequence")
        _choose(self, "old_logprobs", "rollout", "emission", "recomputed")

    @property
    def needs_reference(self) -> bool:
        return self.kl_coefficient > 0


def _choose(config: AlgorithmConfig, field: str, *names: str) -> None:
    value = getattr(config, field)
    if value not in names:
        raise ValueError(f"{field} must be one of {', '.join(names)}, got {value!r}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossInputs:
    """What the loss compares the policy with; float32 [B, T], `mask_BT` bool, `advantages_B` [B].

    Where the mask is False the other arrays may hold anything finite.
    """

    mask_BT: jax.Array
    advantages_B: jax.Array
    rollout_logprobs_BT: jax.Array
    old_logprobs_BT: jax.Array
    reference_logprobs_BT: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenStatistics:
    """Sums and maxima over the response tokens of a micro-batch: they add up, means do not."""

    sums: dict[str, jax.Array]
    maxima: dict[str, jax.Array]


def clipped_policy_loss(
    logprobs_BT: jax.Array,
    old_logprobs_BT: jax.Array,
    advantages_B: jax.Array,
    clip_low: float,
    clip_high: float,
) -> jax.Array:
    """−min(ρ·A, clip(ρ, 1 − low, 1 + high)·A) per token, ρ = exp(logp − old); [B, T].

    Source: PPO, arXiv 1707.06347; two bounds: DAPO, arXiv 2503.14476.
    """
    ratio_BT = jnp.exp(logprobs_BT - old_logprobs_BT)
    clipped_BT = jnp.clip(ratio_BT, 1 - clip_low, 1 + clip_high)
    return -jnp.minimum(ratio_BT * advantages_B[:, None], clipped_BT * advantages_B[:, None])


def kl_estimate(
    logprobs_BT: jax.Array, reference_logprobs_BT: jax.Array, estimator: KLEstimator
) -> jax.Array:
    """Estimates of KL(policy ‖ reference) per token, in nats; with d = ref − logp:

    k1 = −d (unbiased; as a loss its expected gradient is 0), k2 = d²/2 (as a loss,
    the gradient of the KL), k3 = exp(d) − 1 − d (unbiased, never negative). Source:
    J. Schulman, "Approximating KL divergence", joschu.net/blog/kl-approx.html.
    """
    d_BT = reference_logprobs_BT - logprobs_BT
    if estimator == "k1":
        return -d_BT
    if estimator == "k2":
        return 0.5 * d_BT * d_BT
    if estimator == "k3":
        return jnp.expm1(d_BT) - d_BT
    raise ValueError(f"estimator must be 'k1', 'k2' or 'k3', got {estimator!r}")


def token_weights(mask_BT: jax.Array, normaliser: jax.Array, aggregation: Aggregation) -> jax.Array:
    """The weight of each token in the loss; the sum of weight · loss is the aggregate.

    "token": mask / normaliser, the normaliser being the tokens of the optimizer
    step. "sequence": mask / (tokens of its row) / normaliser, the normaliser being
    the sequences of the optimizer step. Rows without tokens weigh nothing.
    """
    if aggregation == "token":
        return mask_BT / normaliser
    if aggregation == "sequence":
        tokens_B = jnp.sum(mask_BT, axis=1)
        return mask_BT / jnp.maximum(tokens_B, 1)[:, None] / normaliser
    raise ValueError(f"aggregation must be 'token' or 'sequence', got {aggregation!r}")


def normaliser_of(num_tokens: int, num_sequences: int, aggregation: Aggregation) -> float:
    """What `token_weights` divides by, for an optimizer step of so many tokens and sequences."""
    return float(num_tokens if aggregation == "token" else num_sequences)


def loss(
    config: AlgorithmConfig,
    logprobs_BT: jax.Array,
    entropy_BT: jax.Array,
    inputs: LossInputs,
    normaliser: jax.Array,
) -> tuple[jax.Array, tuple[TokenStatistics, jax.Array]]:
    """Σ weight · (policy loss + coefficient · KL), its statistics, and which rows are finite.

    Returns (scalar, (statistics, finite_B bool)).
    """
    mask_BT = inputs.mask_BT
    # masked tokens are replaced before any exp: 0 · inf would be NaN in the gradient
    logprobs_BT, old_BT, rollout_BT, reference_BT = (
        jnp.where(mask_BT, x, 0.0)
        for x in (
            logprobs_BT,
            inputs.old_logprobs_BT,
            inputs.rollout_logprobs_BT,
            inputs.reference_logprobs_BT,
        )
    )
    loss_BT = clipped_policy_loss(
        logprobs_BT, old_BT, inputs.advantages_B, config.clip_low, config.clip_high
    )
    per_token = _policy_statistics(config, logprobs_BT, old_BT, inputs.advantages_B)
    per_token |= {"entropy": entropy_BT}
    if config.needs_reference:
        kl_BT = kl_estimate(logprobs_BT, reference_BT, config.kl_estimator)
        loss_BT = loss_BT + config.kl_coefficient * kl_BT
        per_token["kl"] = kl_BT
    weight_BT = token_weights(mask_BT, normaliser, config.aggregation)
    finite_B = jnp.all(jnp.isfinite(loss_BT) | ~mask_BT, axis=1)
    total = jnp.sum(jnp.where(mask_BT, loss_BT, 0.0) * weight_BT)
    mismatch = _mismatch_statistics(logprobs_BT, rollout_BT)
    statistics = _reduce(per_token | mismatch, mask_BT)
    statistics.sums["loss"] = total
    return total, (jax.lax.stop_gradient(statistics), finite_B)


def _policy_statistics(
    config: AlgorithmConfig, logprobs_BT: jax.Array, old_BT: jax.Array, advantages_B: jax.Array
) -> dict[str, jax.Array]:
    """Where the clip took the gradient away: below for A < 0, above for A > 0."""
    ratio_BT = jnp.exp(logprobs_BT - old_BT)
    low_BT = (ratio_BT < 1 - config.clip_low) & (advantages_B[:, None] < 0)
    high_BT = (ratio_BT > 1 + config.clip_high) & (advantages_B[:, None] > 0)
    return {
        "clip_ratio/low_mean": low_BT.astype(jnp.float32),
        "clip_ratio/high_mean": high_BT.astype(jnp.float32),
        "clip_ratio/region_mean": (low_BT | high_BT).astype(jnp.float32),
        "ratio/mean": ratio_BT,
    }


def _mismatch_statistics(logprobs_BT: jax.Array, rollout_BT: jax.Array) -> dict[str, jax.Array]:
    """How far the trainer is from the sampler: |d| and exp(d) − 1 − d, d = trainer − sampler.

    The latter's mean estimates KL(sampler ‖ trainer).
    """
    d_BT = logprobs_BT - rollout_BT
    return {
        "sampling/sampling_logp_difference/mean": jnp.abs(d_BT),
        "mismatch_kl": jnp.expm1(d_BT) - d_BT,
    }


MAXIMA = {  # metric → (statistic, sign): the largest of sign · statistic
    "sampling/sampling_logp_difference/max": ("sampling/sampling_logp_difference/mean", 1.0),
    "ratio/max": ("ratio/mean", 1.0),
    "ratio/min": ("ratio/mean", -1.0),
}
MISMATCH = (  # meaningful only while the policy is still the one that sampled
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    "mismatch_kl",
)


def _reduce(per_token: Mapping[str, jax.Array], mask_BT: jax.Array) -> TokenStatistics:
    sums = {name: jnp.sum(jnp.where(mask_BT, x, 0.0)) for name, x in per_token.items()}
    sums["tokens"] = jnp.sum(mask_BT, dtype=jnp.float32)
    maxima = {
        metric: jnp.max(jnp.where(mask_BT, sign * per_token[name], -jnp.inf))
        for metric, (name, sign) in MAXIMA.items()
    }
    return TokenStatistics(sums, maxima)


def zero_statistics(config: AlgorithmConfig) -> TokenStatistics:
    """The neutral element of `add_statistics`, with the names that `loss` gives."""
    zero = jnp.zeros((), jnp.float32)
    shape = jnp.zeros((1, 1), jnp.float32)
    inputs = LossInputs(shape > 0, shape[0], shape, shape, shape)
    _, (statistics, _) = loss(config, shape, shape, inputs, zero + 1)
    return statistics


def add_statistics(left: TokenStatistics, right: TokenStatistics) -> TokenStatistics:
    """Statistics of two disjoint sets of tokens together."""
    return TokenStatistics(
        jax.tree.map(jnp.add, left.sums, right.sums),
        jax.tree.map(jnp.maximum, left.maxima, right.maxima),
    )


def metrics_of(statistics: TokenStatistics) -> dict[str, float]:
    """Means over tokens, maxima and the summed loss, under TRL's names; host floats."""
    tokens = max(float(statistics.sums["tokens"]), 1.0)
    means = {
        name: float(value) / (1.0 if name == "loss" else tokens)
        for name, value in statistics.sums.items()
        if name != "tokens"
    }
    extremes = {m: float(statistics.maxima[m]) * sign for m, (_, sign) in MAXIMA.items()}
    return means | extremes
