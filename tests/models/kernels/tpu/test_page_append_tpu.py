"""The TPU kernel that writes an entry and attends to it, interpreted, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh
from kernel_interpreters import finding_races, has_races_on_tpu
from page_reference import B, arrays, h, only_live, reference

from reprise.models.attention.page_attention import append_and_attend as with_any_path
from reprise.models.kernels.tpu import page_attention_tpu, page_entries_tpu
from reprise.models.kernels.tpu.page_attention_tpu import append_and_attend, takes
from reprise.models.kernels.tpu.page_buffers_tpu import Buffers

NO_PAGE = 2**30  # the simulator raises where it is read
T = 128
BOTH = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)], ids=["float32", "bfloat16"]
)


def entries(K, dtype, num_slots=B, h=h):
    rng = np.random.default_rng(7)
    return (jnp.asarray(rng.normal(size=(num_slots, K, h)), dtype) for _ in range(2))


def written(pages, new, table, lengths):
    """The pages with each slot's entry at its last position."""
    pages, T = np.array(pages), pages.shape[2]
    for b, length in enumerate(lengths):
        if length:
            pages[table[b, (length - 1) // T], :, (length - 1) % T] = np.asarray(new[b])
    return pages


def wanted(q, k, v, keys, values, table, lengths):
    keys, values = written(keys, k, table, lengths), written(values, v, table, lengths)
    out, _, total = reference(q, keys, values, table, lengths)
    return np.where(total > 0, out / np.where(total > 0, total, 1), 0), keys, values


def assert_same(found, expected, tolerance, table, lengths):
    """Attention, and pages but for what lies behind the entries in theirs, which is of nobody."""
    out, *pages = found
    P, _, T, _ = expected[1].shape
    dead = np.zeros((P, T), bool)
    for b, length in enumerate(lengths):
        if length:
            dead[table[b, (length - 1) // T], (length - 1) % T + 1 :] = True
    np.testing.assert_allclose(
        np.asarray(out, np.float64), expected[0], rtol=0, atol=tolerance * np.abs(expected[0]).max()
    )
    for x, y in zip(pages, expected[1:], strict=True):
        of_somebody = ~dead[:, None, :, None]
        np.testing.assert_array_equal(np.asarray(x) * of_somebody, y * of_somebody)


@pytest.mark.parametrize(
    ("G", "K", "N", "buffers", "dtype", "tolerance"),
    [
        (1, 1, 1, Buffers(1, 2), jnp.float32, 1e-5),
        (4, 2, 5, Buffers(2, 2), jnp.float32, 1e-5),
        (4, 1, 6, None, jnp.bfloat16, 2e-2),
    ],
)
def test_entries_are_written_and_attended_to(G, K, N, buffers, dtype, tolerance):
    q, keys, values, table = arrays(1, G, K, T, N, dtype)
    k, v = entries(K, dtype)
    call = jax.jit(lambda *args: append_and_attend(*args, buffers=buffers, interpret=True))
    full = N * T
    for lengths in ((0, 1, full), (T, min(T + 1, full), full - 1), (17, 16, 0), (0, 0, 0)):
        given = q, k, v, keys, values
        found = call(*given, only_live(table, lengths, T), np.asarray(lengths))
        assert_same(found, wanted(*given, table, lengths), tolerance, table, lengths)


@pytest.mark.soak  # of reading that many: test_page_attention_tpu.py
def test_entries_behind_tens_of_thousands_of_positions():
    q, keys, values, table = arrays(1, 4, 1, T, 256, jnp.float32)
    given, lengths = (q, *entries(1, jnp.float32), keys, values), (32768, 1, 16385)
    pages = only_live(table, lengths, T)
    found = append_and_attend(*given, pages, jnp.asarray(lengths), interpret=True)
    assert_same(found, wanted(*given, table, lengths), 1e-5, table, lengths)


def test_heads_of_any_size_that_it_takes():
    head_dim = 384
    assert takes(head_dim, T, jnp.float32) is None
    q, keys, values, table = arrays(1, 2, 2, T, 3, jnp.float32, h=head_dim)
    given, lengths = (q, *entries(2, jnp.float32, h=head_dim), keys, values), (129, 0, 384)
    found = append_and_attend(*given, table, jnp.asarray(lengths), interpret=True)
    assert_same(found, wanted(*given, table, lengths), 1e-5, table, lengths)


@pytest.mark.parametrize(
    ("buffers", "copies"), [(Buffers(2, 2), "on_wait"), (Buffers(2, 3), "eager")]
)
def test_no_copy_races_with_a_product_or_another_copy(buffers, copies):
    lengths = (129, 0, 640)
    q, keys, values, table = arrays(1, 2, 2, T, 5, jnp.float32)
    given = q, *entries(2, jnp.float32), keys, values
    pages = only_live(table, lengths, T, NO_PAGE)
    params = finding_races(pltpu.InterpretParams, dma_execution_mode=copies)
    found = append_and_attend(
        *given, pages, jnp.asarray(lengths), buffers=buffers, interpret=params
    )
    found = jax.block_until_ready(found)
    assert not has_races_on_tpu()
    assert_same(found, wanted(*given, table, lengths), 1e-5, table, lengths)


def test_an_entry_that_nobody_waits_for_is_found(monkeypatch):
    """A planted fault: its copy may be late, and the next block comes into the buffer."""
    monkeypatch.setattr(page_entries_tpu.Entry, "end", lambda self, pages, buffer: None)
    lengths = (128, 128, 128)
    q, keys, values, table = arrays(1, 1, 1, T, 2, jnp.float32)
    given = q, *entries(1, jnp.float32), keys, values
    params = pltpu.InterpretParams(dma_execution_mode="on_wait")
    buffers, held = Buffers(2, 2), jnp.asarray(lengths)
    found = append_and_attend(*given, table, held, buffers=buffers, interpret=params)
    with pytest.raises(AssertionError):
        assert_same(found, wanted(*given, table, lengths), 1e-5, table, lengths)
    pltpu.reset_tpu_interpret_mode_state()


def test_large_tables_are_attended_to_in_parts(monkeypatch):
    q, keys, values, table = arrays(1, 2, 1, T, 3, jnp.float32)
    given, lengths = (q, *entries(1, jnp.float32), keys, values), (128, 384, 200)
    monkeypatch.setattr(page_attention_tpu, "TABLE_BYTES", 3 * 4)
    found = jax.jit(lambda *args: append_and_attend(*args, buffers=Buffers(2, 2), interpret=True))(
        *given, table, np.asarray(lengths)
    )
    assert_same(found, wanted(*given, table, lengths), 1e-5, table, lengths)


@BOTH
def test_the_portable_path_says_the_same(dtype, tolerance):
    """Slots without a page at their position, or behind all, write nothing and get 0."""
    q, keys, values, table = arrays(1, 4, 2, T, 5, dtype)
    k, v = entries(2, dtype)
    lengths = (129, 0, 640)
    table[1, 1] = -1
    found = jax.jit(with_any_path)(q, k, v, keys, values, table, np.asarray([128, 128, 639]))
    assert_same(found, wanted(q, k, v, keys, values, table, lengths), tolerance, table, lengths)
    found = jax.jit(with_any_path)(q, k, v, keys, values, table, np.asarray([640, -1, 5]))
    assert_same(found, wanted(q, k, v, keys, values, table, (0, 0, 6)), tolerance, table, (0, 0, 6))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("TPU v5 lite", jnp.bfloat16),
        ("TPU v5p", jnp.bfloat16),
        ("TPU v5p", jnp.float32),
        ("TPU v6 lite", jnp.bfloat16),
    ],
)
def test_it_lowers_for_every_generation_and_writes_in_place(kind, dtype):
    K, N, P = 2, 16, 99
    shapes = (2 * B, 1, 4 * K, h), *[(2 * B, K, h)] * 2, *[(P, K, T, h)] * 2
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    args += [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2 * B, N), (2 * B,))]
    device = AbstractDevice(kind, 2 if kind == "TPU v5p" else 1, "tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        exported = jax.export.export(jax.jit(append_and_attend), platforms=["tpu"])(*args)
    text = exported.mlir_module()
    assert "tpu_custom_call" in text and "output_operand_alias" in text
