"""Rotary positions: the angles of a head's pairs at each position, and the turn by them.

Shape suffixes: B rows, T tokens, H heads, h head size.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from models.config import ModelConfig


def rope_frequencies(config: ModelConfig) -> jax.Array:
    """Return the angular frequency of each pair, θ^(−2i/h), with Llama 3's scaling if configured.

    Wavelengths beyond original/low are slowed by `factor`, those below
    original/high are kept, and between them the two are mixed linearly.
    Source: Llama 3.1's `rope_type: llama3`. Returns float32 [h/2].
    """
    h = config.head_dim
    freq = config.rope_theta ** (-jnp.arange(0, h, 2, dtype=jnp.float32) / h)
    scaling = config.rope_scaling
    if scaling is None:
        return freq
    turns = scaling.original_max_positions * freq / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = jnp.clip(keep, 0.0, 1.0)
    return keep * freq + (1 - keep) * freq / scaling.factor


def rope_turns(config: ModelConfig, positions_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return cosine and sine of each pair's angle at each position; two [B, T, h/2]."""
    angle = positions_BT[..., None].astype(jnp.float32) * rope_frequencies(config)
    return jax.lax.platform_dependent(angle, cpu=_turns_once, default=_turns)


def _turns(angle: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.cos(angle), jnp.sin(angle)


def _turns_once(angle: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute `_turns` in a branch: else XLA's CPU does it for every head in every layer."""
    # Angles are finite: the first branch is always taken.
    is_finite = jnp.isfinite(angle.reshape(-1)[0])
    return jax.lax.cond(is_finite, _turns, lambda a: (a, a), angle)


def rotate(x_BTHh: jax.Array, cos_BTh: jax.Array, sin_BTh: jax.Array) -> jax.Array:
    """Turn the pairs (i, i + h/2) of each head by their angles; [B, T, H, h]."""
    first, second = jnp.split(x_BTHh.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_BTh[:, :, None], sin_BTh[:, :, None]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BTHh.dtype)
