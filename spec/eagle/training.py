"""Training of EAGLE-style drafters: one workflow for EAGLE, HASS and EAGLE-3 (TLT section 4.1).

    loss = Σ_j decay^j (feature_weight · feature_j + token_weight · token_j)

over the steps j of the unroll (spec.eagle.unroll), each term the mean over the entries that
count at j (spec.eagle.losses). Entry t joins f_t with x_{t+1}; its output is compared with
f_{t+1} and the policy's distribution of x_{t+2}. The variants differ in these numbers only, and
`eagle3` in the drafter's design. The policy's embedding and head are frozen.

The jitted steps are here. The mesh is the caller's (`jax.set_mesh`): the batch is split by rows,
the parameters are replicated or laid out by `eagle.param_specs`.
"""

from __future__ import annotations

import dataclasses
import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from models.training import clipped_adamw
from spec.eagle import losses
from spec.eagle.batch import DrafterBatch
from spec.eagle.config import DrafterTrainingConfig, EagleConfig
from spec.eagle.model import EagleParams, SharedParams
from spec.eagle.unroll import unrolled_outputs

Metrics = dict[str, jax.Array]
MAX_GRAD_NORM, B1, B2 = 0.5, 0.9, 0.95  # of AdamW


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DrafterState:
    """A drafter in training: weights, optax's state, and steps applied (int32)."""

    params: EagleParams
    optimizer: Any
    step: jax.Array


def loss(
    config: EagleConfig,
    training: DrafterTrainingConfig,
    params: EagleParams,
    frozen: SharedParams,
    batch: DrafterBatch,
    temperature: jax.Array,
) -> tuple[jax.Array, Metrics]:
    """Return the loss and its metrics.

    loss = feature_weight · `feature_loss` + token_weight · `token_loss`, both summed over the
    steps with their decay. `accuracy_top1`, `accuracy_top3` and `agreement` (spec.eagle.losses)
    are those of step 0; `num_entries` that count at step 0 weight means over several batches.
    `frozen` holds the policy's head, which is the teacher, even if the drafter has its own.

    Raises ValueError where drafter and variant do not fit.
    """
    _check_fit(config, training, frozen)
    terms, J = training.terms, training.terms.unroll_steps
    outputs_JBTD = unrolled_outputs(config, params, frozen.embedding_VD, batch, J)
    counts_JBT = _counts(batch, J)
    next_states_BTD = jnp.roll(batch.hidden_BTW[..., -config.layer.d_model :], -1, axis=1)
    sums = losses.token_sums(
        config,
        params,
        frozen,
        outputs_JBTD,
        next_states_BTD,
        jnp.roll(batch.tokens_BT, -2, axis=1),
        counts_JBT,
        jnp.asarray(temperature, jnp.float32),
        chunk_tokens=training.chunk_tokens,
    )
    num_J = jnp.sum(counts_JBT, axis=(1, 2))
    decay_J = terms.unroll_decay ** jnp.arange(J, dtype=jnp.float32)
    share_J = decay_J / jnp.maximum(num_J, 1)
    token_loss, feature_loss = share_J @ sums["loss"], jnp.zeros((), jnp.float32)
    if config.design == "eagle":
        feature_loss = share_J @ losses.feature_sums(outputs_JBTD, next_states_BTD, counts_JBT)
    total = terms.feature_weight * feature_loss + terms.token_weight * token_loss
    names = {"accuracy_top1": "top1", "accuracy_top3": "top3", "agreement": "agreement"}
    metrics = {name: sums[key][0] / jnp.maximum(num_J[0], 1) for name, key in names.items()}
    metrics |= {"loss": total, "token_loss": token_loss, "feature_loss": feature_loss}
    return total, metrics | {"num_entries": num_J[0]}


def _counts(batch: DrafterBatch, num_steps: int) -> jax.Array:
    """Return which entries count at each step, bool [J, B, T].

    Entry t of step j began as entry t − j of step 0, which must be of the same sequence: before a
    window of a long sequence the row holds another sequence, or nothing.
    """
    column_T = jnp.arange(batch.tokens_BT.shape[1])
    sequence_BT = jnp.asarray(batch.sequence_BT)

    def began_BT(j: int) -> jax.Array:
        return (column_T >= j) & (jnp.roll(sequence_BT, j, axis=1) == sequence_BT)

    counts_BT = jnp.asarray(batch.counts_BT).astype(bool)
    return jnp.stack([counts_BT & began_BT(j) for j in range(num_steps)])


@functools.cache
def make_optimizer(training: DrafterTrainingConfig) -> optax.GradientTransformation:
    def learning_rate(step: jax.Array) -> jax.Array:
        rise = jnp.minimum(1.0, (step + 1) / max(training.warmup_steps, 1))
        return training.learning_rate * rise

    return clipped_adamw(learning_rate, b1=B1, b2=B2, max_grad_norm=MAX_GRAD_NORM)


def state_of(training: DrafterTrainingConfig, params: EagleParams) -> DrafterState:
    """Return the state before the first step; it takes `params` over, since steps donate them."""
    return DrafterState(params, make_optimizer(training).init(params), jnp.zeros((), jnp.int32))


@partial(jax.jit, static_argnames=("config", "training"))
def gradients(
    params: EagleParams,
    frozen: SharedParams,
    batch: DrafterBatch,
    temperature: jax.Array,
    *,
    config: EagleConfig,
    training: DrafterTrainingConfig,
) -> tuple[EagleParams, Metrics]:
    """Return the loss's gradient and its metrics, with the norm before clipping as `grad_norm`.

    Gradients of several batches, averaged with the weights `num_entries`, are the gradient of all
    of them if every entry counts at all steps: prompts have more tokens than there are steps, and
    rows hold whole sequences (the first entries of a later window do not count at later steps).
    """

    def loss_of(params: EagleParams) -> tuple[jax.Array, Metrics]:
        return loss(config, training, params, frozen, batch, temperature)

    grads, metrics = jax.grad(loss_of, has_aux=True)(params)
    return grads, metrics | {"grad_norm": _norm(grads)}


@partial(jax.jit, static_argnames=("training",), donate_argnames=("state",))
def apply(
    state: DrafterState, grads: EagleParams, *, training: DrafterTrainingConfig
) -> tuple[DrafterState, jax.Array]:
    """Take one optimizer step, and return int32 1 if it was skipped; `state` is donated.

    A step is skipped, and the state stays as it was, if the norm of the gradient is not finite.
    """
    changes, optimizer = make_optimizer(training).update(grads, state.optimizer, state.params)
    after = DrafterState(optax.apply_updates(state.params, changes), optimizer, state.step + 1)
    finite = jnp.isfinite(_norm(grads))
    state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, state)
    return state, 1 - finite.astype(jnp.int32)


def _norm(grads: EagleParams) -> jax.Array:
    """Return √ of the sum of all squares, float32: not finite if any of them is not."""
    squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)]
    return jnp.sqrt(jnp.sum(jnp.stack(squares)))


def _check_fit(config: EagleConfig, training: DrafterTrainingConfig, frozen: SharedParams) -> None:
    if config.design != training.design:
        raise ValueError(
            f"expected a drafter of design {training.design} for variant={training.variant!r}, "
            f"got {config.design}: change the drafter's design or DrafterTraining.variant"
        )
    num_rows, V = frozen.head_UD.shape[0], frozen.embedding_VD.shape[0]
    assert num_rows == config.num_draft_ids, "not the policy's head over the draft tokens"
    assert num_rows == V or frozen.draft_ids_U is not None, "a head over some tokens needs a map"
