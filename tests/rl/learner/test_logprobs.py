"""Scoring gives the sampler's log-probs, in any chunking, and never holds all logits."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import count_primitives, largest_array
from shapes import CHAT, make_params
from trajectories import trajectory

from reprise.models.config import MeshConfig, ModelConfig
from reprise.models.decoder import transformer
from reprise.models.sharding import make_mesh, param_shardings
from reprise.rl.batches import micro_batches
from reprise.rl.batches.micro_batches import TrainSample
from reprise.rl.learner import logprobs as scoring
from reprise.rl.learner.config import TrainerConfig, TrainSpec
from reprise.rl.records.packing import Shape
from reprise.spec.config import SamplingConfig
from reprise.spec.verification import sampling
from reprise.spec.verification.sampling import Processing

PARAMS = make_params(model=CHAT)
P, T = 3, 12  # two prompts of 3 tokens, two responses of 9 to each
TOKENS = np.random.default_rng(1).integers(0, 16, (4, T)).astype(np.int32)
TOKENS[1, :P], TOKENS[3, :P] = TOKENS[0, :P], TOKENS[2, :P]


def sample_of(i, tokens, prompt_tokens, group=0, config=SamplingConfig()):  # noqa: B008
    prompt, response = np.split(np.asarray(tokens), [prompt_tokens])
    return TrainSample(trajectory(i, prompt, response, group=group, sample=i), 0.0, config)


PLAIN = (SamplingConfig(),) * 4
MIXED = (
    SamplingConfig(),
    SamplingConfig(temperature=0.7, top_p=0.9),
    SamplingConfig(temperature=1.3, top_k=5),
    SamplingConfig(temperature=0.0),
)


def packed(tokens, configs=PLAIN):
    """All four in one micro-batch, in their order; 2 · 20 positions and padding."""
    samples = [sample_of(i, row, P, i // 2, configs[i]) for i, row in enumerate(tokens)]
    [one] = micro_batches.micro_batches(samples, Shape(2, 22, 4))
    assert (one.sample_indices.tolist(), one.used_positions) == ([0, 1, 2, 3], 40)
    return one.batch


def recipe_of(**fields):
    return TrainSpec(CHAT, trainer=TrainerConfig(**fields))


def processing_of(configs):
    """Arrays of one entry a sequence."""
    return jax.tree.map(lambda *x: np.stack(x), *map(Processing.of, configs))


@jax.jit
def drawn(processing):
    """Every position's draw and its log-prob, as the engine makes them."""
    logits = transformer.logits(CHAT, PARAMS, TOKENS)
    keys = sampling.position_keys(
        sampling.request_keys(sampling.step_key(0, 0), jnp.arange(4)),
        jnp.broadcast_to(jnp.arange(T), (4, T)),
    )
    t, k, p = processing.broadcast((4, T))
    return sampling.draw(sampling.processed_logits(logits, t, k, p), keys, t, "cdf")


CHUNKED = recipe_of(logprob_chunk_tokens=16)
LOGPROBS = jax.jit(lambda tokens: jax.nn.log_softmax(transformer.logits(CHAT, PARAMS, tokens)))


def test_scores_equal_the_samplers_logprobs_each_by_its_own_sampling():
    tokens, emitted = drawn(processing_of(MIXED))
    # score the drawn token of one position at a time: put it behind its own prefix
    for t in (P - 1, 5, T - 2):
        given = TOKENS.copy()
        given[:, t + 1] = tokens[:, t]
        scored, _ = scoring.token_logprobs(PARAMS, packed(given, MIXED), recipe=CHUNKED)
        np.testing.assert_allclose(scored[:, t + 1 - P], emitted[:, t], atol=1e-5)


def test_entropy_and_logprob_of_the_plain_distribution():
    scored, entropy = scoring.token_logprobs(PARAMS, packed(TOKENS), recipe=CHUNKED)
    logprobs = np.array(LOGPROBS(TOKENS))[:, P - 1 : -1]
    wanted = np.take_along_axis(logprobs, TOKENS[:, P:, None], axis=2)[..., 0]
    np.testing.assert_allclose(scored[:, : T - P], wanted, atol=1e-5)
    wanted = -np.sum(np.exp(logprobs) * logprobs, -1)
    np.testing.assert_allclose(entropy[:, : T - P], wanted, atol=1e-5)


