"""The forward passes: hand-computed pieces, and cached passes equal to whole-sequence passes."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_cache import dense_cache
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reprise.models.attention import kv_cache
from reprise.models.attention.attention import Packing, attend, attend_causally, packed_mask
from reprise.models.config import Llama3RopeScaling, ModelConfig, num_params
from reprise.models.decoder import transformer
from reprise.models.layout import causal_block_tokens

LLAMA = ModelConfig(
    architecture="llama",
    vocab_size=29,
    d_model=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    d_ff=20,
    rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 4),
)
QWEN2 = dataclasses.replace(
    LLAMA, architecture="qwen2", rope_scaling=None, qkv_bias=True, tied_embeddings=True
)
QWEN3 = dataclasses.replace(LLAMA, architecture="qwen3", rope_scaling=None, qk_norm=True)
CONFIGS = [LLAMA, QWEN2, QWEN3]
NAMES = [config.architecture for config in CONFIGS]

B, T, S = 2, 7, 16  # few shapes: each one is a compilation
LOGITS = jax.jit(transformer.logits, static_argnums=0)
INIT = jax.jit(transformer.init, static_argnums=(0, 2))
CACHED = jax.jit(transformer.hidden_with_cache, static_argnums=0)
HIDDEN = jax.jit(transformer.hidden, static_argnums=0)


@pytest.fixture(autouse=True)
def full_precision():
    # Accelerators multiply float32 in fewer bits unless told otherwise.
    with jax.default_matmul_precision("highest"):
        yield


def random_params(config, seed=0):
    """Noise on every weight, norms and biases too, so that each of them matters."""
    rng = np.random.default_rng(seed)

    def one(spec):
        noise = rng.standard_normal(spec.shape, np.float32)
        return 1 + 0.3 * noise if spec.scale is None else (spec.scale or 0.3) * noise

    return jax.tree.map(one, transformer.param_specs(config))


def random_tokens(seed=0):
    return np.random.default_rng(seed).integers(0, LLAMA.vocab_size, (B, T)).astype(np.int32)


def paged_cache(config, for_cpu):
    """Pages of four positions, in any order."""
    cache = kv_cache.init(
        config,
        num_slots=B,
        slot_pages=S // 4,
        num_pages=B * S // 4 + 1,
        page_tokens=4,
        dtype=jnp.float32,
        for_cpu=for_cpu,
    )
    pages = np.random.default_rng(0).permutation(B * S // 4 + 1)[: B * S // 4]
    return dataclasses.replace(cache, table_BN=pages.reshape(B, -1).astype(np.int32))


CACHES = {
    "one page a slot": lambda config: dense_cache(config, B, S),
    "pages": lambda config: paged_cache(config, for_cpu=True),
    "pages of accelerators": lambda config: paged_cache(config, for_cpu=False),
}


def run_chain(config, params, cache, tokens_BN, start_B):
    start_B = np.asarray(start_B, np.int32)
    N = tokens_BN.shape[1]
    positions_BN = start_B[:, None] + np.arange(N, dtype=np.int32)
    hidden, cache, _ = CACHED(config, params, cache, tokens_BN, positions_BN, start_B)
    return np.asarray(transformer.head(config, params, hidden)), cache


def test_masked_attention_by_hand():
    # One head of width 1: scores are q·k, weights their softmax over what the mask allows.
    q = jnp.array([1.0, 2.0]).reshape(1, 2, 1, 1)
    k = jnp.array([0.0, math.log(3.0), 5.0]).reshape(1, 1, 1, 3)
    v = jnp.array([10.0, 20.0, 99.0]).reshape(1, 1, 3, 1)
    mask = np.array([[[True, True, False], [True, False, False]]])
    out = np.asarray(attend(q, k, v, mask))[0, :, 0, 0]
    np.testing.assert_allclose(out, [(10 + 3 * 20) / 4, 10.0], rtol=1e-6)


@pytest.mark.parametrize("num_tokens", [256, 130])  # in blocks, and as it comes
def test_attention_in_blocks_equals_attention_at_once(num_tokens):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, num_tokens, 4, 8)).astype(np.float32)
    k = rng.standard_normal((2, 2, 8, num_tokens)).astype(np.float32)
    v = rng.standard_normal((2, 2, num_tokens, 8)).astype(np.float32)
    mask = np.tril(rng.random((2, num_tokens, num_tokens)) < 0.5)
    assert (causal_block_tokens(num_tokens) < num_tokens) == (num_tokens == 256)
    got = jax.jit(attend_causally)(q, k, v, mask)
    seen = mask.any(axis=-1)
    np.testing.assert_allclose(
        np.asarray(got)[seen], np.asarray(attend(q, k, v, mask))[seen], atol=1e-5
    )


def test_packed_mask_by_hand():
    # a prompt's shared token and responses of 2 and 1, another prompt's response, padding
    prompt, branch = np.array([[1, 1, 1, 1, 2, 0]]), np.array([[0, 1, 1, 2, 1, 0]])
    mask = packed_mask(Packing(np.zeros((1, 6)), prompt, branch))
    assert np.asarray(mask[0]).astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


@pytest.mark.parametrize("make_cache", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_prefill_and_decode_equal_the_whole_sequence(config, make_cache):
    params, tokens = random_params(config), random_tokens()
    expected = np.asarray(LOGITS(config, params, tokens))
    prefilled, _ = run_chain(config, params, make_cache(config), tokens, [0, 0])
    np.testing.assert_allclose(prefilled, expected, atol=1e-5)
    cache = make_cache(config)
    for t in range(T):
        one, cache = run_chain(config, params, cache, tokens[:, t : t + 1], [t, t])
        np.testing.assert_allclose(one[:, 0], expected[:, t], atol=1e-5)


def products_of(jaxpr):
    """(dtype of its operand, precision) of every matrix product of a program."""
    found = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            found.add((eqn.invars[0].aval.dtype.name, str(eqn.params["precision"])))
        for value in eqn.params.values():
            for x in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(x, "jaxpr", x)
                found |= products_of(inner) if hasattr(inner, "eqns") else set()
    return found


@pytest.mark.parametrize("config", [LLAMA, QWEN2], ids=["own_head", "tied"])
def test_float32_is_float32_on_every_backend(config):
    """Backward passes too. Accelerators multiply it in fewer bits where nothing is said."""
    params, start_B = random_params(config), np.zeros(B, np.int32)

    def whole(params):
        return jnp.sum(transformer.logits(config, params, random_tokens()))

    def cached(params):
        tokens_B1 = random_tokens()[:, :1]
        cache = dense_cache(config, B, S, params.final_norm_D.dtype)
        rest = tokens_B1, start_B[:, None], start_B
        hidden, _, _ = transformer.hidden_with_cache(config, params, cache, *rest)
        return transformer.head(config, params, hidden)

    with jax.default_matmul_precision(None):
        for program in (jax.grad(whole), cached):
            exact = products_of(jax.make_jaxpr(program)(params).jaxpr)
            assert {d for d, _ in exact} == {"float32"}
            assert all("HIGHEST" in precision for _, precision in exact)
            half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
            half = products_of(jax.make_jaxpr(program)(half).jaxpr)
            assert ("bfloat16", "None") in half


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_right_padding_does_not_reach_earlier_positions(config):
    params, tokens = random_params(config), random_tokens()
    other = tokens.copy()
    other[:, 5:] = -1  # padding by any id, also one that is no token
    got, padded = LOGITS(config, params, tokens), LOGITS(config, params, other)
    np.testing.assert_array_equal(got[:, :5], padded[:, :5])
    assert np.abs(np.asarray(got - padded))[:, 5:].max() > 1e-2


def test_init_follows_the_specs():
    params = INIT(QWEN2, jax.random.key(0), jnp.bfloat16)
    specs = transformer.param_specs(QWEN2)
    jax.tree.map(lambda spec, leaf: spec.shape == leaf.shape or pytest.fail(), specs, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    first, second = params.layers
    assert np.all(np.asarray(params.final_norm_D) == 1)
    assert np.all(np.asarray(first.query_bias_Q) == 0)
    assert not np.array_equal(np.asarray(first.query_QD), np.asarray(second.query_QD))
    # 29 · 16 draws of standard deviation 0.02: theirs lies within 20% but once in 10⁸.
    assert 0.016 < np.asarray(params.embedding_VD, np.float32).std() < 0.024


def test_num_params_by_hand():
    # embedding + head, final norm, 2 × (2 norms, q and o, k and v, 3 of the mlp)
    expected = 2 * 29 * 16 + 16 + 2 * (2 * 16 + 2 * 16 * 24 + 2 * 16 * 12 + 3 * 16 * 20)
    assert num_params(LLAMA) == expected
    assert num_params(QWEN3) == expected + 2 * 2 * 6
    assert num_params(QWEN2) == expected - 29 * 16 + 2 * (24 + 2 * 12)


def test_impossible_shapes_are_refused():
    with pytest.raises(ValueError, match="num_heads=4 must be a multiple"):
        dataclasses.replace(LLAMA, num_kv_heads=3)
    with pytest.raises(ValueError, match="head_dim=7 must be even"):
        dataclasses.replace(LLAMA, head_dim=7)
    with pytest.raises(ValueError, match="eos token 29"):
        dataclasses.replace(LLAMA, eos_token_ids=(29,))


PROMPTS = st.lists(  # of a row: shared tokens, and the lengths of the responses after them
    st.tuples(st.integers(0, 3), st.lists(st.integers(1, 4), min_size=1, max_size=3)),
    min_size=1,
    max_size=4,
)
ROW = 24


def packed_row(prompts):
    """The row's packing, and for each response the columns of its prompt and itself."""
    positions, prompt, branch, paths = [], [], [], []
    for number, (shared, responses) in enumerate(prompts, start=1):
        lengths = [shared, *responses]
        if len(positions) + sum(lengths) > ROW:
            break
        first = len(positions)
        for b, length in enumerate(lengths):
            start = 0 if b == 0 else shared
            columns = range(len(positions), len(positions) + length)
            if b:
                paths.append([*range(first, first + shared), *columns])
            positions += range(start, start + length)
            prompt += [number] * length
            branch += [b] * length
    rows = (np.array(x + [0] * (ROW - len(x)), np.int32)[None] for x in (positions, prompt, branch))
    return Packing(*rows), paths


