"""Rotary positions against values by hand."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from models.config import Llama3RopeScaling, ModelConfig
from models.rope import rope_frequencies, rope_turns

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=29,
    d_model=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    d_ff=20,
)


def test_rope_frequencies_by_hand():
    config = dataclasses.replace(CONFIG, head_dim=4, rope_theta=100.0, rope_scaling=None)
    np.testing.assert_allclose(rope_frequencies(config), [1.0, 0.1], rtol=1e-6)


def test_llama3_rope_equals_the_published_branches():
    scaling = Llama3RopeScaling(8.0, 1.0, 4.0, 8192)
    config = dataclasses.replace(CONFIG, head_dim=128, rope_theta=500_000.0, rope_scaling=scaling)
    plain = 500_000.0 ** (-np.arange(0, 128, 2) / 128)
    expected, kinds = [], []
    for freq in plain:
        wavelength = 2 * math.pi / freq
        if wavelength < 8192 / 4:
            expected.append(freq)
            kinds.append("kept")
        elif wavelength > 8192 / 1:
            expected.append(freq / 8)
            kinds.append("slowed")
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected.append((1 - smooth) * freq / 8 + smooth * freq)
            kinds.append("mixed")
    assert set(kinds) == {"kept", "slowed", "mixed"}
    np.testing.assert_allclose(rope_frequencies(config), expected, rtol=2e-5)


def test_a_negative_position_spoils_no_other():
    config = dataclasses.replace(CONFIG, head_dim=4, rope_theta=100.0, rope_scaling=None)
    angles = np.asarray([[-2.0, -0.2], [3.0, 0.3]], np.float32)[:, None]
    cos, sin = jax.jit(partial(rope_turns, config))(jnp.asarray([[-2], [3]]))
    np.testing.assert_allclose(cos, np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(sin, np.sin(angles), atol=1e-6)