def test_ids_without_a_token_have_no_part_in_the_distribution():
    model = dataclasses.replace(CHAT, unused_ids=((16, CHAT.vocab_size),))
    recipe = dataclasses.replace(CHUNKED, model=model)
    scored, entropy = scoring.token_logprobs(PARAMS, packed(TOKENS), recipe=recipe)
    logits = transformer.logits(CHAT, PARAMS, TOKENS)[:, P - 1 : -1, :16]
    logprobs = np.array(jax.nn.log_softmax(logits))
    wanted = np.take_along_axis(logprobs, TOKENS[:, P:, None], axis=2)[..., 0]
    np.testing.assert_allclose(scored[:, : T - P], wanted, atol=1e-5)
    np.testing.assert_allclose(
        entropy[:, : T - P], -np.sum(np.exp(logprobs) * logprobs, -1), atol=1e-5
    )
    _, gradient = weighted(PARAMS, packed(TOKENS, MIXED), recipe=recipe)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))


WEIGHTS = np.sin(np.arange(4.0 * (T - P), dtype=np.float32)).reshape(4, T - P)


@partial(jax.jit, static_argnames=("recipe",))
@jax.value_and_grad
def weighted(params, batch, *, recipe):
    logprobs, _ = scoring.logprobs_and_entropy(params, batch, recipe)
    return jnp.sum(logprobs[:, : T - P] * WEIGHTS)


@jax.jit
@jax.value_and_grad
def unpacked(params, processing):
    """The same from four whole sequences and all their logits at once."""
    logits = transformer.logits(CHAT, params, TOKENS)[:, P - 1 : -1]
    rest = processing.broadcast((4, T - P))
    return jnp.sum(sampling.log_probs(logits, TOKENS[:, P:], *rest)[0] * WEIGHTS)


WHOLE = recipe_of(logprob_chunk_tokens=1000)


@pytest.mark.parametrize("configs", [PLAIN, MIXED])
def test_packing_chunking_and_remat_change_neither_value_nor_gradient(configs):
    value, gradient = unpacked(PARAMS, processing_of(configs))
    gradient = flat(gradient)
    # 18 positions for 2 rows of 22: three slices of 8, the last with padding
    for recipe in (WHOLE, recipe_of(logprob_chunk_tokens=18, remat="layer")):
        other, other_gradient = weighted(PARAMS, packed(TOKENS, configs), recipe=recipe)
        assert float(other) == pytest.approx(float(value), rel=1e-5)
        other_gradient = flat(other_gradient)
        np.testing.assert_allclose(other_gradient, gradient, atol=1e-5 * np.max(np.abs(gradient)))


def flat(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def test_batch_by_length_by_vocabulary_is_never_alive():
    model = ModelConfig("llama", 2000, 8, 1, 1, 1, 8, 8)
    params = jax.eval_shape(lambda key: transformer.init(model, key), jax.random.key(0))
    batch = micro_batches.empty(Shape(2, 160, 32))

    def of(params, chunk_tokens):
        recipe = TrainSpec(model, trainer=TrainerConfig(logprob_chunk_tokens=chunk_tokens))
        return jnp.sum(scoring.logprobs_and_entropy(params, batch, recipe)[0])

    whole = jax.make_jaxpr(jax.grad(lambda p: of(p, 320)))(params)
    chunked = jax.make_jaxpr(jax.grad(lambda p: of(p, 64)))(params)
    assert largest_array(whole.jaxpr) >= 2 * 160 * 2000  # the measure sees what it should
    assert largest_array(chunked.jaxpr) < 2 * 160 * 2000 / 4


def test_backward_computes_logits_again_but_no_maxima():
    V = 2000
    model = ModelConfig("llama", V, 8, 1, 1, 1, 8, 8)
    params = jax.eval_shape(lambda key: transformer.init(model, key), jax.random.key(0))
    batch = micro_batches.empty(Shape(2, 160, 32))
    recipe = TrainSpec(model, trainer=TrainerConfig(logprob_chunk_tokens=64), may_cut=False)

    def loss(params):
        return jnp.sum(scoring.logprobs_and_entropy(params, batch, recipe)[0])

    forward = jax.make_jaxpr(loss)(params).jaxpr
    backward = jax.make_jaxpr(jax.grad(loss))(params).jaxpr
    assert count_primitives(forward, "reduce_max", V) == 1
    assert count_primitives(backward, "reduce_max", V) == 1


@pytest.mark.parametrize(
    "vocab", [pytest.param(208, marks=pytest.mark.soak), 210], ids=["divides", "does not divide"]
)
def test_the_vocabulary_is_split_over_all_that_share_the_weights(vocab):
    """No device has the whole head or its gradient, nor logits of another number than its part."""
    unused = ((40, 60), (vocab - 9, vocab))
    model = dataclasses.replace(CHAT, vocab_size=vocab, tied_embeddings=False, unused_ids=unused)
    recipe = TrainSpec(model, trainer=TrainerConfig(logprob_chunk_tokens=20))
    params = transformer.init(model, jax.random.key(0))
    batch = packed(TOKENS, MIXED)
    value, gradient = weighted(params, batch, recipe=recipe)
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=2), jax.devices()[:4])
    with jax.set_mesh(mesh):
        shardings = param_shardings(mesh, transformer.param_specs(model))
        split = jax.device_put(params, shardings), scoring.place(batch)
        step = jax.jit(partial(weighted, recipe=recipe), out_shardings=(None, shardings))
        compiled = step.lower(*split).compile()
        other, other_gradient = compiled(*split)
    assert float(other) == pytest.approx(float(value), rel=1e-5)
    np.testing.assert_allclose(flat(other_gradient), flat(gradient), rtol=1e-4, atol=1e-4)
    text, divides = compiled.as_text(), vocab % 4 == 0
    assert (f"[{vocab // 4},16]" in text, f"[{vocab},16]" in text) == (divides, False)
    assert f",{vocab // 4 if divides else vocab // 2}]" in text and f",{vocab}]" not in text


