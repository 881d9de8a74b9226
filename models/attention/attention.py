"""Attention: over whole sequences (training), and of packed nodes over a cache (rollouts).

Scores and softmax are float32. This is the portable path; kernels can replace it (`CachedLayer`).

Shape suffixes: B rows, T queries, S keys, H heads, K key/value heads, G = H/K query heads per
key/value head, h head size. Packed nodes: M in total, W per row. Chunks: T in total, C tokens each,
X = T·C.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from reprise.models.kernels.shared.powers import LOG2_E, NEGATIVE, power_of_two
from reprise.models.layout import causal_block_tokens


@struct.dataclass
class Packing:
    """Packed rows: several prompts, each with responses that do not see one another; int32.

    `prompt_BT` numbers the prompts of a row (0: padding), `branch_BT` the responses (0: prompt
    tokens, which all responses share). `positions_BT` are rotary positions.
    """

    positions_BT: jax.Array
    prompt_BT: jax.Array
    branch_BT: jax.Array


def precision_of(x: jax.Array) -> jax.lax.Precision | None:
    """Return the precision of products in the dtype of x: full float32 on every backend."""
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def causal_mask(num_tokens: int) -> jax.Array:
    """Return mask[0, t, s]: s ≤ t; for one sequence per row from column 0. Bool [1, T, T]."""
    return jnp.tril(jnp.ones((1, num_tokens, num_tokens), bool))


def packed_mask(packing: Packing) -> jax.Array:
    """Return mask[b, t, s]: s ≤ t in the same prompt, shared or in the same response; [B, T, T]."""
    return causal_mask(packing.prompt_BT.shape[1]) & may_see(
        packing.prompt_BT, packing.branch_BT, packing.prompt_BT, packing.branch_BT
    )


def may_see(
    prompt_BT: jax.Array, branch_BT: jax.Array, prompt_BS: jax.Array, branch_BS: jax.Array
) -> jax.Array:
    """Return mask[b, t, s]: s is in the prompt of t, shared or in the response of t; [B, T, S]."""
    same_BTS = prompt_BT[:, :, None] == prompt_BS[:, None, :]
    return same_BTS & ((branch_BS[:, None] == 0) | (branch_BT[:, :, None] == branch_BS[:, None]))


@struct.dataclass
class Trees:
    """Packed nodes by cache row: node m has place `place_M` in row `row_M`.

    Row b has up to W consecutive nodes, starting at `first_B`. `path_BWW[b, i, j]` says whether
    node j of the row is its node i or an ancestor of node i. `parent_M` is −1 for roots. There are
    at most `num_paths` paths: each root starts a path, and so does each child but a node's first.
    """

    row_M: jax.Array
    parent_M: jax.Array
    place_M: jax.Array
    first_B: jax.Array
    path_BWW: jax.Array
    num_paths: int = struct.field(pytree_node=False)


@struct.dataclass
class Chunks:
    """Chunks of known tokens, computed in the same round as nodes: C tokens from `start_T`.

    A later chunk of a row starts at the end of the previous chunk, or earlier. Row `slot_T` of the
    cache holds all positions before the first chunk of the row. Chunks of slot −1 are padding at
    the end. With `are_apart`, no row has two chunks.
    """

    slot_T: jax.Array
    start_T: jax.Array
    tokens_TC: jax.Array
    are_apart: bool = struct.field(pytree_node=False, default=False)

    @staticmethod
    def of_table(table_TX: jax.Array, *, are_apart: bool = False) -> Chunks:
        """Return the chunks of a table with one column for slots, one for starts, C for tokens."""
        return Chunks(table_TX[:, 0], table_TX[:, 1], table_TX[:, 2:], are_apart)

    @property
    def positions_TC(self) -> jax.Array:
        return self.start_T[:, None] + jnp.arange(self.tokens_TC.shape[1])

    @property
    def slot_X(self) -> jax.Array:
        return jnp.repeat(self.slot_T, self.tokens_TC.shape[1])

    @property
    def prefix_T(self) -> jax.Array:
        """The number of positions that the cache holds in the row of each chunk."""
        same_TT = self.slot_T[:, None] == self.slot_T
        return jnp.min(jnp.where(same_TT, self.start_T, jnp.max(self.start_T)), axis=1)

    @property
    def parent_X(self) -> jax.Array:
        """The token before each token in its row, −1 for the first token of a row."""
        C = self.tokens_TC.shape[1]
        x_X = jnp.arange(self.tokens_TC.size, dtype=jnp.int32)
        start_T1 = self.start_T[:, None]
        start_X = self.start_T[x_X // C]
        before_TX = (self.slot_T[:, None] == self.slot_X) & (start_X < start_T1)
        before_TX &= self.positions_TC.reshape(-1) == start_T1 - 1
        before_T = jnp.where(jnp.any(before_TX, axis=1), jnp.argmax(before_TX, axis=1), -1)
        return jnp.where(x_X % C == 0, before_T[x_X // C], x_X - 1).astype(jnp.int32)

    @property
    def mask_XX(self) -> jax.Array:
        """mask[x, y]: token y is x or before x in its row, each position once; bool [X, X].

        A token sees earlier-starting chunks of its row up to the start of its chunk.
        """
        chunk_X = jnp.repeat(jnp.arange(len(self.slot_T)), self.tokens_TC.shape[1])
        position_X = self.positions_TC.reshape(-1)
        start_X = self.start_T[chunk_X]
        same_XX = self.slot_X[:, None] == self.slot_X
        own_XX = chunk_X[:, None] == chunk_X
        before_XX = (start_X < start_X[:, None]) & (position_X < start_X[:, None])
        return jnp.where(own_XX, position_X <= position_X[:, None], same_XX & before_XX)


@struct.dataclass
class PartialSoftmax:
    """A softmax over some of the keys: Σ 2^(score − top) · v, top, and Σ 2^(score − top).

    Scores are q·k/√h · log₂e. The top is the highest score, rounded to a whole number for dtypes
    below float32, and `NEGATIVE` without keys. Float32 [B, W, H, h] and twice [B, W, H, 1].
    """

    out: jax.Array
    top: jax.Array
    total: jax.Array


class After(NamedTuple):
    """The places of X tokens that follow positions of a cache; int32.

    A token follows token `parent_X`, or the first `length_X` positions of row `row_X` if its parent
    is −1. The result of a token without a row is arbitrary. The tokens of a row, at most `width`,
    are adjacent; with `num_runs` above 0 they form several runs, at most `num_runs` over all rows.
    Tokens form trees of at most `num_paths` paths in total; if `num_paths` is 0, they form chains
    that the cache holds already.
    """

    row_X: jax.Array
    length_X: jax.Array
    parent_X: jax.Array
    num_paths: int = 0
    width: int = 1
    num_runs: int = 0

    @property
    def arrays(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self.row_X, self.length_X, self.parent_X


Portable = Callable[[], jax.Array]


class CachedLayer(Protocol):
    """The keys and values of a layer for all slots, in any memory layout."""

    def of_prefix(self, q_BWHh: jax.Array, length_B: jax.Array) -> PartialSoftmax:
        """Attend from W nodes of each slot to the first `length` positions of the slot."""
        ...

    def of_chunks(
        self, q_TCHh: jax.Array, slot_T: jax.Array, length_T: jax.Array
    ) -> PartialSoftmax:
        """Attend from each of T chunks of C tokens to the first `length` positions of its slot."""
        ...

    def of_new(
        self, q_XHh: jax.Array, k_XKh: jax.Array, v_XKh: jax.Array, after: After, portable: Portable
    ) -> jax.Array:
        """Attend from X tokens to all positions up to themselves; `portable` if no kernel does."""
        ...


def attend(
    q_BTHh: jax.Array, k_BKhS: jax.Array, v_BKSh: jax.Array, mask_BTS: jax.Array
) -> jax.Array:
    """Return softmax(q·k/√h)·v over the keys of the mask, with grouped heads; [B, T, H, h]."""
    result = partial_attention(q_BTHh, k_BKhS, v_BKSh, mask_BTS)
    return (result.out / result.total).astype(v_BKSh.dtype)


def attend_both(
    q_BTHh: jax.Array,
    one: tuple[jax.Array, jax.Array, jax.Array],
    other: tuple[jax.Array, jax.Array, jax.Array],
) -> jax.Array:
    """Return `attend` over the keys of two caches, each (keys, values, mask); [B, T, H, h]."""
    result = joined(partial_attention(q_BTHh, *one), partial_attention(q_BTHh, *other))
    return result.astype(one[1].dtype)


def attend_nodes(
    q_MHh: jax.Array,
    k_MKh: jax.Array,
    v_MKh: jax.Array,
    cached: CachedLayer,
    length_B: jax.Array,
    trees: Trees | None,
) -> jax.Array:
    """Attend from packed nodes to the first `length` positions of their row, and to their path.

    The cache does not have the entries of the nodes yet. The two softmaxes are joined:

        out = (o₁ 2^(t₁ − t) + o₂ 2^(t₂ − t)) / (Σ₁ 2^(t₁ − t) + Σ₂ 2^(t₂ − t)),  t = max(t₁, t₂)

    Without `trees`, node m is the only node of row m. Rows are padded to W nodes.
    """
    if trees is None:
        row_M = jnp.arange(len(q_MHh), dtype=jnp.int32)
        after = After(row_M, length_B, jnp.full_like(row_M, -1), len(row_M))
        return cached.of_new(
            q_MHh, k_MKh, v_MKh, after, lambda: _of_roots(q_MHh, k_MKh, v_MKh, cached, length_B)
        )
    length_M = jnp.take(length_B, trees.row_M, mode="clip")
    after = After(
        row_X=trees.row_M,
        length_X=length_M,
        parent_X=trees.parent_M,
        num_paths=trees.num_paths,
        width=trees.path_BWW.shape[1],
    )
    return cached.of_new(
        q_MHh, k_MKh, v_MKh, after, lambda: _of_trees(q_MHh, k_MKh, v_MKh, cached, length_B, trees)
    )


def _of_roots(
    q_MHh: jax.Array, k_MKh: jax.Array, v_MKh: jax.Array, cached: CachedLayer, length_B: jax.Array
) -> jax.Array:
    of_prefix = cached.of_prefix(q_MHh[:, None], length_B)
    own = _of_itself(q_MHh[:, None], k_MKh[:, None], v_MKh[:, None])
    return joined(of_prefix, own)[:, 0].astype(v_MKh.dtype)


def _of_trees(
    q_MHh: jax.Array,
    k_MKh: jax.Array,
    v_MKh: jax.Array,
    cached: CachedLayer,
    length_B: jax.Array,
    trees: Trees,
) -> jax.Array:
    W = trees.path_BWW.shape[1]
    node_BW = trees.first_B[:, None] + jnp.arange(W)
    q_BWHh, k_BWKh, v_BWKh = (
        jnp.take(x, node_BW, axis=0, mode="clip") for x in (q_MHh, k_MKh, v_MKh)
    )
    of_prefix = cached.of_prefix(q_BWHh, length_B)
    k_BKhW = k_BWKh.transpose(0, 2, 3, 1)
    v_BKWh = v_BWKh.transpose(0, 2, 1, 3)
    own = partial_attention(q_BWHh, k_BKhW, v_BKWh, trees.path_BWW)
    out_XHh = joined(of_prefix, own).astype(v_MKh.dtype).reshape(-1, *q_MHh.shape[1:])
    return jnp.take(out_XHh, trees.row_M * W + trees.place_M, axis=0, mode="clip")


def attend_chunks(
    q_TCHh: jax.Array,
    k_TCKh: jax.Array,
    v_TCKh: jax.Array,
    cached: CachedLayer,
    chunks: Chunks,
) -> jax.Array:
    """Attend from chunks to the cached positions of their row, and to its earlier tokens."""
    q_XHh, k_XKh, v_XKh = (x.reshape(-1, *x.shape[2:]) for x in (q_TCHh, k_TCKh, v_TCKh))
    length_X = jnp.repeat(chunks.prefix_T, q_TCHh.shape[1])
    T, C = chunks.tokens_TC.shape
    width = C if chunks.are_apart else T * C
    after = After(chunks.slot_X, length_X, chunks.parent_X, T, width, num_runs=T)

    def portable() -> jax.Array:
        return _of_chunks(q_TCHh, k_TCKh, v_TCKh, cached, chunks)

    out_XHh = cached.of_new(q_XHh, k_XKh, v_XKh, after, portable)
    return out_XHh.reshape(q_TCHh.shape)


def _of_chunks(
    q_TCHh: jax.Array,
    k_TCKh: jax.Array,
    v_TCKh: jax.Array,
    cached: CachedLayer,
    chunks: Chunks,
) -> jax.Array:
    of_prefix = cached.of_chunks(q_TCHh, jnp.maximum(chunks.slot_T, 0), chunks.prefix_T)
    if chunks.are_apart:
        k_TKhC = k_TCKh.transpose(0, 2, 3, 1)
        v_TKCh = v_TCKh.transpose(0, 2, 1, 3)
        own = partial_attention(q_TCHh, k_TKhC, v_TKCh, causal_mask(q_TCHh.shape[1]))
        return joined(of_prefix, own).astype(v_TCKh.dtype).reshape(-1, *q_TCHh.shape[2:])
    q_1XHh, k_1XKh, v_1XKh = (x.reshape(1, -1, *x.shape[2:]) for x in (q_TCHh, k_TCKh, v_TCKh))
    k_1KhX = k_1XKh.transpose(0, 2, 3, 1)
    v_1KXh = v_1XKh.transpose(0, 2, 1, 3)
    own = partial_attention(q_1XHh, k_1KhX, v_1KXh, chunks.mask_XX[None])
    own = jax.tree.map(lambda x: x.reshape(*q_TCHh.shape[:3], -1), own)
    return joined(of_prefix, own).astype(v_TCKh.dtype).reshape(-1, *q_TCHh.shape[2:])


def merged(one: PartialSoftmax, other: PartialSoftmax) -> PartialSoftmax:
    """Return the partial softmax over the keys of both."""
    top = jnp.maximum(one.top, other.top)
    of_one = _power(one.top - top)
    of_other = _power(other.top - top)
    total = one.total * of_one + other.total * of_other
    return PartialSoftmax(one.out * of_one + other.out * of_other, top, total)


def joined(one: PartialSoftmax, other: PartialSoftmax) -> jax.Array:
    """Return the attention output over the keys of both."""
    both = merged(one, other)
    return both.out / both.total


def weights(scores: jax.Array, top: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return 2^(score − top) for a whole number `top`, in float32, before rounding to `dtype`.

    For dtypes below float32, every top gives the same mantissas, hence the same rounding in partial
    softmaxes.
    """
    if dtype == jnp.float32:
        return jnp.exp2(scores - top)
    whole = jax.lax.stop_gradient(jnp.round(scores))
    return jnp.exp2(scores - whole) * power_of_two(whole - top)


