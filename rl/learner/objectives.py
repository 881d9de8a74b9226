"""Losses by name, as sums over the places of all data, and their jitted steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.config import trained_specs
from models.sharding import replicated
from models.training import clipped_adamw
from models.transformer import Params
from rl.learner import logprobs, trainer
from rl.learner.algorithms import MIN_EPS, adam_rules, require
from rl.learner.config import TrainSpec
from rl.learner.data import Datum, DatumInputs, pack
from rl.learner.gradient_accumulation import Network, all_finite, whole
from rl.learner.losses import TokenStatistics
from rl.learner.micro_batches import MicroBatch
from rl.learner.optimizer import TrainState
from rl.packing import Shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossSettings:
    """Bounds of the ratio ρ = p / q in `ppo`, `cispo` and `gspo`, and β of `dro`."""

    low: Any = 0.8
    high: Any = 1.2
    beta: Any = 0.05


TokenLoss = Callable[[jax.Array, DatumInputs, LossSettings], jax.Array]


def _cross_entropy(logp_EM: jax.Array, x: DatumInputs, settings: LossSettings) -> jax.Array:
    return -logp_EM


def _importance_sampling(logp_EM: jax.Array, x: DatumInputs, settings: LossSettings) -> jax.Array:
    return -jnp.exp(logp_EM - x.logprobs_EM) * x.advantages_EM


def _ppo(logp_EM: jax.Array, x: DatumInputs, settings: LossSettings) -> jax.Array:
    return _clipped(jnp.exp(logp_EM - x.logprobs_EM), x, settings)


def _clipped(ratio_EM: jax.Array, x: DatumInputs, settings: LossSettings) -> jax.Array:
    clipped_EM = jnp.clip(ratio_EM, settings.low, settings.high)
    return -jnp.minimum(ratio_EM * x.advantages_EM, clipped_EM * x.advantages_EM)


def _gspo(logp_EM: jax.Array, x: DatumInputs, settings: LossSettings) -> jax.Array:
    fixed_EM, counts_EM = jax.lax.stop_gradient(logp_EM), x.weights_EM != 0
    sum_E1 = jnp.sum(fixed_EM - x.logprobs_EM, axis=1, keepdims=True, where=counts_EM)
    num_E1 = jnp.maximum(jnp.sum(counts_EM, axis=1, keepdims=True), 1)
    return _clipped(jnp.exp(sum_E1 / num_E1 + logp_EM - fixed_EM), x, settings)


def _cispo(logp_EM: jax.Array, x: DatumInputs, settings: LossSettings) -> jax.Array:
    ratio_EM = jnp.exp(jax.lax.stop_gradient(logp_EM) - x.logprobs_EM)
    return -jnp.clip(ratio_EM, settings.low, settings.high) * x.advantages_EM * logp_EM


def _dro(logp_EM: jax.Array, x: DatumInputs, settings: LossSettings) -> jax.Array:
    d_EM = logp_EM - x.logprobs_EM
    return -(logp_EM * x.advantages_EM - 0.5 * settings.beta * d_EM * d_EM)


# Per place, times its weight, with q the policy that drew the target:
#   cross_entropy         −log p
#   importance_sampling   −ρ·A, ρ = p / q
#   ppo                   −min(ρ·A, clip(ρ, low, high)·A)                 arXiv 1707.06347
#   cispo                 −clip(ρ, low, high)·A·log p, ρ a constant       arXiv 2506.13585
#   dro                   −(A·log p − β/2 · (log ρ)²)                     arXiv 2405.19107
#   gspo                  −min(s·A, clip(s, low, high)·A)                 arXiv 2507.18071, 4.3
# The value of s is the exponential of the mean log ρ of a datum's places with a weight, its
# gradient the one of log p.
LOSSES: Mapping[str, TokenLoss] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
    "gspo": _gspo,
}


def default_settings(loss: str) -> LossSettings:
    """Return a loss's settings; the bounds of `gspo` are its paper's (section 5.1)."""
    return LossSettings(1 - 3e-4, 1 + 4e-4) if loss == "gspo" else LossSettings()


def _loss(
    token_loss: TokenLoss,
    trained: Any,
    base: Any,
    batch: MicroBatch,
    settings: LossSettings,
    recipe: TrainSpec,
) -> Any:
    params = trainer.policy_of(trained, base, recipe)
    logp_EM, _ = logprobs.logprobs_and_entropy(params, batch, recipe)
    inputs: Any = batch.inputs
    logp_EM = jnp.where(inputs.mask_EM, logp_EM, 0.0)
    loss_EM = jnp.where(inputs.mask_EM, token_loss(logp_EM, inputs, settings), 0.0)
    loss_EM = loss_EM * inputs.weights_EM
    finite_E = jnp.all(jnp.isfinite(loss_EM), axis=1)
    outputs = jax.lax.stop_gradient((logp_EM, jnp.sum(loss_EM, axis=1)))
    return jnp.sum(loss_EM), (TokenStatistics({}, {}), finite_E, outputs)


NETWORKS = {
    name: Network(
        trained_specs,
        partial(_loss, token_loss),
        lambda recipe: recipe.optimizer,
        lambda recipe: TokenStatistics({}, {}),
    )
    for name, token_loss in LOSSES.items()
}


def target_logprobs(
    params: Params, data: Sequence[Datum], shape: Shape, recipe: TrainSpec
) -> list[np.ndarray]:
    """Return the log-probs of each datum's targets, float32 [T]; ValueError if they are NaN."""

    def run(batch: MicroBatch) -> jax.Array:
        return logprobs.token_logprobs(params, batch, recipe=recipe)[0]

    packed = pack(data, recipe.model, shape)
    found = logprobs.fetched(run, packed, list(map(len, data)), shape)
    check_numbers(found)
    return found


