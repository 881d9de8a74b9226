"""The arithmetic of a layer: rows are their own, sums have an order, turns and loops are right."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal, jaxprs_in_params

from reprise.models.attention.attention import Packing
from reprise.models.config import Adapted, Llama3RopeScaling, LowRank, ModelConfig
from reprise.models.decoder import layers, row_attention
from reprise.models.decoder.layers import (
    feed_forward,
    linear,
    mean_square,
    rope_frequencies,
    rope_turns,
    rotate,
    scaled,
    scan_after,
    sum_in_order,
)

# --- products ---


@pytest.mark.parametrize("rows", [1, 4, 17, 64])
def test_rows_are_their_own(rows):
    """A round has as many rows whoever shares it; a row's bits do not depend on the others."""
    D, F = 256, 704
    x_RD, (gate_FD, up_FD, down_DF) = random_array(0, 128, D), random_weights(D, F)

    @jax.jit
    def products(x):
        return linear(x, gate_FD), feed_forward(x, gate_FD, up_FD, down_DF)

    want = products(x_RD[:rows])
    others_RD = jnp.concatenate([x_RD[:1], x_RD[65 : 64 + rows]])
    for got, whole in zip(products(others_RD), want, strict=True):
        np.testing.assert_array_equal(got[0], whole[0])
        assert rows == 1 or (got[1] != whole[1]).any()


def test_few_rows_are_not_padded():
    """Padding them to 64 rows more than halved the speed of plain rounds of 4 slots."""
    x_RD, weights = random_array(0, 4, 32), random_weights(32, 16)
    program = jax.jit(feed_forward).lower(x_RD, *weights).as_text()
    assert "stablehlo.pad" not in program
    assert "x64x" not in program


def test_few_rows_are_computed_as_many():
    x_RD, (gate_FD, up_FD, down_DF) = random_array(0, 80, 32), random_weights(32, 16)
    y_RF = np.asarray(x_RD @ gate_FD.T)
    want = y_RF / (1 + np.exp(-y_RF)) * np.asarray(x_RD @ up_FD.T) @ np.asarray(down_DF.T)
    for rows in (1, 2, 17, 80):
        x = x_RD[:rows]
        got = jax.jit(feed_forward)(x, gate_FD, up_FD, down_DF)
        np.testing.assert_allclose(got, want[:rows], rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(linear(x, gate_FD), y_RF[:rows], atol=1e-4)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_parts_of_features_add_up(parts):
    x_RD, weights = random_array(0, 80, 32), random_weights(32, 16)

    def loss(product, x, weights):
        return (product(x, *weights) ** 2).sum()

    in_parts = lambda x, *weights: layers._feed_forward_in_parts(x, *weights, parts)  # noqa: E731
    both = jax.jit(jax.value_and_grad(loss, argnums=(1, 2)), static_argnums=0)
    want, got = (both(product, x_RD, weights) for product in (feed_forward, in_parts))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        atol = 4e-7 * np.abs(other).max()  # sums of numbers of that size
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=atol)


def test_features_that_fit_are_not_cut(monkeypatch):
    x_RD, weights = random_array(0, 80, 32), random_weights(32, 16)
    in_parts = []
    monkeypatch.setattr(layers, "LONG_ROW_TOKENS", 80)
    monkeypatch.setattr(layers, "is_in_order", lambda *_: False)
    monkeypatch.setattr(layers, "_feed_forward_in_parts", lambda *given: in_parts.append(given[-1]))
    for limit_bytes, wanted in ((80 * 16 * 4, []), (80 * 16 * 4 - 1, [4])):
        monkeypatch.setattr(layers, "WHOLE_FEED_FORWARD_BYTES", limit_bytes)
        feed_forward(x_RD, *weights)
        assert in_parts == wanted


def test_gradients_of_wide_products_round_what_they_are_given():
    """Float32 logits of bfloat16 hidden states: both gradients are products of bfloat16."""
    x_RI = jnp.ones((255, 1), jnp.bfloat16)
    weight_OI = jnp.ones((255, 1), jnp.bfloat16)
    y_RO, pull = jax.vjp(partial(layers._input_first, jnp.float32), x_RI, weight_OI)
    assert y_RO.dtype == jnp.float32
    # 1.0038 rounds to 1; without that, 255 times it would round to 256
    dx_RI, dweight_OI = pull(jnp.full((255, 255), 1.0038))
    for gradient in (dx_RI, dweight_OI):
        assert gradient.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(gradient, np.float64), 255)


def random_weights(D, F):
    return random_array(1, F, D), random_array(2, F, D), random_array(3, D, F)


