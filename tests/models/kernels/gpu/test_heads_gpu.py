"""The Triton kernel of norms, rotary positions and writes, interpreted and lowered for a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from reprise.models.kernels.gpu.heads_gpu import Places, append, takes, turn

H100 = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "cuda")
EPS = 1e-3
X, H, K, P, T = 5, 6, 2, 3, 8  # six query heads: no power of two
ONE_STEP = 2.0**-7  # of a number of bfloat16, relative


def heads(h, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (X, H, h), (X, K, h), (X, K, h)
    return [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]


def turns(h):
    angle_Xh = np.random.default_rng(1).uniform(0, 6, size=(X, h // 2))
    return [jax.lax.reduce_precision(jnp.float32(f(angle_Xh)), 8, 15) for f in (np.cos, np.sin)]


def norms(h):
    rng = np.random.default_rng(2)
    return [jnp.asarray(rng.uniform(0.5, 2, size=h), jnp.bfloat16) for _ in range(2)]


def rounded(x):
    return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)


def by_hand(x_XJh, norm_h, cos_Xh, sin_Xh):
    """Return the formulas of the kernel in float64, with their two roundings."""
    x = np.asarray(x_XJh, np.float64)
    if norm_h is not None:
        square = (x**2).mean(axis=-1, keepdims=True)
        x = rounded(x / np.sqrt(square + EPS) * np.asarray(norm_h, np.float64))
    first, second = np.split(x, 2, axis=-1)
    cos, sin = (np.asarray(y, np.float64)[:, None] for y in (cos_Xh, sin_Xh))
    return rounded(np.concatenate([first * cos - second * sin, second * cos + first * sin], -1))


def assert_near(found, want):
    np.testing.assert_allclose(np.asarray(found, np.float64), want, rtol=ONE_STEP, atol=1e-2)


@pytest.mark.parametrize(("h", "has_norms"), [(64, True), (128, False)])
def test_queries_and_keys_are_those_of_float64(h, has_norms):
    q, k, v = heads(h)
    weights = norms(h) if has_norms else []
    found = turn(q, k, v, *turns(h), *weights, eps=EPS, interpret=True)
    of_norms = weights or [None, None]
    for one, x, weight in zip(found, (q, k), of_norms, strict=True):
        want = by_hand(x, weight, *turns(h))
        assert_near(one, want)
        assert np.mean(np.asarray(one, np.float64) == want) > 0.9, "the sums of norms may differ"


def test_entries_go_to_their_pages_and_no_other_number_changes():
    q, k, v = heads(64)
    rng = np.random.default_rng(3)
    pages = [jnp.asarray(rng.normal(size=(P, K, T, 64)), jnp.bfloat16) for _ in range(2)]
    page_X = np.asarray([2, 0, P, -1, 2])
    offset_X = np.asarray([7, 0, 1, 1, 3])
    places = Places(*pages, jnp.asarray(page_X), jnp.asarray(offset_X))
    given = q, k, v, *turns(64), *norms(64)
    call = jax.jit(lambda places, *given: append(places, *given, eps=EPS, interpret=True))
    found_q, keys, values = call(places, *given)
    want_q, want_k = turn(*given, eps=EPS, interpret=True)
    np.testing.assert_array_equal(found_q, want_q)
    for found, old, new in zip((keys, values), pages, (want_k, v), strict=True):
        want = np.array(old)
        for x in (0, 1, 4):
            want[page_X[x], :, offset_X[x]] = new[x]
        np.testing.assert_array_equal(found, want)


def test_a_value_that_is_not_finite_makes_its_key_nan_and_is_written_as_0():
    q, k, v = heads(64)
    v = v.at[1, 0, 3].set(jnp.inf).at[2, 1, 60].set(jnp.nan)
    empty = jnp.zeros((X, K, 1, 64), jnp.bfloat16)
    places = Places(empty, empty, jnp.arange(X), jnp.zeros(X, jnp.int32))
    _, keys, values = append(places, q, k, v, *turns(64), eps=EPS, interpret=True)
    is_nan_XK = np.isnan(np.asarray(keys, np.float32)).all(axis=(2, 3))
    assert np.argwhere(is_nan_XK).tolist() == [[1, 0], [2, 1]]
    assert np.isfinite(np.asarray(keys, np.float32)).all(axis=(2, 3)).sum() == X * K - 2
    want = v.at[1, 0, 3].set(0).at[2, 1, 60].set(0)
    np.testing.assert_array_equal(values[:, :, 0], want)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [((96, jnp.bfloat16), "head size of 64 or 128, got 96"), ((64, jnp.float32), "got float32")],
)
def test_sizes_that_it_refuses(sizes, words):
    assert words in takes(*sizes)


@pytest.mark.parametrize("has_norms", [True, False])
def test_it_is_lowered_for_a_gpu(has_norms):
    """Triton takes every operation of the kernel."""
    given = [*heads(128), *turns(128), *(norms(128) if has_norms else [])]
    pages = jnp.zeros((P, K, T, 128), jnp.bfloat16)
    places = Places(pages, pages, jnp.zeros(X, jnp.int32), jnp.zeros(X, jnp.int32))
    mesh = AbstractMesh((), (), abstract_device=H100)
    with jax.sharding.use_abstract_mesh(mesh):
        for call, inputs in ((append, (places, *given)), (turn, given)):
            step = jax.jit(lambda *given, call=call: call(*given, eps=EPS))
            lowered = step.trace(*inputs).lower(lowering_platforms=("cuda",))
            assert "triton" in lowered.as_text()
    assert takes(128, jnp.bfloat16) is None
