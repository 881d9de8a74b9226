"""Sizes of blocks: those of the table, and the rule for the others."""

import itertools

import pytest

from models.kernels.tiles import GpuPageTiles, PageTiles, gpu_page_tiles, page_tiles


@pytest.mark.parametrize(
    ("args", "tiles"),
    [
        # generation, head size, bytes, positions of a page, heads, rows
        (("v5p", 128, 2, 128, 2, 16), PageTiles(8, 4)),  # 2 · 1024 · 2 heads · 256 bytes: 1 MiB
        (("v5p", 128, 2, 64, 2, 16), PageTiles(16, 4)),
        (("v5e", 128, 2, 128, 2, 16), PageTiles(4, 6)),  # 3 MiB of 512 KiB
        (("v6e", 128, 2, 128, 1, 64), PageTiles(16, 6)),
        (("v5p", 128, 4, 128, 2, 8), PageTiles(4, 4)),  # not in the table: as many bytes a block
        (("v9", 128, 2, 128, 2, 16), PageTiles(8, 4)),
        (("v5p", 128, 2, 128, 1, 512), PageTiles(2, 8)),  # 2^17 scores, and no more buffers
        (("v5p", 128, 2, 64, 64, 4096), PageTiles(2, 2)),  # at least 128 positions, twice
    ],
)
def test_blocks_are_those_of_the_table_or_the_rule(args, tiles):
    assert page_tiles(*args) == tiles


def test_blocks_are_whole_lanes_and_buffers_take_turns():
    sizes = itertools.product(
        ("v5e", "v5p", ""), (128, 256), (2, 4), (64, 128, 192, 256, 320), (1, 2, 8), (8, 512)
    )
    for sizes_of_call in sizes:
        tiles = page_tiles(*sizes_of_call)
        assert tiles.block_pages * sizes_of_call[3] % 128 == 0 and tiles.buffers >= 2


def test_pages_fit_into_shared_memory_and_parts_fill_the_processors():
    assert gpu_page_tiles(64, 128, 128, 128) == GpuPageTiles(3, 9)  # 9 · 64 blocks of 132 · 4
    assert gpu_page_tiles(1000, 128, 64, 128) == GpuPageTiles(6, 1)
    assert gpu_page_tiles(1, 16, 64, 64) == GpuPageTiles(8, 4)  # four pages a part
