"""An EAGLE drafter as rollouts use it: LiveSlots in, Drafts out.

Its keys and values follow from the hidden states that the engine keeps in each slot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from spec.config import SamplingConfig
from spec.draft_cache.cache import DraftCache, Passes, Runner
from spec.draft_cache.drafter import CachingDrafter
from spec.draft_cache.drafting import StateSource
from spec.drafter import LiveSlots, Source
from spec.eagle.config import EagleConfig, TreeConfig
from spec.eagle.drafting import TreeDrafting
from spec.eagle.model import DeviceWeights
from spec.eagle.tree_search import Search

CHUNK_TOKENS = 32


class EagleDrafter(CachingDrafter):
    """Trees of an EAGLE drafter, of the best draft tokens that `depth` levels find.

    `states` has the current hidden states of the engine's slots. `weights`
    returns the newest weights; entries computed with older ones stay. `depth` is `tree.max_depth`
    at most.
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
        states: StateSource,
        runner: Runner,
        num_draft_tokens: int,
    ) -> None:
        self.depth, self.most_tokens = tree.max_depth, num_draft_tokens
        self._weights, self._states = weights, states
        self._sampling, self._key = sampling, key
        shared_noise = tree.proposal == "shared_noise" and sampling.temperature > 0
        search = Search(config, tree.top_k, tree.max_depth, sampling.scheme, shared_noise)
        passes = Passes(search.window_tokens, (CHUNK_TOKENS,))
        self._held = DraftCache(config.layer, passes, TreeDrafting(search), runner)

    def constants(self) -> Any:
        return self._weights(), self._key

    def features(self) -> tuple[Any, ...]:
        return (self._states.array(),)

    def empty_features(self, num_slots: int, num_positions: int) -> tuple[Any, ...]:
        return (self._states.empty(num_slots, num_positions),)

    def note_drafts(
        self, live: LiveSlots, rows_A: np.ndarray, tokens_AX: np.ndarray, count_A: np.ndarray
    ) -> None:
        self._held.rows.known_B[rows_A] = live.total_tokens_A
