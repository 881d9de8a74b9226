"""The device's part of a draft model: passes over known tokens, and chains of draft tokens.

P = rows of one pass, C = tokens of a chunk, W = tokens of a chain's first pass, K = draft tokens of
a chain. A row's tokens lie at their own positions. Entries behind the known ones are dead: every
pass overwrites those it attends to. Chains write their own entries; the next chain's first pass,
over the last tokens of each row, computes what a round has left out.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from models import kv_cache, transformer
from models.config import ModelConfig
from models.paged_cache import Cache, PagedCache
from models.sharding import constrain
from models.transformer import Cached
from spec import sampling
from spec.draft_cache.drafting import Brought, Found, Given
from spec.draft_cache.tables import Ends, unpack_chunks
from spec.sampling import Processing

LACKING_TOKENS = 2  # the last draft token, whose entry no chain computes, and the draw behind it

# the least probability, the rollout's key, and probabilities of draws with shared noise by depth
Constants = tuple[transformer.Params, jax.Array, jax.Array, jax.Array]
State = tuple[Any, tuple[()]]  # the cache, rows or pages


@dataclasses.dataclass(frozen=True)
class ChainDrafting:
    """`Drafting` of chains; in rounds it needs windows of `LACKING_TOKENS`.

    Without a `scheme` draft tokens are the likeliest tokens; their probability is the product of
    the model's own probabilities. Otherwise they are draws with the noise of the request at its
    response's positions, with the probabilities that the constants give.
    """

    config: ModelConfig
    scheme: sampling.Draw | None
    first_token: ClassVar[int] = 0
    apart: ClassVar[bool] = False

    def catch_up(self, given: Given, cache: Cache, table_PX: jax.Array) -> Cache:
        (params, *_), _ = given
        row_P, _, start_P, tokens_PC = unpack_chunks(table_PX)
        if isinstance(cache, PagedCache):
            table_PN = jnp.take(cache.table_BN, row_P, axis=0, mode="fill", fill_value=-1)
            some = dataclasses.replace(cache, table_BN=table_PN, anywhere=True)
            _, some = run_tokens(self.config, params, some, tokens_PC, start_P)
            return dataclasses.replace(some, table_BN=cache.table_BN, anywhere=False)
        copies = jax.tree.map(lambda rows: jnp.take(rows, row_P, axis=0, mode="clip"), cache)
        _, copies = run_tokens(self.config, params, copies, tokens_PC, start_P)
        return jax.tree.map(
            lambda rows, new: kv_cache.pin(rows.at[row_P].set(new, mode="drop")), cache, copies
        )

    def begin(self, given: Given, cache: Cache, ends: Ends) -> State:
        return cache, ()

    def draft(
        self, constants: Constants, state: State, ends: Ends, depth: jax.Array, most: int
    ) -> tuple[Cache, Found]:
        params, min_prob, key, mean_prob_K = constants
        ends = dataclasses.replace(ends, most_B=jnp.minimum(ends.most_B, jnp.minimum(depth, most)))
        given = params, state[0], ends, min_prob, key
        cache, tokens_RX, prob_RX = _chains(self, *given, most)
        parents_RX = jnp.broadcast_to(jnp.arange(most, dtype=jnp.int32) - 1, tokens_RX.shape)
        if self.scheme is not None:
            prob_X = jnp.take(mean_prob_K, jnp.arange(most), mode="clip")
            prob_RX = jnp.broadcast_to(prob_X, prob_RX.shape)
        likely_R = jnp.sum(prob_RX >= min_prob, axis=1, dtype=jnp.int32)
        count_R = jnp.minimum(ends.most_B, likely_R)
        return cache, Found(tokens_RX, parents_RX, prob_RX, count_R)

    def absorb(self, constants: Constants, state: State, brought: Brought) -> State:
        return state


def _chains(
    drafting: ChainDrafting,
    params: transformer.Params,
    cache: Cached,
    ends: Ends,
    min_prob: jax.Array,
    key: jax.Array,
    most_tokens: int,
) -> tuple[Cached, jax.Array, jax.Array]:
    """Return the cache, and tokens and probabilities [B, K] of chains of up to `most_tokens`.

    The first pass computes the last W of a row's `total` tokens (all, if there are fewer): entries
    before these must be known. Each further pass computes the last draft token. Chains end
    together, once each has its `most` draft tokens or a probability below `min_prob`; what lies
    behind that is 0. Rows with a `most` of 0 are at rest and not written, nor is a row behind its
    `most`. Requires `total + most <= S`.
    """
    config, scheme = drafting.config, drafting.scheme
    K, S, total_B, most_B = most_tokens, cache.num_positions, ends.total_B, ends.most_B
    B = len(total_B)
    keys_B, first_B = sampling.request_keys(key, ends.request_id_B), ends.starts(0, S)
    hidden_BWD, cache = run_tokens(config, params, cache, ends.tokens_BW, first_B)
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
        hidden_B1D, cache = run_tokens(config, params, cache, token_B1, at_B)
        return k + 1, cache, draft_token(k, hidden_B1D, drawn)

    none = jnp.zeros((B, K), jnp.int32), jnp.zeros((B, K)), jnp.ones(B)
    start = jnp.int32(1), cache, draft_token(jnp.int32(0), hidden_B1D, none)
    _, cache, (tokens_BK, prob_BK, _) = jax.lax.while_loop(more, step, start)
    return cache, tokens_BK, prob_BK


def run_tokens(
    config: ModelConfig,
    params: transformer.Params,
    cache: Cached,
    tokens_BC: jax.Array,
    start_B: jax.Array,
) -> tuple[jax.Array, Cached]:
    """Run tokens at positions `start …` of their rows with causal attention."""
    positions_BC = start_B[:, None] + jnp.arange(tokens_BC.shape[1])
    mask_BCS = cache.seen_from(start_B, tokens_BC.shape[1])
    return transformer.hidden_with_cache(
        config, params, cache, tokens_BC, positions_BC, start_B, mask_BCS
    )[:2]


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
