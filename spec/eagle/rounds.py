"""EAGLE's part of rounds that draft on the device: what is emitted is absorbed at once.

An emitted node has all that an entry is made of, the policy's hidden states and the token drawn
from them, so that as many entries are computed as tokens were emitted.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from models import kv_cache
from models.kv_cache import KVCache, Pending
from spec.draft_cache.rounds import Brought, Found
from spec.draft_cache.tables import Ends
from spec.eagle import tree_search
from spec.eagle.model import DeviceWeights
from spec.eagle.tree_search import FIRST_TOKEN, Search

Constants = tuple[DeviceWeights, jax.Array]  # and the rollout's key
State = tuple[KVCache, jax.Array]  # the features of each row's last entry, [R, D]


@dataclasses.dataclass(frozen=True)
class TreeRounds:
    """`Drafting` by a search, which gives as many draft tokens as a round asks for."""

    search: Search

    @property
    def first_token(self) -> int:
        return FIRST_TOKEN

    def begin(self, constants: Constants, cache: KVCache, policy: KVCache, ends: Ends) -> State:
        weights, [hidden_B1SW] = constants[0], policy.features
        return tree_search.absorb_windows(
            weights, cache, hidden_B1SW, ends, config=self.search.config
        )

    def draft(
        self, constants: Constants, state: State, ends: Ends, depth: jax.Array, most: int
    ) -> tuple[KVCache, Found]:
        (weights, key), (cache, g_RD) = constants, state
        search = dataclasses.replace(self.search, num_draft_tokens=most)
        packed = tree_search.search_from(weights, cache, g_RD, ends, depth, key, search=search)
        bits_RX = packed[:, 2 * most : 3 * most]
        prob_RX = jax.lax.bitcast_convert_type(bits_RX, jnp.float32)
        parts = packed[:, :most], packed[:, most : 2 * most], prob_RX, packed[:, 3 * most]
        return cache, Found(*parts)

    def absorb(self, constants: Constants, state: State, brought: Brought) -> State:
        """Absorb the emitted nodes, as many at a time as there are slots."""
        (weights, _), config = constants, self.search.config
        pending, drawn, slots, row_B = brought
        B, [hidden_PW] = len(row_B), pending.features

        def some(carry: tuple) -> tuple:
            done, cache, g_RD = carry
            nth_B = jnp.arange(B)
            at_B = jnp.take(pending.order_P, done + nth_B, mode="clip")
            slot_B, position_B = pending.row_P[at_B], pending.position_P[at_B]
            of_row_B, num_left = row_B[slot_B], jnp.minimum(pending.count - done, B)
            windows = hidden_PW[at_B][:, None], drawn.tokens_M[at_B][:, None], position_B[:, None]
            k_B1Kh, v_B1Kh, g_B1D = tree_search.entries_of(config, weights, *windows)
            dtype = cache.keys[0].dtype
            entries = (k_B1Kh[:, 0].astype(dtype),), (v_B1Kh[:, 0].astype(dtype),), ()
            cache = kv_cache.write(cache, Pending(*entries, of_row_B, position_B, nth_B, num_left))
            is_last_B = (nth_B < num_left) & (position_B == slots.length[slot_B] - 1)
            written_B = jnp.where(is_last_B, of_row_B, len(g_RD))
            return done + B, cache, g_RD.at[written_B].set(g_B1D[:, 0], mode="drop")

        def more(carry: tuple) -> jax.Array:
            return carry[0] < pending.count

        return jax.lax.while_loop(more, some, (jnp.int32(0), *state))[1:]
