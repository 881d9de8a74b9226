"""Training of EAGLE-style drafters: EAGLE, HASS and EAGLE-3 in one workflow (TLT section 4.1).

    loss = Σ_j decay^j (feature_weight · feature_j + token_weight · token_j)

summed over the steps j of an unroll. The drafter reads its previous outputs there, as it does when
it drafts several tokens (training-time test in EAGLE-3, harmonised contexts in HASS):

    step 0     entry t reads (g_t, x_{t+1}) and attends to the entries ≤ t
    step j     entry t reads (o^{j−1}_{t−1}, x_{t+1}) and attends to the entries ≤ t − j of step 0,
               and to entry t − j + i of each step i = 1 … j (i = j is itself)

Entries attend within a sequence and are at rotary position t. If t − j is before the sequence or
its window, the output is finite and no counted entry attends to it. Gradients flow through the
outputs fed back, as in the code of EAGLE-3; the code of HASS stops gradients there.

Output o_t is compared with the last hidden state f_{t+1} of the policy, over the counted entries:

    feature    mean over D of SmoothL1(o_t − f_{t+1})
    token      −Σ_u p(u) log q(u),  p = softmax(head(f_{t+1}) / T),  q = softmax(head'(o_t) / T)

p and q are over the draft tokens; head is the frozen policy head, and head' is the drafter head if
the drafter has one. The caller sets the mesh (`jax.set_mesh`): batches are split by rows,
parameters are replicated or laid out by `eagle.param_specs`. J = steps, `step` or index j, U =
draft tokens.
Sources: EAGLE arXiv 2401.15077, HASS 2408.15766, EAGLE-3 2503.01840.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from reprise.models.decoder.layers import linear
from reprise.models.decoder.training import clipped_adamw
from reprise.models.decoder.transformer import without_unused
from reprise.models.kernels.shared.powers import NEGATIVE
from reprise.models.layout import causal_block_tokens
from reprise.spec.eagle import model as eagle
from reprise.spec.eagle.config import DrafterTrainingConfig, EagleConfig
from reprise.spec.eagle.model import EagleParams, SharedParams
from reprise.spec.eagle_training.training_data import DrafterBatch

CHUNK_TOKENS = 4096  # entries with logits in memory at a time
Entries = list[tuple[jax.Array, jax.Array]]  # rotated keys and values of each step, [B, T, K, h]


def unrolled_outputs(
    config: EagleConfig,
    params: EagleParams,
    embedding_VD: jax.Array,
    batch: DrafterBatch,
    num_steps: int,
) -> jax.Array:
    """Return o^j_t of steps j < `num_steps`, [J, B, T, D] in the parameter dtype."""
    next_BT = jnp.roll(batch.tokens_BT, -1, axis=1)
    features_BTD = eagle.features(config, params, batch.hidden_BTW)
    entries: Entries = []
    outputs = []
    for _ in range(num_steps):

        def look(q_BTHh: jax.Array, k_BTKh: jax.Array, v_BTKh: jax.Array) -> jax.Array:
            entries.append((k_BTKh, v_BTKh))
            return _look(q_BTHh, entries, batch.sequence_BT)

        outputs_BTD = eagle.layer_outputs(
            config, params, embedding_VD, next_BT, features_BTD, batch.positions_BT, look
        )
        outputs.append(outputs_BTD)
        features_BTD = jnp.roll(outputs_BTD, 1, axis=1)
    return jnp.stack(outputs)


def _look(q_BTHh: jax.Array, entries: Entries, sequence_BT: jax.Array) -> jax.Array:
    """Attend from the last step, one block of entries at a time, as `attend_causally` does."""
    T = q_BTHh.shape[1]
    size = causal_block_tokens(T)
    blocks = [
        _attend(end - size, end, q_BTHh, entries, sequence_BT) for end in range(size, T + 1, size)
    ]
    return jnp.concatenate(blocks, axis=1)


# Scores take most of the memory of a step, so the backward pass recomputes them by block.
@partial(jax.checkpoint, static_argnums=(0, 1))
def _attend(
    start: int, end: int, q_BTHh: jax.Array, entries: Entries, sequence_BT: jax.Array
) -> jax.Array:
    """Attend from the entries start … end − 1 of the last step; [B, C, H, h]."""
    positions = slice(start, end)
    step = len(entries) - 1
    (keys_BSKh, values_BSKh), *later = [(k[:, :end], v[:, :end]) for k, v in entries]
    # entry t attends to entry t − step + i of step i
    own = [
        tuple(jnp.roll(x, step - i, axis=1)[:, positions] for x in entry)
        for i, entry in enumerate(later, start=1)
    ]
    B, _, H, h = q_BTHh.shape
    K = keys_BSKh.shape[2]
    q_BCKGh = q_BTHh[:, positions].reshape(B, end - start, K, H // K, h)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)

    seen_CS = jnp.arange(end) <= jnp.arange(start, end)[:, None] - step
    seen_BCS = seen_CS & (sequence_BT[:, positions, None] == sequence_BT[:, None, :end])
    scores_BKGCS = product("bckgh,bskh->bkgcs", q_BCKGh, keys_BSKh)
    scores = [jnp.where(seen_BCS[:, None, None], scores_BKGCS, NEGATIVE)]
    scores += [product("bckgh,bckh->bkgc", q_BCKGh, k_BCKh)[..., None] for k_BCKh, _ in own]

    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1) * h**-0.5, axis=-1)
    weights = weights.astype(values_BSKh.dtype)
    out_BCKGh = product("bkgcs,bskh->bckgh", weights[..., :end], values_BSKh)
    for i, (_, v_BCKh) in enumerate(own):
        out_BCKGh += product("bkgc,bckh->bckgh", weights[..., end + i], v_BCKh)
    return out_BCKGh.astype(values_BSKh.dtype).reshape(B, end - start, H, h)


def feature_sums(
    outputs_JBTD: jax.Array, targets_BTD: jax.Array, counts_JBT: jax.Array
) -> jax.Array:
    """Return Σ mean_D SmoothL1(o − f), float32 [J]; SmoothL1(x) = x²/2 if |x| < 1, else |x| − ½."""
    x = jnp.abs(outputs_JBTD.astype(jnp.float32) - targets_BTD.astype(jnp.float32))
    loss_JBT = jnp.mean(jnp.where(x < 1, 0.5 * x * x, x - 0.5), axis=-1)
    return _sum_counted(loss_JBT, counts_JBT)


def token_sums(
    config: EagleConfig,
    params: EagleParams,
    frozen: SharedParams,
    outputs_JBTD: jax.Array,
    targets_BTD: jax.Array,
    tokens_BT: jax.Array,
    counts_JBT: jax.Array,
    temperature: jax.Array,
    *,
    chunk_tokens: int,
) -> dict[str, jax.Array]:
    """Return sums over the counted entries, each float32 [J].

    `tokens_BT` holds the token that each entry drafts. `loss` is the token loss. `top1` and `top3`
    count entries if this token is among the first 1 or 3 draft tokens; tokens outside the draft
    vocabulary never count. `agreement` is Σ_u min(p, q), the agreement of a maximal coupling.
    Temperature 0 counts as 1. At most `chunk_tokens` entries have logits in memory, in the backward
    pass too.
    """
    scale = 1 / jnp.where(temperature > 0, temperature, 1.0).astype(jnp.float32)
    own_head_UD = frozen.head_UD if params.head_UD is None else params.head_UD

    def chunk(part: tuple[jax.Array, ...]) -> dict[str, jax.Array]:
        outputs_JBCD, targets_BCD, drafted_BC, counts_JBC = part
        x_BCD = targets_BCD.astype(frozen.head_UD.dtype)
        policy_BCU = without_unused(config.layer, linear(x_BCD, frozen.head_UD, jnp.float32))
        log_p_BCU = jax.nn.log_softmax(policy_BCU * scale)

        def one(step: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
            outputs_BCD, counts_BC = step
            logits_BCU = eagle.logits(config, params, own_head_UD, outputs_BCD)
            log_q_BCU = jax.nn.log_softmax(logits_BCU * scale)
            each = _hits(jax.lax.stop_gradient(log_q_BCU), log_p_BCU, drafted_BC)
            finite_BCU = jnp.where(log_p_BCU > -jnp.inf, log_q_BCU, 0.0)  # 0 · −∞ is 0 here
            each["loss"] = -jnp.sum(jnp.exp(log_p_BCU) * finite_BCU, axis=-1)
            return {name: _sum_counted(x_BC, counts_BC) for name, x_BC in each.items()}

        return jax.lax.map(jax.checkpoint(one), (outputs_JBCD, counts_JBC))

    B, T = tokens_BT.shape
    num_chunks = -(-T // max(1, chunk_tokens // B))
    parts = (outputs_JBTD, targets_BTD, draft_ids_of(frozen, tokens_BT), counts_JBT)
    parts = tuple(_sliced(x, axis, num_chunks) for x, axis in zip(parts, (2, 1, 1, 2), strict=True))
    sums = jax.lax.map(jax.checkpoint(chunk), parts)
    return {name: jnp.sum(x, axis=0) for name, x in sums.items()}


def draft_ids_of(frozen: SharedParams, tokens_BT: jax.Array) -> jax.Array:
    """Return the indices of policy tokens in the draft vocabulary, −1 for tokens outside."""
    if frozen.draft_ids_U is None:
        return tokens_BT
    V = frozen.embedding_VD.shape[0]
    U = frozen.head_UD.shape[0]
    ids_V = jnp.full(V, -1, jnp.int32).at[frozen.draft_ids_U].set(jnp.arange(U, dtype=jnp.int32))
    return jnp.take(ids_V, jnp.maximum(tokens_BT, 0), mode="clip")


def _hits(
    log_q_BTU: jax.Array, log_p_BTU: jax.Array, drafted_BT: jax.Array
) -> dict[str, jax.Array]:
    """Return the metrics of each entry; among equally likely tokens, the first ranks higher."""
    ids = jnp.maximum(drafted_BT, 0)[..., None]
    prob_BT1 = jnp.take_along_axis(log_q_BTU, ids, axis=-1)
    first_BTU = jnp.arange(log_q_BTU.shape[-1]) < ids
    better_BTU = (log_q_BTU > prob_BT1) | ((log_q_BTU == prob_BT1) & first_BTU)
    rank_BT = jnp.where(drafted_BT < 0, jnp.iinfo(jnp.int32).max, jnp.sum(better_BTU, axis=-1))
    return {
        "top1": (rank_BT < 1).astype(jnp.float32),
        "top3": (rank_BT < 3).astype(jnp.float32),
        "agreement": jnp.sum(jnp.exp(jnp.minimum(log_q_BTU, log_p_BTU)), axis=-1),
    }


def _sum_counted(x_BT: jax.Array, counts_BT: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(counts_BT, x_BT, 0.0), axis=(-2, -1))


def _sliced(x: jax.Array, axis: int, num_chunks: int) -> jax.Array:
    """Cut an axis into equal slices, padded with zeros; rows stay whole on their devices."""
    size = -(-x.shape[axis] // num_chunks)
    over = [(0, num_chunks * size - n if i == axis else 0) for i, n in enumerate(x.shape)]
    shape = (*x.shape[:axis], num_chunks, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(jnp.pad(x, over).reshape(shape), axis, 0)


Metrics = dict[str, jax.Array]
MAX_GRAD_NORM = 0.5
B1 = 0.9
B2 = 0.95  # of AdamW


@struct.dataclass
class DrafterState:
    """A drafter in training: weights, optax state, and the number of applied steps (int32)."""

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

    `feature_loss` and `token_loss` are sums over the steps, weighted by the decay. `accuracy_top1`,
    `accuracy_top3` and `agreement` are for step 0. `num_entries`, the number of counted entries at
    step 0, is the weight in means over several batches. `frozen` holds the policy head, which is
    the teacher, in the rollout dtype. Raises ValueError if drafter and variant do not fit.
    """
    _check_fit(config, training, frozen)
    dtype = frozen.head_UD.dtype
    params = jax.tree.map(lambda p: p.astype(dtype), params)
    terms = training.terms
    J = training.terms.unroll_steps
    outputs_JBTD = unrolled_outputs(config, params, frozen.embedding_VD, batch, J)
    counts_JBT = _counts(batch, J)
    next_states_BTD = jnp.roll(batch.hidden_BTW[..., -config.layer.d_model :], -1, axis=1)
    sums = token_sums(
        config,
        params,
        frozen,
        outputs_JBTD,
        next_states_BTD,
        jnp.roll(batch.tokens_BT, -2, axis=1),
        counts_JBT,
        jnp.asarray(temperature, jnp.float32),
        chunk_tokens=CHUNK_TOKENS,
    )
    num_J = jnp.sum(counts_JBT, axis=(1, 2))
    decay_J = terms.unroll_decay ** jnp.arange(J, dtype=jnp.float32)
    share_J = decay_J / jnp.maximum(num_J, 1)
    token_loss = share_J @ sums["loss"]
    feature_loss = jnp.zeros((), jnp.float32)
    if config.design == "eagle":
        feature_loss = share_J @ feature_sums(outputs_JBTD, next_states_BTD, counts_JBT)
    total = terms.feature_weight * feature_loss + terms.token_weight * token_loss
    names = {"accuracy_top1": "top1", "accuracy_top3": "top3", "agreement": "agreement"}
    metrics = {name: sums[key][0] / jnp.maximum(num_J[0], 1) for name, key in names.items()}
    metrics |= {"loss": total, "token_loss": token_loss, "feature_loss": feature_loss}
    return total, metrics | {"num_entries": num_J[0]}


