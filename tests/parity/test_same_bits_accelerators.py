"""All passes over a text find the same bits on a Hopper GPU and on a TPU, interpreted.

Products of the GPU are the CPU's in order, in the place of those that XLA makes with one tile.
Products of the TPU's kernels have an order that depends on their inputs alone, as hardware's do.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from benchmarks import passes
from benchmarks.passes import Passes, differences
from reprise.models import config, sharding
from reprise.models.attention import cached_attention, page_tiles
from reprise.models.config import MeshConfig, ModelConfig
from reprise.models.decoder import layers, row_attention, transformer
from reprise.models.kernels.gpu import hopper, page_blocks, row_attention_gpu
from reprise.models.kernels.tpu import (
    page_attention_tpu,
    products_tpu,
    row_attention_tpu,
    softmax_tpu,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="interpreted on a CPU"),
]

MODELS = {
    "cuda": ModelConfig("qwen3", 99, 64, 1, 3, 1, 64, 112, qk_norm=True),
    "tpu": ModelConfig("qwen3", 99, 128, 1, 4, 2, 128, 256, qk_norm=True),
}
PAGE_TOKENS = {"cuda": 64, "tpu": 128}
TEXTS = passes.random_texts(99, 2, 2, np.random.default_rng(0), (58, 66), (4, 18))[:-1]
LONGER = passes.random_texts(99, 1, 2, np.random.default_rng(0), (118, 119), (16, 20))
PASSES = {
    "trees": lambda pages: pages.verified(9),
    "chunks": lambda pages: pages.chunked(40, 1),
    "several chunks": lambda pages: pages.chunked(16, 2),
    "training": lambda pages: pages.trained(256 if pages.page_tokens == 64 else 512),
}


def of_platform(platform):
    def take(*args, default, **paths):
        return paths.get(platform, paths.get("cpu", default))(*args)

    return take


def of_cpu(*args, default, **paths):
    return paths.get("cpu", default)(*args)


def product(x, y, dimensions):
    """Multiply two bfloat16 matrices; the order of a sum depends on its terms alone."""
    ((x_axis,), (y_axis,)), _ = dimensions
    x_Xi, y_Yi = (jnp.moveaxis(z.astype(jnp.float32), i, 1) for z, i in ((x, x_axis), (y, y_axis)))
    return layers.sum_in_order(x_Xi[:, None] * y_Yi)


@contextlib.contextmanager
def hopper_in_use():
    """A CPU takes the paths of a Hopper GPU, with parts of one block."""
    interpret = InterpretGPUParams()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "platform_dependent", of_platform("cuda"))
        patch.setattr(hopper, "is_hopper", lambda: True)
        for module in (cached_attention, row_attention):
            patch.setattr(module, "platform_in_use", lambda: "cuda")
        for module in (layers, row_attention):
            patch.setattr(module, "sums_in_order_on_accelerators", lambda: True)
        for module in (page_blocks, row_attention_gpu):
            patch.setattr(module, "PART_TOKENS", hopper.ROWS)
        for module, name in ((page_tiles, "attend"), (row_attention_gpu, "forward")):
            kernel = functools.partial(getattr(module, name), interpret=interpret)
            patch.setattr(module, name, kernel)
        yield


@contextlib.contextmanager
def tpu_in_use():
    """A CPU takes the paths of a TPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "platform_dependent", of_platform("tpu"))
        for module in (cached_attention, layers, row_attention):
            patch.setattr(module, "platform_in_use", lambda: "tpu")
        for module in (config, layers, row_attention):
            patch.setattr(module, "sums_in_order_on_accelerators", lambda: True)
        patch.setattr(softmax_tpu, "product", product)
        kernels = (
            *((page_attention_tpu, "append_and_attend"), (page_tiles, "attend")),
            *((row_attention_tpu, "forward"), (products_tpu, "product")),
        )
        for module, name in kernels:
            kernel = functools.partial(getattr(module, name), interpret=True)
            patch.setattr(module, name, kernel)
        yield


@pytest.fixture(scope="module", params=MODELS)
def bench(request):
    platform = request.param
    model, texts = MODELS[platform], TEXTS if platform == "cuda" else LONGER
    params = jax.tree.map(lambda x: 2 * x, transformer.init(model, jax.random.key(0), jnp.bfloat16))
    with hopper_in_use() if platform == "cuda" else tpu_in_use():
        jax.clear_caches()
        pages = Passes(model, params, texts, PAGE_TOKENS[platform], for_cpu=False)
        yield pages, pages.decoded(len(texts))
    jax.clear_caches()


@pytest.mark.parametrize("name", PASSES)
def test_bits_of_passes(bench, name):
    pages, want = bench
    found = differences(PASSES[name](pages), want)
    assert not any(found[name] for name in passes.COUNTS), found


@pytest.mark.parametrize("bench", ["tpu"], indirect=True)
@pytest.mark.parametrize("name", ["trees", "several chunks", "training"])
def test_bits_on_a_mesh(bench, name):
    pages, want = bench
    mesh = sharding.make_mesh(MeshConfig(data=2, tensor=2), jax.devices()[:4])
    whole = pages.params
    with jax.set_mesh(mesh):
        specs = transformer.param_specs(pages.config)
        assert specs.layers[0].down_DF.axes == ("mlp", "embed"), "outputs are split"
        pages.params = jax.device_put(whole, sharding.param_shardings(mesh, specs))
        try:
            found = differences(PASSES[name](pages), want)
        finally:
            pages.params = whole
    assert not any(found[name] for name in passes.COUNTS), found


def test_log_probabilities_are_those_of_a_cpu(bench):
    pages, want = bench
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "platform_dependent", of_cpu)
        for module in (cached_attention, layers, row_attention):
            patch.setattr(module, "platform_in_use", lambda: "cpu")
        jax.clear_caches()
        found = pages.trained(512)
    assert 0 < np.abs(found.logprob - want.logprob).mean() < 5e-2  # of numbers up to 13
