"""An EAGLE drafter as rollouts use it: LiveSlots in, Drafts out.

Its keys and values follow from the hidden states that the engine keeps in each slot. Before each
draft, `absorb` fills in what its cache lacks; a slot with a new request, or a resized cache,
starts from nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from models.kv_cache import KVCache
from spec.config import SamplingConfig
from spec.drafter import Drafter, Drafts, LiveSlots, Source, no_drafts
from spec.eagle import tree_search
from spec.eagle.config import EagleConfig, TreeConfig
from spec.eagle.model import DeviceWeights
from spec.eagle.tree_search import Noise, Search, Window
from spec.sampling import Processing

WINDOW_TOKENS = 32  # absorbed by a call that drafts
WIDE_TOKENS = 256  # absorbed by a call that only absorbs
NO_REQUEST = -1


class Runner(Protocol):
    """A worker's devices: `rl.engine.model_runner.ModelRunner`, as far as a drafter uses it."""

    dtype: Any

    def argument(self, x: np.ndarray) -> Any: ...

    def zero_rows(self, shape: Sequence[int], dtype: Any) -> Any: ...


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
        self._search = Search(config, tree.top_k, tree.max_depth, num_draft_tokens, sampling.draw)
        self._shares_noise = tree.proposal == "shared_noise" and sampling.temperature > 0
        self._cache: KVCache | None = None
        self._known_B = np.zeros(0, np.int32)  # entries that the cache has
        self._request_B = np.zeros(0, np.int64)

    def propose(self, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int) -> Drafts:
        """Return the best trees that `depth` levels find, cut to `max_nodes_A`."""
        hidden_B1SW = self._features()
        B, _, S, _ = hidden_B1SW.shape
        cache, weights = self._fitting_cache(B, S), self._weights()
        rows, length_A = live.rows_A, live.total_tokens_A - 1
        self._known_B[rows[self._request_B[rows] != live.request_ids_A]] = 0
        self._request_B[rows] = live.request_ids_A
        while (length_A - self._known_B[rows]).max() > min(WINDOW_TOKENS, S):
            wide = min(WIDE_TOKENS, S)
            start_B = self._start(live, cache, S, wide)
            window = self._window(hidden_B1SW, _following(live, start_B, wide), start_B)
            cache = tree_search.absorb(weights, cache, window, config=self._search.config)
            self._known_B[rows] = np.minimum(start_B[rows] + wide, length_A)
        start_B = self._start(live, cache, S, min(WINDOW_TOKENS, S))
        tokens_BC = _following(live, start_B, min(WINDOW_TOKENS, S))
        length_B = np.ones(B, np.int32)
        length_B[rows] = length_A
        processing_B3 = np.ones((B, 3), np.float32)
        processing_B3[rows] = live.processing(self._sampling)
        self._cache, packed = tree_search.draft(
            weights,
            cache,
            self._window(hidden_B1SW, tokens_BC, start_B),
            self._runner.argument(length_B),
            np.int32(self.depth),
            self._runner.argument(processing_B3[:, 0]),
            self._noise(live, processing_B3),
            search=self._search,
        )
        self._known_B[rows] = length_A
        return _as_drafts(packed, live, max_nodes_A, max_nodes)

    def finished(self, live: LiveSlots) -> None:
        rows = live.rows_A  # there may be more of them since the last draft
        self._request_B[rows[rows < len(self._request_B)]] = NO_REQUEST

    def programs(
        self, features: Callable[[], jax.Array]
    ) -> Iterator[tuple[Any, Callable[[], tuple[tuple, dict[str, Any]]]]]:
        """Yield the jitted steps for slots with such features, and makers of their arguments."""
        B, _, S, _ = features().shape
        zeros_B, weights = np.zeros(B, np.int32), self._weights()

        def shared(C: int) -> tuple:
            window = self._window(features(), np.zeros((B, C), np.int32), zeros_B)
            return weights, self._empty(B, S), window

        def drafting() -> tuple[tuple, dict[str, Any]]:
            ones_B3, put = np.ones((B, 3), np.float32), self._runner.argument
            noise = self._noise_of(zeros_B, zeros_B, ones_B3) if self._shares_noise else None
            rest = put(np.ones(B, np.int32)), np.int32(1), put(ones_B3[:, 0])
            args = *shared(min(WINDOW_TOKENS, S)), *rest, noise
            return args, {"search": self._search}

        yield tree_search.draft, drafting
        if S > WINDOW_TOKENS:
            options = {"config": self._search.config}
            yield tree_search.absorb, lambda: (shared(min(WIDE_TOKENS, S)), options)

    def _start(self, live: LiveSlots, cache: KVCache, num_positions: int, width: int) -> np.ndarray:
        """Return where windows begin: at the first entry that is not known, or before.

        Rows that are not live begin at the end of the cache: they are written nowhere.
        """
        start_B = np.full(cache.num_slots, cache.num_positions, np.int32)
        known_A = np.minimum(self._known_B[live.rows_A], live.total_tokens_A - 2)
        start_B[live.rows_A] = np.clip(known_A, 0, num_positions - width)
        return start_B

    def _window(self, hidden_B1SW: jax.Array, tokens_BC: np.ndarray, start_B: np.ndarray) -> Window:
        return Window(hidden_B1SW, self._runner.argument(tokens_BC), self._runner.argument(start_B))

    def _noise(self, live: LiveSlots, processing_B3: np.ndarray) -> Noise | None:
        if not self._shares_noise:
            return None
        ids_B, emitted_B = np.zeros((2, len(processing_B3)), np.int32)
        ids_B[live.rows_A] = live.request_ids_A
        emitted_B[live.rows_A] = live.total_tokens_A - live.prompt_tokens_A
        return self._noise_of(ids_B, emitted_B, processing_B3)

    def _noise_of(
        self, ids_B: np.ndarray, emitted_B: np.ndarray, processing_B3: np.ndarray
    ) -> Noise:
        put, (temperature_B, top_k_B, top_p_B) = self._runner.argument, processing_B3.T
        processing = Processing(put(temperature_B), put(top_k_B.astype(np.int32)), put(top_p_B))
        return Noise(self._key, put(ids_B), put(emitted_B), processing)

    def _fitting_cache(self, num_slots: int, num_positions: int) -> KVCache:
        size, held = (num_slots, num_positions + self._search.num_columns), self._cache
        if held is None or (held.num_slots, held.num_positions) != size:
            held = self._cache = None  # free it before there is another
            held = self._empty(num_slots, num_positions)
            self._known_B = np.zeros(num_slots, np.int32)
            self._request_B = np.full(num_slots, NO_REQUEST, np.int64)
        return held

    def _empty(self, num_slots: int, num_positions: int) -> KVCache:
        runner = self._runner
        return tree_search.empty_cache(
            self._search, num_slots, num_positions, runner.dtype, runner.zero_rows
        )