def test_bfloat16_compute_leaves_gradients_in_float32():
    recipe = recipe_of(compute_dtype="bfloat16", logprob_chunk_tokens=18)
    _, gradient = weighted(PARAMS, packed(TOKENS), recipe=recipe)
    assert {g.dtype for g in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}
    a, b = flat(gradient), flat(weighted(PARAMS, packed(TOKENS), recipe=WHOLE)[1])
    assert np.sum(a * b) / np.linalg.norm(a) / np.linalg.norm(b) > 0.999
    assert np.max(np.abs(a - b)) > 0  # it did run in bfloat16


QWEN2 = ModelConfig("qwen2", 16, 16, 1, 2, 1, 8, 32, qkv_bias=True, tied_embeddings=True)


def test_gradients_of_a_frequent_token_and_of_biases_are_summed_in_float32():
    """2,048 equal terms: a sum in bfloat16 stands still at 256 of them."""
    params = transformer.init(QWEN2, jax.random.key(5))
    tokens_BT = np.full((64, 32), 5, np.int32)

    @partial(jax.jit, static_argnames=("dtype", "at_once"))
    @partial(jax.grad, argnums=0)
    def of(params, *, dtype, at_once=False):
        params = scoring.cast(params, dtype) if at_once else params
        hidden_BTD = transformer.hidden(QWEN2, params, tokens_BT, dtype=dtype)
        return jnp.sum(hidden_BTD[..., :3].astype(jnp.float32))

    def norms(gradient):
        [layer] = gradient.layers
        embedding_D, bias_P = gradient.embedding_VD[5], layer.value_bias_P
        return np.array([jnp.linalg.norm(embedding_D), jnp.linalg.norm(bias_P)])

    wanted = norms(of(params, dtype=jnp.float32))
    np.testing.assert_allclose(norms(of(params, dtype=jnp.bfloat16)), wanted, rtol=0.03)
    rounded = norms(of(params, dtype=jnp.bfloat16, at_once=True))
    assert rounded[0] < 0.5 * wanted[0]  # what the test is for


def test_samples_get_the_scores_of_their_own_tokens():
    # prompt and response tokens of each; sample 3 is sample 0's sibling; three micro-batches
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 16, p + n) for p, n in [(3, 4), (1, 11), (5, 1), (3, 8), (2, 6)]]
    rows[3][:3] = rows[0][:3]
    samples = [
        sample_of(i, x, p) for i, (x, p) in enumerate(zip(rows, [3, 1, 5, 3, 2], strict=True))
    ]
    shape = Shape(1, 14, 4)
    assert len(micro_batches.micro_batches(samples, shape)) == 3
    scores = scoring.sample_logprobs(PARAMS, samples, shape, CHUNKED)
    ids = np.zeros((8, T), np.int32)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    logprobs = np.array(LOGPROBS(ids))
    for i, (sample, scored) in enumerate(zip(samples, scores, strict=True)):
        start, n = len(sample.trajectory.prompt_ids), sample.trajectory.num_tokens
        wanted = [logprobs[i, j - 1, ids[i, j]] for j in range(start, start + n)]
        np.testing.assert_allclose(scored, wanted, atol=1e-5)
