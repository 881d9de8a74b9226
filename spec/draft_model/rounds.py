"""A draft model's part of rounds that draft on the device.

Its chains write their own entries; the next chain's first pass, over the last tokens of each row,
computes what a round has left out.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from models.config import ModelConfig
from models.kv_cache import KVCache
from models.transformer import Params
from spec.draft_cache.rounds import Brought, Found
from spec.draft_cache.tables import Ends
from spec.draft_model import steps
from spec.sampling import Draw

LACKING_TOKENS = 2  # the last draft token, whose entry no chain computes, and the draw behind it

# the least probability, the rollout's key, and probabilities of draws with shared noise by depth
Constants = tuple[Params, jax.Array, jax.Array, jax.Array]
State = tuple[KVCache, tuple[()]]


@dataclasses.dataclass(frozen=True)
class ChainRounds:
    """`Drafting` of chains; needs windows of `LACKING_TOKENS`."""

    config: ModelConfig
    scheme: Draw | None

    @property
    def first_token(self) -> int:
        return 0

    def begin(self, constants: Constants, cache: KVCache, policy: KVCache, ends: Ends) -> State:
        return cache, ()

    def draft(
        self, constants: Constants, state: State, ends: Ends, depth: jax.Array, most: int
    ) -> tuple[KVCache, Found]:
        params, min_prob, key, mean_prob_K = constants
        ends = dataclasses.replace(ends, most_B=jnp.minimum(ends.most_B, jnp.minimum(depth, most)))
        given = params, state[0], ends, min_prob, key
        cache, tokens_RX, prob_RX, _ = steps.chains(
            *given, config=self.config, scheme=self.scheme, most_tokens=most
        )
        parents_RX = jnp.broadcast_to(jnp.arange(most, dtype=jnp.int32) - 1, tokens_RX.shape)
        if self.scheme is not None:
            prob_X = jnp.take(mean_prob_K, jnp.arange(most), mode="clip")
            prob_RX = jnp.broadcast_to(prob_X, prob_RX.shape)
        likely_R = jnp.sum(prob_RX >= min_prob, axis=1, dtype=jnp.int32)
        count_R = jnp.minimum(ends.most_B, likely_R)
        return cache, Found(tokens_RX, parents_RX, prob_RX, count_R)

    def absorb(self, constants: Constants, state: State, brought: Brought) -> State:
        return state