def _as_drafts(
    packed: jax.Array, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int
) -> Drafts:
    tokens_BM, parents_BM, prob_BM, count_B = tree_search.unpack(packed)
    rows, drafts = live.rows_A, no_drafts(len(live), max_nodes)
    n = min(max_nodes, tokens_BM.shape[1])
    count_A = np.minimum(np.minimum(count_B[rows], max_nodes_A), n)
    real_An = np.arange(n) < count_A[:, None]
    drafts.tokens_AN[:, :n][real_An] = tokens_BM[rows, :n][real_An]
    drafts.parents_AN[:, :n][real_An] = parents_BM[rows, :n][real_An]
    drafts.prob_AN[:, :n][real_An] = prob_BM[rows, :n][real_An]
    drafts.sources_AN[:] = Source.LEARNED
    drafts.count_A[:] = count_A
    return drafts


def _following(live: LiveSlots, start_B: np.ndarray, width: int) -> np.ndarray:
    """Return the tokens after entries start … start + width − 1 of every row."""
    tokens_BC = np.zeros((len(start_B), width), np.int32)
    L = live.tokens_BL.shape[1]
    at_AC = start_B[live.rows_A][:, None] + 1 + np.arange(width)
    tokens_BC[live.rows_A] = live.tokens_BL[live.rows_A[:, None], np.minimum(at_AC, L - 1)]
    return tokens_BC