def _counts(batch: DrafterBatch, num_steps: int) -> jax.Array:
    """Return which entries count at each step j: t and t − j are in one sequence; [J, B, T]."""
    column_T = jnp.arange(batch.tokens_BT.shape[1])
    sequence_BT = jnp.asarray(batch.sequence_BT)

    def same_BT(j: int) -> jax.Array:
        return (column_T >= j) & (jnp.roll(sequence_BT, j, axis=1) == sequence_BT)

    counts_BT = jnp.asarray(batch.counts_BT).astype(bool)
    return jnp.stack([counts_BT & same_BT(j) for j in range(num_steps)])


@functools.cache
def make_optimizer(training: DrafterTrainingConfig) -> optax.GradientTransformation:
    def learning_rate(step: jax.Array) -> jax.Array:
        rise = jnp.minimum(1.0, (step + 1) / max(training.warmup_steps, 1))
        return training.learning_rate * rise

    return clipped_adamw(learning_rate, b1=B1, b2=B2, max_grad_norm=MAX_GRAD_NORM)


def state_of(training: DrafterTrainingConfig, params: EagleParams) -> DrafterState:
    """Return the state before the first step; later steps donate `params`."""
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
    """Return the gradient and metrics of the loss, with the norm before clipping as `grad_norm`.

    The average of batch gradients, weighted by `num_entries`, is the gradient over all batches if
    every counted entry counts at all steps: prompts have more tokens than there are steps, and rows
    hold whole sequences.
    """

    def loss_of(params: EagleParams) -> tuple[jax.Array, Metrics]:
        return loss(config, training, params, frozen, batch, temperature)

    grads, metrics = jax.grad(loss_of, has_aux=True)(params)
    return grads, metrics | {"grad_norm": _norm(grads)}