def _power(x: jax.Array) -> jax.Array:
    """Return 2^x for x ≤ 0, without rounding if x is a whole number."""
    whole = jax.lax.stop_gradient(jnp.round(x))
    return jnp.exp2(x - whole) * power_of_two(whole)


def _of_itself(q_BTHh: jax.Array, k_BTKh: jax.Array, v_BTKh: jax.Array) -> PartialSoftmax:
    """Return the softmax over only the key of the node itself."""
    B, T, H, h = q_BTHh.shape
    K = k_BTKh.shape[2]
    scores_BTKG = jnp.einsum(
        "btkgh,btkh->btkg",
        q_BTHh.reshape(B, T, K, H // K, h),
        k_BTKh,
        precision=precision_of(q_BTHh),
        preferred_element_type=jnp.float32,
    ) * (h**-0.5 * LOG2_E)
    score_BTH1 = scores_BTKG.reshape(B, T, H, 1)
    v_BTHh = jnp.repeat(v_BTKh, H // K, axis=2).astype(jnp.float32)
    if v_BTKh.dtype == jnp.float32:
        return PartialSoftmax(v_BTHh, score_BTH1, jnp.ones_like(score_BTH1))
    top_BTH1 = jnp.round(jax.lax.stop_gradient(score_BTH1))
    weight_BTH1 = weights(score_BTH1, top_BTH1, v_BTKh.dtype)
    rounded_BTH1 = weight_BTH1.astype(v_BTKh.dtype).astype(jnp.float32)
    return PartialSoftmax(v_BTHh * rounded_BTH1, top_BTH1, weight_BTH1)


def _products(q_BKXh: jax.Array, k_BKhS: jax.Array) -> jax.Array:
    """Return q·k, float32 [B, K, X, S].

    CPUs get float32 inputs, because their bfloat16 products sum in an order that depends on the
    number of queries.
    """

    def product(q_BKXh: jax.Array, k_BKhS: jax.Array) -> jax.Array:
        return jnp.einsum(
            "bkxh,bkhs->bkxs",
            q_BKXh,
            k_BKhS,
            precision=precision_of(q_BKXh),
            preferred_element_type=jnp.float32,
        )

    def wide(q_BKXh: jax.Array, k_BKhS: jax.Array) -> jax.Array:
        return product(q_BKXh.astype(jnp.float32), k_BKhS.astype(jnp.float32))

    if q_BKXh.dtype == jnp.float32:
        return product(q_BKXh, k_BKhS)
    return jax.lax.platform_dependent(q_BKXh, k_BKhS, cpu=wide, default=product)


def _apart(x: jax.Array) -> jax.Array:
    """Return x, on a CPU through an optimization barrier, so that XLA does not fuse across it."""
    return jax.lax.platform_dependent(x, cpu=jax.lax.optimization_barrier, default=lambda x: x)


def finite_values(k_XKh: jax.Array, v_XKh: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return keys and values of new tokens, with all values finite.

    A value that is not finite makes its key NaN, and so the score of each query that sees it. For
    other queries its weight is 0, and 0 times NaN would be NaN.
    """
    is_finite_XKh = jnp.isfinite(v_XKh)
    is_finite_XK1 = jnp.all(is_finite_XKh, axis=-1, keepdims=True)
    return jnp.where(is_finite_XK1, k_XKh, jnp.nan), jnp.where(is_finite_XKh, v_XKh, 0)


def partial_attention(
    q_BTHh: jax.Array, k_BKhS: jax.Array, v_BKSh: jax.Array, mask_BTS: jax.Array
) -> PartialSoftmax:
    """Return the softmax over these keys; [B, T, H, h] and twice [B, T, H, 1], float32."""
    B, T, H, h = q_BTHh.shape
    K = k_BKhS.shape[1]
    G = H // K
    q_BKXh = q_BTHh.reshape(B, T, K, G, h).transpose(0, 2, 1, 3, 4).reshape(B, K, T * G, h)
    # float32 uses e^x: 2^x with whole tops is slower on a CPU, and float32 does not need its bits
    is_exact = v_BKSh.dtype == jnp.float32
    scores_BKXS = _products(q_BKXh, k_BKhS) * (h**-0.5 * (1.0 if is_exact else LOG2_E))
    mask_BKXS = jnp.repeat(mask_BTS, G, axis=1)[:, None]
    scores_BKXS = jnp.where(mask_BKXS, scores_BKXS, NEGATIVE)
    highest_BKX1 = jnp.max(jax.lax.stop_gradient(scores_BKXS), axis=-1, keepdims=True)
    # The returned maximum is a second one, because XLA on CPUs fuses the first with the weights.
    apart_BKXS = _apart(jax.lax.stop_gradient(scores_BKXS))
    second_top_BKX1 = jnp.max(apart_BKXS, axis=-1, keepdims=True)
    if is_exact:
        weights_BKXS = jnp.exp(scores_BKXS - highest_BKX1)
        top_BKX1 = second_top_BKX1 * LOG2_E
    else:
        weights_BKXS = weights(scores_BKXS, jnp.round(highest_BKX1), v_BKSh.dtype)
        top_BKX1 = jnp.round(second_top_BKX1)
    total_BKX1 = jnp.sum(weights_BKXS, axis=-1, keepdims=True)
    out_BKXh = jnp.einsum(
        "bkxs,bksh->bkxh",
        weights_BKXS.astype(v_BKSh.dtype),
        v_BKSh,
        precision=precision_of(v_BKSh),
        preferred_element_type=jnp.float32,
    )

    def by_head(x_BKXi: jax.Array) -> jax.Array:
        x_BKTGi = x_BKXi.reshape(B, K, T, G, -1)
        return x_BKTGi.transpose(0, 2, 1, 3, 4).reshape(B, T, H, -1)

    return PartialSoftmax(by_head(out_BKXh), by_head(top_BKX1), by_head(total_BKX1))


def attend_causally(
    q_BTHh: jax.Array, k_BKhT: jax.Array, v_BKTh: jax.Array, mask_BTT: jax.Array
) -> jax.Array:
    """Return `attend` under causal masks, in blocks of queries that skip later keys."""
    T = q_BTHh.shape[1]
    if (size := causal_block_tokens(T)) == T:
        return attend(q_BTHh, k_BKhT, v_BKTh, mask_BTT)

    def block(end: int) -> jax.Array:
        tail = slice(end - size, end)
        return attend(
            q_BTHh[:, tail], k_BKhT[..., :end], v_BKTh[:, :, :end], mask_BTT[:, tail, :end]
        )

    return jnp.concatenate([block(end) for end in range(size, T + 1, size)], axis=1)
