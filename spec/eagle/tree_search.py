"""Trees of draft tokens from an EAGLE drafter, built on the device.

The search starts at the last entry of a row. Level by level, it expands the `top_k` best nodes by
`top_k` children each. It keeps the best nodes overall by cumulative log-probability, so that the
first n draft tokens are the best tree of size n. Keys and values of expanded nodes are in X = top_k
· (max_depth − 1) columns next to the cache, which has one layer, B rows and S positions. Entry t is
at position t.
P = candidates, M = draft tokens kept, U = draft vocabulary. Sources: EAGLE-2 arXiv 2406.16858; TLT
section 5.1 and its Figure 9.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from reprise.models.attention.attention import (
    After,
    PartialSoftmax,
    Portable,
    merged,
    partial_attention,
)
from reprise.models.attention.cached_attention import is_in_order
from reprise.models.attention.entries import KEY_AXIS, VALUE_AXIS, pin
from reprise.models.attention.kv_cache import KVCache, Pages
from reprise.models.decoder.transformer import Attend
from reprise.spec.draft_cache.drafting import DraftTrees, RowEnds
from reprise.spec.drafter import PADDING
from reprise.spec.eagle import model as eagle
from reprise.spec.eagle.config import EagleConfig
from reprise.spec.eagle.model import DeviceWeights
from reprise.spec.verification import sampling

FIRST_TOKEN = 1  # entry t joins the hidden state at t and the token at t + 1
SHARED_NOISE_PROB = 0.8  # of the draft token drawn with the position noise, among its siblings


@dataclasses.dataclass(frozen=True)
class Search:
    """The static arguments of a search; `max_depth` bounds the `depth` of each call.

    With `shared_noise`, the first child of a node is the token that the drafter draws with the
    noise of that position, with probability `SHARED_NOISE_PROB`; its siblings share the rest.
    """

    config: EagleConfig
    top_k: int
    max_depth: int
    scheme: sampling.Draw = "cdf"
    shared_noise: bool = False

    @property
    def num_columns(self) -> int:
        """The number of columns for expanded nodes."""
        return self.top_k * max(self.max_depth - 1, 1)

    @property
    def window_tokens(self) -> int:
        """The number of tokens that a call absorbs: a whole path plus one token."""
        return self.max_depth + 1

    @property
    def num_children(self) -> int:
        return min(self.top_k, self.config.num_draft_ids)


def search_from(
    weights: DeviceWeights,
    cache: KVCache,
    g_BD: jax.Array,
    ends: RowEnds,
    depth: jax.Array,
    key: jax.Array,
    max_tokens: int,
    *,
    search: Search,
) -> DraftTrees:
    """Draft `depth` levels from the last entry of each row, which has features `g_BD`.

    The cache holds these entries already. Log-probabilities are at the temperature of the row (1 if
    that is 0); `key` is the rollout key.
    """
    drafter = _Drafting(search, weights, ends, key, cache.layer(0), cache.values[0].dtype)
    at_rest = cache.num_positions + FIRST_TOKEN
    last_B = ends.total_B - 1 - ends.starts(FIRST_TOKEN, at_rest)
    tokens_B1 = jnp.take_along_axis(ends.tokens_BW, jnp.maximum(last_B, 0)[:, None], axis=1)
    o_B1D = drafter.root(tokens_B1, g_BD[:, None])
    level = jnp.int32(1)
    columns = drafter.columns(search.num_columns)
    _, _, _, pool = jax.lax.while_loop(
        lambda carry: carry[0] < depth,
        lambda carry: (carry[0] + 1, *drafter.expand(*carry)),
        (level, columns, *drafter.first(o_B1D)),
    )
    return pool.best(max_tokens, weights.frozen.draft_ids_U)


@struct.dataclass
class _Beams:
    """The nodes to expand next; `above_BKX` marks the columns of their ancestors."""

    at_BK: jax.Array
    sum_BK: jax.Array
    g_BKD: jax.Array
    index_BK: jax.Array
    above_BKX: jax.Array
    parent_BK: jax.Array  # column of the parent; −1: the last entry of the row


@struct.dataclass
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

    def best(self, max_tokens: int, draft_ids_U: jax.Array | None) -> DraftTrees:
        """Return the best candidates; a parent never ranks after its child."""
        B, P = self.at_BP.shape
        M = min(max_tokens, P)
        sum_BM, chosen_BM = jax.lax.top_k(self.sum_BP, M)
        rank_BP = jnp.zeros((B, P), jnp.int32)
        rank_BP = jax.vmap(lambda rank, at: rank.at[at].set(jnp.arange(M)))(rank_BP, chosen_BM)
        parents_BM = jnp.take_along_axis(self.parents_BP, chosen_BM, axis=1)
        ranked_BM = jnp.take_along_axis(rank_BP, jnp.maximum(parents_BM, 0), axis=1)
        tokens_BM = _policy_ids(jnp.take_along_axis(self.at_BP, chosen_BM, axis=1), draft_ids_U)
        real_BM = sum_BM > -jnp.inf
        pad = partial(jnp.pad, pad_width=((0, 0), (0, max_tokens - M)), constant_values=-1)
        return DraftTrees(
            tokens_RX=pad(jnp.where(real_BM, tokens_BM, PADDING)),
            parents_RX=pad(jnp.where(real_BM & (parents_BM >= 0), ranked_BM, -1)),
            prob_RX=pad(jnp.exp(sum_BM)),
            count_R=jnp.sum(real_BM, axis=1, dtype=jnp.int32),
        )


@struct.dataclass
class _Columns:
    """Keys [B, K, h, X] and values [B, K, X, h] of expanded nodes, and the parent columns."""

    keys: jax.Array
    values: jax.Array
    parents_BX: jax.Array

    def put(
        self, column: jax.Array, k_BNKh: jax.Array, v_BNKh: jax.Array, parents_BN: jax.Array
    ) -> _Columns:
        """Return the columns with N nodes of each row written from `column` on."""
        put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=column)
        k_BKhN = k_BNKh.transpose(0, 2, 3, 1)
        v_BKNh = v_BNKh.transpose(0, 2, 1, 3)
        return _Columns(
            pin(put(self.keys, k_BKhN.astype(self.keys.dtype), axis=KEY_AXIS)),
            pin(put(self.values, v_BKNh.astype(self.values.dtype), axis=VALUE_AXIS)),
            put(self.parents_BX, parents_BN, axis=1),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class _Drafting:
    """The constants of one call; `cached` holds the cache entries, of type `dtype`."""

    search: Search
    weights: DeviceWeights
    ends: RowEnds
    key: jax.Array
    cached: Pages
    dtype: Any

    @property
    def last_B(self) -> jax.Array:
        """The last entry of each row; 0 for idle rows, since no rotary angle may be negative."""
        return jnp.maximum(self.ends.total_B - FIRST_TOKEN - 1, 0)

    def columns(self, size: int) -> _Columns:
        """Return empty columns."""
        B = len(self.ends.total_B)
        layer = self.search.config.layer
        K = layer.num_kv_heads
        h = layer.head_dim
        keys = jnp.zeros((B, K, h, size), self.dtype)
        values = jnp.zeros((B, K, size, h), self.dtype)
        parents_BX = jnp.full((B, size), -1, jnp.int32)
        return _Columns(pin(keys), pin(values), parents_BX)

    def of_cache(self, q_BNHh: jax.Array) -> PartialSoftmax:
        """Attend to all cached entries of a row, or to no entries if the row is idle."""
        return self.cached.of_prefix(q_BNHh, jnp.where(self.ends.max_B > 0, self.last_B + 1, 0))

    def attend(
        self,
        q_BNHh: jax.Array,
        new: _Columns,
        first: jax.Array,
        length_B: jax.Array,
        portable: Portable,
    ) -> jax.Array:
        """Attend from the N new nodes in columns `first` … to all nodes before and to themselves.

        A node sees the first `length` entries of its row, its ancestors and itself. The CPU kernel
        reads only these; without that kernel, `portable` computes the result.
        """
        pages = self.cached
        if not pages.for_cpu or not is_in_order(self.dtype, pages.values_PKTh, for_cpu=True):
            return portable()
        B, X = new.parents_BX.shape
        N = q_BNHh.shape[1]
        b_B1 = jnp.arange(B, dtype=jnp.int32)[:, None]
        x_X = jnp.arange(X)
        asks_BX = (x_X >= first) & (x_X < first + N) & (self.ends.max_B > 0)[:, None]
        after = After(
            row_X=jnp.where(asks_BX, b_B1, -1).reshape(-1),
            length_X=jnp.where(asks_BX, length_B[:, None], 0).reshape(-1),
            parent_X=jnp.where(new.parents_BX < 0, -1, b_B1 * X + new.parents_BX).reshape(-1),
        )

        def of_all(x_BNHh: jax.Array) -> jax.Array:
            x_BXHh = jnp.zeros((B, X, *x_BNHh.shape[2:]), x_BNHh.dtype)
            x_BXHh = jax.lax.dynamic_update_slice_in_dim(x_BXHh, x_BNHh, first, axis=1)
            return x_BXHh.reshape(B * X, *x_BNHh.shape[2:])

        k_BXKh = new.keys.transpose(0, 3, 1, 2)
        v_BXKh = new.values.transpose(0, 2, 1, 3)
        k_XKh, v_XKh = (x.reshape(B * X, *x.shape[2:]) for x in (k_BXKh, v_BXKh))
        out_XHh = pages.of_new(of_all(q_BNHh), k_XKh, v_XKh, after, lambda: of_all(portable()))
        out_BXHh = out_XHh.reshape(B, X, *out_XHh.shape[1:])
        return jax.lax.dynamic_slice_in_dim(out_BXHh, first, N, axis=1)

    def outputs(
        self, tokens_BN: jax.Array, g_BND: jax.Array, position_B: jax.Array, look: Attend
    ) -> jax.Array:
        positions_BN = jnp.broadcast_to(position_B[:, None], tokens_BN.shape)
        params = self.weights.params
        embedding_VD = self.weights.frozen.embedding_VD
        return eagle.layer_outputs(
            self.search.config, params, embedding_VD, tokens_BN, g_BND, positions_BN, look
        )

    def root(self, tokens_B1: jax.Array, g_B1D: jax.Array) -> jax.Array:
        """Return the outputs of the last entries; the cache already has their keys and values."""

        def look(q_B1Hh: jax.Array, k_B1Kh: jax.Array, v_B1Kh: jax.Array) -> jax.Array:
            def portable() -> jax.Array:
                attended = self.of_cache(q_B1Hh)
                return (attended.out / jnp.maximum(attended.total, 1)).astype(self.dtype)

            alone = self.columns(1)
            own = alone.put(jnp.int32(0), k_B1Kh, v_B1Kh, alone.parents_BX)
            return self.attend(q_B1Hh, own, jnp.int32(0), self.last_B, portable)

        return self.outputs(tokens_B1, g_B1D, self.last_B, look)

    def children(self, level: jax.Array, o_BND: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the likeliest draft tokens after each node, and their log-probs; [B, N, K]."""
        weights = self.weights
        temperature_B = self.ends.processing.temperature
        logits_BNU = eagle.logits(self.search.config, weights.params, weights.frozen.head_UD, o_BND)
        if self.search.shared_noise:
            logprob_BNU = self._shared_noise_logprobs(logits_BNU, level)
        else:
            scale_B = jnp.where(temperature_B <= 0, 1.0, temperature_B)
            logprob_BNU = jax.nn.log_softmax(logits_BNU / scale_B[:, None, None])
        logprob_BNK, at_BNK = jax.lax.top_k(logprob_BNU, self.search.num_children)
        return at_BNK, logprob_BNK

    def first(self, o_B1D: jax.Array) -> tuple[_Beams, _Pool]:
        """Return the draft tokens for the next position, as beams and as a pool."""
        B = len(o_B1D)
        K = self.search.num_children
        at_B1K, logprob_B1K = self.children(jnp.int32(0), o_B1D)
        at_BK = at_B1K[:, 0]
        sum_BK = logprob_B1K[:, 0]
        pool = _Pool.empty(B, K + (self.search.max_depth - 1) * K * K)
        beams = _Beams(
            at_BK=at_BK,
            sum_BK=sum_BK,
            g_BKD=jnp.broadcast_to(o_B1D, (B, K, o_B1D.shape[-1])),
            index_BK=jnp.broadcast_to(jnp.arange(K, dtype=jnp.int32), (B, K)),
            above_BKX=jnp.zeros((B, K, self.search.num_columns), bool),
            parent_BK=jnp.full((B, K), -1, jnp.int32),
        )
        return beams, pool.add(jnp.int32(0), at_BK, jnp.full_like(at_BK, -1), sum_BK)

    def expand(
        self, level: jax.Array, columns: _Columns, beams: _Beams, pool: _Pool
    ) -> tuple[_Columns, _Beams, _Pool]:
        """Expand the K beams by K children each; the best K children are the next beams."""
        B, K, X = beams.above_BKX.shape
        column = (level - 1) * K
        first = K + (level - 1) * K * K
        seen_BKX = beams.above_BKX | (jnp.arange(X) == column + jnp.arange(K)[:, None])
        written = [columns]

        def look(q_BNHh: jax.Array, k_BNKh: jax.Array, v_BNKh: jax.Array) -> jax.Array:
            new = written[0] = columns.put(column, k_BNKh, v_BNKh, beams.parent_BK)

            def portable() -> jax.Array:
                of_nodes = partial_attention(q_BNHh, new.keys, new.values, seen_BKX)
                both = merged(self.of_cache(q_BNHh), of_nodes)
                return (both.out / both.total).astype(self.dtype)

            return self.attend(q_BNHh, new, column, self.last_B + 1, portable)

        tokens_BK = _policy_ids(beams.at_BK, self.weights.frozen.draft_ids_U)
        o_BKD = self.outputs(tokens_BK, beams.g_BKD, self.last_B + level, look)
        at_BKK, logprob_BKK = self.children(level, o_BKD)
        at_BP = at_BKK.reshape(B, -1)
        sum_BP = beams.sum_BK[:, :, None] + logprob_BKK
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
            parent_BK=column + chosen_BK // K,
        )
        return written[0], beams, pool

    def _shared_noise_logprobs(self, logits_BNU: jax.Array, level: jax.Array) -> jax.Array:
        """Return log `SHARED_NOISE_PROB` for the drawn token; the other tokens share the rest."""
        B, N, U = logits_BNU.shape
        ids_U = self.weights.frozen.draft_ids_U
        ends = self.ends
        temperature_BN, top_k_BN, top_p_BN = ends.processing.broadcast((B, N))
        processed_BNU = sampling.processed_logits(logits_BNU, temperature_BN, top_k_BN, top_p_BN)
        wide_BNV = processed_BNU
        if ids_U is not None:
            V = self.weights.frozen.embedding_VD.shape[0]
            wide_BNV = jnp.full((B, N, V), -jnp.inf).at[:, :, ids_U].set(processed_BNU)
        position_BN = jnp.broadcast_to((ends.emitted_B + level)[:, None], (B, N))
        request_keys_B = sampling.request_keys(self.key, ends.request_id_B)
        keys_BN = sampling.position_keys(request_keys_B, position_BN)
        drawn_BN, _ = sampling.draw(wide_BNV, keys_BN, temperature_BN, self.search.scheme)
        drawn_BNU = (jnp.arange(U) if ids_U is None else ids_U) == drawn_BN[:, :, None]
        others_BNU = jnp.where(drawn_BNU, -jnp.inf, jax.nn.log_softmax(processed_BNU))
        rest_BN1 = jax.nn.logsumexp(others_BNU, axis=-1, keepdims=True)
        rest_BN1 = jnp.maximum(rest_BN1, jnp.finfo(jnp.float32).min)  # no other token is possible
        others_BNU = others_BNU - rest_BN1 + jnp.log1p(-SHARED_NOISE_PROB)
        return jnp.where(drawn_BNU, jnp.log(SHARED_NOISE_PROB), others_BNU)


def _policy_ids(at: jax.Array, draft_ids_U: jax.Array | None) -> jax.Array:
    return at if draft_ids_U is None else jnp.take(draft_ids_U, at, mode="clip")
