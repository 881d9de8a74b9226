"""The TPU kernel of attention to pages, interpreted, against float64; its races; its lowering."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, PartitionSpec
from kernel_interpreters import finding_races, has_races_on_tpu
from page_reference import B, arrays, assert_close, h, only_live, reference

from reprise.models.kernels.tpu import page_attention_tpu, page_buffers_tpu
from reprise.models.kernels.tpu.page_attention_tpu import attend_pages, takes
from reprise.models.kernels.tpu.page_buffers_tpu import Buffers

DEVICES = {
    "v5e": AbstractDevice("TPU v5 lite", 1, "tpu"),
    "v5p": AbstractDevice("TPU v5p", 2, "tpu"),
    "v6e": AbstractDevice("TPU v6 lite", 1, "tpu"),
}
NO_PAGE = 2**30  # the simulator raises where it is read
T = 128


def interpreted(buffers, interpret=True):
    return jax.jit(lambda *args: attend_pages(*args, buffers=buffers, interpret=interpret))


@pytest.mark.parametrize(
    ("W", "G", "K", "N", "buffers", "dtype"),
    [
        (1, 1, 1, 1, Buffers(1, 2), jnp.float32),  # a page a slot
        (5, 4, 1, 5, Buffers(4, 3), jnp.float32),
        (5, 1, 2, 4, Buffers(1, 8), jnp.float32),  # more buffers than pages
        (16, 4, 2, 6, None, jnp.bfloat16),
    ],
)
def test_partial_softmaxes_are_those_of_float64(W, G, K, N, buffers, dtype):
    attend, tolerance = interpreted(buffers), 1e-5 if dtype == jnp.float32 else 2e-2
    q, k, v, table = arrays(W, G, K, T, N, dtype)
    full = N * T
    for lengths in ((0, 0, 0), (1, T, full), (min(T + 1, full), 0, full - 1), (0, full // 2, 0)):
        pages = only_live(table, lengths, T)
        found = attend(q, k, v, pages, np.asarray(lengths))
        assert_close(found, reference(q, k, v, table, lengths), tolerance)


def test_slots_of_tens_of_thousands_of_positions():
    q, k, v, table = arrays(1, 4, 1, T, 256, jnp.float32)
    lengths = (32768, 1, 16385)
    found = interpreted(None)(q, k, v, only_live(table, lengths, T), np.asarray(lengths))
    assert_close(found, reference(q, k, v, table, lengths), 1e-5)


def test_a_page_in_another_place_is_another_result():
    """Pages of one slot may change places; a page of another slot changes the slot's result."""
    q, k, v, table = arrays(1, 4, 1, T, 4, jnp.float32)
    attend, lengths = interpreted(Buffers(2, 2)), np.asarray([512, 512, 512])
    whole = attend(q, k, v, table.copy(), lengths)  # jax may read it after it has changed here
    table[0, [0, 3]] = table[0, [3, 0]]
    assert_close(attend(q, k, v, table.copy(), lengths), [np.asarray(x) for x in whole], 1e-5)
    table[0, 0], table[1, 0] = table[1, 0], table[0, 0]
    other = attend(q, k, v, table, lengths)
    assert np.abs(other[0][:2] - whole[0][:2]).max(axis=(1, 2, 3)).min() > 1e-2
    np.testing.assert_array_equal(other[0][2], whole[0][2])


def test_numbers_behind_the_length_do_not_count():
    """Not even where they are no numbers: a page may be new, and its end is of nobody."""
    q, k, v, table = arrays(1, 4, 2, T, 4, jnp.float32)
    lengths = (134, 0, 256)
    wanted = reference(q, k, v, table, lengths)
    last = table[0, 1]
    k, v = (x.at[last, :, 6:].set(jnp.nan).at[table[1]].set(jnp.nan) for x in (k, v))
    table = only_live(table, lengths, T)
    found = interpreted(Buffers(2, 2))(q, k, v, table, np.asarray(lengths))
    assert_close(found, wanted, 1e-5)


def test_large_tables_are_attended_to_in_parts(monkeypatch):
    q, k, v, table = arrays(1, 2, 1, T, 3, jnp.float32)
    lengths = np.asarray([128, 384, 200])
    monkeypatch.setattr(page_attention_tpu, "TABLE_BYTES", 3 * 4)
    found = interpreted(Buffers(2, 2))(q, k, v, table, lengths)
    assert_close(found, reference(q, k, v, table, lengths), 1e-5)


# The simulator of a TPU's memories, where new memory is no number. Copies are made at once, so that
# it sees which of them race with the core, or as late as they may be, when they are waited for.


def simulate(q, k, v, table, lengths, buffers, copies, num_cores=1):
    params = finding_races(
        pltpu.InterpretParams, dma_execution_mode=copies, num_cores_or_threads=num_cores
    )
    found = attend_pages(q, k, v, table, jnp.asarray(lengths), buffers=buffers, interpret=params)
    return jax.block_until_ready(found), has_races_on_tpu()


