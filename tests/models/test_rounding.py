"""Programs round to bfloat16 where they say so, and a softmax in parts as one over all keys."""

import os

import jax
import jax.numpy as jnp
import numpy as np

from reprise import models
from reprise.models.attention import attention
from reprise.models.attention.attention import attend, partial_attention, weights
from reprise.models.decoder import row_attention

B, K, G, h, S = 2, 2, 2, 32, 96
H = K * G


def normal(*shape, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), dtype)


def test_no_program_drops_a_rounding_to_bfloat16():
    assert models.__doc__ and "--xla_allow_excess_precision=false" in os.environ["XLA_FLAGS"]
    x, y, z = normal(64, 3), normal(64, 4)[:, :3], normal(64, 5)[:, :3]
    found = jax.jit(lambda x, y, z: (x * y).astype(jnp.float32) + z.astype(jnp.float32))(x, y, z)
    product = np.asarray(x * y)  # of an operation alone, which has to round
    np.testing.assert_array_equal(found, product.astype(np.float32) + np.asarray(z, np.float32))


def test_weights_under_another_top_have_the_same_mantissas():
    scores = np.random.default_rng(0).uniform(-40, 40, 1000).astype(np.float32)
    low, high = (np.asarray(weights(scores, np.float32(top), jnp.bfloat16)) for top in (40, 61))
    np.testing.assert_allclose(low, np.exp2(scores.astype(np.float64) - 40), rtol=1e-5)
    np.testing.assert_array_equal(low * np.float32(2**-21), high)


def test_scores_do_not_depend_on_the_number_of_queries():
    q_BKXh, k_BKhS = normal(B, K, 16, h), normal(B, K, h, S)
    products = jax.jit(attention._products)
    for few in (1, 2, 5):
        found = products(q_BKXh[:, :, :few], k_BKhS)
        np.testing.assert_array_equal(found, products(q_BKXh, k_BKhS)[:, :, :few])


def test_two_softmaxes_of_bfloat16_round_as_one():
    """Their weights do, so that only the order of float32 sums is another."""
    q_BTHh, k_BKhS, v_BKSh = 3 * normal(B, 3, H, h), normal(B, K, h, S), normal(B, K, S, h)
    seen_BTS, cut = np.ones((B, 3, S), bool), S // 3

    @jax.jit
    def one_and_two(q, k, v, seen):
        found = partial_attention(q, k, v, seen)
        both = (k[..., :cut], v[:, :, :cut]), (k[..., cut:], v[:, :, cut:])
        parts = (partial_attention(q, *pair, seen[..., : pair[0].shape[-1]]) for pair in both)
        return found.out / found.total, attention.joined(*parts)

    one, two = one_and_two(q_BTHh, k_BKhS, v_BKSh, seen_BTS)
    np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


def test_gradient_of_attention_is_that_of_the_definition():
    q, k, v = (normal(*s, dtype=jnp.float32) for s in ((1, 3, H, h), (1, K, h, 5), (1, K, 5, h)))
    mask = np.tril(np.ones((1, 3, 5), bool), 2)

    def plain(q, k, v):
        wide_k, wide_v = (jnp.repeat(x, G, axis=1) for x in (k, v))
        scores = jnp.einsum("bthd,bhds->bhts", q, wide_k, precision="highest") / np.sqrt(h)
        p = jax.nn.softmax(jnp.where(mask[:, None], scores, -np.inf))
        return jnp.einsum("bhts,bhsd->bthd", p, wide_v, precision="highest")

    def gradients(function):
        of_sum = jax.grad(lambda *qkv: jnp.sum(function(*qkv) ** 2), argnums=(0, 1, 2))
        return jax.jit(of_sum)(q, k, v)

    found = gradients(lambda q, k, v: attend(q, k, v, mask))
    for x, want in zip(found, gradients(plain), strict=True):
        np.testing.assert_allclose(x, want, atol=1e-4)


def test_attention_by_blocks_rounds_as_in_one_softmax():
    T = 600  # a block of keys and some of the next
    q, k, v = 3 * normal(1, T, H, h), normal(1, T, K, h), normal(1, T, K, h)
    places = jnp.ones((1, T), int), jnp.zeros((1, T), int)
    by_blocks, _ = jax.jit(row_attention._forward_by_blocks)(q, k, v, *places)
    one = jax.jit(attend)(
        q, k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3), attention.causal_mask(T)
    )
    assert np.mean(np.asarray(by_blocks) != np.asarray(one)) < 0.01