def row_tokens(seed):
    return np.random.default_rng(seed).integers(0, LLAMA.vocab_size, (1, ROW)).astype(np.int32)


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
@settings(max_examples=25)
@example([(3, [4, 4, 4]), (0, [4, 4, 1])])  # no padding
@given(PROMPTS)
def test_packed_responses_equal_separate_sequences(config, prompts):
    packing, paths = packed_row(prompts)
    params, tokens = random_params(config), row_tokens(seed=len(paths))
    sequences = np.zeros((ROW, T), np.int32)
    for sequence, path in zip(sequences, paths, strict=False):
        sequence[: len(path)] = tokens[0, path]
    packed = np.asarray(HIDDEN(config, params, tokens, packing))
    separate = np.asarray(HIDDEN(config, params, sequences))
    for e, path in enumerate(paths):
        np.testing.assert_allclose(packed[0, path], separate[e, : len(path)], atol=1e-5)


@settings(max_examples=40)
@given(PROMPTS, st.integers(0, ROW - 1))
def test_a_token_reaches_only_what_follows_it_in_its_own_sequences(prompts, column):
    packing, paths = packed_row(prompts)
    params, tokens = random_params(QWEN3), row_tokens(seed=column)
    other = tokens.copy()
    other[0, column] = (tokens[0, column] + 1) % LLAMA.vocab_size
    before, after = (np.asarray(HIDDEN(QWEN3, params, x, packing))[0] for x in (tokens, other))
    reached = {t for path in paths if column in path for t in path if t >= column}
    if not reached:  # padding: it may reach padding
        reached = set(range(column, ROW))
    rest = sorted(set(range(ROW)) - reached)
    np.testing.assert_array_equal(after[rest], before[rest])
    assert np.abs(after[column] - before[column]).max() > 1e-3
