"""CISPO (MiniMax-M1, equation 4): the clipped ratio is a weight without a gradient."""

import jax
import jax.numpy as jnp


def cispo(algorithm, logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT):
    ratio_BT = jnp.exp(logprobs_BT - old_logprobs_BT)
    weight_BT = jnp.clip(ratio_BT, 1 - algorithm.clip_low, 1 + algorithm.clip_high)
    return -jax.lax.stop_gradient(weight_BT) * advantages_BT * logprobs_BT, ratio_BT
