"""All passes over a text find the same bits, on any mesh of CPUs, in float32 and in bfloat16.

Rounding to bfloat16 hides other sums. So a third policy has matrices of bfloat16 and float32 for
all that flows between them: its sums are compared before any rounding.
"""

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import cuts, passes
from benchmarks.passes import Passes, differences
from benchmarks.same_bits import KINDS, as_kind
from reprise.models import sharding
from reprise.models.attention import cached_attention, kv_cache
from reprise.models.config import MeshConfig, ModelConfig
from reprise.models.decoder import layers, row_attention, transformer
from reprise.spec.verification import sampling

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="kernels of CPUs"),
]

MODEL = ModelConfig(
    architecture="qwen3",
    vocab_size=99,
    d_model=64,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    d_ff=112,
    qk_norm=True,
    qkv_bias=True,
)


def policy(kind):
    rng = np.random.default_rng(0)

    def one(spec):
        noise = rng.standard_normal(spec.shape, np.float32)
        return jnp.asarray(
            1 + 0.2 * noise if spec.scale is None else 2 * (spec.scale or 0.1) * noise
        )

    return as_kind(kind, jax.tree.map(one, transformer.param_specs(MODEL)))


@pytest.fixture(scope="module")
def bench():
    """`bench(kind, number)`: passes of a policy, traced anew for each number, and decoded bits."""
    texts = passes.random_texts(MODEL.vocab_size, 2, 3, np.random.default_rng(1))
    wanted = {}

    def make(kind, number=0, page_tokens=0):
        params = policy(kind)
        if kind not in wanted:
            wanted[kind] = Passes(MODEL, params, texts).decoded(6)
        # the number of positions is in no sum
        model = dataclasses.replace(MODEL, max_positions=MODEL.max_positions + number)
        return Passes(model, params, texts, page_tokens), wanted[kind]

    return make


def found(want, got):
    row = differences(got, want)
    return {name: row[name] for name in passes.COUNTS}


PASSES = {
    "one slot": lambda passes: passes.decoded(1),
    "64 slots": lambda passes: passes.decoded(64),
    "trees": lambda passes: passes.verified(9),
    "large trees": lambda passes: passes.verified(30),
    "chunks": lambda passes: passes.chunked(8, 1),
    "several chunks": lambda passes: passes.chunked(16, 2),
    "training": lambda passes: passes.trained(192),
    "long training rows": lambda passes: passes.trained(512),
}
OF_PAGES = {"page by page": lambda passes: passes.decoded(6)} | {
    name: PASSES[name] for name in ("trees", "several chunks")
}


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_passes_over_one_page_a_text(bench, kind, name):
    one, want = bench(kind)
    assert not any(found(want, PASSES[name](one)).values())


@pytest.mark.parametrize("name", OF_PAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_passes_over_pages(bench, kind, name):
    one, want = bench(kind, page_tokens=16)
    assert not any(found(want, OF_PAGES[name](one)).values())


@pytest.mark.parametrize("axes", [{"data": 1, "fsdp": 4}, {"data": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize(
    "name, page_tokens",
    [("training", 0), *itertools.product(("64 slots", "trees", "several chunks"), (0, 16))],
)
def test_bits_of_passes_on_meshes(bench, axes, name, page_tokens):
    mesh = sharding.make_mesh(MeshConfig(**axes), jax.devices()[:4])
    with jax.set_mesh(mesh):
        one, want = bench("wide", page_tokens=page_tokens)
        shardings = sharding.param_shardings(mesh, transformer.param_specs(MODEL))
        one.params = jax.device_put(one.params, shardings)
        assert not any(found(want, PASSES[name](one)).values())


def other_order(product):
    """Products sum their inputs backwards."""
    return lambda way, *given: product(way, *(x[..., ::-1] for x in given))


def by_xla(x):
    return jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)


def in_parts(x, *weights):
    return layers._feed_forward_in_parts(x, *weights, 4)


def by_log_softmax(logits_V, tokens, *processing):
    logprobs_V = jax.nn.log_softmax(sampling.processed_logits(logits_V, *processing))
    return jnp.take_along_axis(logprobs_V, tokens[..., None], axis=-1)[..., 0], None


def without_rounding(attend, new, *rest, **more):
    """The output of attention is rounded to another type than elsewhere."""
    return attend(new, *rest, **more).astype(jnp.float16).astype(new[0].dtype)


def never(*_, **__):
    return False


def few(is_in_order, x, *weights):
    return x.size // x.shape[-1] <= 64 and is_in_order(x, *weights)


def of_module(place, name, change):
    """Replace `place.name` by a function, or by `change(the one that was there)`."""
    return lambda monkeypatch: monkeypatch.setattr(place, name, change)


PLANTED = {
    "many rows by another product": (
        "training",
        of_module(layers, "is_in_order", partial(few, layers.is_in_order)),
    ),
    "inputs in another order": (
        "trees",
        of_module(layers, "_in_order", other_order(layers._in_order)),
    ),
    "features in parts": ("training", of_module(transformer, "feed_forward", in_parts)),
    "norms by reductions": ("trees", of_module(transformer, "mean_square", by_xla)),
    "log-probabilities by another formula": (
        "training",
        of_module(sampling, "log_probs", by_log_softmax),
    ),
    "attention of training under a mask": (
        "training",
        of_module(transformer, "is_faster", never),
    ),
    "attention of training by blocks": (
        "training",
        of_module(
            row_attention, "_forward_by_kernel", lambda _, *x: row_attention._forward_by_blocks(*x)
        ),
    ),
    "attention in two softmaxes, over dead entries": (
        "trees",
        of_module(cached_attention, "is_in_order", never),
    ),
    "another rounding": (
        "chunks",
        of_module(kv_cache, "attend_in_order", partial(without_rounding, kv_cache.attend_in_order)),
    ),
}


@pytest.mark.parametrize("violation", PLANTED)
def test_a_planted_violation_is_found(bench, monkeypatch, violation):
    name, plant = PLANTED[violation]
    one, want = bench("wide", number=1 + list(PLANTED).index(violation))
    plant(monkeypatch)
    got = found(want, PASSES[name](one))
    assert got["logprobs"] > 0.05 * len(want.logprob)


def cuts_found(num_rows, vocab_size):
    rows = cuts.random_rows(num_rows, vocab_size, np.random.default_rng(0))
    return {
        (row["devices"], row["function"]): row["tokens"] + row["logprobs"]
        for row in cuts.differences(rows)
    }


# Two devices split a vocabulary of 1,000. XLA's programs for thousands of rows are others.
@pytest.mark.parametrize("num_rows, vocab_size", [(256, 99), (4096, 1000), (256, 1003)])
def test_bits_of_cuts_on_meshes(num_rows, vocab_size):
    found = cuts_found(num_rows, vocab_size)
    assert len(found) == 6 and not any(found.values()), found


def test_a_cut_by_a_sum_of_another_order_is_found(monkeypatch):
    by_reduction = partial(jnp.sum, axis=-1, dtype=jnp.float32)
    monkeypatch.setattr(sampling, "_whole_sum", by_reduction)
    found = cuts_found(260, 1000)  # rows of no other test, so that all is traced anew
    assert found["tensor=2", "sampler"] > 0 and found["fsdp=2", "trainer"] > 0, found
