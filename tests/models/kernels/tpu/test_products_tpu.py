"""The TPU kernel of products with weights, interpreted; its gradients; its lowering."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from reprise.models.decoder import layers
from reprise.models.kernels.tpu import products_tpu
from reprise.models.kernels.tpu.products_tpu import product, takes

KINDS = [("TPU v5 lite", 1), ("TPU v5p", 2), ("TPU v6 lite", 1)]


def arrays(num_rows, num_inputs, num_outputs, seed=0):
    rng = np.random.default_rng(seed)
    sizes = (num_rows, num_inputs), (num_outputs, num_inputs)
    return [jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in sizes]


def wanted(x, weight):
    return np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T


@pytest.mark.parametrize(
    "sizes", [(1, 128, 7), (5, 384, 130), (40, 1024, 512), (33, 256, 99)], ids=str
)
def test_products_are_those_of_float64(monkeypatch, sizes):
    """With blocks of rows and outputs of which the last is in part outside."""
    monkeypatch.setattr(products_tpu, "ROWS", 16)
    monkeypatch.setattr(products_tpu, "OUTPUTS", 128)
    x, weight = arrays(*sizes)
    found = product(x, weight, jnp.float32, interpret=True)
    np.testing.assert_allclose(found, wanted(x, weight), rtol=0, atol=2e-3)
    rounded = product(x, weight, jnp.bfloat16, interpret=True)
    np.testing.assert_array_equal(rounded, found.astype(jnp.bfloat16))


def test_a_row_has_the_same_bits_in_any_number_of_rows(monkeypatch):
    """Blocks of inputs do not depend on rows; a planted block that does is found."""
    x, weight = arrays(64, 1536, 256)
    whole = product(x, weight, jnp.float32, interpret=True)
    one = product(x[:8], weight, jnp.float32, interpret=True)
    np.testing.assert_array_equal(one, whole[:8])
    monkeypatch.setattr(products_tpu, "INPUTS", 256)
    other = product(x[:8], weight, jnp.float32, interpret=True)
    assert (np.asarray(other) != np.asarray(whole[:8])).mean() > 0.1


def test_what_is_taken():
    assert takes(4096, jnp.bfloat16) is None and takes(128, "bfloat16") is None
    assert "bfloat16, got float32" in takes(4096, jnp.float32)
    assert "inputs that 128 divides, got 192" in takes(192, jnp.bfloat16)


@pytest.fixture
def on_tpu(monkeypatch):
    monkeypatch.setattr(layers, "platform_in_use", lambda: "tpu")
    monkeypatch.setattr(layers, "sums_in_order_on_accelerators", lambda: True)
    return monkeypatch


def test_gradients_are_those_of_xla(on_tpu):
    on_tpu.setattr(jax.lax, "platform_dependent", lambda *args, tpu, **_: tpu(*args))
    on_tpu.setattr(products_tpu, "product", partial(product, interpret=True))
    x, weight = arrays(24, 256, 128)

    def loss(x, weight):
        return (layers.linear(x, weight, jnp.float32) ** 2).sum()

    found = jax.grad(loss, argnums=(0, 1))(x, weight)
    y = wanted(x, weight)
    expected = 2 * y @ np.asarray(weight, np.float64), 2 * y.T @ np.asarray(x, np.float64)
    for one, other in zip(found, expected, strict=True):
        error = np.abs(np.asarray(one, np.float64) - other).max()
        assert one.dtype == jnp.bfloat16 and error < 2e-2 * np.abs(other).max()


@pytest.mark.parametrize(("kind", "cores"), KINDS)
@pytest.mark.parametrize("rows", [16, 4096])
def test_it_lowers_for_every_generation(on_tpu, kind, cores, rows):
    sizes = (1, rows, 4096), (1536, 4096)
    shapes = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes]
    device = AbstractDevice(kind, cores, "tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        exported = jax.export.export(jax.jit(layers.linear), platforms=["tpu"])(*shapes)
    assert "tpu_custom_call" in exported.mlir_module()
