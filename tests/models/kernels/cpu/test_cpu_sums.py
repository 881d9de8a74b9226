"""Sums of attention: tiles of one line of keys and of two, and the last keys, add alike."""

import jax.numpy as jnp
import numba
import numpy as np
import pytest

from reprise.models.kernels.cpu.cpu_sums import all_dots, dots, highest

HEAD_DIM, NUM_POSITIONS = 8, 70  # four whole lines, and six positions that are no line


@numba.njit
def call_all_dots(a_Yh, bT_hS, first, end, out_YV):
    all_dots(a_Yh, bT_hS, first, end, out_YV, 0)


@numba.njit
def call_dots(a_h, bT_hS, first, end, out_V):
    dots(a_h, bT_hS, first, first, end, out_V)


@numba.njit
def call_highest(score_V):
    return highest(score_V)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_any_number_of_queries_and_keys_adds_in_one_order(dtype):
    rng = np.random.default_rng(0)
    keys_hS = np.asarray(jnp.asarray(rng.standard_normal((HEAD_DIM, NUM_POSITIONS)), dtype))
    wide_hS = keys_hS.astype(np.float32)
    words_hS = keys_hS if dtype == jnp.float32 else keys_hS.view(np.uint16)
    for num_queries in (1, 2, 3, 4, 7):
        queries_Yh = rng.standard_normal((num_queries, HEAD_DIM)).astype(np.float32)
        for first in (0, 16):
            for end in range(first + 1, NUM_POSITIONS + 1):
                got_YV = np.full((num_queries, NUM_POSITIONS + 16), np.nan, np.float32)
                call_all_dots(queries_Yh, words_hS, first, end, got_YV)
                want_YV = np.zeros((num_queries, end - first), np.float32)
                for y in range(num_queries):
                    call_dots(queries_Yh[y], wide_hS, first, end, want_YV[y])
                np.testing.assert_array_equal(got_YV[:, : end - first], want_YV)
                untouched = got_YV[:, end - first + 16 :]
                assert np.isnan(untouched).all(), "a line more is overwritten at most"
    exact_YV = queries_Yh.astype(float) @ wide_hS.astype(float)[:, first:]
    np.testing.assert_allclose(want_YV, exact_YV, rtol=1e-5, atol=1e-5)


def test_the_highest_score_is_found_at_any_place():
    for size in range(1, 20):
        for place in range(size):
            scores_V = -np.arange(1, size + 1, dtype=np.float32)
            scores_V[place] = 0.5
            assert call_highest(scores_V) == 0.5
