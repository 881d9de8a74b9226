"""The schemes of `Sampling.draw`, which draw a token of a distribution with the noise of a key.

All schemes draw with the exact probabilities. `cdf` inverts a cumulative distribution. The other
two take the argmax of noisy tokens, which stays the same far more often when probabilities move a
little: `gumbel` has noise for every token, `gumbel_blocks` for every block of tokens and then for
the tokens of one block. Masses are in blocks, [..., C', W] and [..., C] (`sampling.Masses`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from reprise.models.decoder.layers import PRODUCT_AXES
from reprise.models.sharding import constrain

BELOW_ONE = np.float32(1 - 2**-24)  # the largest random words would round up to 1


def _random_floats(keys: jax.Array, count: int) -> jax.Array:
    """Return random words of each key as float32 multiples of 2⁻³²; [..., count]."""
    flat = jax.vmap(lambda k: jax.random.bits(k, (count,), jnp.uint32))(keys.reshape(-1))
    return flat.reshape(*keys.shape, count).astype(jnp.float32) * np.float32(2**-32)


def uniforms(keys: jax.Array) -> jax.Array:
    """Return two uniforms in [0, 1) per key, [..., 2]: for a block and for the token inside it."""
    return jnp.minimum(_random_floats(keys, 2), BELOW_ONE)


def exponentials(keys: jax.Array, count: int) -> jax.Array:
    """Return exponential variables E = −log(1 − u) of each key, [..., count]; −log E are Gumbel.

    One random word per variable is enough: small E decide draws, and are multiples of 2⁻³². No E is
    0 or infinite.
    """
    u = jnp.minimum(_random_floats(keys, count) + np.float32(2**-33), BELOW_ONE)
    return -jnp.log1p(-u)


def _first_above(mass_N: jax.Array, upto_N: jax.Array, target: jax.Array) -> jax.Array:
    """Return the first index of positive mass with cumulative mass above the target, else the last.

    A parallel scan rounds each entry separately, so that the cumulative mass may move by an ulp at
    a mass of 0: a search of `upto_N` only could draw there.
    """
    index_N = jnp.arange(mass_N.shape[-1])
    positive_N = mass_N > 0
    above_N = positive_N & (upto_N > target[..., None])
    first = jnp.min(jnp.where(above_N, index_N, mass_N.shape[-1]), axis=-1)
    return jnp.minimum(first, jnp.max(jnp.where(positive_N, index_N, 0), axis=-1))


def _block_masses(mass_CW: jax.Array, block: jax.Array) -> jax.Array:
    """Return the masses of one block per row, without splitting blocks over devices; [..., W]."""
    mass_W = jnp.take_along_axis(mass_CW, block[..., None, None], axis=-2)[..., 0, :]
    rows = (PRODUCT_AXES[0], *[None] * mass_W.ndim)[: mass_W.ndim - 1]
    return constrain(mass_W, *rows, None)


def cdf(mass_CW: jax.Array, mass_C: jax.Array, keys: jax.Array) -> jax.Array:
    """Draw a block by its cumulative mass, then a token in the block.

    Each search takes the first entry with a cumulative mass above uniform · total, in V/W + W
    sequential additions instead of V. Each search has a separate uniform: with a shared uniform,
    the second search would use the float32 difference, 2⁻²⁴ of all mass, which is too coarse for
    rare tokens. A token of mass 0 is never drawn.
    """
    u_2 = uniforms(keys)
    W = mass_CW.shape[-1]
    upto_C = jnp.cumsum(mass_C, axis=-1)
    block = _first_above(mass_C, upto_C, u_2[..., 0] * upto_C[..., -1])
    mass_W = _block_masses(mass_CW, block)
    upto_W = jnp.cumsum(mass_W, axis=-1)
    inside = _first_above(mass_W, upto_W, u_2[..., 1] * upto_W[..., -1])
    return (block * W + inside).astype(jnp.int32)


def _races(mass_CW: jax.Array, mass_C: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return exponentials of the blocks, [..., C], and of the places inside a block, [..., W].

    All blocks share the noise of the places, since a draw looks inside only one block.
    """
    C = mass_C.shape[-1]
    wait_X = exponentials(keys, C + mass_CW.shape[-1])
    return wait_X[..., :C], wait_X[..., C:]


def gumbel_blocks(mass_CW: jax.Array, mass_C: jax.Array, keys: jax.Array) -> jax.Array:
    """Draw a block by the argmax of log mass + Gumbel(r, t, block), then a token in it likewise.

    P(token) = P(block) · P(token | block), with V/W + W random numbers instead of V. The draw is
    computed as the argmax of mass / E, which needs no logarithms of masses. A token of mass 0 is
    never drawn: the drawn block has at least 2⁻³³/17 of the mass of the heaviest block, so that no
    quotient underflows.
    """
    wait_C, wait_W = _races(mass_CW, mass_C, keys)
    block = jnp.argmax(mass_C / wait_C, axis=-1)
    inside = jnp.argmax(_block_masses(mass_CW, block) / wait_W, axis=-1)
    return (block * mass_CW.shape[-1] + inside).astype(jnp.int32)


def ranked_blocks(
    logits_V: jax.Array, mass_CW: jax.Array, mass_C: jax.Array, keys: jax.Array
) -> jax.Array:
    """Return scores of `gumbel_blocks`, [..., V]: high if a small change would draw the token.

    A score is minus the lead of the drawn block over the block of the token, less the lead of the
    best token in that block over the token. Scores are differences of logits, up to a constant.
    """
    V = logits_V.shape[-1]
    C = mass_C.shape[-1]
    W = mass_CW.shape[-1]
    wait_C, wait_W = _races(mass_CW, mass_C, keys)
    block_C = jnp.log(mass_C) - jnp.log(wait_C)  # a quotient of masses could underflow
    best_C = jnp.max(jnp.log(mass_CW) - jnp.log(wait_W)[..., None, :], axis=-1)[..., :C]
    lead_C = jnp.where(mass_C > 0, block_C - best_C, 0.0)  # an empty block would give −∞ − −∞
    noise_V = jnp.tile(-jnp.log(wait_W), C)[..., :V]
    return logits_V + noise_V + jnp.repeat(lead_C, W, axis=-1)[..., :V]


def noisy(logits_V: jax.Array, keys: jax.Array) -> jax.Array:
    """Return logit + Gumbel(r, t, token), [..., V]; its argmax is the draw of `gumbel`."""
    V = logits_V.shape[-1]
    noise = jax.vmap(lambda k: jax.random.gumbel(k, (V,), jnp.float32, mode="high"))(
        keys.reshape(-1)
    )
    return logits_V + noise.reshape(logits_V.shape)
