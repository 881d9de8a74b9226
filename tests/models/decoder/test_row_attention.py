"""Attention by blocks against one softmax over the whole row, in float64; and what it skips."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from programs import largest_array

from reprise.models.attention.attention import Packing, packed_mask
from reprise.models.config import ModelConfig
from reprise.models.decoder import layers, row_attention, transformer
from reprise.models.decoder.row_attention import attend_rows

B, H, K, h = 2, 4, 2, 8
C = 16  # positions of a block, here

jitted = jax.jit(lambda *args: attend_rows(*args))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of the portable path, which a CPU with its kernel does not take."""
    monkeypatch.setattr(row_attention, "LONG_ROW_BLOCK_TOKENS", C)
    monkeypatch.setattr(row_attention, "why_portable", lambda *_: "blocks are tried here")


def packing_of(prompt, branch):
    return Packing(jnp.zeros_like(prompt), prompt, branch)


def plain(q, k, v, prompt, branch):
    """softmax(q·k/√h)·v of what may be seen, in float64."""
    T = q.shape[1]
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    packing = Packing(jnp.zeros((B, T), jnp.int32), jnp.asarray(prompt), jnp.asarray(branch))
    mask = np.asarray(packed_mask(packing))
    k, v = (np.repeat(x, H // K, axis=2) for x in (k, v))
    scores = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(h)
    scores = np.where(mask[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("bhts,bshd->bthd", weights / weights.sum(axis=-1, keepdims=True), v)


def dense(q, k, v, prompt, branch):
    """The same in jax, for its gradient."""
    T = q.shape[1]
    mask = packed_mask(Packing(jnp.zeros((B, T), jnp.int32), prompt, branch))
    k, v = (jnp.repeat(x, H // K, axis=2) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k, precision="highest") * h**-0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights, v, precision="highest")


def causal(T, rng):
    return np.ones((B, T), np.int32), np.zeros((B, T), np.int32)


def packed(T, rng):
    """Rows of prompts with responses of any lengths, and padding."""
    prompt, branch = np.zeros((2, B, T), np.int32)
    for b in range(B):
        at, number = 0, 0
        while at < T - 4:
            number += 1
            lengths = rng.integers(1, T // 3, rng.integers(2, 5))
            for n, length in enumerate(lengths):
                prompt[b, at : at + length], branch[b, at : at + length] = number, n
                at += length
            if rng.random() < 0.3:
                break
    return prompt, branch


def one_token_each(T, rng):
    return np.broadcast_to(np.arange(T, dtype=np.int32), (B, T)).copy(), np.zeros((B, T), np.int32)


KINDS = {"causal": causal, "packed": packed, "one_token_each": one_token_each}


def inputs(T, kind, seed=0, dtype=np.float32, scale=1.0):
    rng = np.random.default_rng(seed)
    shapes = (B, T, H, h), (B, T, K, h), (B, T, K, h)
    q, k, v = (jnp.asarray(scale * rng.normal(size=s), dtype) for s in shapes)
    prompt, branch = KINDS[kind](T, rng)
    return q, k, v, jnp.asarray(prompt), jnp.asarray(branch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("T", [1, 15, 16, 17, 64, 77])
def test_outputs(T, kind):
    for seed, scale in enumerate((1.0, 10.0)):
        q, k, v, prompt, branch = inputs(T, kind, seed, scale=scale)
        got = jitted(q, k, v, packing_of(prompt, branch))
        want = plain(q, k, v, prompt, branch)
        np.testing.assert_allclose(got, want, atol=1e-5 * scale**2, rtol=1e-5)


def by_blocks(q, k, v, prompt, branch):
    return attend_rows(q, k, v, packing_of(prompt, branch))


@pytest.mark.parametrize("T", [15, 64, 77])
def test_gradients(T):
    dout = jnp.asarray(np.random.default_rng(9).normal(size=(B, T, H, h)), np.float32)

    def gradients(attend):
        return jax.jit(jax.grad(lambda *x: (attend(*x) * dout).sum(), argnums=(0, 1, 2)))

    by_both = [gradients(attend) for attend in (by_blocks, dense)]
    for kind in KINDS:
        got, want = (gradient(*inputs(T, kind)) for gradient in by_both)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5, rtol=1e-4, err_msg=kind)


def test_bfloat16_is_as_near_as_its_rounding():
    q, k, v, prompt, branch = inputs(77, "packed", dtype=jnp.bfloat16)
    got = jitted(q, k, v, packing_of(prompt, branch))
    assert got.dtype == jnp.bfloat16
    want = plain(q, k, v, prompt, branch)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=2e-2, rtol=2e-2)


def test_what_is_computed_again_is_the_same():
    """Under `jax.checkpoint`, as training has it."""
    *qkv, prompt, branch = inputs(40, "packed")

    def loss(q, k, v):
        return attend_rows(q, k, v, packing_of(prompt, branch)).sum()

    for one, other in zip(
        jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*qkv),
        jax.jit(jax.grad(jax.checkpoint(loss), argnums=(0, 1, 2)))(*qkv),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


def test_pairs_of_blocks_that_see_nothing_are_skipped():
    """Two prompts of two blocks each, and one with a shared block and two responses of one."""
    prompt = jnp.asarray(np.repeat([[1, 1, 2, 2, 3, 3, 3]], C, axis=1))
    branch = jnp.asarray(np.repeat([[0, 0, 0, 0, 0, 1, 2]], C, axis=1))
    cut = [x.reshape(1, 7, C).transpose(1, 0, 2) for x in (prompt, branch)]
    seen = np.tril(np.asarray(row_attention._seen(*cut)))
    want = np.zeros((7, 7), bool)
    want[:2, :2] = want[2:4, 2:4] = True
    want[4:, 4] = want[5, 5] = want[6, 6] = True
    np.testing.assert_array_equal(seen, np.tril(want))


def test_skipping_leaves_nothing_out(monkeypatch):
    given = inputs(77, "packed", seed=4)
    packing = packing_of(*given[3:])
    usual = attend_rows(*given[:3], packing)
    monkeypatch.setattr(row_attention, "_seen", lambda p, b: jnp.ones((len(p), len(p)), bool))
    np.testing.assert_allclose(attend_rows(*given[:3], packing), usual, atol=1e-6)
    # and a planted fault is found
    monkeypatch.setattr(row_attention, "_seen", lambda p, b: jnp.eye(len(p), dtype=bool))
    assert np.abs(np.asarray(attend_rows(*given[:3], packing) - usual)).max() > 1e-2


def test_long_rows_of_a_whole_policy(monkeypatch):
    """By blocks and in parts as in one piece: hidden states, gradients, also computed again."""
    model = ModelConfig("qwen3", 64, 32, 2, H, K, h, 48, qk_norm=True)
    params = transformer.init(model, jax.random.key(0))
    T = 40
    prompt, branch = (jnp.asarray(x) for x in packed(T, np.random.default_rng(3)))
    packing = Packing(jnp.broadcast_to(jnp.arange(T), (B, T)), prompt, branch)
    tokens = jax.random.randint(jax.random.key(1), (B, T), 0, 64)
    real = np.asarray(prompt) > 0

    def both(least, remat, packing):
        monkeypatch.setattr(transformer, "is_faster", lambda *_: least == 1)
        monkeypatch.setattr(layers, "LONG_ROW_TOKENS", least)
        monkeypatch.setattr(layers, "WHOLE_FEED_FORWARD_BYTES", 0)

        def loss(params):
            out = transformer.hidden(model, params, tokens, packing, remat=remat)
            return (out * real[..., None]).var(), out

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    for rows, remat in ((packing, "layer:2"), (None, "dots")):
        grads, hidden = both(10**9, "none", rows)
        got_grads, got = both(1, remat, rows)
        np.testing.assert_allclose(got[real], hidden[real], atol=2e-5)
        for one, other in zip(jax.tree.leaves(got_grads), jax.tree.leaves(grads), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-3)


def test_no_array_grows_with_the_square_of_the_length():
    def loss(q, k, v, prompt, branch):
        return attend_rows(q, k, v, packing_of(prompt, branch)).sum()

    sizes = []
    for T in (128, 256, 512):
        given = inputs(T, "causal")
        sizes.append(largest_array(jax.make_jaxpr(jax.grad(loss))(*given).jaxpr))
    assert sizes[2] <= 2 * sizes[1] <= 4 * sizes[0], sizes
