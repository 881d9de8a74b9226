"""Losses by name, summed over the places of all data, and their jitted steps."""

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
from flax import struct

from reprise.models.config import trained_specs
from reprise.models.decoder.training import clipped_adamw
from reprise.models.decoder.transformer import Params
from reprise.models.sharding import replicated
from reprise.rl.batches.data import Datum, DatumInputs, pack
from reprise.rl.batches.drawn import DrawnResponses
from reprise.rl.batches.micro_batches import MicroBatch
from reprise.rl.learner import logprobs, trainer
from reprise.rl.learner.config import TrainSpec
from reprise.rl.learner.gradient_accumulation import Network, all_finite, whole
from reprise.rl.learner.optimizer import TrainState
from reprise.rl.losses.algorithms import MIN_EPS, adam_rules, require
from reprise.rl.losses.losses import TokenStatistics
from reprise.rl.records.packing import Shape


@struct.dataclass
class LossSettings:
    """Bounds of the ratio in `ppo`, `cispo` and `gspo`, and β of `dro`.

    A field of None has the default of the loss (`LOSSES`).
    """

    low: Any = None
    high: Any = None
    beta: Any = None


TokenLoss = Callable[[jax.Array, DatumInputs, LossSettings], jax.Array]


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss per place, and the defaults of the settings that it reads."""

    per_place: TokenLoss
    defaults: LossSettings = dataclasses.field(default_factory=LossSettings)
    has_ratio: bool = True  # of the policy to the policy that drew the target

    @property
    def has_bounds(self) -> bool:
        return self.defaults.low is not None


def _cross_entropy(logp_EM: jax.Array, x: DatumInputs, settings: LossSettings) -> jax.Array:
    return -logp_EM


def _importance_sampling(logp_EM: jax.Array, x: DatumInputs, settings: LossSettings) -> jax.Array:
    return -jnp.exp(logp_EM - x.logprobs_EM) * x.advantages_EM


def _ppo(logp_EM: jax.Array, x: DatumInputs, settings: LossSettings) -> jax.Array:
    return _clipped(jnp.exp(logp_EM - x.logprobs_EM), x, settings)


def _clip(ratio_EM: jax.Array, x: DatumInputs, settings: LossSettings) -> jax.Array:
    """Return the ratio clipped to the bounds of its place, or of the settings if data have none."""
    low = settings.low if x.low_EM is None else x.low_EM
    high = settings.high if x.high_EM is None else x.high_EM
    return jnp.clip(ratio_EM, low, high)


def _clipped(ratio_EM: jax.Array, x: DatumInputs, settings: LossSettings) -> jax.Array:
    clipped_EM = _clip(ratio_EM, x, settings)
    return -jnp.minimum(ratio_EM * x.advantages_EM, clipped_EM * x.advantages_EM)


def _gspo(logp_EM: jax.Array, x: DatumInputs, settings: LossSettings) -> jax.Array:
    fixed_EM = jax.lax.stop_gradient(logp_EM)
    counts_EM = x.weights_EM != 0
    sum_E1 = jnp.sum(fixed_EM - x.logprobs_EM, axis=1, keepdims=True, where=counts_EM)
    num_E1 = jnp.maximum(jnp.sum(counts_EM, axis=1, keepdims=True), 1)
    return _clipped(jnp.exp(sum_E1 / num_E1 + logp_EM - fixed_EM), x, settings)


def _cispo(logp_EM: jax.Array, x: DatumInputs, settings: LossSettings) -> jax.Array:
    ratio_EM = jnp.exp(jax.lax.stop_gradient(logp_EM) - x.logprobs_EM)
    return -_clip(ratio_EM, x, settings) * x.advantages_EM * logp_EM


def _dro(logp_EM: jax.Array, x: DatumInputs, settings: LossSettings) -> jax.Array:
    d_EM = logp_EM - x.logprobs_EM
    return -(logp_EM * x.advantages_EM - 0.5 * settings.beta * d_EM * d_EM)


# Loss per place, before its weight; q is the policy that drew the target:
#   cross_entropy         −log p
#   importance_sampling   −ρ·A, ρ = p / q
#   ppo                   −min(ρ·A, clip(ρ, low, high)·A)                 arXiv 1707.06347
#   cispo                 −clip(ρ, low, high)·A·log p, ρ a constant       arXiv 2506.13585
#   dro                   −(A·log p − β/2 · (log ρ)²)                     arXiv 2405.19107
#   gspo                  −min(s·A, clip(s, low, high)·A)                 arXiv 2507.18071, 4.3
# The value of s is the exponential of the mean log ρ over the weighted places of a datum; log s has
# the gradient of log p.
#
# Sources of the defaults: ppo and cispo (no lower bound, as in its paper), Tinker's tutorial 202,
# "Loss Functions"; dro, the example there; gspo, its paper, section 5.1.
LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(_cross_entropy, has_ratio=False),
    "importance_sampling": Loss(_importance_sampling),
    "ppo": Loss(_ppo, LossSettings(low=0.8, high=1.2)),
    "cispo": Loss(_cispo, LossSettings(low=0.0, high=4.0)),
    "dro": Loss(_dro, LossSettings(beta=0.05)),
    "gspo": Loss(_gspo, LossSettings(low=1 - 3e-4, high=1 + 4e-4)),
}


def complete(loss: str, settings: LossSettings | None) -> LossSettings:
    """Return the settings of a loss, completed with its defaults. Raises ValueError."""
    if loss not in LOSSES:
        raise ValueError(f"expected a loss of {', '.join(LOSSES)}, got {loss!r}")
    defaults = vars(LOSSES[loss].defaults)
    values = {name: x for name, x in vars(settings or LossSettings()).items() if x is not None}
    if unread := [name for name in values if defaults[name] is None]:
        reads = [name for name, x in defaults.items() if x is not None]
        raise ValueError(f"{loss} reads {', '.join(reads) or 'no settings'}, got {unread[0]}")
    whole = dataclasses.replace(LOSSES[loss].defaults, **values)
    if LOSSES[loss].has_bounds and not whole.low <= whole.high:
        raise ValueError(f"{loss}: expected low <= high, got {whole.low} and {whole.high}")
    return whole


def check_inputs(loss: str, data: Sequence[Datum]) -> None:
    """Raise ValueError for data without an input of the loss, or with bounds that it ignores."""
    for i, datum in enumerate(data):
        for name in ("logprobs", "advantages") if LOSSES[loss].has_ratio else ():
            if getattr(datum, name) is None:
                raise ValueError(f"datum {i}: {loss} needs {name}, got none")
        for name in () if LOSSES[loss].has_bounds else ("low", "high"):
            if getattr(datum, name) is not None:
                raise ValueError(f"datum {i}: {loss} has no bounds, got {name}")


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
        partial(_loss, one.per_place),
        lambda recipe: recipe.optimizer,
        lambda recipe: TokenStatistics({}, {}),
    )
    for name, one in LOSSES.items()
}


def target_logprobs(
    params: Params, data: Sequence[Datum], drawn: DrawnResponses, shape: Shape, recipe: TrainSpec
) -> list[np.ndarray]:
    """Return the log-probs of the targets, float32 [T] per datum. Raises ValueError for NaN."""

    def run(batch: MicroBatch) -> jax.Array:
        return logprobs.token_logprobs(params, batch, recipe=recipe)[0]

    packed = pack(data, recipe.model, shape, drawn)
    found = logprobs.fetched(run, packed, list(map(len, data)), shape)
    check_numbers(found)
    drawn.note_scored(data, found)
    return found


def check_numbers(logprobs: Sequence[np.ndarray]) -> None:
    """Raise ValueError that names the data with NaN log-probs: their logits are not finite."""
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
    """Return the log-probs [E, M] and the losses [E] of the data of a micro-batch."""
    _, (_, _, outputs) = _loss(LOSSES[loss].per_place, trained, base, batch, settings, recipe)
    return replicated(outputs)


@struct.dataclass
class Adam:
    """Settings of one AdamW step, after clipping by the global norm (off by default)."""

    learning_rate: Any = 1e-4
    b1: Any = 0.9
    b2: Any = 0.95
    eps: Any = 1e-12
    weight_decay: Any = 0.0
    max_grad_norm: Any = math.inf

    def check(self) -> None:
        """Raise ValueError for settings that are out of range in float32."""
        norm = self.max_grad_norm
        require(self, **adam_rules(self), max_grad_norm=(norm >= MIN_EPS, "positive, or inf"))


@partial(jax.jit, static_argnames=("recipe",), donate_argnames=("state",))
def apply(
    state: TrainState, gradients: Any, adam: Adam, *, recipe: TrainSpec
) -> tuple[TrainState, jax.Array, jax.Array]:
    """Take an optimizer step unless the norm or the new weights are not finite.

    Returns the state, the norm, and whether the new weights are finite. `gradients` are the sums
    after `gradient_accumulation.join`.
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
