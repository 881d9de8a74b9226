"""Attention over packed rows on a TPU: a Pallas (Mosaic) kernel, forward and backward.

    forward    out = Σ_s e^(score_s − lse) v_s,   lse = log Σ_s e^(score_s)
    backward   p = e^(score − lse),  δ = Σ_h dout · out,  ds = p (dout vᵀ − δ)
               dq = ds k / √h,  dk = dsᵀ q / √h,  dv = pᵀ dout

A grid step is a pair of a block of queries and a block of keys (`row_pairs`), for all query heads
of a key/value head, so that keys and values are read once for these heads. Scores are held keys
first, [S, C], so that the numbers of a query (maximum, sum, log-sum-exp) are a row of lanes. The
forward pass takes keys in the order of attention to pages (`softmax_tpu`).
`models.decoder.row_attention` is the reference. On a mesh each device calls this with its local
rows and heads.

B rows, T positions, H heads, K key/value heads, G = H/K, h head size, n blocks, P pairs of blocks,
C queries of a block, S keys of a block. Sources: arXiv 2205.14135 (blocks), arXiv 2307.08691 (two
passes backward).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from reprise.models.kernels.shared import row_pairs
from reprise.models.kernels.shared.powers import LOG2_E, NEGATIVE
from reprise.models.kernels.tpu.softmax_tpu import (
    FIRST,
    KEYS,
    LANES,
    LAST,
    PLAIN,
    KeysFirst,
    product,
    scores,
)

_BLOCK_TOKENS = 512  # at most; of queries and of keys
_VMEM_BYTES = 48 * 2**20  # limit of a kernel; TPUs since v5e have 64 MiB and more
_BLOCK_BYTES = 2 * 2**20  # at most, for the queries of a block in float32
_MAX_PAIRS = 2**17  # in all rows; half of the scalar memory


def takes(q_shape: tuple[int, ...], kv_shape: tuple[int, ...], dtype: Any) -> str | None:
    """Return why the kernel does not take [B, T, H, h] and [B, T, K, h]; None if it does."""
    B, T, H, h = q_shape
    K = kv_shape[2]
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        return f"expected float32 or bfloat16, got {jnp.dtype(dtype).name}"
    if h % 8 or h > 2 * LANES:
        return f"expected a head size that 8 divides, of at most {2 * LANES}, got {h}"
    if H % K:
        return f"expected heads that {K} key/value heads divide, got {H}"
    size = block_tokens(T, H // K, h)
    n = -(-T // size)
    if B * n * (n + 1) // 2 > _MAX_PAIRS or n >= 2**row_pairs.BLOCK_BITS:
        return f"expected at most {_MAX_PAIRS} pairs of blocks of {size}, got {B} rows of {T}"
    return None


def block_tokens(num_tokens: int, group: int, head_size: int) -> int:
    """Return the positions of a block: fewer for large groups of heads, and for short rows."""
    size = _BLOCK_TOKENS
    while size > LANES and 4 * size * group * max(head_size, LANES) > _BLOCK_BYTES:
        size //= 2
    return min(size, -(-num_tokens // LANES) * LANES)


def forward(
    q_BTHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    prompt_BT: jax.Array,
    branch_BT: jax.Array,
    *,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Return attention as `decoder.row_attention`, [B, T, H, h], and log Σ e^score [B, H, T]."""
    call = _Call.of(q_BTHh, k_BTKh, prompt_BT, branch_BT, interpret)
    q = call.queries(q_BTHh)
    k = call.keys(k_BTKh)
    v = call.keys(v_BTKh)
    out, lse = call.run(
        _forward_kernel,
        by_query=True,
        inputs=[(q, "queries"), (k, "keys"), (v, "keys")],
        outputs=[
            (jax.ShapeDtypeStruct(q.shape, v.dtype), "queries"),
            (jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32), "sums"),
        ],
        scratch=[
            pltpu.VMEM((call.G, call.h, call.C), jnp.float32),
            pltpu.VMEM((call.G, call.C), jnp.float32),
            pltpu.VMEM((call.G, KEYS, call.C), jnp.float32),
        ],
        products=2,
    )
    return call.rows(out), lse.reshape(call.B, -1, lse.shape[-1])[:, :, : call.T]


