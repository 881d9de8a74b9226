"""Device steps of a draft model: passes over chunks of known tokens, and chains of draft tokens.

Its cache holds a row per request: B = rows, P = rows of one pass, C = tokens of a chunk,
W = tokens of a chain's first pass, K = draft tokens of a chain. A row's tokens lie at their own
positions. Entries behind the known ones are dead: every pass overwrites those it attends to.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from models import kv_cache, transformer
from models.config import ModelConfig
from models.kv_cache import KVCache
from models.sharding import constrain
from spec import sampling
from spec.draft_cache.tables import Ends, unpack_chunks, unpack_ends
from spec.sampling import Processing


@partial(jax.jit, static_argnames="config", donate_argnames="cache")
def catch_up(
    params: transformer.Params, cache: KVCache, table_PX: jax.Array, *, config: ModelConfig
) -> KVCache:
    """Write the entries of chunks of P rows (`DraftCache`): all before them must be known."""
    row_P, _, start_P, tokens_PC = unpack_chunks(table_PX)
    some = jax.tree.map(lambda rows: jnp.take(rows, row_P, axis=0, mode="clip"), cache)
    _, some = _pass(config, params, some, tokens_PC, start_P)
    return jax.tree.map(
        lambda rows, new: kv_cache.pin(rows.at[row_P].set(new, mode="drop")), cache, some
    )


@partial(
    jax.jit,
    static_argnames=("config", "scheme", "most_tokens"),
    donate_argnames="cache",
)
def draft_chains(
    params: transformer.Params,
    cache: KVCache,
    table_BX: jax.Array,
    min_prob: jax.Array,
    key: jax.Array,
    *,
    config: ModelConfig,
    scheme: sampling.Draw | None,
    most_tokens: int,
) -> tuple[KVCache, jax.Array]:
    """Chains of up to `most_tokens` draft tokens from the ends of all rows (`unpack_ends`).

    The first pass computes the last W of a row's `total` tokens (all, if there are fewer): entries
    before these must be known. Each further pass computes the last draft token. Chains end
    together, once each has its `most` draft tokens or a probability below `min_prob`. Without a
    `scheme` draft tokens are the likeliest tokens, otherwise draws with the noise of `request_id`
    at response positions `emitted` …; their probability is the product of the model's own
    probabilities. Rows with a `most` of 0 are at rest and not written, nor is a row behind its
    `most`. Requires `total + most <= S`. The result is packed, for `unpack`.
    """
    ends = unpack_ends(table_BX)
    state = params, cache, ends, min_prob, key
    cache, tokens_BK, prob_BK, k = chains(
        *state, config=config, scheme=scheme, most_tokens=most_tokens
    )
    bits_BK = jax.lax.bitcast_convert_type(prob_BK, jnp.int32)
    count_B1 = jnp.broadcast_to(k, (len(table_BX), 1))
    # a loop's results may come out on other shards
    cache = kv_cache.map_arrays(kv_cache.pin, cache)
    return cache, jnp.concatenate([tokens_BK, bits_BK, count_B1], axis=1)


def chains(
    params: transformer.Params,
    cache: KVCache,
    ends: Ends,
    min_prob: jax.Array,
    key: jax.Array,
    *,
    config: ModelConfig,
    scheme: sampling.Draw | None,
    most_tokens: int,
) -> tuple[KVCache, jax.Array, jax.Array, jax.Array]:
    """Compute `draft_chains`; returns the cache, tokens and probabilities [B, K], and their number.

    What lies behind that number is 0.
    """
    K, S, total_B, most_B = most_tokens, cache.num_positions, ends.total_B, ends.most_B
    B = len(total_B)
    keys_B, first_B = sampling.request_keys(key, ends.request_id_B), ends.starts(0, S)
    hidden_BWD, cache = _pass(config, params, cache, ends.tokens_BW, first_B)
    last_B11 = jnp.maximum(total_B - first_B - 1, 0)[:, None, None]
    hidden_B1D = jnp.take_along_axis(hidden_BWD, last_B11, axis=1)

    def draft_token(k: jax.Array, hidden_B1D: jax.Array, drawn: tuple) -> tuple:
        tokens_BK, prob_BK, prob_B = drawn
        logits_B1V = constrain(transformer.head(params, hidden_B1D), "batch", None, "vocab")
        keys_B1 = sampling.position_keys(keys_B, (ends.emitted_B + k)[:, None])
        token_B1, logprob_B1 = _draw(logits_B1V, keys_B1, ends.processing, scheme)
        prob_B = prob_B * jnp.exp(logprob_B1[:, 0])
        tokens_BK = jax.lax.dynamic_update_slice(tokens_BK, token_B1, (0, k))
        prob_BK = jax.lax.dynamic_update_slice(prob_BK, prob_B[:, None], (0, k))
        return tokens_BK, prob_BK, prob_B

    def more(carry: tuple) -> jax.Array:
        k, _, (_, _, prob_B) = carry
        return jnp.any((k < most_B) & (prob_B >= min_prob))

    def step(carry: tuple) -> tuple:
        k, cache, drawn = carry
        token_B1 = jax.lax.dynamic_slice_in_dim(drawn[0], k - 1, 1, axis=1)
        at_B = jnp.where(k < most_B, total_B + k - 1, S)  # not written
        hidden_B1D, cache = _pass(config, params, cache, token_B1, at_B)
        return k + 1, cache, draft_token(k, hidden_B1D, drawn)

    none = jnp.zeros((B, K), jnp.int32), jnp.zeros((B, K)), jnp.ones(B)
    start = jnp.int32(1), cache, draft_token(jnp.int32(0), hidden_B1D, none)
    k, cache, (tokens_BK, prob_BK, _) = jax.lax.while_loop(more, step, start)
    return cache, tokens_BK, prob_BK, k


def unpack(packed: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens_BK, prob_BK) of the draft tokens on the host: waits for the device."""
    packed_BX = np.asarray(packed)
    K, count = packed_BX.shape[1] // 2, int(packed_BX[0, -1])
    prob_BK = packed_BX[:, K : 2 * K].view(np.float32)
    return packed_BX[:, :count], prob_BK[:, :count]


