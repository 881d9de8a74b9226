"""The sizes of the kernels' blocks: from public figures and compilers' schedules, not measured."""

from __future__ import annotations

import dataclasses
import math

import jax
from jax.experimental.pallas import tpu as pltpu


@dataclasses.dataclass(frozen=True)
class PageTiles:
    """Pages of one matrix product, and such blocks in VMEM: one is computed, the others copied."""

    block_pages: int
    buffers: int


@dataclasses.dataclass(frozen=True)
class PageSizes:
    """Positions times key/value heads of a device, in a block; bytes of all buffers."""

    block_positions: int
    buffer_bytes: int


# By (generation, kernel, head size, bytes of a number).
# A block should take less long to compute than to copy. Of two heads of 1024 positions and 64 rows
# the compiler's schedule has 1,000 cycles on a v5p (650 of two heads of 512), where the copy takes
# 1,330 (665) by bandwidth; on a v6e 950 (570) of 1,120 (560); on a v5e 700 of 960 for the half.
# Shorter blocks waste less on short slots.
# What is on its way has to cover the latency of HBM: 1.5 µs are 1.2 MB on a v5e, 2.5 MB on a v6e,
# and 2.1 MB for each of the two cores of a v5p.
PAGE_SIZES: dict[tuple[str, str, int, int], PageSizes] = {
    ("v5e", "page_attention", 128, 2): PageSizes(1024, 3 << 20),
    ("v5p", "page_attention", 128, 2): PageSizes(2048, 4 << 20),
    ("v6e", "page_attention", 128, 2): PageSizes(2048, 6 << 20),
}
MAX_SCORES = 1 << 17  # of a head and block: what a product leaves has to fit beside the buffers


HOPPERS = ("H100", "H200", "GH200", "H800", "H20", "h100")  # in names of devices


def device_generation() -> str:
    """Return the TPU generation of the mesh in use, or of the default device ("v5p"), or ""."""
    return str(pltpu.get_tpu_info().chip_version) if pltpu.is_tpu_device() else ""


def is_hopper() -> bool:
    """Return whether programs are compiled for an NVIDIA GPU of compute capability 9.

    By the mesh in use, or the default device. A GPU without a name is rl.preflight's, a Hopper.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = jax.devices()[0].device_kind if device is None else device.device_kind
    return not kind or any(name in kind for name in HOPPERS)


def page_tiles(
    generation: str,
    head_dim: int,
    itemsize: int,
    page_tokens: int,
    num_kv_heads: int,
    num_rows: int,
) -> PageTiles:
    """Return the tiles of attention over pages of `page_tokens` positions, of so many queries.

    By default a block has the bytes of 2048 head-positions of 128 numbers in bfloat16, and the
    buffers have 4 MiB. A block is a multiple of 128 positions and at most `MAX_SCORES` scores a
    head, and there are 2 to 8 buffers.
    """
    default = PageSizes(2048 * 128 * 2 // (head_dim * itemsize), 4 << 20)
    sizes = PAGE_SIZES.get((generation, "page_attention", head_dim, itemsize), default)
    positions = min(sizes.block_positions // num_kv_heads, MAX_SCORES // num_rows)
    least = 128 // math.gcd(128, page_tokens)
    block_pages = max(1, positions // (page_tokens * least)) * least
    block_bytes = 2 * block_pages * page_tokens * num_kv_heads * head_dim * itemsize
    return PageTiles(block_pages, min(8, max(2, sizes.buffer_bytes // block_bytes)))


@dataclasses.dataclass(frozen=True)
class GpuPageTiles:
    """`buffers` pages have room in shared memory; a slot's pages are shared by `parts` blocks."""

    buffers: int
    parts: int


H100_PROCESSORS = 132
H100_BUFFER_BYTES = 192 << 10  # of 227 KiB of shared memory a block


def gpu_page_tiles(
    num_blocks: int, max_pages: int, page_tokens: int, head_dim: int
) -> GpuPageTiles:
    """Return the tiles on an H100: four thread blocks a processor, parts of at least four pages."""
    buffers = H100_BUFFER_BYTES // (2 * page_tokens * head_dim * 2)
    parts = -(-4 * H100_PROCESSORS // num_blocks)
    return GpuPageTiles(min(8, buffers), max(1, min(parts, max_pages // 4)))


def rows_by_head(q_BWHh: jax.Array, num_kv_heads: int) -> jax.Array:
    """Return [B, K, X, h]."""
    B, W, _, h = q_BWHh.shape
    q_BKWGh = q_BWHh.reshape(B, W, num_kv_heads, -1, h).transpose(0, 2, 1, 3, 4)
    return q_BKWGh.reshape(B, num_kv_heads, -1, h)


def heads_of_rows(x_BKXi: jax.Array, num_nodes: int, num_heads: int) -> jax.Array:
    """Return [B, W, H, i] of rows."""
    B, K, _, i = x_BKXi.shape
    G = num_heads // K
    x_BKWGi = x_BKXi[:, :, : num_nodes * G].reshape(B, K, num_nodes, G, i)
    return x_BKWGi.transpose(0, 2, 1, 3, 4).reshape(B, num_nodes, num_heads, i)
