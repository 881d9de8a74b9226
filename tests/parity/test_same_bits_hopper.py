"""All passes over a text find the same bits on a Hopper GPU: its attention, interpreted.

Products are the CPU's in order, in the place of those that XLA makes with one tile.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from benchmarks import passes
from benchmarks.passes import Passes, differences
from models import cached_attention, layers, page_tiles, row_attention, transformer
from models.config import ModelConfig
from models.kernels import hopper, page_attention_gpu, row_attention_gpu

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="interpreted on a CPU")

MODEL = ModelConfig("qwen3", 99, 64, 1, 3, 1, 64, 112, qk_norm=True)
TEXTS = passes.random_texts(99, 2, 2, np.random.default_rng(0), (58, 66), (4, 30))
PASSES = {
    "trees": lambda pages: pages.verified(9),
    "chunks": lambda pages: pages.chunked(40, 1),
    "several chunks": lambda pages: pages.chunked(16, 2),
    "training": lambda pages: pages.trained(256),
}


def of_cuda(*args, default, **paths):
    return paths.get("cuda", paths.get("cpu", default))(*args)


def of_cpu(*args, default, **paths):
    return paths.get("cpu", default)(*args)


@pytest.fixture(scope="module")
def on_hopper():
    """A CPU takes the paths of a Hopper GPU, with parts of one block."""
    interpret = InterpretGPUParams()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "platform_dependent", of_cuda)
        patch.setattr(hopper, "is_hopper", lambda: True)
        for module in (cached_attention, row_attention):
            patch.setattr(module, "platform_in_use", lambda: "gpu")
        for module in (layers, row_attention):
            patch.setattr(module, "sums_in_order_on_accelerators", lambda: True)
        for module in (page_attention_gpu, row_attention_gpu):
            patch.setattr(module, "PART_TOKENS", hopper.ROWS)
        for module, name in ((page_tiles, "attend"), (row_attention_gpu, "forward")):
            kernel = functools.partial(getattr(module, name), interpret=interpret)
            patch.setattr(module, name, kernel)
        yield patch
    jax.clear_caches()


@pytest.fixture(scope="module")
def bench(on_hopper):
    params = jax.tree.map(lambda x: 2 * x, transformer.init(MODEL, jax.random.key(0), jnp.bfloat16))
    pages = Passes(MODEL, params, TEXTS, 64)
    return pages, pages.decoded(2)


@pytest.mark.parametrize("name", PASSES)
def test_bits_of_passes(bench, name):
    pages, want = bench
    found = differences(PASSES[name](pages), want)
    names = "tokens_cdf", "tokens_gumbel", "logprobs", "hidden", "logits"
    assert not any(found[name] for name in names), found


def test_log_probabilities_are_those_of_a_cpu(bench):
    pages, want = bench
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "platform_dependent", of_cpu)
        for module in (cached_attention, row_attention):
            patch.setattr(module, "platform_in_use", lambda: "cpu")
        jax.clear_caches()
        found = pages.trained(256)
    assert 0 < np.abs(found.logprob - want.logprob).mean() < 5e-2  # of numbers up to 13
