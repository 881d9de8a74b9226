"""The forward pass of a drafter's training, in which the drafter reads its own outputs.

A draft of several tokens feeds outputs back. Step j computes the j-th such entry of a draft, for
the drafts from all entries at once (EAGLE-3's training-time test; HASS's harmonised contexts):

    step 0     entry t reads (g_t, x_{t+1}) and attends to the entries ≤ t
    step j     entry t reads (o^{j−1}_{t−1}, x_{t+1}) and attends to the entries ≤ t − j of step 0,
               and to entry t − j + i of each step i = 1 … j, its own the last

all within a sequence and at rotary position t. If t − j lies before the first column of the
sequence, or of its window, there is no such draft: the output there is finite, and no entry that
counts attends to it (spec.eagle.training). Gradients flow through the outputs fed back, as in
EAGLE-3's code; HASS's stops them there. J = steps, `step` or index j.
Sources: HASS arXiv 2408.15766, EAGLE-3 2503.01840; TLT section 4.1.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from models.attention import NEGATIVE
from models.layout import causal_block_tokens
from spec.eagle import model as eagle
from spec.eagle.batch import DrafterBatch
from spec.eagle.config import EagleConfig
from spec.eagle.model import EagleParams

Entries = list[tuple[jax.Array, jax.Array]]  # each step's rotated keys and values [B, T, K, h]


def unrolled_outputs(
    config: EagleConfig,
    params: EagleParams,
    embedding_VD: jax.Array,
    batch: DrafterBatch,
    num_steps: int,
) -> jax.Array:
    """Return o^j_t of steps j < `num_steps`, [J, B, T, D] in the parameters' dtype."""
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


# The scores are most of a step's memory: the backward pass recomputes them, block by block.
@partial(jax.checkpoint, static_argnums=(0, 1))
def _attend(
    start: int, end: int, q_BTHh: jax.Array, entries: Entries, sequence_BT: jax.Array
) -> jax.Array:
    """Attend from the entries start … end − 1 of the last step; [B, C, H, h]."""
    here, step = slice(start, end), len(entries) - 1
    (keys_BSKh, values_BSKh), *later = [(k[:, :end], v[:, :end]) for k, v in entries]
    # entry t attends to entry t − step + i of step i
    own = [
        tuple(jnp.roll(x, step - i, axis=1)[:, here] for x in entry)
        for i, entry in enumerate(later, start=1)
    ]
    B, _, H, h = q_BTHh.shape
    K = keys_BSKh.shape[2]
    q_BCKGh = q_BTHh[:, here].reshape(B, end - start, K, H // K, h)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)

    seen_CS = jnp.arange(end) <= jnp.arange(start, end)[:, None] - step
    seen_BCS = seen_CS & (sequence_BT[:, here, None] == sequence_BT[:, None, :end])
    scores_BKGCS = product("bckgh,bskh->bkgcs", q_BCKGh, keys_BSKh)
    scores = [jnp.where(seen_BCS[:, None, None], scores_BKGCS, NEGATIVE)]
    scores += [product("bckgh,bckh->bkgc", q_BCKGh, k_BCKh)[..., None] for k_BCKh, _ in own]

    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1) * h**-0.5, axis=-1)
    weights = weights.astype(values_BSKh.dtype)
    out_BCKGh = product("bkgcs,bskh->bckgh", weights[..., :end], values_BSKh)
    for i, (_, v_BCKh) in enumerate(own):
        out_BCKGh += product("bkgc,bckh->bckgh", weights[..., end + i], v_BCKh)
    return out_BCKGh.astype(values_BSKh.dtype).reshape(B, end - start, H, h)
