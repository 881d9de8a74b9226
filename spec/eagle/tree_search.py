"""Trees of draft tokens by an EAGLE drafter, on the device: one call a round.

    absorb   entries of tokens that were accepted since: their keys and values, no attention
    draft    the last entry's draft tokens; then, level by level, the `top_k` best nodes so far are
             expanded by `top_k` children each; of all these the best `num_draft_tokens` are kept

What is best is the cumulative log-probability, so that the first n draft tokens are the best tree
of n. Nodes that are expanded have keys and values of their own behind the row's positions.
A drafter's cache has one layer: B rows of S positions, then X = top_k · (max_depth − 1) columns.
C = tokens of a window, P = candidates, M = draft tokens kept, U = draft vocabulary.
Sources: EAGLE-2 arXiv 2406.16858; TLT section 5.1 and its Figure 9.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import kv_cache
from models.attention import attend
from models.kv_cache import KVCache
from spec import sampling
from spec.eagle import model as eagle
from spec.eagle.config import EagleConfig
from spec.eagle.model import EagleParams, SharedParams
from spec.tree import PADDING

SHARED_NOISE_PROB = 0.8  # of a draft token drawn with the position's own noise, among its siblings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Noise:
    """What the policy will draw with: the step's key, requests and their tokens so far; sampling.

    Arrays of one entry a row, and scalars.
    """

    key: jax.Array
    request_ids_B: jax.Array
    emitted_B: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array


def empty_cache(
    config: EagleConfig,
    num_slots: int,
    num_positions: int,
    top_k: int,
    max_depth: int,
    dtype: Any,
    zeros: Callable[..., Any] = jnp.zeros,
) -> KVCache:
    """A drafter's cache for rows of `num_positions`, with room for the nodes it expands."""
    columns = num_positions + num_columns(top_k, max_depth)
    return kv_cache.init(config.layer, num_slots, columns, dtype, zeros=zeros)


def num_columns(top_k: int, max_depth: int) -> int:
    """Columns for the nodes that are expanded."""
    return top_k * max(max_depth - 1, 1)


@partial(jax.jit, static_argnames="config", donate_argnames="cache")
def absorb(
    params: EagleParams,
    frozen: SharedParams,
    cache: KVCache,
    hidden_B1SW: jax.Array,
    tokens_BC: jax.Array,
    start_B: jax.Array,
    *,
    config: EagleConfig,
) -> KVCache:
    """Write the keys and values of entries start … start + C − 1.

    `tokens_BC[:, j]` is the token after entry start + j. A row whose `start` is the end of
    the cache is at rest: it is written nowhere.
    """
    return _absorb(config, params, frozen, cache, hidden_B1SW, tokens_BC, start_B)[0]


@partial(
    jax.jit,
    static_argnames=("config", "top_k", "max_depth", "num_draft_tokens", "scheme"),
    donate_argnames="cache",
)
def draft(
    params: EagleParams,
    frozen: SharedParams,
    cache: KVCache,
    hidden_B1SW: jax.Array,
    tokens_BC: jax.Array,
    start_B: jax.Array,
    length_B: jax.Array,
    depth: jax.Array,
    temperature: jax.Array,
    noise: Noise | None = None,
    *,
    config: EagleConfig,
    top_k: int,
    max_depth: int,
    num_draft_tokens: int,
    scheme: sampling.Draw = "cdf",
) -> tuple[KVCache, jax.Array]:
    """Absorb a window that reaches entry length − 1, then draft `depth` levels from there.

    `depth` is traced, at most `max_depth`. Log-probabilities are those at `temperature` (0: at
    1). With `noise` each node's first child is what the drafter draws with the noise of that
    position, and has `SHARED_NOISE_PROB`; the others share the rest. Rows at rest are those of
    `absorb`; nothing is to be read from what they draft. Returns the cache and int32
    [B, 3 M + 1]: tokens, parents (−1: the root), bits of the probabilities, count.
    """
    S, last_B = hidden_B1SW.shape[2], length_B - 1
    drafter = _Drafting(config, params, frozen, temperature, noise, top_k, scheme)
    cache, g_BCD = _absorb(config, params, frozen, cache, hidden_B1SW, tokens_BC, start_B)
    query_B1 = jnp.maximum(last_B - start_B, 0)[:, None]  # 0: a row at rest
    tokens_B1 = jnp.take_along_axis(tokens_BC, query_B1, axis=1)
    g_B1D = jnp.take_along_axis(g_BCD, query_B1[:, :, None], axis=1)
    committed_BS = jnp.arange(cache.num_positions) < jnp.minimum(length_B, S)[:, None]
    o_B1D, cache = drafter.outputs(cache, tokens_B1, g_B1D, last_B, committed_BS[:, None], None)
    beams, pool = drafter.first(o_B1D, cache.num_positions - S, max_depth)

    def expand(carry: tuple) -> tuple:
        level, cache, beams, pool = carry
        cache, beams, pool = drafter.expand(level, cache, beams, pool, committed_BS, last_B, S)
        return level + 1, cache, beams, pool

    _, cache, _, pool = jax.lax.while_loop(
        lambda carry: carry[0] < depth, expand, (jnp.int32(1), cache, beams, pool)
    )
    return cache, pool.best(num_draft_tokens, frozen.draft_ids_U)


