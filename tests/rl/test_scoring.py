"""Scoring gives the sampler's log-probs, in any chunking, and never holds all logits."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import transformer
from models.config import ModelConfig
from rl import scoring
from rl.batching import Sample
from rl.recipe import Recipe, TrainerConfig
from rl.trajectory import FinishReason, Trajectory
from spec import sampling
from spec.sampling import SamplingConfig

MODEL = ModelConfig("qwen3", 16, 16, 1, 2, 1, 8, 32, qk_norm=True, tied_embeddings=True)
PARAMS = jax.tree.map(lambda p: 2 * p, transformer.init(MODEL, jax.random.key(0)))
TOKENS = jax.random.randint(jax.random.key(1), (4, 12), 0, 16)


def recipe_of(**fields):
    return Recipe(MODEL, trainer=TrainerConfig(**fields))


def processing_of(**fields):
    return scoring.Processing.of(SamplingConfig(**fields))


@jax.jit
def drawn(processing):
    """Every position's draw and its log-prob, as the engine makes them."""
    logits = transformer.logits(MODEL, PARAMS, TOKENS)
    keys = sampling.position_keys(
        sampling.request_keys(sampling.step_key(0, 0), jnp.arange(4)),
        jnp.broadcast_to(jnp.arange(12), (4, 12)),
    )
    t, k, p = (jnp.full((4, 12), x) for x in jax.tree.leaves(processing))
    return sampling.draw(sampling.processed_logits(logits, t, k, p), keys, t, "cdf")


CHUNKED = recipe_of(logprob_chunk_tokens=16)
LOGPROBS = jax.jit(lambda tokens: jax.nn.log_softmax(transformer.logits(MODEL, PARAMS, tokens)))


@pytest.mark.parametrize(
    "config",
    [
        SamplingConfig(),
        SamplingConfig(temperature=0.7, top_p=0.9),
        SamplingConfig(temperature=1.3, top_k=5),
        SamplingConfig(temperature=0.0),
    ],
)
def test_scores_equal_the_samplers_logprobs(config):
    processing = scoring.Processing.of(config)
    tokens, emitted = drawn(processing)
    # score the drawn token of one position at a time: put it behind its own prefix
    for t in (0, 5, 10):
        given = np.array(TOKENS)
        given[:, t + 1] = tokens[:, t]
        scored, _ = scoring.score(PARAMS, given, processing, recipe=CHUNKED)
        np.testing.assert_allclose(scored[:, t], emitted[:, t], atol=1e-5)


def test_entropy_and_logprob_of_the_plain_distribution():
    scored, entropy = scoring.score(PARAMS, np.array(TOKENS), processing_of(), recipe=CHUNKED)
    logprobs, tokens = np.array(LOGPROBS(TOKENS)), np.array(TOKENS)
    wanted = np.take_along_axis(logprobs[:, :-1], tokens[:, 1:, None], axis=2)[..., 0]
    np.testing.assert_allclose(scored[:, :-1], wanted, atol=1e-5)
    np.testing.assert_allclose(entropy, -np.sum(np.exp(logprobs) * logprobs, -1), atol=1e-5)


@partial(jax.jit, static_argnames=("recipe",))
@jax.value_and_grad
def weighted(params, processing, *, recipe):
    tokens = jnp.pad(TOKENS, ((0, 0), (0, 1)))
    logprobs, _ = scoring.token_logprobs(params, tokens, processing, recipe)
    return jnp.sum(logprobs * jnp.sin(jnp.arange(52.0)).reshape(4, 13))


WHOLE = recipe_of(logprob_chunk_tokens=1000)


def test_chunking_and_remat_change_neither_value_nor_gradient():
    # 20 positions for 4 rows of 13: three slices of 5, the last with padding
    recipe = recipe_of(logprob_chunk_tokens=20, remat=True)
    for processing in (processing_of(), processing_of(temperature=0.7, top_p=0.9)):
        value, gradient = weighted(PARAMS, processing, recipe=WHOLE)
        other, other_gradient = weighted(PARAMS, processing, recipe=recipe)
        assert float(other) == pytest.approx(float(value), rel=1e-5)
        gradient, other_gradient = flat(gradient), flat(other_gradient)
        np.testing.assert_allclose(other_gradient, gradient, atol=1e-5 * np.max(np.abs(gradient)))


def flat(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def largest_array(jaxpr) -> int:
    """The most elements that any value of a program has, in its inner programs too."""
    sizes = [v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars if hasattr(v.aval, "size")]
    inner = [
        largest_array(getattr(x, "jaxpr", x))
        for eqn in jaxpr.eqns
        for value in eqn.params.values()
        for x in (value if isinstance(value, (tuple, list)) else (value,))
        if hasattr(x, "eqns") or hasattr(x, "jaxpr")
    ]
    return max(sizes + inner, default=0)


def test_batch_by_length_by_vocabulary_is_never_alive():
    model = ModelConfig("llama", 500, 8, 1, 1, 1, 8, 8)
    params = jax.eval_shape(lambda key: transformer.init(model, key), jax.random.key(0))
    tokens = jnp.zeros((2, 64), jnp.int32)

    def of(params, chunk_tokens):
        recipe = Recipe(model, trainer=TrainerConfig(logprob_chunk_tokens=chunk_tokens))
        return jnp.sum(scoring.token_logprobs(params, tokens, processing_of(), recipe)[0])

    whole = jax.make_jaxpr(jax.grad(lambda p: of(p, 128)))(params)
    chunked = jax.make_jaxpr(jax.grad(lambda p: of(p, 16)))(params)
    assert largest_array(whole.jaxpr) >= 2 * 64 * 500  # the measure sees what it should
    assert largest_array(chunked.jaxpr) < 2 * 64 * 500 / 4


def test_bfloat16_compute_leaves_gradients_in_float32():
    recipe = recipe_of(compute_dtype="bfloat16", logprob_chunk_tokens=20)
    _, gradient = weighted(PARAMS, processing_of(), recipe=recipe)
    assert {g.dtype for g in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}
    a, b = flat(gradient), flat(weighted(PARAMS, processing_of(), recipe=WHOLE)[1])
    assert np.sum(a * b) / np.linalg.norm(a) / np.linalg.norm(b) > 0.999
    assert np.max(np.abs(a - b)) > 0  # it did run in bfloat16


def test_samples_get_the_scores_of_their_own_tokens():
    rng = np.random.default_rng(0)
    samples = []
    for i, (prompt, response) in enumerate([(3, 4), (1, 11), (5, 1)]):
        n = response
        zeros = np.zeros(n, np.int32)
        prompt_ids, response_ids = rng.integers(0, 16, prompt), rng.integers(0, 16, n)
        t = Trajectory(i, 0, i, prompt_ids, response_ids, zeros, zeros, zeros, FinishReason.STOP)
        samples.append(Sample(t, 0.0))
    scores = scoring.score_samples(PARAMS, samples, ((2, 12),), SamplingConfig(), CHUNKED)
    for sample, scored in zip(samples, scores, strict=True):
        t = sample.trajectory
        start, end = len(t.prompt_ids), sample.num_tokens
        ids = np.zeros((4, 12), np.int32)
        ids[0, :end] = np.concatenate([t.prompt_ids, t.response_ids])
        logprobs = np.array(LOGPROBS(ids))[0]
        wanted = [logprobs[j - 1, ids[0, j]] for j in range(start, end)]
        np.testing.assert_allclose(scored, wanted, atol=1e-5)
