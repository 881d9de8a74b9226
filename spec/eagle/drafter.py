"""EAGLE drafters in rollouts: cache entries, and searches from the last entries.

An entry depends on the policy hidden state at a token and on the next token, not on other entries.
P = chunks or nodes, C = tokens of a chunk or window, R = rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from reprise.models.attention.entries import Entries, Pending
from reprise.models.attention.kv_cache import KVCache, PagedStates, places_of_windows
from reprise.spec.config import SamplingConfig
from reprise.spec.draft_cache.cache import DraftCache, PassSizes, Runner
from reprise.spec.draft_cache.drafter import CachingDrafter
from reprise.spec.draft_cache.drafting import (
    DraftTrees,
    Inputs,
    RoundResult,
    RowEnds,
    unpack_chunks,
)
from reprise.spec.drafter import LiveSlots, Source
from reprise.spec.eagle import model as eagle
from reprise.spec.eagle import tree_search
from reprise.spec.eagle.config import EagleConfig, TreeConfig
from reprise.spec.eagle.model import DeviceWeights
from reprise.spec.eagle.tree_search import FIRST_TOKEN, Search

Constants = tuple[DeviceWeights, jax.Array]  # weights, and the rollout key
State = tuple[KVCache, jax.Array]  # cache, and features of the last entry of each row, [R, D]


@dataclasses.dataclass(frozen=True)
class TreeDrafting:
    """`Drafting` by a tree search."""

    search: Search
    first_token: ClassVar[int] = FIRST_TOKEN
    apart: ClassVar[bool] = True

    def catch_up(self, given: Inputs, cache: KVCache, table_PX: jax.Array) -> KVCache:
        (weights, _), [states] = given
        row_P, slot_P, first_P, tokens_PC = unpack_chunks(table_PX)
        at_P = first_P - FIRST_TOKEN
        k_PCKh, v_PCKh, _ = _entries(self.search.config, weights, states, slot_P, at_P, tokens_PC)
        return _written(cache, row_P, at_P, k_PCKh, v_PCKh)

    def begin(self, given: Inputs, cache: KVCache, ends: RowEnds) -> State:
        (weights, _), [states] = given
        at_rest = cache.num_positions + FIRST_TOKEN
        length_B = ends.total_B - FIRST_TOKEN
        at_B = ends.starts(FIRST_TOKEN, at_rest) - FIRST_TOKEN
        k_BCKh, v_BCKh, g_BCD = _entries(
            self.search.config, weights, states, ends.slot_B, at_B, ends.tokens_BW
        )
        query_B11 = jnp.maximum(length_B - 1 - at_B, 0)[:, None, None]  # 0: an idle row
        cache = _written(cache, jnp.arange(len(at_B)), at_B, k_BCKh, v_BCKh)
        return cache, jnp.take_along_axis(g_BCD, query_B11, axis=1)[:, 0]

    def draft(
        self, constants: Constants, state: State, ends: RowEnds, depth: jax.Array, max_tokens: int
    ) -> tuple[KVCache, DraftTrees]:
        weights, key = constants
        cache, g_RD = state
        return cache, tree_search.search_from(
            weights, cache, g_RD, ends, depth, key, max_tokens, search=self.search
        )

    def absorb(self, constants: Constants, state: State, result: RoundResult) -> State:
        """Absorb the emitted nodes in batches of B, the number of slots."""
        weights, _ = constants
        config = self.search.config
        pending, drawn, slots, row_B = result
        B = len(row_B)
        [hidden_PW] = pending.features

        def some(carry: tuple) -> tuple:
            done, cache, g_RD = carry
            nth_B = jnp.arange(B)
            at_B = jnp.take(pending.order_P, done + nth_B, mode="clip")
            slot_B = pending.row_P[at_B]
            position_B = pending.position_P[at_B]
            of_row_B = row_B[slot_B]
            num_left = jnp.minimum(pending.count - done, B)
            k_B1Kh, v_B1Kh, g_B1D = _entries_of(
                config,
                weights,
                hidden_PW[at_B][:, None],
                drawn.tokens_M[at_B][:, None],
                position_B[:, None],
            )
            dtype = cache.keys[0].dtype
            cache = cache.written(
                Pending(
                    (k_B1Kh[:, 0].astype(dtype),),
                    (v_B1Kh[:, 0].astype(dtype),),
                    (),
                    of_row_B,
                    position_B,
                    nth_B,
                    num_left,
                )
            )
            is_last_B = (nth_B < num_left) & (position_B == slots.length[slot_B] - 1)
            written_B = jnp.where(is_last_B, of_row_B, len(g_RD))
            return done + B, cache, g_RD.at[written_B].set(g_B1D[:, 0], mode="drop")

        def more(carry: tuple) -> jax.Array:
            return carry[0] < pending.count

        return jax.lax.while_loop(more, some, (jnp.int32(0), *state))[1:]


def _written(
    cache: KVCache, row_P: jax.Array, at_P: jax.Array, k_PCKh: jax.Array, v_PCKh: jax.Array
) -> KVCache:
    """Write windows of entries from `at` on; entries without a page are dropped."""
    P, C = k_PCKh.shape[:2]
    nth_X, position_X = places_of_windows(at_P, C)
    keys, values = (x.reshape(P * C, *x.shape[2:]) for x in (k_PCKh, v_PCKh))
    return cache.put(Entries((keys,), (values,)), row_P[nth_X], position_X)


def _entries(
    config: EagleConfig,
    weights: DeviceWeights,
    states: PagedStates,
    slot_P: jax.Array,
    at_P: jax.Array,
    tokens_PC: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return keys and values, [P, C, K, h], and features [P, C, D] of windows of entries."""
    C = tokens_PC.shape[1]
    hidden_PCW = states.windows(slot_P, at_P, C)
    positions_PC = at_P[:, None] + jnp.arange(C)
    return _entries_of(config, weights, hidden_PCW, tokens_PC, positions_PC)


