"""Shared by the kernels for Hopper GPUs: sizes, tiles in the registers of a warp group, softmaxes.

A softmax takes keys in blocks of `ROWS` in order of position. Every `PART_TOKENS` positions are a
part, and the parts are joined in order. So the bits of a result depend only on the keys of its
query, whichever kernel computes it and with whichever other queries. Unseen keys have weight 0.

    top = round(max score),  total = Σ 2^(score − top),  sum = Σ 2^(score − top) v

The interpreter of JAX supports neither layouts nor transposed operands, so it gets plain arrays.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from reprise.models.kernels.shared.powers import NEGATIVE, power_of_two

HOPPERS = ("H100", "H200", "GH200", "H800", "H20", "h100")  # in names of devices
H100_BUFFER_BYTES = 96 << 10  # of 227 KiB of shared memory: two blocks have 113 KiB each
ROWS = 64  # the minimum that a warp group multiplies, and the keys of a block
PART_TOKENS = 1024
SWIZZLE_BYTES = 128
_WHOLE = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()  # jax < 0.12


def is_hopper() -> bool:
    """Return whether programs are compiled for an NVIDIA GPU of compute capability 9.

    This depends on the mesh in use, or the default device. A GPU without a name is the Hopper of
    rl.preflight.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = jax.devices()[0].device_kind if device is None else device.device_kind
    return not kind or any(name in kind for name in HOPPERS)


