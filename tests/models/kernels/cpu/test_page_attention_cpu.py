"""Attention over pages of a cache on a CPU, against float64 and bit by bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_cache import own_pages

from reprise.models.kernels.cpu import page_attention_cpu

ATTEND = jax.jit(page_attention_cpu.attend)


def inputs(X, B, S, K, G, h, scale=1.0):
    """Return X new tokens, and keys and values of B rows with one page of S positions each."""
    rng = np.random.default_rng(0)
    shapes = (X, K * G, h), (X, K, h), (X, K, h), (B, K, h, S), (B, K, S, h)
    return [jnp.asarray(scale * rng.normal(size=shape), jnp.float32) for shape in shapes]


def cut(keys, values, page_tokens):
    """Return keys, values and table of the same rows in pages of other sizes, in any order."""
    (B, K, S, h), T = values.shape, page_tokens
    N, rng = S // T, np.random.default_rng(0)
    table_BN = rng.permutation(B * N + 2)[: B * N].reshape(B, N).astype(np.int32)
    keys_PKhT = np.full((B * N + 2, K, h, T), np.nan, np.float32)
    values_PKTh = np.full((B * N + 2, K, T, h), np.nan, np.float32)
    keys_PKhT[table_BN] = np.asarray(keys).reshape(B, K, h, N, T).transpose(0, 3, 1, 2, 4)
    values_PKTh[table_BN] = np.asarray(values).reshape(B, K, N, T, h).transpose(0, 2, 1, 3, 4)
    return keys_PKhT, values_PKTh, table_BN


def one_by_one(q, k, v, keys, values, row_X, length_X, parent_X):
    """softmax(q·k/√h)·v of each token over the positions and tokens before it, in float64."""
    q, k, v, keys, values = (np.asarray(x, float) for x in (q, k, v, keys, values))
    out, G = np.zeros(q.shape), q.shape[1] // k.shape[1]
    for x, (b, length) in enumerate(zip(row_X, length_X, strict=True)):
        if b >= 0:
            path, at = [], x
            while at >= 0:
                path, at = [at, *path], parent_X[at]
            k_TKh = np.concatenate([keys[b, :, :, :length].transpose(2, 0, 1), k[path]])
            v_TKh = np.concatenate([values[b, :, :length].transpose(1, 0, 2), v[path]])
            scores = np.einsum("hd,thd->ht", q[x], np.repeat(k_TKh, G, 1)) / np.sqrt(q.shape[2])
            weights = np.exp(scores - scores.max(1, keepdims=True))
            weights /= weights.sum(1, keepdims=True)
            out[x] = np.einsum("ht,thd->hd", weights, np.repeat(v_TKh, G, 1))
    return out


@pytest.mark.parametrize("K, G, h, scale", [(1, 1, 8, 1.0), (2, 7, 40, 5.0), (3, 2, 64, 1.0)])
def test_it_attends_to_all_before_a_token(K, G, h, scale):
    """Rows of any length, in any order, more tokens of a row than are taken at once; padding."""
    given = inputs(16, 3, 600, K, G, h, scale)
    row_X = np.repeat(np.int32([2, 0, 1, -1, 3]), [10, 3, 1, 1, 1])  # 3: there is no such row
    length_X = np.int32([600, 0, 258, -1])[row_X]
    parent_X = np.int32([-1, 0, 0, 2, 3, 4, 5, 6, 7, 1, -1, 10, 11, -1, -1, -1])
    row_X[-1] = -1
    got = ATTEND(*given, own_pages(3), row_X, length_X, parent_X)
    want = one_by_one(*given, row_X, length_X, parent_X)
    np.testing.assert_allclose(got, want, atol=3e-6 * scale**3)
    no_row_X = np.where(row_X < 0, 3, row_X)
    np.testing.assert_array_equal(ATTEND(*given, own_pages(3), no_row_X, length_X, parent_X), got)


@pytest.mark.parametrize("length", [0, 1, 254, 255, 256, 1030])
def test_a_token_has_the_same_bits_in_a_tree_and_after_its_ancestors_are_written(length):
    K, G, h, T = 2, 2, 32, 5
    q, k, v, keys, values = inputs(T, 2, length + T, K, G, h)
    at_T = np.arange(T, dtype=np.int32)
    table = own_pages(2)
    chain = ATTEND(q, k, v, keys, values, table, np.ones_like(at_T), at_T * 0 + length, at_T - 1)
    for t in range(T):
        keys = keys.at[1, :, :, length + t].set(k[t])
        values = values.at[1, :, length + t].set(v[t])
        if t + 1 < T:
            next_one = (x[t + 1 : t + 2] for x in (q, k, v))
            place = (np.int32([n]) for n in (1, length + t + 1, -1))
            alone = ATTEND(*next_one, keys, values, table, *place)
            np.testing.assert_array_equal(alone[0], chain[t + 1])


@pytest.mark.parametrize("page_tokens", [4, 16, 48])
def test_pages_of_all_sizes_have_the_same_bits(page_tokens):
    K, G, h, B = 2, 3, 16, 3
    q, k, v, keys, values = inputs(9, B, 2 * 96, K, G, h)
    row_X, length_X = (
        np.repeat(np.arange(B, dtype=np.int32), 3),
        np.repeat(np.int32([192, 0, 77]), 3),
    )
    parent_X = np.tile(np.int32([-1, 0, 0]), B) + np.where(np.arange(9) % 3, 3 * row_X, 0)
    place = row_X, length_X, parent_X.astype(np.int32)
    *pages, table_BN = cut(keys, values, page_tokens)
    table_BN[1] = -1  # a row without positions
    got = ATTEND(q, k, v, *pages, table_BN, *place)
    np.testing.assert_array_equal(got, ATTEND(q, k, v, keys, values, own_pages(B), *place))


@pytest.mark.parametrize("page_tokens", [200, 40])
def test_a_bfloat16_cache_is_read_as_it_is(page_tokens):
    """With the bits of one that is converted first; no program converts it."""
    K, G, h, B, P = 3, 3, 16, 4, 4 * 200 // page_tokens + 1
    q, k, v, _, _ = (x.astype(jnp.bfloat16) for x in inputs(4 * B, B, 8, K, G, h))
    row_X = np.repeat(np.arange(B, dtype=np.int32), 4)
    at_X = np.arange(4 * B, dtype=np.int32)
    place = row_X, np.int32([200, 0, 77, 133])[row_X], np.where(at_X % 4, at_X - 1, -1)
    keys = rng_pages(0, (P, K, h, page_tokens))
    values = rng_pages(1, (P, K, page_tokens, h))
    table_BN = np.random.default_rng(1).permutation(P - 1).reshape(B, -1).astype(np.int32)
    wide = (x.astype(jnp.float32) for x in (keys, values))
    got = ATTEND(q, k, v, keys, values, table_BN, *place)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, ATTEND(q, k, v, *wide, table_BN, *place))
    text = ATTEND.lower(q, k, v, keys, values, table_BN, *place).as_text()
    for x in (keys, values):
        shape = "x".join(map(str, x.shape))
        assert f"{shape}xbf16" in text and f"{shape}xf32" not in text


def rng_pages(seed, shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


@pytest.mark.parametrize("K", [1, 2, 3])
@pytest.mark.parametrize("num_rows", [2, 3, 16, 64])
def test_parts_are_even(K, num_rows):
    """In number, so that two cores have equally many; and in positions, but for one row's."""
    row_X = np.arange(num_rows, dtype=np.int32)
    length_X = np.random.default_rng(0).integers(200, 800, num_rows).astype(np.int32)
    total, num_runs = page_attention_cpu._size(row_X, length_X, num_rows)
    assert (total, num_runs) == (length_X.sum() + num_rows, num_rows)
    assert page_attention_cpu._size(row_X, length_X, num_rows - 1)[0] == total - length_X[-1]
    groups = page_attention_cpu._num_groups(total, num_runs, 3 * K, K, 64)
    assert groups == num_runs or groups * K % 2 == 0
    assert groups * K >= 2
    before = np.cumsum(length_X + 1) - length_X - 1
    work = np.bincount(before * groups // total, length_X + 1, groups)
    assert np.abs(work - total / groups).max() <= 801


def test_rows_have_the_same_bits_alone():
    """In whichever group of rows, long enough for several; however many positions are dead."""
    given = inputs(24, 12, 600, 3, 3, 64)
    row_X = np.repeat(np.arange(12, dtype=np.int32), 2)
    place = (
        row_X,
        50 * row_X,
        np.tile(np.int32([-1, 0]), 12) + np.where(np.arange(24) % 2, 2 * row_X, 0).astype(np.int32),
    )
    assert page_attention_cpu._num_groups(*page_attention_cpu._size(*place[:2], 12), 9, 3, 64) > 2
    table = own_pages(12)
    together = ATTEND(*given, table, *place)
    none, dead = (0, 0), (0, 110)
    keys = np.pad(given[3], [none, none, none, dead], constant_values=np.nan)
    values = np.pad(given[4], [none, none, dead, none], constant_values=np.nan)
    np.testing.assert_array_equal(ATTEND(*given[:3], keys, values, table, *place), together)
    for b in range(12):
        two = slice(2 * b, 2 * b + 2)
        q, k, v = (x[two] for x in given[:3])
        of_two = *(x[two] for x in place[:2]), np.int32([-1, 0])
        alone = ATTEND(q, k, v, *given[3:], table, *of_two)
        np.testing.assert_array_equal(alone, together[two])


def test_many_calls_at_once_share_the_threads():
    """Two programs run at a time, each with calls that depend on one another."""
    given = inputs(32, 8, 512, 4, 2, 32)
    row_X = np.repeat(np.arange(8, dtype=np.int32), 4)
    place = row_X, row_X * 0 + 500, row_X * 0 - 1
    table = own_pages(8)

    @jax.jit
    def many(q, *rest):
        for _ in range(20):
            q = page_attention_cpu.attend(q, *rest)
        return q

    found = [many(*given, table, *place) for _ in range(8)]
    for one in found:
        np.testing.assert_array_equal(one, found[0])
    want = given[0]
    for _ in range(20):
        want = jnp.float32(one_by_one(want, *given[1:], *place))
    np.testing.assert_allclose(found[0], want, atol=1e-5)


def test_takes():
    """Pages of any size."""
    assert page_attention_cpu.takes(64, 1, jnp.float32) is None
    assert page_attention_cpu.takes(64, 7, jnp.bfloat16) is None
    assert "a head size that 8 divides, got 66" in page_attention_cpu.takes(66, 8, jnp.float32)
    assert "bfloat16, got float16" in page_attention_cpu.takes(64, 8, jnp.float16)