@partial(jax.jit, static_argnames=("training",), donate_argnames=("state",))
def apply(
    state: DrafterState, grads: EagleParams, *, training: DrafterTrainingConfig
) -> tuple[DrafterState, jax.Array]:
    """Apply one step (`state` is donated); skip it and return int32 1 for a non-finite gradient."""
    changes, optimizer = make_optimizer(training).update(grads, state.optimizer, state.params)
    after = DrafterState(optax.apply_updates(state.params, changes), optimizer, state.step + 1)
    finite = jnp.isfinite(_norm(grads))
    state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, state)
    return state, 1 - finite.astype(jnp.int32)


def _norm(grads: EagleParams) -> jax.Array:
    """Return the float32 norm of all gradients; not finite if any gradient is not finite."""
    squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)]
    return jnp.sqrt(jnp.sum(jnp.stack(squares)))


def _check_fit(config: EagleConfig, training: DrafterTrainingConfig, frozen: SharedParams) -> None:
    if config.design != training.design:
        raise ValueError(
            f"expected a drafter of design {training.design} for variant={training.variant!r}, "
            f"got {config.design}: change the drafter's design or DrafterTraining.variant"
        )
    num_rows = frozen.head_UD.shape[0]
    V = frozen.embedding_VD.shape[0]
    assert num_rows == config.num_draft_ids, "not the policy's head over the draft tokens"
    assert num_rows == V or frozen.draft_ids_U is not None, "a head over some tokens needs a map"
