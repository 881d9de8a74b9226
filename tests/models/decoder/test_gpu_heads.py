"""Queries, keys and values of rounds by the kernel of GPUs, interpreted, against those by XLA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reprise.models import sharding
from reprise.models.attention import kv_cache
from reprise.models.config import MeshConfig, ModelConfig
from reprise.models.decoder import gpu_heads, transformer
from reprise.models.decoder.gpu_heads import turn_of
from reprise.models.decoder.layers import rope_turns, rotate
from reprise.models.decoder.transformer import rms_norm
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
    monkeypatch.setattr(transformer, "platform_in_use", lambda: "cuda")
    for name in ("append", "turn"):
        monkeypatch.setattr(heads_gpu, name, interpreted(name))
    jax.clear_caches()
    yield calls
    jax.clear_caches()


def projected(dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    shapes = (B, 1, 4, 64), (B, 1, 2, 64), (B, 1, 2, 64)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def rope():
    return rope_turns(MODEL, jnp.arange(B)[:, None] * 7)


def layer_of(model, dtype=jnp.bfloat16):
    """Return a layer whose norms differ from ones."""
    layer = transformer.init(model, jax.random.key(0), dtype).layers[0]
    if not model.qk_norm:
        return layer
    rng = np.random.default_rng(1)
    weights = [jnp.asarray(rng.uniform(0.5, 2, size=64), dtype) for _ in range(2)]
    return dataclasses.replace(layer, query_norm_h=weights[0], key_norm_h=weights[1])


def by_xla(model, layer, q, k):
    if model.qk_norm:
        q = rms_norm(q, layer.query_norm_h, model.norm_eps)
        k = rms_norm(k, layer.key_norm_h, model.norm_eps)
    return rotate(q, *rope()), rotate(k, *rope())


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


@pytest.mark.parametrize("qk_norm", [True, False])
def test_queries_and_keys_of_a_round_with_drafts(hopper_kernel, qk_norm):
    model = dataclasses.replace(MODEL, qk_norm=qk_norm)
    layer = layer_of(model)
    q, k, v = projected()
    found = turn_of(model, layer, rope(), empty_cache().layer(0))(q, k, v)
    assert hopper_kernel == ["turn"] and found[2] is v
    for one, other in zip(found, by_xla(model, layer, q, k), strict=False):
        assert one.shape == other.shape
        assert_near(one, other)


def test_tokens_are_appended_where_their_slots_have_pages(hopper_kernel):
    layer = layer_of(MODEL)
    q, k, v = projected()
    start_B = jnp.asarray([0, 9, 3, 16])  # the last is behind the pages of its slot
    pages = empty_cache().layer(0)
    append = turn_of(MODEL, layer, rope(), pages).appending(pages, start_B)
    found_q, *_ = append(q, k, v)
    assert hopper_kernel == ["append"]
    want_q, want_k = by_xla(MODEL, layer, q, k)
    assert_near(found_q, want_q)
    for held, x in ((append.layer.keys_PKTh, want_k), (append.layer.values_PKTh, v)):
        want = np.zeros(held.shape, np.float32)
        want[0, :, 0] = x[0, 0]
        want[3, :, 1] = x[1, 0]  # page 1 of slot 1
        assert_near(held, want)


@pytest.mark.parametrize("change", ["sums in order", "float32", "another GPU"])
def test_without_a_kernel_there_is_no_turn(hopper_kernel, monkeypatch, change):
    if change == "sums in order":
        monkeypatch.setattr(gpu_heads, "sums_in_order_on_accelerators", lambda: True)
    if change == "another GPU":
        monkeypatch.setattr(hopper, "is_hopper", lambda: False)
    dtype = jnp.float32 if change == "float32" else jnp.bfloat16
    assert turn_of(MODEL, layer_of(MODEL, dtype), rope(), empty_cache().layer(0)) is None


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
