"""Drafts from a smaller model with the policy's tokenizer, which has a cache of its own.

Each round runs the tokens that the cache lacks through the model, then drafts a chain from every
request's last token. The entries of accepted draft tokens are in the cache already; those of
rejected ones are overwritten. So a round costs one short pass, one pass a draft token, and one
fetch. Source: the draft model of SpecActor and others; draws with shared noise are ours.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

from models import kv_cache, transformer
from models.config import ModelConfig
from models.kv_cache import KVCache
from spec import cache_rows
from spec.buckets import bucket, buckets
from spec.config import SamplingConfig
from spec.draft_model.cached_rows import CachedRows
from spec.draft_model.config import ChainConfig, Proposal
from spec.draft_model.steps import COLUMNS, Draws, catch_up, draft_chains, empty_cache, unpack
from spec.drafter import Drafter, Drafts, LiveSlots, Source, no_drafts
from spec.tree import PADDING

Put = Callable[[Any], jax.Array]
Arguments = Callable[[], tuple[tuple, dict[str, Any]]]
AXES = {"keys": kv_cache.KEY_AXIS, "values": kv_cache.VALUE_AXIS}
PRIOR_DRAFTS = 8  # the weight of `shared_noise_prob`, in observed drafts


class DraftModelDrafter(Drafter):
    """Chains of a draft model: its `likeliest` tokens, or its own draws (`shared_noise`).

    Shared noise is the noise that the policy will draw with (by position), so that a draft is
    accepted if both distributions map that noise to the same token. The probability of a
    `likeliest` draft token is the product of the model's probabilities at the sampling's
    temperature; with shared noise it is the product of the mean acceptances observed at each depth.
    Chains have at most `depth` draft tokens, which may be changed between rounds.

    `model` must have the vocabulary of `policy`, otherwise ValueError. `params` are on the device
    to which `put` moves host arrays; `dtype` is the cache's, None that of `params`. Call all
    methods under the engine's mesh or default device. One drafter serves one rollout of one worker.
    """

    def __init__(
        self,
        model: ModelConfig,
        params: transformer.Params,
        config: ChainConfig | None = None,
        *,
        policy: ModelConfig,
        sampling: SamplingConfig,
        key: jax.Array,
        proposal: Proposal = "likeliest",
        put: Put = jax.device_put,
        dtype: Any = None,
    ) -> None:
        if model.vocab_size != policy.vocab_size:
            raise ValueError(
                f"expected a draft model with the policy's vocabulary of {policy.vocab_size}, got "
                f"{model.vocab_size}: take one of the same tokenizer, its embedding cut or padded"
            )
        if proposal not in ("likeliest", "shared_noise"):
            raise ValueError(f"proposal must be 'likeliest' or 'shared_noise', got {proposal!r}")
        self.config = config or ChainConfig()
        self.depth = self.config.max_draft_tokens
        self._model, self._params, self._put = model, params, put
        self._proposal = proposal
        self._scheme = sampling.draw if proposal == "shared_noise" else None
        # the host cuts chains of shared noise: the model does not know their probabilities
        min_prob = self.config.min_prob if proposal == "likeliest" else 0.0
        self._draws = jax.tree.map(put, Draws(np.float32(min_prob), key))
        self._sampling = sampling
        self._zero = put(np.zeros((), dtype or params.embedding_VD.dtype))
        self._held = CachedRows(0, self.config.min_positions)
        self._cache: KVCache | None = None
        self._accepted_K = np.zeros(self.config.max_draft_tokens, np.int64)
        self._observed_K = np.zeros(self.config.max_draft_tokens, np.int64)

    def propose(self, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int) -> Drafts:
        """Return a chain for each request that may have draft tokens."""
        drafts = no_drafts(len(live), max_nodes)
        drafts.sources_AN[:] = Source.MODEL
        most_A = np.minimum(max_nodes_A, min(max_nodes, self._longest_chain()))
        asked_A = np.nonzero(most_A > 0)[0]
        if not len(asked_A):
            return drafts
        some, most_A = live.take(asked_A), most_A[asked_A].astype(np.int32)
        self._fit(live, int((some.total_tokens_A + most_A).max()))
        rows_A, acceptance_A2 = self._held.follow(some)
        self._observe(acceptance_A2)
        self._catch_up(rows_A, some.total_tokens_A)
        tokens_AK, prob_AK = self._draft(some, rows_A, most_A)
        count_A = np.minimum(most_A, tokens_AK.shape[1])
        self._held.drafted(rows_A, tokens_AK, count_A)
        if self._proposal == "shared_noise":
            prob_AK = np.broadcast_to(self._mean_prob()[: tokens_AK.shape[1]], tokens_AK.shape)
        else:
            count_A = np.minimum(count_A, (prob_AK >= self.config.min_prob).sum(axis=1))
        return _fill(drafts, asked_A, tokens_AK, prob_AK, count_A)

    def finished(self, live: LiveSlots) -> None:
        held = live.take(self._held.has(live))
        if len(held):
            self._observe(self._held.follow(held)[1])
            self._held.ended(held)

    def programs(self, *, max_requests: int, max_tokens: int) -> Iterator[tuple[Any, Arguments]]:
        """Yield the jitted steps that such requests can reach, and makers of their arguments.

        Later drafters on the same device use the same programs if their `config`, `proposal` and
        scheme of draws are equal.
        """
        rows = buckets(max_requests, self.config.min_rows)
        sizes = buckets(max_tokens, self.config.min_positions)
        for B, S in itertools.product(rows, sizes):
            yield empty_cache, partial(self._empty_arguments, B, S)
            yield draft_chains, partial(self._chain_arguments, B, S)
            for C in self.config.chunk_widths:
                yield catch_up, partial(self._chunk_arguments, B, S, C)
            others = [(b, S) for b in (B // 2, 2 * B) if b in rows]
            for b, s in [*others, *[(B, 2 * S)] * (2 * S in sizes)]:
                for name in ("keys", "values"):
                    resized = partial(self._resize_arguments, (B, S), (b, s), name)
                    yield cache_rows.resize_layer, resized

    # -- probabilities ---------------------------------------------------------------------

    def _observe(self, acceptance_A2: np.ndarray) -> None:
        """Count, by depth, chains accepted up to there, and those whose next token was accepted."""
        depth_K = np.arange(len(self._accepted_K))
        accepted_A1, seen_A1 = acceptance_A2[:, :1], acceptance_A2[:, 1:]
        self._accepted_K += (depth_K < accepted_A1).sum(axis=0)
        self._observed_K += ((depth_K <= accepted_A1) & (depth_K < seen_A1)).sum(axis=0)

    def _mean_prob(self) -> np.ndarray:
        prior = PRIOR_DRAFTS * self.config.shared_noise_prob
        rate_K = (self._accepted_K + prior) / (self._observed_K + PRIOR_DRAFTS)
        return np.cumprod(rate_K).astype(np.float32)

    def _longest_chain(self) -> int:
        """Return how many draft tokens are worth drafting: at least one, to keep observing."""
        if self._proposal == "likeliest":
            return self.depth
        return max(1, int((self._mean_prob()[: self.depth] >= self.config.min_prob).sum()))

    # -- the cache -------------------------------------------------------------------

    def _fit(self, live: LiveSlots, num_positions: int) -> None:
        """Resize the cache to the buckets of the live requests and their positions."""
        config = self.config
        rows = bucket(len(live), config.min_rows)
        if self._cache is None:
            positions = bucket(num_positions, config.min_positions)
            self._held, self._cache = CachedRows(rows, positions), self._empty(rows, positions)
            return
        while len(self._held) != rows:
            now = len(self._held)
            self._resize(2 * now if now < rows else now // 2, self._cache.num_positions, live)
        while self._cache.num_positions < num_positions:
            self._resize(rows, 2 * self._cache.num_positions, live)

    def _resize(self, num_rows: int, num_positions: int, live: LiveSlots) -> None:
        assert self._cache is not None
        self._held, row_B = self._held.resized(num_rows, num_positions, live)
        cache, self._cache = self._cache, None
        self._cache = cache_rows.resize(cache, self._put(row_B), num_positions)

    def _empty(self, num_rows: int, num_positions: int) -> KVCache:
        args, options = self._empty_arguments(num_rows, num_positions)
        return empty_cache(*args, **options)

    def _catch_up(self, rows_A: np.ndarray, total_A: np.ndarray) -> None:
        """Compute entries until no row lacks more than its chain's window, the longest first.

        A chunk ends at the row's last token at the latest, so that it stays inside the cache.
        """
        held, config = self._held, self.config
        while True:
            lacking_A = total_A - held.known_B[rows_A] - config.window_tokens
            longest = int(lacking_A.max())
            if longest <= 0:
                return
            widths = config.chunk_widths
            C = next((w for w in widths if w >= longest), widths[-1])
            P = config.pass_rows(C, len(held))
            chosen = np.argsort(-lacking_A, kind="stable")[:P]
            chosen = chosen[lacking_A[chosen] > 0]
            rows, total = rows_A[chosen], total_A[chosen]
            start = np.clip(total - C, 0, held.known_B[rows])
            table_PX = np.zeros((P, 2 + C), np.int32)
            table_PX[:, 0] = len(held)
            table_PX[: len(rows), 0], table_PX[: len(rows), 1] = rows, start
            table_PX[: len(rows), 2:] = held.tokens_BS[rows[:, None], start[:, None] + np.arange(C)]
            cache, self._cache = self._cache, None
            self._cache = catch_up(self._params, cache, self._put(table_PX), config=self._model)
            held.known_B[rows] = np.minimum(start + C, total)

    def _draft(
        self, live: LiveSlots, rows_A: np.ndarray, most_A: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return chains from the ends of these rows, (tokens_AK, prob_AK): the round's fetch."""
        held, W = self._held, self.config.window_tokens
        table_BX = np.zeros((len(held), W + len(COLUMNS)), np.int32)
        first_A = np.maximum(live.total_tokens_A - W, 0)
        table_BX[rows_A, :W] = held.tokens_BS[rows_A[:, None], first_A[:, None] + range(W)]
        emitted_A = live.total_tokens_A - live.prompt_tokens_A
        columns = live.total_tokens_A, emitted_A, live.request_ids_A, most_A
        table_BX[rows_A, W:-3] = np.stack(columns, axis=1)  # other rows are at rest
        table_BX[rows_A, -3:] = live.processing(self._sampling).view(np.int32)
        cache, self._cache = self._cache, None
        self._cache, packed = draft_chains(
            self._params, cache, self._put(table_BX), self._draws, **self._chain_options()
        )
        tokens_BK, prob_BK = unpack(packed)
        return tokens_BK[rows_A], prob_BK[rows_A]

    def _chain_options(self) -> dict[str, Any]:
        return {
            "config": self._model,
            "scheme": self._scheme,
            "window_tokens": self.config.window_tokens,
            "most_tokens": self.config.max_draft_tokens,
        }

    # -- arguments of the programs ---------------------------------------------------

    def _empty_arguments(self, B: int, S: int) -> tuple[tuple, dict[str, Any]]:
        return (self._zero,), {"config": self._model, "num_rows": B, "num_positions": S}

    def _chain_arguments(self, B: int, S: int) -> tuple[tuple, dict[str, Any]]:
        table_BX = np.zeros((B, self.config.window_tokens + len(COLUMNS)), np.int32)
        table_BX[:, self.config.window_tokens] = 1
        args = self._params, self._empty(B, S), self._put(table_BX), self._draws
        return args, self._chain_options()

    def _chunk_arguments(self, B: int, S: int, C: int) -> tuple[tuple, dict[str, Any]]:
        table_PX = np.zeros((self.config.pass_rows(C, B), 2 + C), np.int32)
        return (self._params, self._empty(B, S), self._put(table_PX)), {"config": self._model}

    def _resize_arguments(
        self, old: tuple[int, int], new: tuple[int, int], name: str
    ) -> tuple[tuple, dict[str, Any]]:
        layer, axis = getattr(self._empty(*old), name)[0], AXES[name]
        args = layer, self._put(np.zeros(new[0], np.int32))
        return args, {"num_positions": new[1], "axis": axis}


def _fill(
    drafts: Drafts,
    asked_A: np.ndarray,
    tokens_AK: np.ndarray,
    prob_AK: np.ndarray,
    count_A: np.ndarray,
) -> Drafts:
    """Write chains to the drafts of the requests that asked for them."""
    K = int(count_A.max())
    valid_AK = np.arange(K) < count_A[:, None]
    drafts.tokens_AN[asked_A, :K] = np.where(valid_AK, tokens_AK[:, :K], PADDING)
    drafts.parents_AN[asked_A, :K] = np.where(valid_AK, np.arange(-1, K - 1), -1)
    drafts.prob_AN[asked_A, :K] = np.where(valid_AK, prob_AK[:, :K], 0.0)
    drafts.count_A[asked_A] = count_A
    return drafts