def random_array(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_of_products_are_those_of_the_definition(dtype):
    x_BTI, weight_OI, dy_BTO = (
        random_array(seed, *shape).astype(dtype)
        for seed, shape in enumerate([(2, 40, 32), (48, 32), (2, 40, 48)])
    )
    low = LowRank(random_array(5, 16, 32), random_array(6, 48, 16))
    adapted = Adapted(weight_OI, jax.tree.map(lambda a: a.astype(dtype), low), 0.5)
    x, w, dy, down, up = (
        np.asarray(a, np.float64) for a in (x_BTI, weight_OI, dy_BTO, low.down_RI, low.up_OR)
    )
    scale = 30 * float(jnp.finfo(dtype).eps)

    def close(got, want):
        assert got.dtype == dtype
        np.testing.assert_allclose(np.asarray(got, float), want, atol=scale * np.abs(want).max())

    dx, dw = jax.jit(lambda *given: jax.vjp(linear, *given)[1](dy_BTO))(x_BTI, weight_OI)
    close(dx, dy @ w)
    close(dw, np.einsum("bto,bti->oi", dy, x))
    dx, dadapted = jax.jit(lambda *given: jax.vjp(linear, *given)[1](dy_BTO))(x_BTI, adapted)
    close(dx, dy @ (w + 0.5 * up @ down))
    close(dadapted.low.up_OR, np.einsum("bto,bti->oi", dy, 0.5 * x @ down.T))


@pytest.mark.parametrize("shape", [(48,), (3, 48), (2, 5, 3, 48)])
def test_gradients_of_scales_are_those_of_the_definition(shape):
    x, weight_D, dy = random_array(0, *shape), random_array(1, 48), random_array(2, *shape)
    dx, dweight_D = jax.jit(lambda *given: jax.vjp(scaled, *given)[1](dy))(x, weight_D)
    np.testing.assert_array_equal(dx, dy * weight_D)
    want = (np.asarray(dy, float) * x).reshape(-1, 48).sum(axis=0)
    np.testing.assert_allclose(dweight_D, want, rtol=1e-5, atol=1e-6)


# --- sums ---


def test_sums_in_order_are_sums():
    for length in (1, 2, 16, 17, 99, 512):
        x_N = np.random.default_rng(length).random((2, length)).astype(np.float32)
        np.testing.assert_allclose(sum_in_order(x_N), x_N.sum(-1), rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_mean_of_squares_is_that_of_the_definition(dtype):
    x_RD = jnp.asarray(np.random.default_rng(0).standard_normal((3, 48)), dtype)
    want = np.square(np.asarray(x_RD, np.float64)).mean(axis=-1, keepdims=True)
    np.testing.assert_allclose(mean_square(x_RD), want, rtol=1e-6)


def test_squares_of_bfloat16_are_exact_in_float32():
    """So a sum that is fused with them rounds as one that is not."""
    x = np.random.default_rng(0).normal(size=5000).astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(np.square(x), np.square(x.astype(np.float64)))


def test_turns_of_bfloat16_round_once():
    """A fused multiply-add could not round otherwise."""
    rng = np.random.default_rng(0)
    x_1THh = jnp.asarray(rng.normal(size=(1, 300, 4, 64)), jnp.bfloat16)
    angle_1Th = rng.uniform(0, 7, (1, 300, 32))
    turns = [jnp.float32(np.cos(angle_1Th)), jnp.float32(np.sin(angle_1Th))]
    cos, sin = (np.asarray(jax.lax.reduce_precision(x, 8, 15), float)[:, :, None] for x in turns)
    first, second = np.split(np.asarray(x_1THh, float), 2, axis=-1)
    want = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    rounded = jnp.asarray(want.astype(np.float32), jnp.bfloat16)
    np.testing.assert_array_equal(rotate(x_1THh, *turns), rounded)


def test_mean_squares_of_bfloat16_do_not_depend_on_the_program():
    """Not on the number of rows, nor on how they are arranged."""
    x_RD = jnp.asarray(np.random.default_rng(1).standard_normal((256, 128)), jnp.bfloat16)
    of_rows = jax.jit(mean_square)
    all_of_them = np.asarray(of_rows(x_RD))
    for few in (1, 3, 16, 64):
        np.testing.assert_array_equal(of_rows(x_RD[:few]), all_of_them[:few])
    by_slots = of_rows(x_RD.reshape(32, 8, 128)).reshape(-1, 1)
    np.testing.assert_array_equal(by_slots, all_of_them)


# --- rope ---


CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=29,
    d_model=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    d_ff=20,
)


def test_rope_frequencies_by_hand():
    config = dataclasses.replace(CONFIG, head_dim=4, rope_theta=100.0, rope_scaling=None)
    np.testing.assert_allclose(rope_frequencies(config), [1.0, 0.1], rtol=1e-6)


def test_llama3_rope_equals_the_published_branches():
    scaling = Llama3RopeScaling(8.0, 1.0, 4.0, 8192)
    config = dataclasses.replace(CONFIG, head_dim=128, rope_theta=500_000.0, rope_scaling=scaling)
    plain = 500_000.0 ** (-np.arange(0, 128, 2) / 128)
    expected, kinds = [], []
    for freq in plain:
        wavelength = 2 * math.pi / freq
        if wavelength < 8192 / 4:
            expected.append(freq)
            kinds.append("kept")
        elif wavelength > 8192 / 1:
            expected.append(freq / 8)
            kinds.append("slowed")
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected.append((1 - smooth) * freq / 8 + smooth * freq)
            kinds.append("mixed")
    assert set(kinds) == {"kept", "slowed", "mixed"}
    np.testing.assert_allclose(rope_frequencies(config), expected, rtol=2e-5)


def test_a_negative_position_spoils_no_other():
    config = dataclasses.replace(CONFIG, head_dim=4, rope_theta=100.0, rope_scaling=None)
    angles = np.asarray([[-2.0, -0.2], [3.0, 0.3]], np.float32)[:, None]
    cos, sin = jax.jit(partial(rope_turns, config))(jnp.asarray([[-2], [3]]))
    np.testing.assert_allclose(cos, np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(sin, np.sin(angles), atol=1e-6)


# --- loops ---


ZERO = jax.ShapeDtypeStruct((2,), jnp.float32)


def body(inputs, total, x):
    (a,) = inputs
    return total + a * x, (total, {"x": x.astype(jnp.int8)})


def test_totals_start_at_zero_and_results_are_stacked():
    xs = jnp.asarray([[1.0, 2], [3, 4], [5, 6]])
    total, (before, others) = scan_after(body, ZERO, xs, jnp.float32(2))
    np.testing.assert_array_equal(total, [18, 24])
    np.testing.assert_array_equal(before, [[0, 0], [2, 4], [8, 12]])
    assert others["x"].dtype == jnp.int8 and others["x"].shape == (3, 2)


def untied(function, *inputs):
    """The shapes of arrays that loops start from and that depend on none of the inputs."""
    found = []

    def walk(jaxpr, given):
        depends = dict(zip(jaxpr.invars, given, strict=True))
        for eqn in jaxpr.eqns:
            known = [not isinstance(v, Literal) and depends.get(v, False) for v in eqn.invars]
            depends |= dict.fromkeys(eqn.outvars, any(known))
            if eqn.primitive.name == "scan":
                first, count = eqn.params["num_consts"], eqn.params["num_carry"]
                starts = list(zip(eqn.invars, known, strict=True))[first : first + count]
                found.extend(v.aval.shape for v, tied in starts if v.aval.ndim and not tied)
                continue  # arrays in a loop's body live for one round
            for inner in jaxprs_in_params(eqn.params):
                walk(inner, known[len(known) - len(inner.invars) :])

    jaxpr = jax.make_jaxpr(function)(*inputs).jaxpr
    walk(jaxpr, [True] * len(jaxpr.invars))
    return found


def test_no_zeros_before_the_inputs():
    xs, a = jnp.ones((3, 2)), jnp.float32(2)
    assert untied(lambda xs, a: scan_after(body, ZERO, xs, a), xs, a) == []
    plain = lambda xs, a: jax.lax.scan(partial(body, (a,)), jnp.zeros(2), xs)  # noqa: E731
    assert untied(plain, xs, a) == [(2,)]


@pytest.mark.parametrize("name", ["attention", "feed_forward"])
def test_loops_over_rows_wait_in_both_passes(name, monkeypatch):
    monkeypatch.setattr(row_attention, "LONG_ROW_BLOCK_TOKENS", 4)
    x = jnp.ones((1, 8, 4))
    if name == "attention":
        packing = Packing(*[jnp.zeros((1, 8), jnp.int32)] * len(Packing.__dataclass_fields__))

        def apply(x):
            return row_attention.attend_rows(*[x.reshape(1, 8, 2, 2)] * 3, packing)
    else:
        weights = [jnp.ones((8, 4)), jnp.ones((8, 4)), jnp.ones((4, 8))]

        def apply(x):
            return layers._feed_forward_in_parts(x, *weights, 2)

    assert untied(jax.grad(lambda x: apply(x).sum()), x) == []