def check_numbers(logprobs: Sequence[np.ndarray]) -> None:
    """Raise ValueError, naming the data, if log-probs are NaN: their logits are not finite."""
    if bad := [i for i, logprobs_T in enumerate(logprobs) if np.isnan(logprobs_T).any()]:
        raise ValueError(
            f"the log-probs of data {bad[:8]} are not finite; fix: look at the weights (a lower "
            "learning rate often helps)"
        )


@partial(jax.jit, static_argnames=("loss", "recipe"))
def evaluate(
    trained: Any,
    batch: MicroBatch,
    settings: LossSettings,
    base: Any,
    *,
    loss: str,
    recipe: TrainSpec,
) -> tuple[jax.Array, jax.Array]:
    """Return the log-probs [E, M] and the losses [E] of a micro-batch's data."""
    _, (_, _, outputs) = _loss(LOSSES[loss], trained, base, batch, settings, recipe)
    return replicated(outputs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adam:
    """AdamW of one step, after clipping by the global norm (default: not at all)."""

    learning_rate: Any = 1e-4
    b1: Any = 0.9
    b2: Any = 0.95
    eps: Any = 1e-12
    weight_decay: Any = 0.0
    max_grad_norm: Any = math.inf

    def check(self) -> None:
        """Raise ValueError for settings that float32 does not hold."""
        norm = self.max_grad_norm
        require(self, **adam_rules(self), max_grad_norm=(norm >= MIN_EPS, "positive, or inf"))


@partial(jax.jit, static_argnames=("recipe",), donate_argnames=("state",))
def apply(
    state: TrainState, gradients: Any, adam: Adam, *, recipe: TrainSpec
) -> tuple[TrainState, jax.Array, jax.Array]:
    """Take an optimizer step unless the norm or the new weights are not finite.

    Returns the state, the norm, and whether the new weights are finite. `gradients` are sums after
    `gradient_accumulation.join`.
    """
    gradients = whole(gradients)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
    rates = dict(vars(adam))
    rate = rates.pop("learning_rate")
    optimizer = clipped_adamw(lambda step: rate, **rates)
    changes, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    params = trainer.POLICY.constrain(recipe, optax.apply_updates(state.params, changes))
    after = dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state)
    is_finite = all_finite(params)
    is_taken = jnp.isfinite(norm) & is_finite
    state = jax.tree.map(lambda new, old: jnp.where(is_taken, new, old), after, state)
    return state, norm, is_finite
