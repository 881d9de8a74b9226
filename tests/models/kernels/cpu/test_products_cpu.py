"""Products on CPUs, against float64 and against themselves beside other rows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reprise.models.decoder import layers
from reprise.models.kernels.cpu import products_cpu
from reprise.models.kernels.cpu.products_cpu import BLOCK_OUTPUTS, BLOCK_ROWS, OUTPUTS, product

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="a kernel of CPUs")


def numbers(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 8, 11, 64, BLOCK_ROWS + 3])
@pytest.mark.parametrize("num_outputs", [1, OUTPUTS, BLOCK_OUTPUTS + 2, 5 * BLOCK_OUTPUTS + 1])
def test_products_are_those_of_float64(num_rows, num_outputs, dtype):
    x_XI, weight_OI = numbers(num_rows, 48), numbers(num_outputs, 48, seed=1, dtype=dtype)
    wide_OI = weight_OI.astype(np.float64)
    exact_XO = x_XI.astype(np.float64) @ wide_OI.T
    size_XO = np.abs(x_XI).astype(np.float64) @ np.abs(wide_OI).T
    error_XO = np.abs(np.asarray(product(x_XI, weight_OI)) - exact_XO)
    assert (error_XO <= 8 * np.finfo(np.float32).eps * size_XO).all()


@pytest.mark.parametrize("num_rows", [1, 3, 4, 16])
@pytest.mark.parametrize("num_outputs", [OUTPUTS, BLOCK_OUTPUTS + 2])
def test_a_second_product_is_added_in_the_same_sums(num_rows, num_outputs):
    """As if its terms followed the others'."""
    x_XI, weight_OI = numbers(num_rows, 64), numbers(num_outputs, 64, seed=1)
    inner_XR, up_OR = numbers(num_rows, 32, seed=2), numbers(num_outputs, 32, seed=3)
    joined = np.concatenate([x_XI, inner_XR], 1), np.concatenate([weight_OI, up_OR], 1)
    np.testing.assert_array_equal(product(x_XI, weight_OI, inner_XR, up_OR), product(*joined))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("num_rows", [2, 4, 7, 33, BLOCK_ROWS + 5])
def test_a_row_has_the_same_bits_alone(num_rows, dtype):
    x_XI = numbers(num_rows, 512, dtype=dtype)
    weight_OI = numbers(2 * BLOCK_OUTPUTS + 4, 512, seed=1, dtype=dtype)
    together_XO = np.asarray(product(x_XI, weight_OI))
    for x in range(0, num_rows, 1 + num_rows // 40):
        np.testing.assert_array_equal(together_XO[x], product(x_XI[x], weight_OI))


def test_several_cores_compute_what_one_does():
    x_XI, weight_OI = numbers(4, 1024), numbers(1024, 1024, seed=1)
    apart_XO = np.concatenate([product(x_XI, rows) for rows in np.split(weight_OI, 64)], axis=1)
    for _ in range(20):
        np.testing.assert_array_equal(product(x_XI, weight_OI), apart_XO)


def test_gradients_and_vmap_are_those_of_a_product():
    x_ZTI, weight_OI = numbers(2, 3, 32), numbers(5, 32, seed=1)
    in_order = partial(layers._in_order, layers.Way(jnp.float32))

    def loss(product):
        return lambda *given: jnp.sum(jnp.sin(product(*given)))

    def plain(x, w):
        return jnp.einsum("...i,oi->...o", x, w, precision="highest")

    def both(x, w, inner, up):
        return plain(x, w) + plain(inner, up)

    more = numbers(2, 3, 16, seed=2), numbers(5, 16, seed=3)
    cases = [((x_ZTI,), plain), ((x_ZTI[0],), plain), ((x_ZTI, *more), both)]
    for (x, *rest), reference in cases:
        given = x, weight_OI, *rest
        places = tuple(range(len(given)))
        ours, theirs = (jax.grad(loss(f), argnums=places)(*given) for f in (in_order, reference))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), ours, theirs)
    mapped = jax.vmap(in_order, in_axes=(0, None))(x_ZTI, weight_OI)
    np.testing.assert_array_equal(mapped, product(x_ZTI, weight_OI))


def test_sizes_that_the_kernel_takes():
    for dtype in (jnp.float32, np.dtype("float32"), jnp.bfloat16):
        assert products_cpu.takes(32, dtype) is None
    assert "inputs that 16 divides, got 24" in products_cpu.takes(24, jnp.float32)
    assert "bfloat16, got float16" in products_cpu.takes(32, jnp.float16)
