"""A learned drafter as rollouts see it: LiveSlots in, Drafts out.

Its keys and values follow from the hidden states that the engine keeps with each row. So
wherever a row has come from, what its cache lacks is absorbed before the next draft token; a row
that was moved, or a cache that was resized, starts from nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from models.kv_cache import KVCache
from spec.config import SamplingConfig
from spec.drafter import Drafter, Drafts, LiveSlots, Source, no_drafts
from spec.eagle import tree_search
from spec.eagle.config import EagleConfig, TreeConfig
from spec.eagle.model import EagleParams, SharedParams
from spec.eagle.tree_search import Noise

WINDOW_TOKENS = 32  # that a call which drafts absorbs first
WIDE_TOKENS = 256  # that a call which only absorbs takes
NO_REQUEST = -1


@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
    """A drafter on a worker's devices."""

    params: EagleParams
    frozen: SharedParams


class EagleDrafter(Drafter):
    """The drafter of one worker for one phase.

    `features` gives the hidden states of the engine's rows as they are now, [B, 1, S, W]; `put`
    puts a host array on the worker's devices, `zero_rows` makes rows there. `weights` gives the
    newest ones: what is known of the rows stays as the former had it. `depth` may be changed
    between rounds, up to `max_depth`.
    """

    def __init__(
        self,
        config: EagleConfig,
        weights: Callable[[], Weights],
        tree: TreeConfig,
        sampling: SamplingConfig,
        key: jax.Array,
        *,
        features: Callable[[], jax.Array],
        put: Callable[[Any], Any],
        zero_rows: Callable[..., jax.Array],
        dtype: Any,
        num_draft_tokens: int,
    ) -> None:
        self.depth = tree.max_depth
        self._weights, self._tree = weights, tree
        self._config, self._sampling, self._key = config, sampling, key
        self._features, self._put, self._zero_rows = features, put, zero_rows
        self._dtype, self._num_draft_tokens = dtype, num_draft_tokens
        self._cache: KVCache | None = None
        self._known_B = np.zeros(0, np.int32)  # entries that the cache has
        self._request_B = np.zeros(0, np.int64)

    def propose(self, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int) -> Drafts:
        hidden_B1SW = self._features()
        B, _, S, _ = hidden_B1SW.shape
        cache, weights = self._fitting_cache(B, S), self._weights()
        rows, length_A = live.rows_A, live.total_tokens_A - 1
        self._known_B[rows[self._request_B[rows] != live.request_ids_A]] = 0
        self._request_B[rows] = live.request_ids_A
        length_B = np.ones(B, np.int32)
        length_B[rows] = length_A
        while (length_A - self._known_B[rows]).max() > _window(S):
            cache = self._absorb(weights, cache, hidden_B1SW, live)
        start_B = self._start(live, cache, S, _window(S))
        tokens_BC = _following(live, start_B, _window(S))
        self._cache, packed = tree_search.draft(
            *self._shared(weights, cache, hidden_B1SW, tokens_BC, start_B),
            self._put(length_B),
            np.int32(self.depth),
            np.float32(self._sampling.temperature),
            self._noise(live, B),
            **self._options(),
        )
        self._known_B[rows] = length_A
        return self._as_drafts(packed, live, max_nodes_A, max_nodes)

    def finished(self, live: LiveSlots) -> None:
        rows = live.rows_A  # there may be more of them since the last draft token
        self._request_B[rows[rows < len(self._request_B)]] = NO_REQUEST

    def programs(
        self, caught: Callable[[], jax.Array]
    ) -> Iterator[tuple[Any, Callable[[], tuple[tuple, dict[str, Any]]]]]:
        """The jitted steps that rows with such features need, and makers of their arguments."""
        B, _, S, _ = caught().shape
        zeros_B, weights = np.zeros(B, np.int32), self._weights()

        def shared(C: int) -> tuple:
            tokens_BC = np.zeros((B, C), np.int32)
            return self._shared(weights, self._empty(B, S), caught(), tokens_BC, zeros_B)

        def drafting() -> tuple[tuple, dict[str, Any]]:
            args = shared(_window(S))
            noise = self._noise_of(zeros_B, zeros_B) if self._shares_noise else None
            scalars = np.int32(1), np.float32(1.0)
            return (*args, self._put(np.ones(B, np.int32)), *scalars, noise), self._options()

        yield tree_search.draft, drafting
        if S > _window(S):
            yield tree_search.absorb, lambda: (shared(_wide(S)), {"config": self._config})

    # -- what the calls are made of ------------------------------------------------------

    def _absorb(
        self,
        weights: Weights,
        cache: KVCache,
        caught: jax.Array,
        live: LiveSlots,
    ) -> KVCache:
        """One wide window of every live row."""
        S, rows = caught.shape[2], live.rows_A
        start_B = self._start(live, cache, S, _wide(S))
        tokens_BC = _following(live, start_B, _wide(S))
        cache = tree_search.absorb(
            *self._shared(weights, cache, caught, tokens_BC, start_B), config=self._config
        )
        self._known_B[rows] = np.minimum(start_B[rows] + _wide(S), live.total_tokens_A - 1)
        return cache

    def _start(
        self, live: LiveSlots, cache: KVCache, num_positions: int, window: int
    ) -> np.ndarray:
        """Where a window begins: at the first entry that is not known, or before.

        Of rows that are not live at the end of the cache: they are written nowhere.
        """
        start_B = np.full(cache.num_slots, cache.num_positions, np.int32)
        known_A = np.minimum(self._known_B[live.rows_A], live.total_tokens_A - 2)
        start_B[live.rows_A] = np.clip(known_A, 0, num_positions - window)
        return start_B

    def _shared(
        self,
        weights: Weights,
        cache: KVCache,
        caught: jax.Array,
        tokens_BC: np.ndarray,
        start_B: np.ndarray,
    ) -> tuple:
        tokens, start = self._put(tokens_BC), self._put(start_B)
        return weights.params, weights.frozen, cache, caught, tokens, start

    def _options(self) -> dict[str, Any]:
        tree = self._tree
        return {
            "config": self._config,
            "top_k": tree.top_k,
            "max_depth": tree.max_depth,
            "num_draft_tokens": self._num_draft_tokens,
            "scheme": self._sampling.draw,
        }

    @property
    def _shares_noise(self) -> bool:
        return self._tree.proposal == "shared_noise" and self._sampling.temperature > 0

    def _noise(self, live: LiveSlots, num_slots: int) -> Noise | None:
        if not self._shares_noise:
            return None
        ids_B, emitted_B = np.zeros(num_slots, np.int32), np.zeros(num_slots, np.int32)
        ids_B[live.rows_A] = live.request_ids_A
        emitted_B[live.rows_A] = live.total_tokens_A - live.prompt_tokens_A
        return self._noise_of(ids_B, emitted_B)

    def _noise_of(self, ids_B: np.ndarray, emitted_B: np.ndarray) -> Noise:
        sampling, put = self._sampling, self._put
        temperature, top_p = np.float32(sampling.temperature), np.float32(sampling.top_p)
        draws = temperature, np.int32(sampling.top_k), top_p
        return Noise(self._key, put(ids_B), put(emitted_B), *draws)

    def _fitting_cache(self, num_slots: int, num_positions: int) -> KVCache:
        fresh = self._empty_size(num_slots, num_positions)
        held = self._cache
        if held is None or (held.num_slots, held.num_positions) != fresh:
            self._cache = None  # free it before there is another
            held = self._empty(num_slots, num_positions)
            self._known_B = np.zeros(num_slots, np.int32)
            self._request_B = np.full(num_slots, NO_REQUEST, np.int64)
        return held

    def _empty_size(self, num_slots: int, num_positions: int) -> tuple[int, int]:
        return num_slots, num_positions + tree_search.num_columns(
            self._tree.top_k, self._tree.max_depth
        )

    def _empty(self, num_slots: int, num_positions: int) -> KVCache:
        tree = self._tree
        size = num_slots, num_positions, tree.top_k, tree.max_depth
        return tree_search.empty_cache(self._config, *size, self._dtype, self._zero_rows)

    def _as_drafts(
        self, packed: jax.Array, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int
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


def _window(num_positions: int) -> int:
    return min(WINDOW_TOKENS, num_positions)


def _wide(num_positions: int) -> int:
    return min(WIDE_TOKENS, num_positions)


def _following(live: LiveSlots, start_B: np.ndarray, width: int) -> np.ndarray:
    """The tokens after entries start … start + width − 1 of every row."""
    tokens_BC = np.zeros((len(start_B), width), np.int32)
    L = live.tokens_BL.shape[1]
    at_AC = start_B[live.rows_A][:, None] + 1 + np.arange(width)
    tokens_BC[live.rows_A] = live.tokens_BL[live.rows_A[:, None], np.minimum(at_AC, L - 1)]
    return tokens_BC