def shared_tiles(*shape: int) -> Any:
    """Return bfloat16 matrices in shared memory, in the layout of both copies and products."""
    layout = plgpu.TilingTransform((8, SWIZZLE_BYTES // 2))
    return plgpu.SMEM(
        shape, jnp.bfloat16, transforms=(layout, plgpu.SwizzleTransform(SWIZZLE_BYTES))
    )


def shared_rows(*shape: int) -> Any:
    """Return bfloat16 matrices in shared memory, row by row, for copies of any number of rows."""
    return plgpu.SMEM(shape, jnp.bfloat16)


def shared_sums(*shape: int) -> Any:
    """Return float32 matrices in shared memory, which copies take eight rows at a time."""
    layout = plgpu.TilingTransform((8, SWIZZLE_BYTES // 4))
    return plgpu.SMEM(
        shape, jnp.float32, transforms=(layout, plgpu.SwizzleTransform(SWIZZLE_BYTES))
    )


@dataclasses.dataclass(frozen=True)
class WarpGroup:
    """A warp group, or the interpreter in its place."""

    interpreted: bool

    def laid_out(self, x: jax.Array) -> jax.Array:
        """Return numbers in the register layout of a product: [R, j], or by row, [R]."""
        layout = plgpu.Layout.WGMMA if x.ndim == 2 else plgpu.Layout.WGMMA.reduce(1)
        return x if self.interpreted else plgpu.layout_cast(x, layout)

    def along(self, ref: Any, axis: int) -> jax.Array:
        """Load one number for each row (axis 0) or column (1) of a product."""
        if self.interpreted:
            return ref[...]
        layout = plgpu.Layout.WGMMA.reduce(1 - axis)
        return plgpu.load(ref, *_WHOLE, layout=layout, optimized=False)  # few bytes

    def tile(self, ref: Any) -> jax.Array:
        """Load a matrix in the register layout of a product."""
        if self.interpreted:
            return ref[...]
        return plgpu.load(ref, *_WHOLE, layout=plgpu.Layout.WGMMA, optimized=False)

    def full(self, shape: tuple[int, ...], number: float) -> jax.Array:
        """Return the same float32 number everywhere, [R, j], or by row, [R]."""
        return self.laid_out(jnp.full(shape, number, jnp.float32))

    def positions(self, shape: tuple[int, int], axis: int) -> jax.Array:
        """Return the row or column of each number of a product."""
        if self.interpreted:
            return jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)

    def product(self, x_Ri: Any, y_ref: Any, transposed: bool = False) -> jax.Array:
        """Multiply an array, or a shared-memory array, with a shared one; float32 [R, j]."""
        if self.interpreted:
            x_Ri = x_Ri[...]
            y_ij = y_ref[...].T if transposed else y_ref[...]
            plgpu.commit_smem()  # products of tensor cores read shared memory as copies do
            return jnp.dot(x_Ri, y_ij, preferred_element_type=jnp.float32)
        y_ref = plgpu.transpose_ref(y_ref, (1, 0)) if transposed else y_ref

        def multiply(sum_Rj: Any) -> jax.Array:
            plgpu.wgmma(sum_Rj, x_Ri, y_ref)
            return sum_Rj[...]

        return pl.run_scoped(multiply, plgpu.ACC((x_Ri.shape[0], y_ref.shape[1]), jnp.float32))

    def scores(self, x_Rh: Any, y_Sh: Any, scale: float) -> jax.Array:
        """Return x · yᵀ · scale, [R, S]; no product is fused with a later subtraction."""
        return jnp.maximum(self.product(x_Rh, y_Sh, transposed=True) * scale, NEGATIVE)

    def add_product(self, sum_Rj: jax.Array, x_Ri: jax.Array, y_ref: Any) -> jax.Array:
        """Return sum + x · y, accumulated in the registers of the sum."""
        if self.interpreted:
            return sum_Rj + self.product(x_Ri, y_ref)

        def multiply(sum_ref: Any) -> None:
            plgpu.wgmma(sum_ref, x_Ri, y_ref)

        return pl.run_state(multiply)(plgpu.ACC.init(sum_Rj))


class Softmax(NamedTuple):
    """A softmax of R queries over some keys: [R, h] and twice [R], in registers."""

    sum_Rh: jax.Array
    top_R: jax.Array
    total_R: jax.Array

    @staticmethod
    def over_none(registers: WarpGroup, head_dim: int) -> Softmax:
        numbers = ((ROWS, head_dim), 0.0), ((ROWS,), NEGATIVE), ((ROWS,), 0.0)
        return Softmax(*(registers.full(*number) for number in numbers))

    def weigh(self, scores_RS: jax.Array) -> tuple[jax.Array, Softmax]:
        """Return the weights of a block of scores · log₂e, and the softmax before its values."""
        top_R = jnp.maximum(self.top_R, jnp.round(scores_RS.max(axis=1)))
        weights_RS = jnp.exp2(scores_RS - across(top_R, scores_RS.shape[1]))
        kept_R = power_of_two(self.top_R - top_R)
        total_R = self.total_R * kept_R + weights_RS.sum(axis=1)
        sum_Rh = self.sum_Rh * across(kept_R, self.sum_Rh.shape[1])
        return weights_RS, Softmax(sum_Rh, top_R, total_R)

    def with_values(self, registers: WarpGroup, weights_RS: jax.Array, values_Sh: Any) -> Softmax:
        """Add the weighted values of a block, which are in shared memory."""
        weights_RS = weights_RS.astype(values_Sh.dtype)
        return self._replace(sum_Rh=registers.add_product(self.sum_Rh, weights_RS, values_Sh))

    def joined(self, other: Softmax) -> Softmax:
        """Return the softmax over the keys of this softmax, then of the other."""
        top_R = jnp.maximum(self.top_R, other.top_R)
        one_R = power_of_two(self.top_R - top_R)
        other_R = power_of_two(other.top_R - top_R)
        h = self.sum_Rh.shape[1]
        sum_Rh = self.sum_Rh * across(one_R, h) + other.sum_Rh * across(other_R, h)
        return Softmax(sum_Rh, top_R, self.total_R * one_R + other.total_R * other_R)

    def attention(self) -> jax.Array:
        """Return the average of the values, [R, h]; 0 without keys."""
        some_R = jnp.where(self.total_R > 0, self.total_R, 1.0)
        return self.sum_Rh / across(some_R, self.sum_Rh.shape[1])


class Parts(NamedTuple):
    """The softmax over the keys of the current part so far, and over all earlier parts."""

    current: Softmax
    before: Softmax

    @staticmethod
    def over_none(registers: WarpGroup, head_dim: int) -> Parts:
        return Parts(*[Softmax.over_none(registers, head_dim)] * 2)

    def next_if(self, begins: jax.Array, registers: WarpGroup) -> Parts:
        """Return the state before the next block, with a new part if the block starts one."""

        def following(parts: Parts) -> Parts:
            h = parts.current.sum_Rh.shape[1]
            return Parts(Softmax.over_none(registers, h), parts.joined())

        return jax.lax.cond(begins, following, lambda parts: parts, self)

    def joined(self) -> Softmax:
        return self.before.joined(self.current)


def across(x_R: jax.Array, columns: int) -> jax.Array:
    """Broadcast numbers by row to [R, columns]."""
    return jax.lax.broadcast_in_dim(x_R, (len(x_R), columns), [0])
