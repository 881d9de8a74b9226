"""Powers of 2, and the lowest score, in the softmaxes of all kernels."""

import math

import jax
import jax.numpy as jnp

LOG2_E = math.log2(math.e)  # softmax in powers of 2, which the hardware computes
NEGATIVE = -1e30  # the top without keys; finite, so that differences are not NaN


def power_of_two(whole: jax.Array) -> jax.Array:
    """Return 2^whole of float32 whole numbers up to 127, without rounding; 0 from −127 down."""
    exponent = jnp.maximum(whole, -127).astype(jnp.int32) + 127
    return jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)
