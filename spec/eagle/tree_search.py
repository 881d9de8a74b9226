"""Trees of draft tokens by an EAGLE drafter, on the device: one call a round.

    absorb   write keys and values of the tokens that were accepted since, without attention
    draft    draft from the last entry; then, level by level, expand the `top_k` best nodes of the
             level by `top_k` children each; keep the best `num_draft_tokens` of all nodes

Nodes are ranked by cumulative log-probability, so that the first n draft tokens are the best tree
of n. Expanded nodes have keys and values of their own behind the row's positions.
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
from spec.eagle.model import DeviceWeights
from spec.sampling import Processing
from spec.tree import PADDING

SHARED_NOISE_PROB = 0.8  # of a draft token drawn with the position's own noise, among its siblings


@dataclasses.dataclass(frozen=True)
class Search:
    """The static arguments of a search; `max_depth` bounds the depth that calls ask for."""

    config: EagleConfig
    top_k: int
    max_depth: int
    num_draft_tokens: int
    scheme: sampling.Draw = "cdf"

    @property
    def num_columns(self) -> int:
        """Columns of a cache for the nodes that are expanded."""
        return self.top_k * max(self.max_depth - 1, 1)

    @property
    def num_children(self) -> int:
        return min(self.top_k, self.config.num_draft_ids)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Window:
    """Entries start … start + C − 1 of each row, and the hidden states of all entries.

    `tokens_BC[:, j]` is the token after entry start + j. A row whose `start` is the end of the
    cache is at rest: it is written nowhere.
    """

    hidden_B1SW: Any
    tokens_BC: Any
    start_B: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Noise:
    """The policy's own noise for the tokens to come, and its processing of logits.

    `emitted_B` are the response tokens of each row so far.
    """

    key: jax.Array
    request_ids_B: Any
    emitted_B: Any
    processing: Processing


def empty_cache(
    search: Search,
    num_slots: int,
    num_positions: int,
    dtype: Any,
    zeros: Callable[..., Any] = jnp.zeros,
) -> KVCache:
    """Return a drafter's cache for rows of `num_positions`, with room for the expanded nodes."""
    columns = num_positions + search.num_columns
    return kv_cache.init(search.config.layer, num_slots, columns, dtype, zeros=zeros)


@partial(jax.jit, static_argnames="config", donate_argnames="cache")
def absorb(
    weights: DeviceWeights, cache: KVCache, window: Window, *, config: EagleConfig
) -> KVCache:
    """Write the keys and values of a window's entries."""
    return _absorb(config, weights, cache, window)[0]


@partial(jax.jit, static_argnames="search", donate_argnames="cache")
def draft(
    weights: DeviceWeights,
    cache: KVCache,
    window: Window,
    length_B: jax.Array,
    depth: jax.Array,
    temperature: jax.Array,
    noise: Noise | None = None,
    *,
    search: Search,
) -> tuple[KVCache, jax.Array]:
    """Absorb a window that reaches entry length − 1, then draft `depth` levels from there.

    Log-probabilities are those at `temperature`, one or [B] (0: at 1). With `noise` each node's
    first child is what the drafter draws with the noise of that position, and has
    `SHARED_NOISE_PROB`; the others share the rest. What rows at rest draft has no meaning.
    Returns the cache and int32 [B, 3 M + 1]: tokens, parents (−1: the root), bits of the
    probabilities, count.
    """
    S, last_B = window.hidden_B1SW.shape[2], length_B - 1
    drafter = _Drafting(search, weights, temperature, noise)
    cache, g_BCD = _absorb(search.config, weights, cache, window)
    query_B1 = jnp.maximum(last_B - window.start_B, 0)[:, None]  # 0: a row at rest
    tokens_B1 = jnp.take_along_axis(window.tokens_BC, query_B1, axis=1)
    g_B1D = jnp.take_along_axis(g_BCD, query_B1[:, :, None], axis=1)
    committed_BS = jnp.arange(cache.num_positions) < jnp.minimum(length_B, S)[:, None]
    o_B1D, cache = drafter.outputs(cache, tokens_B1, g_B1D, last_B, committed_BS[:, None], None)
    beams, pool = drafter.first(o_B1D, cache.num_positions - S)

    def expand(carry: tuple) -> tuple:
        level, cache, beams, pool = carry
        cache, beams, pool = drafter.expand(level, cache, beams, pool, committed_BS, last_B, S)
        return level + 1, cache, beams, pool

    _, cache, _, pool = jax.lax.while_loop(
        lambda carry: carry[0] < depth, expand, (jnp.int32(1), cache, beams, pool)
    )
    return cache, pool.best(search.num_draft_tokens, weights.frozen.draft_ids_U)