def _pass(
    config: ModelConfig,
    params: transformer.Params,
    cache: KVCache,
    tokens_BC: jax.Array,
    start_B: jax.Array,
) -> tuple[jax.Array, KVCache]:
    """Run tokens at positions `start …` of their rows with causal attention."""
    positions_BC = start_B[:, None] + jnp.arange(tokens_BC.shape[1])
    mask_BCS = jnp.arange(cache.num_positions) <= positions_BC[..., None]
    return transformer.hidden_with_cache(
        config, params, cache, tokens_BC, positions_BC, start_B, mask_BCS
    )


def _draw(
    logits_B1V: jax.Array, keys_B1: jax.Array, processing: Processing, scheme: sampling.Draw | None
) -> tuple[jax.Array, jax.Array]:
    """Return tokens and their log-probabilities, both [B, 1]."""
    temperature_B1, top_k_B1, top_p_B1 = processing.broadcast(keys_B1.shape)
    if scheme is not None:
        cut_B1V = sampling.processed_logits(logits_B1V, temperature_B1, top_k_B1, top_p_B1)
        return sampling.draw(cut_B1V, keys_B1, temperature_B1, scheme)
    scale_B1 = jnp.where(temperature_B1 <= 0, 1.0, temperature_B1)
    logits_B1V = logits_B1V.astype(jnp.float32) / scale_B1[:, :, None]
    token_B1 = jnp.argmax(logits_B1V, axis=-1).astype(jnp.int32)
    total_B1 = jax.nn.logsumexp(logits_B1V, axis=-1)
    return token_B1, jnp.max(logits_B1V, axis=-1) - total_B1
