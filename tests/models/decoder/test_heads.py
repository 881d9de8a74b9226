"""Queries, keys and values of rounds by the kernel of GPUs, interpreted, against those by XLA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reprise.models import sharding
from reprise.models.attention import kv_cache
from reprise.models.config import MeshConfig, ModelConfig
from reprise.models.decoder import heads, transformer
from reprise.models.decoder.heads import Projections
from reprise.models.decoder.layers import rope_turns
from reprise.models.kernels.gpu import heads_gpu, hopper

MODEL = ModelConfig(
    architecture="qwen3",
    vocab_size=64,
    d_model=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    d_ff=64,
    qk_norm=True,
)
B, PAGE_TOKENS, SLOT_PAGES = 4, 8, 2
TOLERANCE = 2e-2


@pytest.fixture
def hopper_kernel(monkeypatch):
    """A CPU uses the kernel; returns the names of the calls."""
    calls = []

    def interpreted(name):
        kernel = getattr(heads_gpu, name)

        def call(*given, **more):
            calls.append(name)
            return kernel(*given, **more, interpret=True)

        return call

    monkeypatch.setattr(hopper, "is_hopper", lambda: True)
    monkeypatch.setattr(heads, "platform_in_use", lambda: "cuda")
    for name in ("append", "turn"):
        monkeypatch.setattr(heads_gpu, name, interpreted(name))
    jax.clear_caches()
    yield calls
    jax.clear_caches()


def projections(has_norms=True):
    rng = np.random.default_rng(0)
    shapes = (B, 1, 4, 64), (B, 1, 2, 64), (B, 1, 2, 64)
    new = [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]
    weights = tuple(jnp.asarray(rng.uniform(0.5, 2, size=64), jnp.bfloat16) for _ in range(2))
    cos, sin = rope_turns(MODEL, jnp.arange(B)[:, None] * 7)
    return Projections(*new, weights if has_norms else (), 1e-6, cos, sin)


def empty_cache():
    cache = kv_cache.init(
        MODEL, B, SLOT_PAGES, B * SLOT_PAGES, PAGE_TOKENS, jnp.bfloat16, for_cpu=False
    )
    table_BN = np.arange(B * SLOT_PAGES, dtype=np.int32).reshape(B, SLOT_PAGES)
    table_BN[2] = -1  # a slot without pages
    return cache.replace(table_BN=jnp.asarray(table_BN))


def assert_near(found, want):
    found, want = (np.asarray(x, np.float32) for x in (found, want))
    np.testing.assert_allclose(found, want, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("has_norms", [True, False])
def test_a_round_with_drafts(hopper_kernel, monkeypatch, has_norms):
    new = projections(has_norms)
    found = new.of_round()
    assert hopper_kernel == ["turn"]
    monkeypatch.undo()
    for one, other in zip(found, new.of_round(), strict=True):
        assert one.shape == other.shape
        assert_near(one, other)


def test_tokens_are_appended_where_their_slots_have_pages(hopper_kernel):
    new = projections()
    q, k, v = new.turned()
    start_B = jnp.asarray([0, 9, 3, 16])  # the last is behind the pages of its slot
    layer = empty_cache().layer(0)
    found_q, held = new.appended(layer, start_B)
    assert hopper_kernel == ["append"]
    assert_near(found_q, q)
    for pages, x in ((held.keys_PKTh, k), (held.values_PKTh, v)):
        want = np.zeros(pages.shape, np.float32)
        want[0, :, 0] = x[0, 0]
        want[3, :, 1] = x[1, 0]  # page 1 of slot 1
        assert_near(pages, want)


@pytest.mark.parametrize("change", ["sums in order", "float32", "CPU"])
def test_without_a_kernel_nothing_is_appended(hopper_kernel, monkeypatch, change):
    new = projections()
    if change == "sums in order":
        monkeypatch.setattr(heads, "sums_in_order_on_accelerators", lambda: True)
    if change == "float32":
        wide = [x.astype(jnp.float32) for x in (new.q_BTHh, new.k_BTKh, new.v_BTKh)]
        new = Projections(*wide, new.norms, new.eps, new.cos_BTh, new.sin_BTh)
    if change == "CPU":
        monkeypatch.setattr(heads, "platform_in_use", lambda: "cpu")
    assert new.appended(empty_cache().layer(0), jnp.zeros(B, jnp.int32)) is None
    new.of_round()
    assert hopper_kernel == []


@pytest.mark.parametrize("ways", [None, {"data": 2, "tensor": 2}])
def test_a_decoded_token(hopper_kernel, monkeypatch, ways):
    """Hidden states and the cache, on one device and on a mesh, are those of XLA."""
    params = transformer.init(MODEL, jax.random.key(0), jnp.bfloat16)
    tokens_BN = jnp.asarray([[5], [6], [7], [8]])
    start_B = jnp.asarray([0, 0, 0, 0])

    def decoded():
        step = jax.jit(functools.partial(transformer.hidden_with_cache, MODEL))
        hidden, cache, _ = step(params, empty_cache(), tokens_BN, start_B[:, None], start_B)
        return hidden, cache

    if ways is None:
        found, cache = decoded()
    else:
        with jax.set_mesh(sharding.make_mesh(MeshConfig(**ways), jax.devices()[:4])):
            found, cache = decoded()
    assert hopper_kernel == ["append"]  # one trace for all layers
    monkeypatch.undo()
    jax.clear_caches()
    want, other = decoded()
    has_pages = np.asarray([0, 1, 3])
    assert_near(found[has_pages], want[has_pages])
    jax.tree.map(assert_near, (cache.keys, cache.values), (other.keys, other.values))
    assert np.abs(np.asarray(cache.keys[1], np.float32)).max() > 0.1
