"""The TPU kernel of row attention, interpreted, against float64; what it skips; its lowering."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from row_reference import inputs, largest_error, packed, reference

from reprise.models.attention.attention import Packing, may_see
from reprise.models.config import MeshConfig
from reprise.models.decoder import row_attention
from reprise.models.kernels.shared import row_pairs
from reprise.models.kernels.tpu import row_attention_tpu
from reprise.models.sharding import make_mesh

BLOCK = 128  # the fewest lanes: blocks of the tests


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(row_attention_tpu, "_BLOCK_TOKENS", BLOCK)


@jax.jit
def interpreted(qkv, places, dout):
    out, lse = row_attention_tpu.forward(*qkv, *places, interpret=True)
    rest = row_attention_tpu.backward(*qkv, *places, out, lse, dout, interpret=True)
    return out, lse, *rest


@pytest.mark.parametrize(("T", "H", "K", "h"), [(1, 2, 1, 8), (300, 6, 2, 24), (256, 4, 1, 128)])
def test_float32(T, H, K, h):
    given = inputs(T, H, K, h)
    assert max(largest_error(interpreted(*given), reference(*given))) < 1e-5


def test_bfloat16():
    given = inputs(300, 4, 2, 64, jnp.bfloat16)
    got = interpreted(*given)
    assert [x.dtype for x in got] == [jnp.bfloat16, jnp.float32, *[jnp.bfloat16] * 3]
    assert max(largest_error(got, reference(*given))) < 2e-2


def test_large_scores_stay_finite():
    qkv, places, dout = inputs(200, 2, 1, 16)
    given = [qkv[0] * 100, *qkv[1:]], places, dout
    assert max(largest_error(interpreted(*given)[:2], reference(*given)[:2])) < 1e-5


def brute_force(prompt, branch, size):
    """Which pairs of blocks have something to see, and of which everything is seen."""
    B, T = prompt.shape
    mask = np.tril(np.ones((T, T), bool)) & np.asarray(may_see(prompt, branch, prompt, branch))
    cut = mask.reshape(B, T // size, size, T // size, size)
    return cut.any(axis=(2, 4)), cut.all(axis=(2, 4))


@pytest.mark.parametrize("seed", range(4))
def test_pairs_that_are_left_out_have_nothing_to_see(seed):
    places = packed(512, seed)
    seen, whole = brute_force(*places, 32)
    got = np.asarray(row_pairs.seen_pairs(*map(jnp.asarray, places), 32))
    assert not (seen & ~got).any() and got.sum() < 1.5 * seen.sum()
    assert not (np.asarray(row_pairs.whole_pairs(*map(jnp.asarray, places), 32)) & ~whole).any()
    np.testing.assert_array_equal(got[1], np.tril(np.ones((16, 16), bool)))


@pytest.mark.parametrize("by_query", [True, False])
def test_lists_of_pairs(by_query):
    places = [jnp.asarray(x) for x in packed(512, 1)]
    pairs, num = row_pairs.pair_list(*places, 32, by_query)
    pairs, n = np.asarray(pairs).reshape(2, -1), 16
    assert pairs.shape[1] == n * (n + 1) // 2
    seen, whole = row_pairs.seen_pairs(*places, 32), row_pairs.whole_pairs(*places, 32)
    for b in range(2):
        row = pairs[b, : num[b]]
        found = list(zip(row_pairs.query_block(row), row_pairs.key_block(row), strict=True))
        assert set(found) == set(zip(*np.nonzero(np.asarray(seen[b])), strict=True))
        assert found == sorted(found, key=lambda pair: pair if by_query else pair[::-1])
        assert [bool(whole[b, i, j]) for i, j in found] == list(row_pairs.is_whole(row))
        assert (pairs[b, num[b] :] == row[-1]).all()


def test_a_mask_left_out_is_noticed(monkeypatch):
    """A planted fault: every pair is taken for one without a mask."""
    given = inputs(300, 2, 1, 16)
    monkeypatch.setattr(row_pairs, "whole_pairs", row_pairs.seen_pairs)
    got = jax.jit(interpreted.__wrapped__)(*given)
    assert min(largest_error(got, reference(*given))) > 1e-2


@pytest.mark.parametrize(("kind", "cores"), [("TPU v5 lite", 1), ("TPU v5", 2), ("TPU v6 lite", 1)])
def test_gradients_lower_for_a_tpu(monkeypatch, kind, cores):
    """Through `attend_rows`, which chooses the kernel there; on a CPU it is not in the program."""
    monkeypatch.setattr(row_attention_tpu, "_BLOCK_TOKENS", 512)
    shapes = [jax.ShapeDtypeStruct((1, 4096, n, 128), jnp.bfloat16) for n in (8, 2, 2)]
    place = jax.ShapeDtypeStruct((1, 4096), jnp.int32)

    def loss(q, k, v, prompt, branch):
        packing = Packing(prompt, prompt, branch)
        return row_attention.attend_rows(q, k, v, packing).astype(jnp.float32).sum()

    step = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    with jax.sharding.use_abstract_mesh(
        AbstractMesh((), (), abstract_device=AbstractDevice(kind, cores, "tpu"))
    ):
        exported = jax.export.export(step, platforms=["tpu"])(*shapes, place, place)
    for name in ("forward_kernel", "dq_kernel", "dkv_kernel"):
        assert name in exported.mlir_module()
    assert "tpu_custom_call" not in step.lower(*shapes, place, place).as_text()


def test_under_a_mesh_devices_compute_their_own_rows_and_heads(monkeypatch):
    """In interpret mode in the place of the portable path, on 4 devices; and lowered for TPUs."""
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=2), jax.devices()[:4])
    (q, k, v), places, dout = inputs(150, 4, 2, 16)
    seen = []

    def noted(function):
        def call(*args):
            seen.append(args[0].shape)
            return function(*args, interpret=True)

        return call

    for name in ("forward", "backward"):
        monkeypatch.setattr(row_attention_tpu, name, noted(getattr(row_attention_tpu, name)))
    monkeypatch.setattr(row_attention, "LONG_ROW_TOKENS", 1)  # shorter ones are a CPU's
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, tpu, **_: tpu(*args))

    def both(q, k, v):
        attend = partial(row_attention.attend_rows, packing=Packing(places[0], *places))
        out, vjp = jax.vjp(attend, q, k, v)
        return out, *vjp(dout)

    with jax.set_mesh(mesh):
        got = jax.jit(both)(q, k, v)
    out, _, *gradients = reference((q, k, v), places, dout)
    assert max(largest_error(got, (out, *gradients))) < 1e-5
    assert seen == [(1, 150, 2, 16)] * 2


def test_what_is_not_taken_goes_the_portable_way():
    given = (1, 4096, 8, 128), (1, 4096, 2, 128), jnp.float32
    assert row_attention_tpu.takes(*given) is None
    assert "head size" in row_attention_tpu.takes((1, 4096, 8, 20), (1, 4096, 2, 20), jnp.float32)
    assert "float16" in row_attention_tpu.takes(*given[:2], jnp.float16)
    many = (4096, 4096, 8, 128), (4096, 4096, 2, 128), jnp.float32
    assert "pairs of blocks" in row_attention_tpu.takes(*many)
    mesh = make_mesh(MeshConfig(data=1, fsdp=1, tensor=4), jax.devices()[:4])
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in given[:2]]
    assert row_attention.why_portable(*shapes, "tpu") is None
    with jax.set_mesh(mesh):
        assert "4 devices divide" in row_attention.why_portable(*shapes, "tpu")
