"""PPO's critic: a copy of the policy trunk with a scalar head, which learns expected rewards.

It reads the same packed micro-batches as the policy; the value of a token is at the position that
predicts it. Axes: B rows, T positions, E samples, M their response tokens, D model width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from reprise.models.config import ModelConfig
from reprise.models.decoder import transformer
from reprise.models.decoder.transformer import Params, ParamSpec, param_specs
from reprise.models.sharding import replicated
from reprise.rl.batches.micro_batches import CriticTargets, MicroBatch, TrainSample
from reprise.rl.learner import gradient_accumulation
from reprise.rl.learner.config import OptimizerConfig, TrainSpec
from reprise.rl.learner.gradient_accumulation import Network, Report, StepScalars
from reprise.rl.learner.logprobs import at_responses, by_sample, unwatched
from reprise.rl.learner.optimizer import CriticState, make_optimizer, settle, trained_shapes
from reprise.rl.losses.advantages import gae, whiten
from reprise.rl.losses.algorithms import AlgorithmConfig
from reprise.rl.losses.losses import LossInputs, TokenStatistics, token_weights
from reprise.rl.losses.policy_losses import clipped_value_loss
from reprise.rl.records.packing import Shape


@struct.dataclass
class Critic:
    """The weights of a critic: a policy without its language head, and a value head."""

    trunk: Params
    head_D: jax.Array


def critic_specs(model: ModelConfig) -> Critic:
    """Return the tree of `ParamSpec`, like `models.decoder.transformer.param_specs`."""
    plain = dataclasses.replace(model, lora=None)
    trunk = dataclasses.replace(param_specs(plain), head_VD=None)
    head_D = ParamSpec((model.d_model,), (None,), 0.0)
    return Critic(trunk, head_D)  # type: ignore[arg-type]


def optimizer_of(recipe: TrainSpec) -> OptimizerConfig:
    """Return the optimizer settings of the policy, with the learning rate of the critic."""
    return dataclasses.replace(recipe.optimizer, learning_rate=recipe.critic.learning_rate)


def init(policy: Params, recipe: TrainSpec) -> CriticState:
    """Return a critic that predicts 0 everywhere; the policy is copied."""
    trunk = dataclasses.replace(policy, head_VD=None)
    trunk = jax.tree.map(lambda p: jnp.array(p, jnp.float32, copy=True), trunk)
    params = Critic(trunk, jnp.zeros(recipe.model.d_model, jnp.float32))
    optimizer = make_optimizer(optimizer_of(recipe), recipe.total_steps)
    return settle(CriticState(params, optimizer.init(params)))


def shapes(recipe: TrainSpec) -> CriticState:
    """Return the shapes of `init`, under the mesh in use."""
    optimizer = make_optimizer(optimizer_of(recipe), recipe.total_steps)
    return CriticState(*trained_shapes(critic_specs(recipe.model), optimizer))


def values(params: Critic, batch: MicroBatch, recipe: TrainSpec) -> jax.Array:
    """Return V = hidden · head where each response token is predicted; float32 [E, M]."""
    hidden_BTD = transformer.hidden(
        recipe.model,
        params.trunk,
        batch.tokens_BT,
        batch.packing,
        remat=recipe.trainer.remat_policy,
        dtype=recipe.trainer.dtype,
    )
    values_BT = jnp.sum(hidden_BTD.astype(jnp.float32) * params.head_D, axis=-1)
    return at_responses(values_BT, batch)


def value_loss(
    values_BT: jax.Array, inputs: LossInputs, normaliser: jax.Array, clip: float
) -> tuple[jax.Array, tuple[TokenStatistics, jax.Array, None]]:
    """Return Σ clipped value loss / normaliser, statistics, and a mask of finite rows.

    The normaliser is the number of tokens of the step.
    """
    assert inputs.critic is not None, "a critic learns from targets"
    mask_BT = inputs.mask_BT
    values_BT = jnp.where(mask_BT, values_BT, 0.0)
    loss_BT, clipped_BT = clipped_value_loss(
        values_BT, inputs.critic.values_BT, inputs.critic.returns_BT, clip
    )
    finite_B = jnp.all(jnp.isfinite(loss_BT) | ~mask_BT, axis=1)
    per_token = {
        "critic/value_loss": loss_BT,
        "critic/clip_fraction": clipped_BT.astype(jnp.float32),
        "critic/value_mean": values_BT,
    }
    sums = {name: jnp.sum(jnp.where(mask_BT, x, 0.0)) for name, x in per_token.items()}
    total = jnp.sum(jnp.where(mask_BT, loss_BT, 0.0) * token_weights(mask_BT, normaliser, "token"))
    sums |= {"tokens": jnp.sum(mask_BT, dtype=jnp.float32), "loss": total}
    return total, (jax.lax.stop_gradient(TokenStatistics(sums, {})), finite_B, None)


def _loss(
    params: Critic, _: Any, batch: MicroBatch, scalars: StepScalars, recipe: TrainSpec
) -> Any:
    values_EM = values(params, batch, recipe)
    return value_loss(values_EM, batch.inputs, scalars.num_tokens, recipe.critic.value_clip)


def _no_statistics(_: TrainSpec) -> TokenStatistics:
    names = ("critic/value_loss", "critic/clip_fraction", "critic/value_mean", "tokens", "loss")
    return TokenStatistics({name: jnp.zeros((), jnp.float32) for name in names}, {})


CRITIC = Network(critic_specs, _loss, optimizer_of, _no_statistics)


@partial(jax.jit, static_argnames=("recipe",))
def token_values(params: Critic, batch: MicroBatch, *, recipe: TrainSpec) -> jax.Array:
    """Return `values` without gradients, whole on every device; compiled once."""
    return replicated(values(params, batch, recipe))


def sample_values(
    params: Critic,
    samples: Sequence[TrainSample],
    shape: Shape,
    recipe: TrainSpec,
    on_pass: Callable[[], None] = unwatched,
) -> list[np.ndarray]:
    """Return the values of response tokens, float32 [num_tokens] per sample, with one fetch."""

    def run(batch: MicroBatch) -> jax.Array:
        return token_values(params, batch, recipe=recipe)

    return by_sample(run, samples, shape, on_pass)


def evaluate(
    params: Critic,
    samples: list[TrainSample],
    shape: Shape,
    recipe: TrainSpec,
    on_pass: Callable[[], None] = unwatched,
) -> tuple[list[TrainSample], dict[str, float]]:
    """Return the samples with advantage, return and value of each token, and metrics of these.

    With `Algorithm.kl_in_reward` the reward of each token is −β (log π − log π_ref), and the reward
    of the response is added at its last token. Explained variance is 1 − Var(returns − values) /
    Var(returns) over all tokens.
    """
    if not samples:
        return samples, {}
    values_E = sample_values(params, samples, shape, recipe, on_pass)
    lengths_E = np.array([len(v) for v in values_E])
    mask_EM = np.arange(lengths_E.max()) < lengths_E[:, None]
    rewards_EM, metrics = _token_rewards(samples, mask_EM, recipe.algorithm)
    values_EM = np.zeros(mask_EM.shape, np.float32)
    values_EM[mask_EM] = np.concatenate(values_E)
    rates = {"gamma": recipe.critic.gamma, "gae_lambda": recipe.critic.gae_lambda}
    advantages_EM, returns_EM = gae(rewards_EM, values_EM, lengths_E, **rates)
    if recipe.algorithm.resolved.advantage_normalisation == "batch":
        advantages_EM = whiten(advantages_EM, mask_EM)
    evaluated = []
    for e, (sample, n) in enumerate(zip(samples, lengths_E, strict=True)):
        targets = CriticTargets(returns_EM[e, :n], values_EM[e, :n])
        advantages = advantages_EM[e, :n]
        evaluated.append(
            dataclasses.replace(sample, token_advantages=advantages, critic_targets=targets)
        )
    returns = returns_EM[mask_EM]
    errors = (returns_EM - values_EM)[mask_EM]
    metrics["critic/return_mean"] = float(returns.mean(dtype=np.float64))
    if (variance := float(returns.var(dtype=np.float64))) > 0:
        explained = 1 - float(errors.var(dtype=np.float64)) / variance
        metrics["critic/explained_variance"] = explained
    return evaluated, metrics


def _token_rewards(
    samples: Sequence[TrainSample], mask_EM: np.ndarray, algorithm: AlgorithmConfig
) -> tuple[np.ndarray, dict[str, float]]:
    """Return the rewards of tokens, float64 [E, M], and the mean KL if the rewards include it."""
    rewards_EM = np.zeros(mask_EM.shape)
    metrics = dict[str, float]()
    if algorithm.kl_in_reward:
        kl = [s.trajectory.logprobs - s.reference_logprobs for s in samples]
        rewards_EM[mask_EM] = -algorithm.kl_coefficient * np.concatenate(kl)
        metrics["kl"] = float(np.concatenate(kl).mean(dtype=np.float64))
    last_E = mask_EM.sum(axis=1) - 1
    rewards_EM[np.arange(len(samples)), last_E] += [s.trajectory.reward for s in samples]
    return rewards_EM, metrics


def metrics_of(reports: Sequence[Report]) -> dict[str, float]:
    """Return means over the tokens of all optimizer steps; `lr` is from the last step."""
    sums = gradient_accumulation.summed(reports).sums
    tokens = max(float(sums["tokens"]), 1.0)
    means = {name: float(x) / tokens for name, x in sums.items() if name.startswith("critic/")}
    return means | {
        "critic/grad_norm": float(np.mean([r.grad_norm for r in reports])),
        "critic/lr": float(reports[-1].lr),
    }