def backward(
    q_BTHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    prompt_BT: jax.Array,
    branch_BT: jax.Array,
    out_BTHh: jax.Array,
    lse_BHT: jax.Array,
    dout_BTHh: jax.Array,
    *,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of queries, keys and values, from inputs and results of `forward`."""
    call = _Call.of(q_BTHh, k_BTKh, prompt_BT, branch_BT, interpret)
    q = call.queries(q_BTHh)
    k = call.keys(k_BTKh)
    v = call.keys(v_BTKh)
    dout = call.queries(dout_BTHh)
    lse = call.sums(lse_BHT)
    inputs = [(q, "queries"), (k, "keys"), (v, "keys"), (dout, "queries"), (lse, "sums")]
    dq, delta = call.run(
        _dq_kernel,
        by_query=True,
        inputs=[*inputs, (call.queries(out_BTHh), "queries")],
        outputs=[
            (jax.ShapeDtypeStruct(q.shape, q.dtype), "queries"),
            (jax.ShapeDtypeStruct(lse.shape, jnp.float32), "sums"),
        ],
        scratch=[pltpu.VMEM((call.G, call.h, call.C), jnp.float32)],
        products=3,
    )
    dk, dv = call.run(
        _dkv_kernel,
        by_query=False,
        inputs=[*inputs, (delta, "sums")],
        outputs=[(jax.ShapeDtypeStruct(x.shape, x.dtype), "keys") for x in (k, v)],
        scratch=[pltpu.VMEM((call.C, call.h), jnp.float32)] * 2,
        products=4,
    )
    return call.rows(dq), call.rows(dk), call.rows(dv)


@dataclasses.dataclass(frozen=True)
class _Call:
    """The shapes and the pairs of a call, and the layout of its arrays for the kernel."""

    B: int
    T: int
    K: int
    G: int
    h: int
    C: int
    prompt_BT: jax.Array  # padded to whole blocks, like branch_BT
    branch_BT: jax.Array
    interpret: Any

    @staticmethod
    def of(
        q_BTHh: jax.Array, k_BTKh: jax.Array, prompt_BT: jax.Array, branch_BT: jax.Array, how: Any
    ) -> _Call:
        B, T, H, h = q_BTHh.shape
        K = k_BTKh.shape[2]
        size = block_tokens(T, H // K, h)
        widths = (0, 0), (0, -T % size)
        prompt_BT, branch_BT = (
            jnp.pad(x.astype(jnp.int32), widths) for x in (prompt_BT, branch_BT)
        )
        return _Call(B, T, K, H // K, h, size, prompt_BT, branch_BT, how)

    def queries(self, x_BTHh: jax.Array) -> jax.Array:
        """Return [B, K, G, T, h], with T padded to whole blocks."""
        x_BHTh = self._filled(x_BTHh.swapaxes(1, 2), 2)
        return x_BHTh.reshape(self.B, self.K, self.G, *x_BHTh.shape[2:])

    def keys(self, x_BTKh: jax.Array) -> jax.Array:
        """Return [B, K, T, h], padded."""
        return self._filled(x_BTKh.swapaxes(1, 2), 2)

    def sums(self, x_BHT: jax.Array) -> jax.Array:
        """Return [B, K, G, T], padded."""
        x_BHT = self._filled(x_BHT, 2)
        return x_BHT.reshape(self.B, self.K, self.G, -1)

    def rows(self, x: jax.Array) -> jax.Array:
        """Return [B, T, H, h] from queries or keys in the layout of the kernel."""
        x_BHTh = x.reshape(self.B, -1, *x.shape[-2:])
        return x_BHTh.swapaxes(1, 2)[:, : self.T]

    def _filled(self, x: jax.Array, axis: int) -> jax.Array:
        over = self.prompt_BT.shape[1] - self.T
        widths = [(0, over if i == axis else 0) for i in range(x.ndim)]
        return jnp.pad(x, widths) if over else x

    def _specs(self, at: Callable) -> dict[str, pl.BlockSpec]:
        """Return the blocks of a step by kind of array; `at` gives the pair of a step."""
        G = self.G
        C = self.C
        h = self.h
        return {
            "queries": pl.BlockSpec((1, 1, G, C, h), lambda b, k, *p: (b, k, 0, at(b, *p)[0], 0)),
            "keys": pl.BlockSpec((1, 1, C, h), lambda b, k, *p: (b, k, at(b, *p)[1], 0)),
            "sums": pl.BlockSpec((1, 1, G, C), lambda b, k, *p: (b, k, 0, at(b, *p)[0])),
            "query places": pl.BlockSpec((1, 2, C), lambda b, k, *p: (b, 0, at(b, *p)[0])),
            "key places": pl.BlockSpec((1, C, 2), lambda b, k, *p: (b, at(b, *p)[1], 0)),
        }

    def run(
        self,
        kernel: Callable,
        *,
        by_query: bool,
        inputs: list[tuple[jax.Array, str]],
        outputs: list[tuple[jax.ShapeDtypeStruct, str]],
        scratch: list[Any],
        products: int,
    ) -> Any:
        """Run a kernel over the visible pairs, with all heads of a key/value head in a step."""
        places = [self.prompt_BT, self.branch_BT]
        pair_P, num_B = row_pairs.pair_list(self.prompt_BT, self.branch_BT, self.C, by_query)
        P = len(pair_P) // self.B

        def at(b: jax.Array, p: jax.Array, pair_P: Any, num_B: Any) -> tuple[jax.Array, jax.Array]:
            pair = pair_P[b * P + p]
            return row_pairs.query_block(pair), row_pairs.key_block(pair)

        specs = self._specs(at)
        places_B2T, places_BT2 = (jnp.stack(places, axis=axis) for axis in (1, 2))
        inputs = [(places_B2T, "query places"), (places_BT2, "key places"), *inputs]
        return pl.pallas_call(
            partial(kernel, num_pairs=P, group=self.G, scale=self.h**-0.5),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(self.B, self.K, num_B.max()),
                in_specs=[specs[kind] for _, kind in inputs],
                out_specs=[specs[kind] for _, kind in outputs],
                scratch_shapes=scratch,
            ),
            out_shape=[shape for shape, _ in outputs],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary"),
                vmem_limit_bytes=_VMEM_BYTES,
            ),
            cost_estimate=self._cost(P, products, inputs, outputs),
            interpret=self.interpret,
            name=kernel.__name__.strip("_"),
        )(pair_P, num_B, *(x for x, _ in inputs))

    def _cost(self, num_pairs: int, products: int, inputs: list, outputs: list) -> pl.CostEstimate:
        """Return the cost if each row is one sequence: every pair is a step that reads keys."""
        steps = self.B * self.K * self.G * num_pairs * self.C**2
        keys = 2 * self.B * self.K * num_pairs * self.C * self.h * outputs[0][0].dtype.itemsize
        once = sum(x.size * x.dtype.itemsize for x, _ in [*inputs, *outputs])
        return pl.CostEstimate(
            flops=2 * products * self.h * steps,
            transcendentals=steps,
            bytes_accessed=keys + once,
        )


@dataclasses.dataclass(frozen=True)
class _Step:
    """A grid step: a pair of blocks, or nothing; `first` or `last` of its result block."""

    pair: jax.Array
    is_pair: jax.Array
    first: jax.Array
    last: jax.Array

    @staticmethod
    def of(pair_P: Any, num_B: Any, num_pairs: int, block_of: Callable) -> _Step:
        b = pl.program_id(0)
        p = pl.program_id(2)
        at = b * num_pairs + p
        num = num_B[b]
        block = block_of(pair_P[at])
        before = block_of(pair_P[jnp.maximum(at - 1, 0)])
        behind = block_of(pair_P[b * num_pairs + jnp.minimum(p + 1, num_pairs - 1)])
        first = (p == 0) | (before != block)
        last = (p == num - 1) | (behind != block)
        return _Step(pair_P[at], p < num, (p < num) & first, (p < num) & last)

    def meet(self, places: Sequence[Any], each: Callable[[Callable], None]) -> None:
        """Call `each` with a function that masks scores [S, C], the identity for a whole pair."""
        is_whole = row_pairs.is_whole(self.pair)

        @pl.when(self.is_pair & is_whole)
        def _() -> None:
            each(lambda scores_SC: scores_SC)

        @pl.when(self.is_pair & jnp.logical_not(is_whole))
        def _() -> None:
            mask_SC = self._mask(*places)
            each(lambda scores_SC: jnp.where(mask_SC, scores_SC, NEGATIVE))

    def _mask(self, of_queries: Any, of_keys: Any) -> jax.Array:
        """Return mask[s, c]: query c of the pair may see key s of the pair."""
        prompt_1C = of_queries[0, 0:1, :]
        branch_1C = of_queries[0, 1:2, :]
        prompt_S1 = of_keys[0, :, 0:1]
        branch_S1 = of_keys[0, :, 1:2]
        shape = prompt_S1.shape[0], prompt_1C.shape[1]
        ahead = (row_pairs.key_block(self.pair) - row_pairs.query_block(self.pair)) * shape[0]
        key_SC, query_SC = (jax.lax.broadcasted_iota(jnp.int32, shape, i) for i in (0, 1))
        before_SC = key_SC + ahead <= query_SC
        own_SC = (branch_S1 == 0) | (branch_S1 == branch_1C)
        return before_SC & (prompt_S1 == prompt_1C) & own_SC


def _forward_kernel(*refs: Any, num_pairs: int, group: int, scale: float) -> None:
    """Compute a running maximum and sum of each query, as `models.decoder.row_attention` does."""
    pair_P, num_B, *places, q, k, v, out, lse, sum_GhC, top_GC, total_GSC = refs
    step = _Step.of(pair_P, num_B, num_pairs, row_pairs.query_block)

    @pl.when(step.first)
    def _() -> None:
        sum_GhC[...] = jnp.zeros_like(sum_GhC)
        top_GC[...] = jnp.full_like(top_GC, NEGATIVE)
        total_GSC[...] = jnp.zeros_like(total_GSC)

    def so_far(g: int) -> KeysFirst:
        return KeysFirst(sum_GhC[g], top_GC[g : g + 1], total_GSC[g])

    def each(masked: Callable) -> None:
        for g in range(group):
            softmax = so_far(g).with_blocks(masked(scores(k[0, 0], q[0, 0, g])), v[0, 0])
            sum_GhC[g], top_GC[g : g + 1], total_GSC[g] = softmax

    step.meet(places, each)

    @pl.when(step.last)
    def _() -> None:
        for g in range(group):
            softmax = so_far(g)
            out[0, 0, g] = softmax.attention().T.astype(out.dtype)
            lse[0, 0, g : g + 1] = softmax.top_1C / LOG2_E + jnp.log(softmax.total())


def _dq_kernel(*refs: Any, num_pairs: int, group: int, scale: float) -> None:
    """Compute the gradients of queries, and δ, which the gradients of keys and values need too."""
    pair_P, num_B, *places, q, k, v, dout, lse, out, dq, delta, sum_GhC = refs
    step = _Step.of(pair_P, num_B, num_pairs, row_pairs.query_block)

    @pl.when(step.first)
    def _() -> None:
        sum_GhC[...] = jnp.zeros_like(sum_GhC)
        ones_8h = jnp.ones((8, out.shape[-1]), jnp.float32)  # a sum over lanes, as a row of lanes
        for g in range(group):
            products_Ch = dout[0, 0, g].astype(jnp.float32) * out[0, 0, g].astype(jnp.float32)
            delta[0, 0, g : g + 1] = product(ones_8h, products_Ch, LAST)[:1]

    def each(masked: Callable) -> None:
        k_Sh = k[0, 0]
        v_Sh = v[0, 0]
        for g in range(group):
            scores_SC = masked(product(k_Sh, q[0, 0, g], LAST) * scale)
            p_SC = jnp.exp(scores_SC - lse[0, 0, g : g + 1])
            dp_SC = product(v_Sh, dout[0, 0, g], LAST)
            ds_SC = (p_SC * (dp_SC - delta[0, 0, g : g + 1])).astype(k_Sh.dtype)
            sum_GhC[g] += product(k_Sh, ds_SC, FIRST)

    step.meet(places, each)

    @pl.when(step.last)
    def _() -> None:
        for g in range(group):
            dq[0, 0, g] = (sum_GhC[g] * scale).T.astype(dq.dtype)


def _dkv_kernel(*refs: Any, num_pairs: int, group: int, scale: float) -> None:
    pair_P, num_B, *places, q, k, v, dout, lse, delta, dk, dv, dk_Sh, dv_Sh = refs
    step = _Step.of(pair_P, num_B, num_pairs, row_pairs.key_block)

    @pl.when(step.first)
    def _() -> None:
        dk_Sh[...] = jnp.zeros_like(dk_Sh)
        dv_Sh[...] = jnp.zeros_like(dv_Sh)

    def each(masked: Callable) -> None:
        k_Sh = k[0, 0]
        v_Sh = v[0, 0]
        for g in range(group):
            q_Ch = q[0, 0, g]
            dout_Ch = dout[0, 0, g]
            p_SC = jnp.exp(masked(product(k_Sh, q_Ch, LAST) * scale) - lse[0, 0, g : g + 1])
            dv_Sh[...] += product(p_SC.astype(dout_Ch.dtype), dout_Ch, PLAIN)
            dp_SC = product(v_Sh, dout_Ch, LAST)
            ds_SC = (p_SC * (dp_SC - delta[0, 0, g : g + 1])).astype(q_Ch.dtype)
            dk_Sh[...] += product(ds_SC, q_Ch, PLAIN)

    step.meet(places, each)

    @pl.when(step.last)
    def _() -> None:
        dk[0, 0] = (dk_Sh[...] * scale).astype(dk.dtype)
        dv[0, 0] = dv_Sh[...].astype(dv.dtype)
