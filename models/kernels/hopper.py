"""Shared by the kernels for Hopper GPUs: sizes, and tiles in the registers of a warp group.

Jax's interpreter knows neither their layouts nor transposed operands; there these are plain arrays.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

HOPPERS = ("H100", "H200", "GH200", "H800", "H20", "h100")  # in names of devices
H100_PROCESSORS = 132
H100_BUFFER_BYTES = 192 << 10  # of 227 KiB of shared memory a block
ROWS = 64  # the least that a warp group multiplies
SWIZZLE_BYTES = 128
_WHOLE = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()  # jax < 0.12


def is_hopper() -> bool:
    """Return whether programs are compiled for an NVIDIA GPU of compute capability 9.

    By the mesh in use, or the default device. A GPU without a name is rl.preflight's, a Hopper.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = jax.devices()[0].device_kind if device is None else device.device_kind
    return not kind or any(name in kind for name in HOPPERS)


@dataclasses.dataclass(frozen=True)
class GpuPageTiles:
    """`buffers` pages have room in shared memory; a slot's pages are shared by `parts` blocks."""

    buffers: int
    parts: int


def gpu_page_tiles(
    num_blocks: int, max_pages: int, page_tokens: int, head_dim: int
) -> GpuPageTiles:
    """Return the tiles on an H100: four thread blocks a processor, parts of at least four pages."""
    buffers = H100_BUFFER_BYTES // (2 * page_tokens * head_dim * 2)
    parts = -(-4 * H100_PROCESSORS // num_blocks)
    return GpuPageTiles(min(8, buffers), max(1, min(parts, max_pages // 4)))


def shared_tiles(*shape: int) -> Any:
    """Return bfloat16 matrices in shared memory, as copies write and products read them."""
    layout = plgpu.TilingTransform((8, SWIZZLE_BYTES // 2))
    return plgpu.SMEM(
        shape, jnp.bfloat16, transforms=(layout, plgpu.SwizzleTransform(SWIZZLE_BYTES))
    )


@dataclasses.dataclass(frozen=True)
class WarpGroup:
    """A warp group, or the interpreter in its place."""

    interpreted: bool

    def laid_out(self, x: jax.Array) -> jax.Array:
        """Return numbers as registers hold a product's result: [R, j], or by row, [R]."""
        layout = plgpu.Layout.WGMMA if x.ndim == 2 else plgpu.Layout.WGMMA.reduce(1)
        return x if self.interpreted else plgpu.layout_cast(x, layout)

    def along(self, ref: Any, axis: int) -> jax.Array:
        """Load one number for each row (axis 0) or column (1) of a product's result."""
        if self.interpreted:
            return ref[...]
        layout = plgpu.Layout.WGMMA.reduce(1 - axis)
        return plgpu.load(ref, *_WHOLE, layout=layout, optimized=False)  # few bytes

    def full(self, shape: tuple[int, ...], number: float) -> jax.Array:
        """Return the same float32 number everywhere, [R, j] or by row, [R]."""
        return self.laid_out(jnp.full(shape, number, jnp.float32))

    def positions(self, shape: tuple[int, int], axis: int) -> jax.Array:
        """Return the row or column of each number of a product's result."""
        if self.interpreted:
            return jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)

    def product(self, x_Ri: Any, y_ref: Any, transposed: bool = False) -> jax.Array:
        """Multiply an array, or one in shared memory, with one in shared memory; float32 [R, j]."""
        if self.interpreted:
            x_Ri, y_ij = x_Ri[...], y_ref[...].T if transposed else y_ref[...]
            plgpu.commit_smem()  # products of tensor cores read as copies do
            return jnp.dot(x_Ri, y_ij, preferred_element_type=jnp.float32)
        y_ref = plgpu.transpose_ref(y_ref, (1, 0)) if transposed else y_ref

        def multiply(sum_Rj: Any) -> jax.Array:
            plgpu.wgmma(sum_Rj, x_Ri, y_ref)
            return sum_Rj[...]

        return pl.run_scoped(multiply, plgpu.ACC((x_Ri.shape[0], y_ref.shape[1]), jnp.float32))

    def add_product(self, sum_Rj: jax.Array, x_Ri: jax.Array, y_ref: Any) -> jax.Array:
        """Return sum + x · y, summed in the registers of the sum."""
        if self.interpreted:
            return sum_Rj + self.product(x_Ri, y_ref)

        def multiply(sum_ref: Any) -> None:
            plgpu.wgmma(sum_ref, x_Ri, y_ref)

        return pl.run_state(multiply)(plgpu.ACC.init(sum_Rj))
