"""Weakened policies: noise in matrices alone, of the size that is asked for."""

import jax
import numpy as np
import pytest

from policies.make.weaken import weakened
from reprise.models.config import ModelConfig
from reprise.models.decoder import transformer

QWEN3 = ModelConfig("qwen3", 50, 32, 2, 4, 2, 8, 48, qk_norm=True, tied_embeddings=True)


def test_matrices_get_noise_of_their_own_size_and_vectors_none():
    params = transformer.init(QWEN3, jax.random.key(0))
    noisy = weakened(params, 0.25, seed=1)
    for before, after in zip(*map(jax.tree.leaves, (params, noisy)), strict=True):
        change = np.asarray(after - before)
        if before.ndim < 2:
            assert not change.any()
            continue
        root = np.sqrt(np.mean(np.square(np.asarray(before))))
        assert np.sqrt(np.mean(np.square(change))) == pytest.approx(0.25 * root, rel=0.1)
    again = weakened(params, 0.25, seed=1)
    for one, other in zip(*map(jax.tree.leaves, (noisy, again)), strict=True):
        np.testing.assert_array_equal(one, other)
