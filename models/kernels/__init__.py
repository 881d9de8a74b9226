"""Accelerator kernels for functions of `models` that also have a portable path."""

import math

import jax
import jax.numpy as jnp

LOG2_E = math.log2(math.e)  # softmax in powers of 2, which the hardware has
NEGATIVE = -1e30  # the top over no key: finite, so that a difference of two is a number


def power_of_two(whole: jax.Array) -> jax.Array:
    """2^whole of float32 whole numbers up to 127, without rounding; 0 from −127 down."""
    exponent = jnp.maximum(whole, -127).astype(jnp.int32) + 127
    return jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)
