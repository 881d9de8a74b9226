"""The Hopper kernel of row attention, interpreted, against float64; its races; its lowering.

The interpreter runs copies, barriers, masks and the softmax; for products of the tensor cores and
layouts of registers the kernel has other code there.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from kernel_interpreters import finding_races, has_races
from row_reference import inputs, largest_error, packed, reference

from reprise.models.attention.attention import Packing
from reprise.models.decoder import row_attention
from reprise.models.kernels.gpu import row_attention_gpu
from reprise.models.kernels.shared import row_pairs

H100 = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "cuda")
A100 = AbstractDevice("NVIDIA A100-SXM4-80GB", 108, "cuda")
TOLERANCE = 2e-2


def simulate(qkv, places, dout):
    """Outputs, log-sum-exp and gradients, and whether a kernel had races."""
    races, run = [], row_attention_gpu._run

    def noted(*args, **keywords):
        found = jax.block_until_ready(run(*args, **keywords))
        races.append(has_races())
        return found

    interpret = finding_races()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_attention_gpu, "_run", noted)
        out, lse = row_attention_gpu.forward(*qkv, *places, interpret=interpret)
        rest = *qkv, *places, out, lse, dout
        gradients = row_attention_gpu.backward(*rest, interpret=interpret)
    assert len(races) == 3
    return (out, lse, *gradients), any(races)


def responses_of_one_token(T):
    """A row of a short prompt and responses of one token; one of prompts of a block, and padding.

    Blocks of the second row see themselves alone.
    """
    at = np.arange(T)
    prompt = np.stack([np.ones(T), np.where(at < T - 9, at // row_attention_gpu.ROWS + 1, 0)])
    branch = np.stack([np.maximum(at - 4, 0), np.zeros(T)])
    return [jnp.asarray(x, jnp.int32) for x in (prompt, branch)]


@pytest.mark.parametrize(
    ("places", "T", "H", "K", "h"),
    [(packed, 150, 2, 1, 64), (responses_of_one_token, 137, 1, 1, 128), (packed, 1, 4, 2, 64)],
)
def test_outputs_and_gradients_are_those_of_float64(places, T, H, K, h):
    qkv, _, dout = inputs(T, H, K, h, jnp.bfloat16)
    places = [jnp.asarray(x) for x in places(T)]
    got, races = simulate(qkv, places, dout)
    assert not races
    assert [x.dtype for x in got] == [jnp.bfloat16, jnp.float32, *[jnp.bfloat16] * 3]
    assert max(largest_error(got, reference(qkv, places, dout))) < TOLERANCE


def test_a_product_that_does_not_wait_is_found(monkeypatch):
    monkeypatch.setattr(row_attention_gpu.plgpu, "barrier_wait", lambda barrier: None)
    assert simulate(*inputs(1, 1, 1, 64, jnp.bfloat16))[1]


@pytest.mark.parametrize("by_query", [True, False])
def test_bounds_of_the_pairs_of_a_block(by_query):
    """Two blocks of a prompt, one of another; and three blocks that see themselves alone."""
    prompt = jnp.asarray(np.repeat([[1, 1, 2], [1, 2, 3]], 8, axis=1), jnp.int32)
    bounds = row_pairs.block_bounds(prompt, jnp.zeros_like(prompt), 8, by_query)
    first = [0, 1, 3, 4] if by_query else [0, 2, 3, 4]
    np.testing.assert_array_equal(bounds, [*first, 6, 7, 8, 9])
    pairs, _ = row_pairs.pair_list(prompt, jnp.zeros_like(prompt), 8, by_query)
    block_of = row_pairs.query_block if by_query else row_pairs.key_block
    for b, i in np.ndindex(2, 3):
        own = np.asarray(pairs)[bounds[b * 4 + i] : bounds[b * 4 + i + 1]]
        assert (block_of(own) == i).all()


def lowered(device, dtype, sizes=(), axes=()):
    """The gradient step's program for a device of a mesh, through `attend_rows`."""
    shapes = [jax.ShapeDtypeStruct((2, 4096, n, 128), dtype) for n in (8, 2, 2)]
    place = jax.ShapeDtypeStruct((2, 4096), jnp.int32)

    def loss(q, k, v, prompt, branch):
        packing = Packing(prompt, prompt, branch)
        return row_attention.attend_rows(q, k, v, packing).astype(jnp.float32).sum()

    auto = (AxisType.Auto,) * len(axes)
    mesh = AbstractMesh(sizes, axes, axis_types=auto, abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.export.export(
            jax.jit(jax.grad(loss, argnums=(0, 1, 2))),
            platforms=["cuda"],
            disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")],
        )(*shapes, place, place).mlir_module()


@pytest.mark.parametrize(("sizes", "axes"), [((), ()), ((1, 2, 2), ("data", "fsdp", "tensor"))])
def test_gradients_lower_for_an_h100(sizes, axes):
    text = lowered(H100, jnp.bfloat16, sizes, axes)
    for name in ("forward", "dq", "dkv"):
        assert f"row_attention_{name}" in text


def test_other_gpus_and_float32_have_the_portable_path():
    for device, dtype in ((A100, jnp.bfloat16), (H100, jnp.float32)):
        assert "mosaic_gpu" not in lowered(device, dtype)


@pytest.mark.parametrize(
    ("q_shape", "kv_shape", "dtype", "says"),
    [
        ((1, 4096, 8, 80), (1, 4096, 2, 80), jnp.bfloat16, "64 or 128, got 80"),
        ((1, 4096, 8, 64), (1, 4096, 2, 64), jnp.float32, "bfloat16, got float32"),
        ((1, 4096, 8, 64), (1, 4096, 3, 64), jnp.bfloat16, "3 key/value heads divide, got 8"),
        ((1, 2**20, 8, 64), (1, 2**20, 2, 64), jnp.bfloat16, "pairs of blocks of 64"),
    ],
)
def test_what_it_does_not_take_is_said(q_shape, kv_shape, dtype, says):
    assert says in row_attention_gpu.takes(q_shape, kv_shape, dtype)


def test_it_takes_what_models_have():
    for h in (64, 128):
        shapes = (1, 2**17, 32, h), (1, 2**17, 8, h)
        assert row_attention_gpu.takes(*shapes, jnp.bfloat16) is None
