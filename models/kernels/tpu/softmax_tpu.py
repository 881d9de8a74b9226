"""Softmaxes of queries over keys in one order, shared by the TPU kernels for attention.

A softmax takes keys in blocks of `KEYS` in order of position, and adds the weights of a block in
halves. So the bits of a result depend only on the keys of its query, whichever kernel computes it
and with whichever other queries. Unseen keys have weight 0. Attention to pages has few queries and
holds scores queries first; packed rows have many queries and hold scores keys first.

    score = q·k/√h · log₂e,   top = round(max score)
    total = Σ 2^(score − top),   sum = Σ 2^(score − top) v

X or C queries, S = `KEYS` keys of a block, h head size, l lanes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from reprise.models.kernels.shared.powers import LOG2_E, NEGATIVE, power_of_two

LANES = 128
SUBLANES = 8
KEYS = LANES  # keys of a block
LAST = (((1,), (1,)), ((), ()))  # x · yᵀ
PLAIN = (((1,), (0,)), ((), ()))  # x · y
FIRST = (((0,), (0,)), ((), ()))  # xᵀ · y


def product(x: jax.Array, y: jax.Array, dimensions: Any) -> jax.Array:
    """Return a product summed in float32, in full precision if its operands are float32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(x, y, dimensions, precision, preferred_element_type=jnp.float32)


def scores(x_Xh: jax.Array, y_Yh: jax.Array) -> jax.Array:
    """Return the scores of queries and keys, in either order; [X, Y].

    The maximum keeps the product from being fused with a later subtraction.
    """
    scale = x_Xh.shape[1] ** -0.5 * LOG2_E
    return jnp.maximum(product(x_Xh, y_Yh, LAST) * scale, NEGATIVE)


class Softmax(NamedTuple):
    """A softmax over some keys: sums [X, h], the top in each lane, and totals by lane, [X, l]."""

    sum_Xh: jax.Array
    top_Xl: jax.Array
    total_Xl: jax.Array

    @staticmethod
    def over_none(num_rows: int, head_dim: int) -> Softmax:
        widths = (head_dim, 0.0), (LANES, NEGATIVE), (LANES, 0.0)
        return Softmax(*(jnp.full((num_rows, w), x, jnp.float32) for w, x in widths))

    def with_blocks(self, scores_XY: jax.Array, values_Yh: jax.Array) -> Softmax:
        """Return the softmax with these keys added."""
        sum_Xh, top_Xl, total_Xl = self
        blocks = [slice(i, i + KEYS) for i in range(0, len(values_Yh), KEYS)]
        tops = [jnp.round(jnp.max(scores_XY[:, x], axis=1, keepdims=True)) for x in blocks]
        for x, highest_X1 in zip(blocks, tops, strict=True):
            before_Xl = top_Xl
            top_Xl = jnp.maximum(top_Xl, highest_X1)
            weights_XS = jnp.exp2(scores_XY[:, x] - top_Xl)
            kept_Xl = power_of_two(before_Xl - top_Xl)
            new_Xh = product(weights_XS.astype(values_Yh.dtype), values_Yh[x], PLAIN)
            sum_Xh = sum_Xh * wide(kept_Xl, new_Xh.shape[1]) + new_Xh
            total_Xl = total_Xl * kept_Xl + weights_XS
        return Softmax(sum_Xh, top_Xl, total_Xl)

    def total(self) -> jax.Array:
        """Return the total over all lanes, in each lane; [X, l]."""
        return sum_of_halves(self.total_Xl, 1)

    def attention(self) -> jax.Array:
        """Return the average of the values, [X, h]; 0 without keys."""
        total_Xl = self.total()
        inverse_Xl = jnp.where(total_Xl > 0, 1.0 / jnp.where(total_Xl > 0, total_Xl, 1.0), 0.0)
        return self.sum_Xh * wide(inverse_Xl, self.sum_Xh.shape[1])


def sum_of_halves(x: jax.Array, axis: int) -> jax.Array:
    """Sum `KEYS` numbers along an axis: [1, C] along the first, else equal lanes, [X, l]."""
    step = KEYS
    while (step := step // 2) > 0:
        if axis == 0 and step >= SUBLANES:
            x = x[:step] + x[step:]
        else:
            x += pltpu.roll(x, step, axis)
    return x if axis else x[:1]


def wide(x_Xl: jax.Array, width: int) -> jax.Array:
    """Return `width` columns, all equal to the given lanes, which are identical."""
    return jnp.concatenate([x_Xl] * (width // LANES), axis=-1)


class KeysFirst(NamedTuple):
    """A softmax over some keys: sums [h, C], tops [1, C], and the total by key, [S, C]."""

    sum_hC: jax.Array
    top_1C: jax.Array
    total_SC: jax.Array

    def with_blocks(self, scores_XC: jax.Array, values_Xh: jax.Array) -> KeysFirst:
        """Return the softmax with these keys added."""
        sum_hC, top_1C, total_SC = self
        blocks = [slice(i, i + KEYS) for i in range(0, len(scores_XC), KEYS)]
        tops = [jnp.round(jnp.max(scores_XC[x], axis=0, keepdims=True)) for x in blocks]
        for x, highest_1C in zip(blocks, tops, strict=True):
            before_1C = top_1C
            top_1C = jnp.maximum(top_1C, highest_1C)
            weights_SC = jnp.exp2(scores_XC[x] - top_1C)
            kept_1C = power_of_two(before_1C - top_1C)
            new_hC = product(values_Xh[x], weights_SC.astype(values_Xh.dtype), FIRST)
            sum_hC = sum_hC * kept_1C + new_hC
            total_SC = total_SC * kept_1C + weights_SC
        return KeysFirst(sum_hC, top_1C, total_SC)

    def total(self) -> jax.Array:
        """Return the total over all keys, [1, C]."""
        return sum_of_halves(self.total_SC, 0)

    def attention(self) -> jax.Array:
        """Return the average of the values, [h, C]."""
        return self.sum_hC * (1.0 / self.total())
