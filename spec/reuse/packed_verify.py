"""The packed verification pass: many cached responses in one forward pass, without padding.

Rows hold several prompts, each computed once, followed by the responses to it
(`models.attention.Packing`). The pass returns the policy's log-probability of every response
token, the token that it draws there, and the keys and values of all positions, from which
accepted prefixes are continued without recomputing them. R = rows, T = positions of each,
C = positions of a chunk, X = R · T. Source: SPEC-RL, section 3.2.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from models import transformer
from models.attention import Packing
from models.config import ModelConfig
from models.kv_cache import KVCache
from models.sharding import constrain
from spec import sampling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedResponses:
    """Input tokens, the tokens that they predict, and the noise of the draws there; int32 [R, T].

    `processing` has arrays of the same shape. `position_RT` is that of the predicted token in its
    response. The targets of prompts and padding are ignored.
    """

    tokens_RT: jax.Array
    targets_RT: jax.Array
    packing: Packing
    request_ids_RT: jax.Array
    position_RT: jax.Array
    processing: sampling.Processing


@partial(jax.jit, static_argnames=("config", "scheme", "chunk_tokens", "dtype", "feature_layers"))
def verify_packed(
    params: transformer.Params,
    batch: PackedResponses,
    key: jax.Array,
    *,
    config: ModelConfig,
    scheme: sampling.Draw,
    chunk_tokens: int,
    dtype: np.dtype,
    feature_layers: tuple[int, ...] | None = None,
) -> tuple[KVCache, jax.Array]:
    """Return a cache with one row of X positions, and an int32 [4, R, T] for `unpack`.

    That holds the drawn token, the bits of its log-prob, the bits of the target's, and if the
    target is possible. `chunk_tokens` positions have logits at a time. Compiled once for each
    [R, T].
    """
    R, T = batch.tokens_RT.shape
    C = next(c for c in range(max(1, min(T, chunk_tokens // R)), 0, -1) if T % c == 0)
    hidden_RTD, cache = transformer.hidden_and_cache(
        config, params, batch.tokens_RT, batch.packing, dtype, feature_layers
    )

    def chunk(start: jax.Array) -> jax.Array:
        def part(x_RT: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x_RT, start, C, axis=1)

        targets_RC = part(batch.targets_RT)
        logits_RCV = transformer.head(params, part(hidden_RTD))
        logits_RCV = constrain(logits_RCV, "batch", None, "vocab")
        request_keys_X = sampling.request_keys(key, part(batch.request_ids_RT).reshape(-1))
        position_RC1 = part(batch.position_RT).reshape(-1, 1)
        keys_RC = sampling.position_keys(request_keys_X, position_RC1).reshape(R, C)
        processing = jax.tree.map(part, batch.processing)
        temperature_RC, *cuts_RC = processing.broadcast((R, C))
        processed_RCV = sampling.processed_logits(logits_RCV, temperature_RC, *cuts_RC)
        drawn_RC, drawn_logprob_RC = sampling.draw(processed_RCV, keys_RC, temperature_RC, scheme)
        logprob_RC, possible_RC = sampling.given_log_probs(
            logits_RCV, processed_RCV, targets_RC, temperature_RC
        )
        possible_RC &= (temperature_RC > 0) | (drawn_RC == targets_RC)
        found = (drawn_RC, _bits(drawn_logprob_RC), _bits(logprob_RC), possible_RC)
        return jnp.stack([x.astype(jnp.int32) for x in found])

    found_I4RC = jax.lax.map(chunk, jnp.arange(0, T, C))
    return cache, found_I4RC.transpose(1, 2, 0, 3).reshape(4, R, T)


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)


def unpack(found_4RT: jax.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (drawn, its log-probs, the targets' log-probs, possible) on the host, [X] each."""
    found_4X = np.asarray(found_4RT).reshape(4, -1)
    drawn_X, drawn_bits_X, bits_X, possible_X = found_4X
    return drawn_X, drawn_bits_X.view(np.float32), bits_X.view(np.float32), possible_X > 0