def _entries_of(
    config: EagleConfig,
    weights: DeviceWeights,
    hidden_PCW: jax.Array,
    tokens_PC: jax.Array,
    positions_PC: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return keys and values, [P, C, K, h], and features, [P, C, D], of entries."""
    g_PCD = eagle.features(config, weights.params, hidden_PCW)
    entries = list[jax.Array]()

    def look(q_PCHh: jax.Array, k_PCKh: jax.Array, v_PCKh: jax.Array) -> jax.Array:
        entries.extend((k_PCKh, v_PCKh))
        return q_PCHh  # the outputs are not used

    embedding_VD = weights.frozen.embedding_VD
    eagle.layer_outputs(config, weights.params, embedding_VD, tokens_PC, g_PCD, positions_PC, look)
    k_PCKh, v_PCKh = entries
    return k_PCKh, v_PCKh, g_PCD


CHUNK_TOKENS = 32


class EagleDrafter(CachingDrafter):
    """An EAGLE drafter; trees hold the best draft tokens in `depth` levels (`tree.max_depth`).

    `states` are `rl.engine.rollout_spec.CachedStates`. `weights` returns the newest weights; cache
    entries computed with older weights stay.
    """

    source = Source.LEARNED

    def __init__(
        self,
        config: EagleConfig,
        weights: Callable[[], DeviceWeights],
        tree: TreeConfig,
        sampling: SamplingConfig,
        key: jax.Array,
        *,
        states: Any,
        runner: Runner,
        num_draft_tokens: int,
    ) -> None:
        self.depth = tree.max_depth
        self.max_tokens = num_draft_tokens
        self._weights = weights
        self._states = states
        self._sampling = sampling
        self._key = key
        shared_noise = tree.proposal == "shared_noise" and sampling.temperature > 0
        search = Search(config, tree.top_k, tree.max_depth, sampling.scheme, shared_noise)
        passes = PassSizes(search.window_tokens, (CHUNK_TOKENS,))
        self._held = DraftCache(config.layer, passes, TreeDrafting(search), runner)

    def constants(self) -> Any:
        return self._weights(), self._key

    def features(self) -> tuple[Any, ...]:
        return (self._states.array(),)

    def empty_features(self, num_slots: int) -> tuple[Any, ...]:
        return (self._states.empty(num_slots),)

    def note_drafts(
        self, live: LiveSlots, rows_A: np.ndarray, tokens_AX: np.ndarray, count_A: np.ndarray
    ) -> None:
        self._held.rows.known_B[rows_A] = live.total_tokens_A
