"""The Hopper kernel of attention to pages, interpreted, against float64; its races; its lowering.

The interpreter runs copies, barriers and the softmax; for products of the tensor cores and layouts
of registers the kernel has other code there.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import core as mosaic_gpu
from jax.sharding import AbstractDevice, AbstractMesh
from kernel_interpreters import finding_races, has_races
from page_reference import arrays, assert_close, h, only_live, reference

from reprise.models.attention import page_tiles
from reprise.models.attention.attention import After
from reprise.models.kernels.gpu import page_attention_gpu, page_blocks
from reprise.models.kernels.gpu.page_attention_gpu import attend_pages, takes

H100 = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "cuda")
TOLERANCE = 2e-2
HALF_OF_MEMORY = 113 << 10  # of the shared memory of a processor, without 1 KiB that each block has


def simulate(q, k, v, table, lengths):
    interpret = finding_races()
    found = attend_pages(q, k, v, table, np.asarray(lengths), interpret=interpret)
    return jax.block_until_ready(found), has_races()


@pytest.mark.parametrize(
    ("W", "G", "K", "T", "N", "lengths"),
    [
        (1, 1, 1, 128, 1, (1, 128, 0)),
        (5, 4, 2, 64, 5, (65, 0, 320)),
        (16, 5, 1, 64, 6, (384, 1, 200)),  # two tiles of rows
        (1, 4, 1, 128, 16, (2048, 0, 1025)),  # two parts
    ],
)
def test_partial_softmaxes_are_those_of_float64(W, G, K, T, N, lengths):
    q, k, v, table = arrays(W, G, K, T, N, jnp.bfloat16)
    wanted = reference(q, k, v, table, lengths)
    found, races = simulate(q, k, v, only_live(table, lengths, T), lengths)
    assert not races
    assert_close(found, wanted, TOLERANCE)


def test_a_thread_block_may_compute_several_parts(monkeypatch):
    """Three parts in two thread blocks, or one, have the bits that they have in three."""
    monkeypatch.setattr(page_blocks, "PART_TOKENS", 128)
    q, k, v, table = arrays(1, 4, 1, 64, 6, jnp.bfloat16)
    lengths = (384, 0, 200)
    want, _ = simulate(q, k, v, table, lengths)
    for blocks in (6, 3):
        monkeypatch.setattr(page_attention_gpu, "MANY_BLOCKS", blocks)
        found, races = simulate(q, k, v, table, lengths)
        assert not races
        for one, other in zip(want, found, strict=True):
            np.testing.assert_array_equal(one, other)


def test_numbers_behind_the_length_do_not_count():
    q, k, v, table = arrays(1, 4, 1, 64, 2, jnp.bfloat16)
    lengths = (70, 0, 128)
    wanted = reference(q, k, v, table, lengths)
    k, v = (x.at[table[0, 1], :, 6:].set(jnp.nan).at[table[1]].set(jnp.nan) for x in (k, v))
    assert_close(simulate(q, k, v, table, lengths)[0], wanted, TOLERANCE)


def test_a_page_of_another_slot_is_another_result():
    q, k, v, table = arrays(1, 4, 1, 64, 2, jnp.bfloat16)
    lengths = (128, 128, 128)
    whole = simulate(q, k, v, table, lengths)[0]
    table[0, 0], table[1, 0] = table[1, 0], table[0, 0]
    other = simulate(q, k, v, table, lengths)[0]
    assert np.abs(other[0][:2] - whole[0][:2]).max(axis=(1, 2, 3)).min() > 0.1
    np.testing.assert_array_equal(other[0][2], whole[0][2])


def of_shape(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def ints(*shapes):
    return [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]


def lowered(function, *args):
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=H100)):
        exported = jax.export.export(
            jax.jit(lambda *args: function(*args)),
            platforms=["cuda"],
            disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")],
        )
        return exported(*args).mlir_module()


@pytest.mark.parametrize(("T", "width"), [(128, h), (64, h), (128, 64)])
def test_it_lowers_for_an_h100_and_two_blocks_fit_on_a_processor(T, width, monkeypatch):
    """Mosaic refuses kernels with more shared memory than the bound."""
    monkeypatch.setattr(mosaic_gpu, "_SMEM_SIZE_BOUND", HALF_OF_MEMORY)
    pages = [of_shape(99, 2, T, width)] * 2
    given = of_shape(6, 16, 8, width), *pages, *ints((6, 16), (6,))
    assert "mosaic_gpu" in lowered(attend_pages, *given)


@pytest.mark.parametrize("num_paths", [0, 6])
def test_kernels_of_rounds_lower_so_too(num_paths, monkeypatch):
    """Of six slots; in one part, and in several."""
    monkeypatch.setattr(mosaic_gpu, "_SMEM_SIZE_BOUND", HALF_OF_MEMORY)
    X = 48 if num_paths else 6

    def attend(q, k, v, keys, values, row, length, parent, table):
        after = After(row, length, parent, num_paths, X // 6)
        return page_tiles.attend("cuda", q, k, v, keys, values, after, table)

    new = of_shape(X, 4, h), of_shape(X, 2, h), of_shape(X, 2, h)
    pages = [of_shape(99, 2, 128, h)] * 2
    for slot_pages in (4, 64):
        given = *new, *pages, *ints((X,), (X,), (X,), (6, slot_pages))
        assert "mosaic_gpu" in lowered(attend, *given)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((80, 128, jnp.bfloat16), "64 or 128, got 80"),
        ((128, 32, jnp.bfloat16), "64 or 128 positions, got 32"),
        ((128, 64, jnp.float32), "got float32"),
    ],
)
def test_what_it_does_not_take_is_said_in_a_sentence(sizes, says):
    assert says in takes(*sizes) and "fix: " in takes(*sizes)
    width, T, dtype = sizes
    q, (k, v) = jnp.zeros((1, 1, 1, width), dtype), jnp.zeros((2, 2, 1, T, width), dtype)
    with pytest.raises(ValueError, match=says):
        attend_pages(q, k, v, jnp.zeros((1, 1), jnp.int32), jnp.zeros((1,), jnp.int32))


def test_it_takes_what_models_have():
    for width, T in ((64, 64), (128, 64), (128, 128)):
        assert takes(width, T, "bfloat16") is None
