"""Copies of prompts between rows of a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reprise.models import kv_cache
from reprise.models.config import ModelConfig
from reprise.rl.engine import cache_ops

MODEL = ModelConfig("qwen3", 32, 16, 2, 4, 2, 4, 16, qk_norm=True, max_positions=512)


def filled(num_slots, num_positions):
    cache = kv_cache.init(MODEL, num_slots, num_positions, jnp.float32, (0,))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), cache)


def positions(cache, row, first, end):
    """Keys, values and features of some positions of a row, with positions first."""
    found = []
    kv_cache.map_arrays(
        lambda x, kind: found.append(np.moveaxis(x[row], kind.axis - 1, 0)[first:end]), cache
    )
    assert len(found) == 2 * MODEL.num_layers + 1
    return found


@pytest.mark.parametrize(
    ("num_positions", "num_tokens"), [(200, 70), (200, 128), (210, 210), (9, 5)]
)
def test_a_prompt_is_copied_and_what_follows_in_a_long_row_is_not(num_positions, num_tokens):
    before = jax.device_get(filled(4, num_positions))
    pairs = np.int32([0, 1, 0, 0]), np.int32([1, 3, 0, 0])  # of the third on: padding
    after = cache_ops.copy_rows(
        jax.tree.map(jnp.asarray, before), *pairs, np.int32(2), np.int32(num_tokens)
    )
    for row in (1, 3):  # row 3 has what row 1 got before it
        for got, want in zip(
            positions(after, row, 0, num_tokens), positions(before, 0, 0, num_tokens), strict=True
        ):
            np.testing.assert_array_equal(got, want)
    dead = -(-num_tokens // cache_ops.COPY_TOKENS) * cache_ops.COPY_TOKENS
    untouched = [(0, 0), (2, 0), (1, dead), (3, dead)]
    for row, first in untouched if num_positions >= dead else untouched[:2]:
        for got, want in zip(
            positions(after, row, first, None), positions(before, row, first, None), strict=True
        ):
            np.testing.assert_array_equal(got, want)
