"""The policy-gradient objective as functions of per-token arrays [B, T].

B counts samples, T their response tokens. Sums are divided by a normaliser of the whole optimizer
step, so that micro-batches add up to the full batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import struct

from reprise.rl.losses.algorithms import Aggregation, Algorithm, AlgorithmConfig, KLEstimator
from reprise.rl.losses.policy_losses import importance_weights, policy_loss
from reprise.rl.records.trajectory import Origin


@struct.dataclass
class CriticInputs:
    """Values of a critic before the update, and returns to learn; [B, T]."""

    returns_BT: jax.Array
    values_BT: jax.Array


@struct.dataclass
class LossInputs:
    """The inputs of the loss; float32 [B, T], `mask_BT` bool, `advantages_B` [B].

    `origins_BT` hold `rl.records.trajectory.Origin` values; advantages of tokens replace
    `advantages_B`.
    """

    mask_BT: jax.Array
    advantages_B: jax.Array
    rollout_logprobs_BT: jax.Array
    old_logprobs_BT: jax.Array
    reference_logprobs_BT: jax.Array
    emission_logprobs_BT: jax.Array
    origins_BT: jax.Array
    token_advantages_BT: jax.Array | None = None
    critic: CriticInputs | None = None


@struct.dataclass
class TokenStatistics:
    """Sums and maxima over the response tokens of a micro-batch, which add up, unlike means."""

    sums: dict[str, jax.Array]
    maxima: dict[str, jax.Array]


def kl_estimate(
    logprobs_BT: jax.Array, reference_logprobs_BT: jax.Array, estimator: KLEstimator
) -> jax.Array:
    """Return estimates of KL(policy ‖ reference) per token, in nats.

    With d = ref − logp: k1 = −d (unbiased; as a loss its expected gradient is 0), k2 = d²/2 (as a
    loss, the gradient of the KL), k3 = exp(d) − 1 − d (unbiased, never negative; as a loss, the
    gradient of KL(reference ‖ policy)). Source: J. Schulman, "Approximating KL divergence",
    joschu.net/blog/kl-approx.html.
    """
    d_BT = reference_logprobs_BT - logprobs_BT
    if estimator == "k1":
        return -d_BT
    if estimator == "k2":
        return 0.5 * d_BT * d_BT
    return jnp.expm1(d_BT) - d_BT


def token_weights(mask_BT: jax.Array, normaliser: jax.Array, aggregation: Aggregation) -> jax.Array:
    """Return the weight of each token in the loss; the sum of weight · loss is the aggregate.

    "sequence": mask / (tokens of its row) / normaliser. Other aggregations: mask / normaliser.
    """
    if aggregation != "sequence":
        return mask_BT / normaliser
    tokens_B = jnp.sum(mask_BT, axis=1)
    return mask_BT / jnp.maximum(tokens_B, 1)[:, None] / normaliser


def normaliser_of(
    num_tokens: int, num_sequences: int, aggregation: Aggregation, limit_tokens: int
) -> float:
    """Return the divisor of `token_weights`, for the tokens and sequences of one optimizer step.

    "token": the tokens (DAPO, arXiv 2503.14476); "sequence" and "sequence_sum": the sequences
    (GRPO, 2402.03300; RLOO, 2402.14740); "constant": the limits of all sequences (Dr. GRPO,
    2503.20783).
    """
    if aggregation == "token":
        return float(num_tokens)
    return float(limit_tokens if aggregation == "constant" else num_sequences)


def loss(
    config: AlgorithmConfig,
    logprobs_BT: jax.Array,
    entropy_BT: jax.Array,
    inputs: LossInputs,
    normaliser: jax.Array,
    unmoved: jax.Array | bool = False,
) -> tuple[jax.Array, tuple[TokenStatistics, jax.Array]]:
    """Return the loss, statistics, and finite rows.

    loss = Σ weight · (importance · policy loss + KL coefficient · KL − entropy coefficient · H)

    `unmoved`: the policy has not been updated with this batch yet, so `recomputed` denominators are
    exactly these log-probs, regardless of rounding.
    """
    algorithm = config.resolved
    mask_BT = inputs.mask_BT

    # masked tokens are replaced before any exp: 0 · inf would be NaN in the gradient
    def masked(x_BT: jax.Array) -> jax.Array:
        return jnp.where(mask_BT, x_BT, 0.0)

    logprobs_BT = masked(logprobs_BT)
    old_BT = masked(inputs.old_logprobs_BT)
    emission_BT = masked(inputs.emission_logprobs_BT)
    if algorithm.old_logprobs == "recomputed":
        old_BT = jnp.where(unmoved, jax.lax.stop_gradient(logprobs_BT), old_BT)
    advantages_BT = inputs.advantages_B[:, None]
    if inputs.token_advantages_BT is not None:
        advantages_BT = inputs.token_advantages_BT
    loss_BT, ratio_BT = policy_loss(algorithm, logprobs_BT, old_BT, advantages_BT, mask_BT)
    per_token = _policy_statistics(algorithm, ratio_BT, advantages_BT) | {
        "batch/entropy": entropy_BT
    }
    if config.importance is not None:
        # REINFORCE has no ratio: the weight follows the policy as it is updated
        now_BT = logprobs_BT if algorithm.policy_loss == "reinforce" else old_BT
        importance_BT, cut_BT = importance_weights(config.importance, now_BT, emission_BT, mask_BT)
        loss_BT = importance_BT * loss_BT
        name = "truncated" if config.importance.kind == "tis" else "masked"
        per_token["correction/weight_mean"] = importance_BT
        per_token[f"correction/{name}_fraction"] = cut_BT.astype(jnp.float32)
    if config.has_kl_loss:
        reference_BT = masked(inputs.reference_logprobs_BT)
        kl_BT = kl_estimate(logprobs_BT, reference_BT, config.kl_estimator or "k3")
        loss_BT = loss_BT + config.kl_coefficient * kl_BT
        per_token["kl"] = kl_BT
    if config.entropy_coefficient:
        loss_BT = loss_BT - config.entropy_coefficient * masked(entropy_BT)
    weight_BT = token_weights(mask_BT, normaliser, algorithm.aggregation)
    finite_B = jnp.all(jnp.isfinite(loss_BT) | ~mask_BT, axis=1)
    total = jnp.sum(jnp.where(mask_BT, loss_BT, 0.0) * weight_BT)
    mismatch = _mismatch_statistics(logprobs_BT, masked(inputs.rollout_logprobs_BT))
    statistics = _reduce(per_token | mismatch, mask_BT)
    statistics.sums["loss"] = total
    statistics.sums.update(_by_origin(logprobs_BT - emission_BT, inputs.origins_BT, mask_BT))
    return total, (jax.lax.stop_gradient(statistics), finite_B)


def _policy_statistics(
    algorithm: Algorithm, ratio_BT: jax.Array, advantages_BT: jax.Array
) -> dict[str, jax.Array]:
    """Return clip statistics; the clip removes the gradient below for A < 0, above for A > 0."""
    low_BT = (ratio_BT < 1 - algorithm.clip_low) & (advantages_BT < 0)
    high_BT = (ratio_BT > 1 + algorithm.clip_high) & (advantages_BT > 0)
    return {
        "clip_ratio/low_mean": low_BT.astype(jnp.float32),
        "clip_ratio/high_mean": high_BT.astype(jnp.float32),
        "clip_ratio/region_mean": (low_BT | high_BT).astype(jnp.float32),
        "ratio/mean": ratio_BT,
    }


def _mismatch_statistics(logprobs_BT: jax.Array, rollout_BT: jax.Array) -> dict[str, jax.Array]:
    """Return |d| and exp(d) − 1 − d, with d = trainer − sampler.

    The mean of the second estimates KL(sampler ‖ trainer).
    """
    d_BT = logprobs_BT - rollout_BT
    return {
        "sampling/sampling_logp_difference/mean": jnp.abs(d_BT),
        "mismatch_kl": jnp.expm1(d_BT) - d_BT,
    }


def _by_origin(d_BT: jax.Array, origins_BT: jax.Array, mask_BT: jax.Array) -> dict[str, jax.Array]:
    """Return sums of exp(d) − 1 − d, d = trainer − emission, over the tokens by origin; counts."""
    sums = {}
    for origin in Origin:
        these_BT = mask_BT & (origins_BT == int(origin))
        kl_BT = jnp.where(these_BT, jnp.expm1(d_BT) - d_BT, 0.0)
        sums[f"{BY_ORIGIN}{origin.name.lower()}"] = jnp.sum(kl_BT)
        sums[f"{COUNT}{origin.name.lower()}"] = jnp.sum(these_BT, dtype=jnp.float32)
    return sums


BY_ORIGIN = "emission_kl/"
COUNT = "emission_tokens/"
CLIPPED = "clip_ratio/"
MAXIMA = {  # metric → (statistic, sign): the largest of sign · statistic
    "sampling/sampling_logp_difference/max": ("sampling/sampling_logp_difference/mean", 1.0),
    "ratio/max": ("ratio/mean", 1.0),
    "ratio/min": ("ratio/mean", -1.0),
}
MISMATCH = (  # meaningful only while the policy is unchanged since sampling
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    "mismatch_kl",
    *(f"{BY_ORIGIN}{origin.name.lower()}" for origin in Origin),
)


def _reduce(per_token: Mapping[str, jax.Array], mask_BT: jax.Array) -> TokenStatistics:
    sums = {name: jnp.sum(jnp.where(mask_BT, x, 0.0)) for name, x in per_token.items()}
    sums["tokens"] = jnp.sum(mask_BT, dtype=jnp.float32)
    maxima = {
        metric: jnp.max(jnp.where(mask_BT, factor * per_token[name], -jnp.inf))
        for metric, (name, factor) in MAXIMA.items()
    }
    return TokenStatistics(sums, maxima)


def zero_statistics(config: AlgorithmConfig) -> TokenStatistics:
    """Return the neutral element of `add_statistics`, with the names that `loss` returns."""
    zero_11 = jnp.zeros((1, 1), jnp.float32)
    inputs = LossInputs(
        zero_11 > 0, zero_11[0], zero_11, zero_11, zero_11, zero_11, zero_11.astype(jnp.int32)
    )
    _, (statistics, _) = loss(config, zero_11, zero_11, inputs, jnp.float32(1))
    return statistics


def add_statistics(left: TokenStatistics, right: TokenStatistics) -> TokenStatistics:
    """Return the statistics of two disjoint sets of tokens together."""
    return TokenStatistics(
        jax.tree.map(jnp.add, left.sums, right.sums),
        jax.tree.map(jnp.maximum, left.maxima, right.maxima),
    )


def metrics_of(
    statistics: TokenStatistics, num_response_tokens: int | None = None
) -> dict[str, float]:
    """Return means over tokens, maxima and the summed loss, under TRL's names; host floats.

    Shares of clipped tokens are relative to `num_response_tokens`, by default to the tokens in the
    statistics: tokens without an advantage need no pass, and are never clipped.
    """
    sums = {name: float(value) for name, value in statistics.sums.items()}
    tokens = max(sums["tokens"], 1.0)
    clip_tokens = tokens if num_response_tokens is None else max(num_response_tokens, 1)
    means = {
        name: value / (clip_tokens if name.startswith(CLIPPED) else tokens)
        for name, value in sums.items()
        if name not in ("tokens", "loss") and not name.startswith((BY_ORIGIN, COUNT))
    }
    means["loss"] = sums["loss"]
    for origin in (o.name.lower() for o in Origin):  # origins without tokens have no mean
        if count := sums[f"{COUNT}{origin}"]:
            means[f"{BY_ORIGIN}{origin}"] = sums[f"{BY_ORIGIN}{origin}"] / count
    extremes = {m: float(statistics.maxima[m]) * factor for m, (_, factor) in MAXIMA.items()}
    return means | extremes