def unpack(packed: jax.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (tokens_BM, parents_BM, prob_BM, count_B) on the host: waits for the device."""
    packed_BX = np.asarray(packed)
    M = packed_BX.shape[1] // 3
    prob_BM = packed_BX[:, 2 * M : 3 * M].view(np.float32)
    return packed_BX[:, :M], packed_BX[:, M : 2 * M], prob_BM, packed_BX[:, 3 * M]


def _absorb(
    config: EagleConfig, weights: DeviceWeights, cache: KVCache, window: Window
) -> tuple[KVCache, jax.Array]:
    """Return the cache with the window's keys and values, and the window's features."""
    tokens_BC, start_B, written = window.tokens_BC, window.start_B, list[KVCache]()
    C = tokens_BC.shape[1]

    def cut(rows_SW: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(rows_SW, start, C, axis=0)

    hidden_BCW = jax.vmap(cut)(window.hidden_B1SW[:, 0], start_B)
    g_BCD = eagle.features(config, weights.params, hidden_BCW)

    def look(q_BCHh: jax.Array, k_BCKh: jax.Array, v_BCKh: jax.Array) -> jax.Array:
        written.append(_written(cache, k_BCKh, v_BCKh, start_B))
        return q_BCHh  # the outputs are not used

    positions_BC = start_B[:, None] + jnp.arange(C)
    embedding_VD = weights.frozen.embedding_VD
    eagle.layer_outputs(config, weights.params, embedding_VD, tokens_BC, g_BCD, positions_BC, look)
    return written[0], g_BCD


def _written(cache: KVCache, k_BCKh: jax.Array, v_BCKh: jax.Array, start_B: jax.Array) -> KVCache:
    [keys], [values] = cache.keys, cache.values
    keys = kv_cache.pin(kv_cache.write_keys(keys, k_BCKh, start_B))
    values = kv_cache.pin(kv_cache.write_values(values, v_BCKh, start_B))
    return KVCache((keys,), (values,))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Beams:
    """The nodes that are expanded next: draft token, sum of log-probs, feature, index in the pool.

    `above_BKX` are the columns of their ancestors.
    """

    at_BK: jax.Array
    sum_BK: jax.Array
    g_BKD: jax.Array
    index_BK: jax.Array
    above_BKX: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Pool:
    """All candidates, parents before children; empty entries have a sum of −inf."""

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
        """Return the pool with candidates written from `first` on."""
        put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=first, axis=1)
        return _Pool(
            put(self.at_BP, at_BN), put(self.parents_BP, parents_BN), put(self.sum_BP, sum_BN)
        )

    def best(self, num_draft_tokens: int, draft_ids_U: jax.Array | None) -> jax.Array:
        """Return the best candidates, packed; a parent never ranks behind its child."""
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
    """The constants of one call."""

    search: Search
    weights: DeviceWeights
    temperature: jax.Array
    noise: Noise | None

    def outputs(
        self,
        cache: KVCache,
        tokens_BN: jax.Array,
        g_BND: jax.Array,
        position_B: jax.Array,
        mask_BNS: jax.Array,
        column: jax.Array | None,
    ) -> tuple[jax.Array, KVCache]:
        """Return the outputs of N entries, and the cache with their keys and values at `column`.

        Without a `column` the cache has them already.
        """
        written = [cache]

        def look(q_BNHh: jax.Array, k_BNKh: jax.Array, v_BNKh: jax.Array) -> jax.Array:
            if column is not None:
                at_B = jnp.broadcast_to(column, position_B.shape)
                written[0] = _written(cache, k_BNKh, v_BNKh, at_B)
            [keys], [values] = written[0].keys, written[0].values
            return attend(q_BNHh, keys, values, mask_BNS)

        positions_BN = jnp.broadcast_to(position_B[:, None], tokens_BN.shape)
        params, embedding_VD = self.weights.params, self.weights.frozen.embedding_VD
        o_BND = eagle.layer_outputs(
            self.search.config, params, embedding_VD, tokens_BN, g_BND, positions_BN, look
        )
        return o_BND, written[0]

    def children(self, level: jax.Array, o_BND: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the likeliest draft tokens after each node, and their log-probs; [B, N, K]."""
        weights = self.weights
        logits_BNU = eagle.logits(self.search.config, weights.params, weights.frozen.head_UD, o_BND)
        if self.noise is None:
            scale = jnp.where(self.temperature <= 0, 1.0, self.temperature)
            scaled_BNU = logits_BNU / scale.reshape(-1, 1, 1)
            logprob_BNU = jax.nn.log_softmax(scaled_BNU)
        else:
            logprob_BNU = self._shared_noise_logprobs(logits_BNU, self.noise, level)
        logprob_BNK, at_BNK = jax.lax.top_k(logprob_BNU, self.search.num_children)
        return at_BNK, logprob_BNK

    def first(self, o_B1D: jax.Array, num_columns: int) -> tuple[_Beams, _Pool]:
        """Return the draft tokens for the next position."""
        B, K = len(o_B1D), self.search.num_children
        at_B1K, logprob_B1K = self.children(jnp.int32(0), o_B1D)
        at_BK, sum_BK = at_B1K[:, 0], logprob_B1K[:, 0]
        pool = _Pool.empty(B, K + (self.search.max_depth - 1) * K * K)
        beams = _Beams(
            at_BK=at_BK,
            sum_BK=sum_BK,
            g_BKD=jnp.broadcast_to(o_B1D, (B, K, o_B1D.shape[-1])),
            index_BK=jnp.broadcast_to(jnp.arange(K, dtype=jnp.int32), (B, K)),
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
        """Expand the K beams by K children each, of which the best K are the next beams."""
        B, K, X = beams.above_BKX.shape
        column, first = (level - 1) * K, K + (level - 1) * K * K
        seen_BKX = beams.above_BKX | (jnp.arange(X) == column + jnp.arange(K)[:, None])
        row_BKS = jnp.broadcast_to(committed_BS[:, None, :num_positions], (B, K, num_positions))
        mask_BKS = jnp.concatenate([row_BKS, seen_BKX], axis=-1)
        tokens_BK = _policy_ids(beams.at_BK, self.weights.frozen.draft_ids_U)
        o_BKD, cache = self.outputs(
            cache, tokens_BK, beams.g_BKD, last_B + level, mask_BKS, num_positions + column
        )
        at_BKK, logprob_BKK = self.children(level, o_BKD)
        at_BP, sum_BP = at_BKK.reshape(B, -1), beams.sum_BK[:, :, None] + logprob_BKK
        sum_BP = sum_BP.reshape(B, -1)
        pool = pool.add(first, at_BP, jnp.repeat(beams.index_BK, K, axis=1), sum_BP)
        best_BK, chosen_BK = jax.lax.top_k(sum_BP, K)
        from_BK1 = (chosen_BK // K)[:, :, None]
        beams = _Beams(
            at_BK=jnp.take_along_axis(at_BP, chosen_BK, axis=1),
            sum_BK=best_BK,
            g_BKD=jnp.take_along_axis(o_BKD, from_BK1, axis=1),
            index_BK=first + chosen_BK,
            above_BKX=jnp.take_along_axis(seen_BKX, from_BK1, axis=1),
        )
        return cache, beams, pool

    def _shared_noise_logprobs(
        self, logits_BNU: jax.Array, noise: Noise, level: jax.Array
    ) -> jax.Array:
        """Return log `SHARED_NOISE_PROB` for the token that the position's noise draws.

        The others share the rest. Noise goes by the policy's tokens; the drafter's are in the same
        order.
        """
        (B, N, U), ids_U = logits_BNU.shape, self.weights.frozen.draft_ids_U
        temperature_BN, top_k_BN, top_p_BN = noise.processing.broadcast((B, N))
        processed_BNU = sampling.processed_logits(logits_BNU, temperature_BN, top_k_BN, top_p_BN)
        wide_BNV = processed_BNU
        if ids_U is not None:
            V = self.weights.frozen.embedding_VD.shape[0]
            wide_BNV = jnp.full((B, N, V), -jnp.inf).at[:, :, ids_U].set(processed_BNU)
        position_BN = jnp.broadcast_to((noise.emitted_B + level)[:, None], (B, N))
        request_keys_B = sampling.request_keys(noise.key, noise.request_ids_B)
        keys_BN = sampling.position_keys(request_keys_B, position_BN)
        drawn_BN, _ = sampling.draw(wide_BNV, keys_BN, temperature_BN, self.search.scheme)
        drawn_BNU = (jnp.arange(U) if ids_U is None else ids_U) == drawn_BN[:, :, None]
        others_BNU = jnp.where(drawn_BNU, -jnp.inf, jax.nn.log_softmax(processed_BNU))
        rest_BN1 = jax.nn.logsumexp(others_BNU, axis=-1, keepdims=True)
        rest_BN1 = jnp.maximum(rest_BN1, jnp.finfo(jnp.float32).min)  # nothing else is possible
        others_BNU = others_BNU - rest_BN1 + jnp.log1p(-SHARED_NOISE_PROB)
        return jnp.where(drawn_BNU, jnp.log(SHARED_NOISE_PROB), others_BNU)


def _policy_ids(at: jax.Array, draft_ids_U: jax.Array | None) -> jax.Array:
    return at if draft_ids_U is None else jnp.take(draft_ids_U, at, mode="clip")