def unpack(packed: jax.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(tokens_BM, parents_BM, chance_BM, count_B) on the host: waits for the device."""
    packed_BX = np.asarray(packed)
    M = packed_BX.shape[1] // 3
    prob_BM = packed_BX[:, 2 * M : 3 * M].view(np.float32)
    return packed_BX[:, :M], packed_BX[:, M : 2 * M], prob_BM, packed_BX[:, 3 * M]


def _absorb(
    config: EagleConfig,
    params: EagleParams,
    frozen: SharedParams,
    cache: KVCache,
    hidden_B1SW: jax.Array,
    tokens_BC: jax.Array,
    start_B: jax.Array,
) -> tuple[KVCache, jax.Array]:
    """The cache with the window's keys and values, and the window's features."""
    C, written = tokens_BC.shape[1], list[KVCache]()

    def window(rows_SW: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(rows_SW, start, C, axis=0)

    g_BCD = eagle.features(config, params, jax.vmap(window)(hidden_B1SW[:, 0], start_B))

    def look(q_BCHh: jax.Array, k_BCKh: jax.Array, v_BCKh: jax.Array) -> jax.Array:
        [keys], [values] = cache.keys, cache.values
        keys = kv_cache.pin(kv_cache.write_keys(keys, k_BCKh, start_B))
        values = kv_cache.pin(kv_cache.write_values(values, v_BCKh, start_B))
        written.append(KVCache((keys,), (values,)))
        return q_BCHh  # nobody reads what comes of it

    positions_BC = start_B[:, None] + jnp.arange(C)
    eagle.layer_outputs(config, params, frozen.embedding_VD, tokens_BC, g_BCD, positions_BC, look)
    return written[0], g_BCD


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Beams:
    """The nodes that are expanded next: draft token, sum of log-probs, feature, place in the pool.

    `above_BKX` are the columns of their ancestors.
    """

    at_BK: jax.Array
    sum_BK: jax.Array
    g_BKD: jax.Array
    place_BK: jax.Array
    above_BKX: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Pool:
    """All candidates, parents before children; what is not filled has a sum of −inf."""

    at_BP: jax.Array
    parents_BP: jax.Array
    sum_BP: jax.Array

    @staticmethod
    def empty(num_rows: int, size: int) -> _Pool:
        none_BP = jnp.zeros((num_rows, size), jnp.int32)
        return _Pool(none_BP, none_BP, jnp.full((num_rows, size), -jnp.inf))

    def add(
        self, first: jax.Array, at_BN: jax.Array, parents_BN: jax.Array, sum_BN: jax.Array
    ) -> _Pool:
        """With candidates `first` … put in."""
        put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=first, axis=1)
        return _Pool(
            put(self.at_BP, at_BN), put(self.parents_BP, parents_BN), put(self.sum_BP, sum_BN)
        )

    def best(self, num_draft_tokens: int, draft_ids_U: jax.Array | None) -> jax.Array:
        """The best candidates, packed; a parent is never worth less than its child."""
        B, P = self.at_BP.shape
        M = min(num_draft_tokens, P)
        sum_BM, chosen_BM = jax.lax.top_k(self.sum_BP, M)
        rank_BP = jnp.zeros((B, P), jnp.int32)
        rank_BP = jax.vmap(lambda rank, at: rank.at[at].set(jnp.arange(M)))(rank_BP, chosen_BM)
        parents_BM = jnp.take_along_axis(self.parents_BP, chosen_BM, axis=1)
        ranked_BM = jnp.take_along_axis(rank_BP, jnp.maximum(parents_BM, 0), axis=1)
        ranked_BM = jnp.where(parents_BM < 0, -1, ranked_BM)
        tokens_BM = _policy_ids(jnp.take_along_axis(self.at_BP, chosen_BM, axis=1), draft_ids_U)
        real_BM = sum_BM > -jnp.inf
        parts = (
            jnp.where(real_BM, tokens_BM, PADDING),
            jnp.where(real_BM, ranked_BM, -1),
            jax.lax.bitcast_convert_type(jnp.exp(sum_BM), jnp.int32),
        )
        wide = [jnp.pad(x, ((0, 0), (0, num_draft_tokens - M)), constant_values=-1) for x in parts]
        count_B1 = jnp.sum(real_BM, axis=1, keepdims=True, dtype=jnp.int32)
        return jnp.concatenate([*wide, count_B1], axis=1)


@dataclasses.dataclass(frozen=True, eq=False)
class _Drafting:
    """One call's constants."""

    config: EagleConfig
    params: EagleParams
    frozen: SharedParams
    temperature: jax.Array
    noise: Noise | None
    top_k: int
    scheme: sampling.Draw

    @property
    def num_children(self) -> int:
        return min(self.top_k, self.config.num_draft_ids)

    def outputs(
        self,
        cache: KVCache,
        tokens_BN: jax.Array,
        g_BND: jax.Array,
        position_B: jax.Array,
        mask_BNS: jax.Array,
        column: jax.Array | None,
    ) -> tuple[jax.Array, KVCache]:
        """Outputs of N entries; their keys and values go to `column`, None: they are there."""
        [keys], [values] = cache.keys, cache.values
        written = [(keys, values)]

        def look(q_BNHh: jax.Array, k_BNKh: jax.Array, v_BNKh: jax.Array) -> jax.Array:
            if column is not None:
                at_B = jnp.broadcast_to(column, position_B.shape)
                written[0] = (
                    kv_cache.pin(kv_cache.write_keys(keys, k_BNKh, at_B)),
                    kv_cache.pin(kv_cache.write_values(values, v_BNKh, at_B)),
                )
            return attend(q_BNHh, *written[0], mask_BNS)

        positions_BN = jnp.broadcast_to(position_B[:, None], tokens_BN.shape)
        shared = self.frozen.embedding_VD
        o_BND = eagle.layer_outputs(
            self.config, self.params, shared, tokens_BN, g_BND, positions_BN, look
        )
        return o_BND, KVCache((written[0][0],), (written[0][1],))

    def children(self, level: jax.Array, o_BND: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The likeliest draft tokens after each node, and their log-probs; [B, N, K]."""
        logits_BNU = eagle.logits(self.config, self.params, self.frozen.head_DU, o_BND)
        if self.noise is None:
            scaled_BNU = logits_BNU / jnp.where(self.temperature <= 0, 1.0, self.temperature)
            logprob_BNU = jax.nn.log_softmax(scaled_BNU)
        else:
            logprob_BNU = self._shares_noise(logits_BNU, self.noise, level)
        logprob_BNK, at_BNK = jax.lax.top_k(logprob_BNU, self.num_children)
        return at_BNK, logprob_BNK

    def first(self, o_B1D: jax.Array, num_columns: int, max_depth: int) -> tuple[_Beams, _Pool]:
        """The draft tokens for the next position."""
        B, K = len(o_B1D), self.num_children
        at_B1K, logprob_B1K = self.children(jnp.int32(0), o_B1D)
        at_BK, sum_BK = at_B1K[:, 0], logprob_B1K[:, 0]
        pool = _Pool.empty(B, K + (max_depth - 1) * K * K)
        beams = _Beams(
            at_BK=at_BK,
            sum_BK=sum_BK,
            g_BKD=jnp.broadcast_to(o_B1D, (B, K, o_B1D.shape[-1])),
            place_BK=jnp.broadcast_to(jnp.arange(K, dtype=jnp.int32), (B, K)),
            above_BKX=jnp.zeros((B, K, num_columns), bool),
        )
        return beams, pool.add(jnp.int32(0), at_BK, jnp.full_like(at_BK, -1), sum_BK)

    def expand(
        self,
        level: jax.Array,
        cache: KVCache,
        beams: _Beams,
        pool: _Pool,
        committed_BS: jax.Array,
        last_B: jax.Array,
        num_positions: int,
    ) -> tuple[KVCache, _Beams, _Pool]:
        """The next level: K children of each of the K best, of which the best K go on."""
        B, K, X = beams.above_BKX.shape
        column, first = (level - 1) * K, K + (level - 1) * K * K
        seen_BKX = beams.above_BKX | (jnp.arange(X) == column + jnp.arange(K)[:, None])
        row_BKS = jnp.broadcast_to(committed_BS[:, None, :num_positions], (B, K, num_positions))
        mask_BKS = jnp.concatenate([row_BKS, seen_BKX], axis=-1)
        tokens_BK = _policy_ids(beams.at_BK, self.frozen.draft_ids_U)
        o_BKD, cache = self.outputs(
            cache, tokens_BK, beams.g_BKD, last_B + level, mask_BKS, num_positions + column
        )
        at_BKK, logprob_BKK = self.children(level, o_BKD)
        at_BP, sum_BP = at_BKK.reshape(B, -1), beams.sum_BK[:, :, None] + logprob_BKK
        sum_BP = sum_BP.reshape(B, -1)
        pool = pool.add(first, at_BP, jnp.repeat(beams.place_BK, K, axis=1), sum_BP)
        best_BK, chosen_BK = jax.lax.top_k(sum_BP, K)
        from_BK1 = (chosen_BK // K)[:, :, None]
        beams = _Beams(
            at_BK=jnp.take_along_axis(at_BP, chosen_BK, axis=1),
            sum_BK=best_BK,
            g_BKD=jnp.take_along_axis(o_BKD, from_BK1, axis=1),
            place_BK=first + chosen_BK,
            above_BKX=jnp.take_along_axis(seen_BKX, from_BK1, axis=1),
        )
        return cache, beams, pool

    def _shares_noise(self, logits_BNU: jax.Array, noise: Noise, level: jax.Array) -> jax.Array:
        """log of `SHARED_NOISE_PROB` for what the position's noise draws; the others share the
        rest.

        Noise goes by the policy's tokens: the drafter's are in the same order.
        """
        (B, N, U), ids_U = logits_BNU.shape, self.frozen.draft_ids_U
        temperature_BN, top_k_BN, top_p_BN = (
            jnp.broadcast_to(x, (B, N)) for x in (noise.temperature, noise.top_k, noise.top_p)
        )
        processed_BNU = sampling.processed_logits(logits_BNU, temperature_BN, top_k_BN, top_p_BN)
        wide_BNV = processed_BNU
        if ids_U is not None:
            V = self.frozen.embedding_VD.shape[0]
            wide_BNV = jnp.full((B, N, V), -jnp.inf).at[:, :, ids_U].set(processed_BNU)
        position_BN = jnp.broadcast_to((noise.emitted_B + level)[:, None], (B, N))
        request_keys_B = sampling.request_keys(noise.key, noise.request_ids_B)
        keys_BN = sampling.position_keys(request_keys_B, position_BN)
        drawn_BN, _ = sampling.draw(wide_BNV, keys_BN, temperature_BN, self.scheme)
        drawn_BNU = (jnp.arange(U) if ids_U is None else ids_U) == drawn_BN[:, :, None]
        others_BNU = jnp.where(drawn_BNU, -jnp.inf, jax.nn.log_softmax(processed_BNU))
        rest_BN1 = jax.nn.logsumexp(others_BNU, axis=-1, keepdims=True)
        rest_BN1 = jnp.maximum(rest_BN1, jnp.finfo(jnp.float32).min)  # nothing else is possible
        others_BNU = others_BNU - rest_BN1 + jnp.log1p(-SHARED_NOISE_PROB)
        return jnp.where(drawn_BNU, jnp.log(SHARED_NOISE_PROB), others_BNU)


def _policy_ids(at: jax.Array, draft_ids_U: jax.Array | None) -> jax.Array:
    return at if draft_ids_U is None else jnp.take(draft_ids_U, at, mode="clip")
