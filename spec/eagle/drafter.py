"""An EAGLE drafter as rollouts use it: LiveSlots in, Drafts out.

Its keys and values follow from the hidden states that the engine keeps in each slot; what its cache
(`DraftCache`) lacks is computed before each draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from models.kv_cache import KVCache
from models.layout import FEATURE_AXES
from spec.config import SamplingConfig
from spec.draft_cache.cache import Absorb, DraftCache, Runner
from spec.draft_cache.config import Passes
from spec.drafter import (
    Arguments,
    Drafter,
    Drafts,
    LiveSlots,
    Program,
    RoundsDrafter,
    RoundsInput,
    Source,
    fill,
    no_drafts,
)
from spec.eagle import tree_search
from spec.eagle.config import EagleConfig, TreeConfig
from spec.eagle.model import DeviceWeights
from spec.eagle.rounds import TreeRounds
from spec.eagle.tree_search import FIRST_TOKEN, Search

CHUNK_TOKENS = 32


class EagleDrafter(Drafter):
    """The drafter of one worker for one rollout.

    `features` returns the current hidden states of the engine's slots, [B, 1, S, W]. `weights`
    returns the newest weights; entries computed with older ones stay. `depth` may be changed
    between rounds, up to `tree.max_depth`.
    """

    def __init__(
        self,
        config: EagleConfig,
        weights: Callable[[], DeviceWeights],
        tree: TreeConfig,
        sampling: SamplingConfig,
        key: jax.Array,
        *,
        features: Callable[[], jax.Array],
        runner: Runner,
        num_draft_tokens: int,
    ) -> None:
        self.depth = tree.max_depth
        self._weights, self._features, self._runner = weights, features, runner
        self._sampling, self._key = sampling, key
        shared_noise = tree.proposal == "shared_noise" and sampling.temperature > 0
        size = tree.top_k, tree.max_depth, num_draft_tokens
        self._search = Search(config, *size, sampling.draw, shared_noise)
        widths = self._search.window_tokens, (CHUNK_TOKENS,)
        passes = Passes(*widths, first_token=FIRST_TOKEN, apart=True)
        self._held = DraftCache(config.layer, passes, runner)

    def propose(self, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int) -> Drafts:
        """Return the best trees that `depth` levels find, cut to `max_nodes_A`."""
        drafts, held = no_drafts(len(live), max_nodes), self._held
        drafts.sources_AN[:] = Source.LEARNED
        asked_A = np.nonzero(max_nodes_A > 0)[0]
        if not len(asked_A):
            return drafts
        some, most_A = live.take(asked_A), max_nodes_A[asked_A]
        hidden_B1SW, weights = self._features(), self._weights()
        absorb = self._absorb(weights, lambda: hidden_B1SW)
        rows_A, _ = held.follow(live, some, hidden_B1SW.shape[2], absorb)
        table_BX = held.ends(some, rows_A, most_A, self._sampling)
        depth = min(self.depth, int(most_A.max()))  # the best n draft tokens are n deep at most
        args, options = self._draft_arguments(weights, held.taken(), hidden_B1SW, table_BX, depth)
        held.arrays, packed = tree_search.draft(*args, **options)
        held.rows.known_B[rows_A] = some.total_tokens_A
        tokens_BM, parents_BM, prob_BM, found_B = tree_search.unpack(packed)
        count_A = np.minimum(found_B[rows_A], np.minimum(most_A, max_nodes))
        return fill(
            drafts, asked_A, tokens_BM[rows_A], parents_BM[rows_A], prob_BM[rows_A], count_A
        )

    def finished(self, live: LiveSlots) -> None:
        self._held.rows.ended(live)

    # -- rounds on the device ----------------------------------------------------------

    source = Source.LEARNED

    def in_rounds(self) -> RoundsDrafter:
        return self

    @property
    def most_tokens(self) -> int:
        return self._search.num_draft_tokens

    @property
    def num_positions(self) -> int:
        return self._held.num_positions

    def enter_rounds(self, live: LiveSlots, most_tokens: int, num_positions: int) -> RoundsInput:
        held, weights = self._held, self._weights()
        rows_A, _ = held.follow(live, live, num_positions, self._absorb(weights, self._features))
        most_A = np.full(len(live), most_tokens)
        return self._rounds_input(held.taken(), held.ends(live, rows_A, most_A, self._sampling))

    def leave_rounds(self, live: LiveSlots, cache: KVCache, acceptance_X2: np.ndarray) -> None:
        self._held.arrays = cache
        self._held.complete(live)

    def empty_rounds(self, num_slots: int, num_positions: int) -> RoundsInput:
        held = self._held
        return self._rounds_input(held.empty(num_slots, num_positions), held.empty_ends(num_slots))

    def _rounds_input(self, cache: KVCache, table_RX: Any) -> RoundsInput:
        constants = self._weights(), self._key
        return RoundsInput(TreeRounds(self._search), cache, constants, table_RX, self.depth)

    def programs(self, num_slots: int, num_positions: int) -> Iterator[Program]:
        """Yield the jitted steps of rollouts in this bucket, and makers of their arguments."""
        size, held, weights = (num_slots, num_positions), self._held, self._weights()

        def hidden_B1SW() -> Any:
            shape = num_slots, 1, num_positions, self._search.config.hidden_width
            return self._runner.zero_rows(shape, self._runner.dtype, FEATURE_AXES)

        def drafting() -> Arguments:
            table_BX = held.empty_ends(num_slots)
            return self._draft_arguments(weights, held.empty(*size), hidden_B1SW(), table_BX, 1)

        yield tree_search.draft, drafting
        yield from held.programs(*size, self._absorb(weights, hidden_B1SW))

    def _absorb(self, weights: DeviceWeights, hidden: Callable[[], Any]) -> Absorb:
        def arguments(cache: KVCache, table_PX: Any) -> Arguments:
            return (weights, cache, hidden(), table_PX), {"config": self._search.config}

        return Absorb(tree_search.absorb, arguments)

    def _draft_arguments(
        self, weights: DeviceWeights, cache: KVCache, hidden_B1SW: Any, table_BX: Any, depth: int
    ) -> Arguments:
        args = weights, cache, hidden_B1SW, table_BX, np.int32(depth), self._key
        return args, {"search": self._search}