@pytest.mark.parametrize(
    ("buffers", "copies"), [(Buffers(2, 2), "eager"), (Buffers(2, 3), "on_wait")]
)
def test_no_copy_races_with_a_product(buffers, copies):
    lengths = (129, 0, 640)
    q, k, v, table = arrays(2, 2, 2, T, 5, jnp.float32)
    wanted = reference(q, k, v, table, lengths)
    table = only_live(table, lengths, T, NO_PAGE)
    found, races = simulate(q, k, v, table, lengths, buffers, copies)
    assert not races
    assert_close(found, wanted, 1e-5)


def test_two_cores_share_the_slots():
    lengths = (129, 0, 256, 1)
    q, k, v, table = arrays(1, 2, 1, T, 2, jnp.float32, num_slots=4)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=DEVICES["v5p"])):
        found, races = simulate(q, k, v, table, lengths, Buffers(2, 2), "on_wait", num_cores=2)
    assert not races
    assert_close(found, reference(q, k, v, table, lengths), 1e-5)


def test_a_product_that_does_not_wait_is_found(monkeypatch):
    each_page = page_buffers_tpu.Pages._each_page

    def no_wait(self, left, do):
        if do.__name__ == "start":
            each_page(self, left, do)

    monkeypatch.setattr(page_buffers_tpu.Pages, "_each_page", no_wait)
    q, k, v, table = arrays(1, 1, 1, T, 1, jnp.float32)
    assert simulate(q, k, v, table, (128, 0, 0), Buffers(1, 2), "eager")[1]


def test_a_page_that_does_not_exist_is_found():
    """The tests above would see a page behind the live ones that is read."""
    q, k, v, table = arrays(1, 1, 1, T, 1, jnp.float32)
    table[1] = NO_PAGE
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out-of-bounds read"):
        simulate(q, k, v, table, (128, 1, 0), Buffers(1, 2), "on_wait")
    pltpu.reset_tpu_interpret_mode_state()


# What the compiler is given


def lowered(device, W=1, dtype=jnp.bfloat16, T=T, K=2, width=h, **options):
    """Return the text of a program for this device: Mosaic has taken the kernel."""
    shapes = (B * 2, W, 4 * K, width), (99, K, T, width), (99, K, T, width)
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    args += [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((B * 2, 16), (B * 2,))]
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        attend = jax.jit(lambda *args: attend_pages(*args, **options))
        return jax.export.export(attend, platforms=["tpu"])(*args).mlir_module()


@pytest.mark.parametrize(
    ("generation", "sizes"),
    [
        *(("v5e", {}), ("v5p", {}), ("v6e", {})),
        ("v5p", {"W": 16, "dtype": jnp.float32, "K": 1}),
    ],
    ids=str,
)
def test_it_lowers_for_every_generation(generation, sizes):
    assert "tpu_custom_call" in lowered(DEVICES[generation], **sizes)


def test_the_compiler_is_told_what_a_call_reads():
    text = lowered(DEVICES["v5e"])
    slots, K, rows = B * 2, 2, 4
    pages = 2 * 16 * 128 * h * 2
    bytes_accessed = slots * K * (pages + rows * (h * 2 + h * 4 + 128 * 4))
    assert f"bytes_accessed\\22:{bytes_accessed}," in text.replace(" ", "")


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((64, 128, jnp.bfloat16), "multiple of 128, got 64"),
        ((128, 64, jnp.bfloat16), "pages of 128 positions, got 64"),
        ((128, 128, jnp.float16), "got float16"),
    ],
)
def test_what_it_does_not_take_is_said_in_a_sentence(sizes, says):
    assert says in takes(*sizes) and "fix: " in takes(*sizes)
    width, T, dtype = sizes
    with pytest.raises(ValueError, match=says):
        lowered(DEVICES["v5e"], T=T, dtype=dtype, width=width)


def test_it_takes_what_models_have():
    for width, dtype in ((128, "bfloat16"), (128, "float32"), (256, "bfloat16")):
        assert takes(width, T, dtype) is None


def test_each_device_attends_with_its_heads():
    """Under shard_map over the project's mesh, heads over `tensor`."""
    devices = np.asarray(jax.devices()[:2]).reshape(1, 1, 2)
    mesh = jax.sharding.Mesh(devices, ("data", "fsdp", "tensor"))
    q, k, v, table = arrays(2, 2, 2, T, 3, jnp.float32)
    lengths, heads = np.asarray([129, 0, 384]), PartitionSpec(None, None, "tensor")
    own, whole = PartitionSpec(None, "tensor"), PartitionSpec()
    attend = jax.shard_map(
        interpreted(Buffers(2, 2), pltpu.InterpretParams()),
        mesh=mesh,
        in_specs=(heads, own, own, whole, whole),
        out_specs=heads,
    )
    assert_close(attend(q, k, v, table, lengths), reference(q, k, v, table, lengths), 1e-5)
