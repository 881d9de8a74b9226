"""Drafts from a draft model of the policy's tokenizer, which keeps a cache of its own.

Each round: tokens that the cache lacks are run through the model, then a chain is drafted from
every request's last token. Entries of draft tokens that come true are in the cache already; those
of wrong draft tokens are overwritten. So a round costs one short pass and one a draft token, and
one fetch. Source: a draft model as drafter, as SpecActor has among others; coupled draws are ours.
"""

from __future__ import annotations

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
PRIOR_DRAFTS = 8  # what `shared_noise_prob` weighs beside what is seen


class DraftModelDrafter(Drafter):
    """Chains of a draft model: its `likeliest` tokens, or its own draws (`shared_noise`).

    Coupled draft tokens are drawn with the noise that the policy will draw with (noise by
    position), so that they are right wherever both distributions put the token at the same noise. A
    draft token's probability is, likeliest, the product of the model's probabilities at the
    sampling's temperature; coupled, the product of the mean acceptances at each depth so far.
    Chains have `depth` draft tokens at most, which may be changed between rounds.

    `model` must have the vocabulary of `policy`, else ValueError. `params` are on the device to
    which `put` takes host arrays; `dtype` is the cache's, None that of `params`. Call all methods
    under the engine's mesh or default device. One drafter serves one phase of one worker.
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
        # coupled chains are cut by the host: the model's own probabilities are not their
        # probability
        min_prob = self.config.min_prob if proposal == "likeliest" else 0.0
        self._draws = Draws(
            temperature=put(np.float32(sampling.temperature)),
            top_k=put(np.int32(sampling.top_k)),
            top_p=put(np.float32(sampling.top_p)),
            min_prob=put(np.float32(min_prob)),
            key=put(key),
        )
        self._zero = put(np.zeros((), dtype or params.embedding_VD.dtype))
        self._held = CachedRows(0, self.config.min_positions)
        self._cache: KVCache | None = None
        self._accepted_K = np.zeros(self.config.max_draft_tokens, np.int64)
        self._observed_K = np.zeros(self.config.max_draft_tokens, np.int64)

    def propose(self, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int) -> Drafts:
        drafts = no_drafts(len(live), max_nodes)
        drafts.sources_AN[:] = Source.MODEL
        most_A = np.minimum(max_nodes_A, min(max_nodes, self._longest_chain()))
        asked_A = np.nonzero(most_A > 0)[0]
        if not len(asked_A):
            return drafts
        some, most_A = live.take(asked_A), most_A[asked_A].astype(np.int32)
        self._fit(live, int((some.total_tokens_A + most_A).max()))
        rows_A, acceptance_A2 = self._held.follow(some)
        self._judge(acceptance_A2)
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
            self._judge(self._held.follow(held)[1])
            self._held.ended(held)

    def programs(
        self, *, max_requests: int, max_tokens: int
    ) -> Iterator[tuple[Any, Callable[[], tuple[tuple, dict[str, Any]]]]]:
        """The jitted steps that so many live requests of up to `max_tokens` tokens can reach.

        Each with a maker of its arguments. Drafters of other phases on the same device find what
        was compiled too, where `config`, `proposal` and scheme of draws are the same.
        """
        for step, make, options in self._programs(max_requests, max_tokens):
            yield step, partial(_call, make, options)

    # -- probabilities ---------------------------------------------------------------------

    def _judge(self, acceptance_A2: np.ndarray) -> None:
        """Count, by depth, chains that came so far, and those whose next draft token was right."""
        depth_K = np.arange(len(self._accepted_K))
        accepted_A1, seen_A1 = acceptance_A2[:, :1], acceptance_A2[:, 1:]
        self._accepted_K += (depth_K < accepted_A1).sum(axis=0)
        self._observed_K += ((depth_K <= accepted_A1) & (depth_K < seen_A1)).sum(axis=0)

    def _mean_prob(self) -> np.ndarray:
        prior = PRIOR_DRAFTS * self.config.shared_noise_prob
        rate_K = (self._accepted_K + prior) / (self._observed_K + PRIOR_DRAFTS)
        return np.cumprod(rate_K).astype(np.float32)

    def _longest_chain(self) -> int:
        """Draft tokens that are worth having; one at least, or probabilities would never be known
        better.
        """
        if self._proposal == "likeliest":
            return self.depth
        return max(1, int((self._mean_prob()[: self.depth] >= self.config.min_prob).sum()))

    # -- the cache -------------------------------------------------------------------

    def _fit(self, live: LiveSlots, num_positions: int) -> None:
        """Rows and positions for the live requests: both from their buckets."""
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
        return empty_cache(
            self._zero, config=self._model, num_rows=num_rows, num_positions=num_positions
        )

    def _catch_up(self, rows_A: np.ndarray, total_A: np.ndarray) -> None:
        """Compute entries until no row lacks more than the window of its chain, the longest first.

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
        """Chains from the ends of these rows: (tokens_AK, chance_AK), the round's one fetch."""
        held, W = self._held, self.config.window_tokens
        table_BX = np.zeros((len(held), W + len(COLUMNS)), np.int32)
        first_A = np.maximum(live.total_tokens_A - W, 0)
        table_BX[rows_A, :W] = held.tokens_BS[rows_A[:, None], first_A[:, None] + range(W)]
        emitted_A = live.total_tokens_A - live.prompt_tokens_A
        columns = live.total_tokens_A, emitted_A, live.request_ids_A, most_A
        table_BX[rows_A, W:] = np.stack(columns, axis=1)  # other rows are at rest: most of 0
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

    # -- programs --------------------------------------------------------------------

    def _programs(self, max_requests: int, max_tokens: int) -> Iterator[tuple]:
        """(step, maker of its arguments, its static arguments), every one once."""
        config = self.config
        rows = buckets(max_requests, config.min_rows)
        sizes = buckets(max_tokens, config.min_positions)
        for B in rows:
            for S in sizes:
                options = {"config": self._model, "num_rows": B, "num_positions": S}
                yield empty_cache, partial(tuple, (self._zero,)), options
                yield draft_chains, partial(self._chain_arguments, B, S), self._chain_options()
                for C in config.chunk_widths:
                    make = partial(self._chunk_arguments, B, S, C)
                    yield catch_up, make, {"config": self._model}
                others = [(b, S) for b in (B // 2, 2 * B) if b in rows]
                for b, s in [*others, *[(B, 2 * S)] * (2 * S in sizes)]:
                    for name, axis in (
                        ("keys", kv_cache.KEY_AXIS),
                        ("values", kv_cache.VALUE_AXIS),
                    ):
                        make = partial(self._resize_arguments, B, S, b, name)
                        yield cache_rows.resize_layer, make, {"num_positions": s, "axis": axis}

    def _chain_arguments(self, B: int, S: int) -> tuple:
        table_BX = np.zeros((B, self.config.window_tokens + len(COLUMNS)), np.int32)
        table_BX[:, self.config.window_tokens] = 1
        return self._params, self._empty(B, S), self._put(table_BX), self._draws

    def _chunk_arguments(self, B: int, S: int, C: int) -> tuple:
        table_PX = np.zeros((self.config.pass_rows(C, B), 2 + C), np.int32)
        return self._params, self._empty(B, S), self._put(table_PX)

    def _resize_arguments(self, B: int, S: int, rows: int, name: str) -> tuple:
        layer = getattr(self._empty(B, S), name)[0]
        return layer, self._put(np.zeros(rows, np.int32))


def _call(make: Callable[[], tuple], options: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    return make(), options


def _fill(
    drafts: Drafts,
    asked_A: np.ndarray,
    tokens_AK: np.ndarray,
    prob_AK: np.ndarray,
    count_A: np.ndarray,
) -> Drafts:
    """Chains into the rows of drafts that asked for them."""
    K = int(count_A.max())
    valid_AK = np.arange(K) < count_A[:, None]
    drafts.tokens_AN[asked_A, :K] = np.where(valid_AK, tokens_AK[:, :K], PADDING)
    drafts.parents_AN[asked_A, :K] = np.where(valid_AK, np.arange(-1, K - 1), -1)
    drafts.prob_AN[asked_A, :K] = np.where(valid_AK, prob_AK[:, :K], 0.0)
    drafts.count_A[asked_A] = count_A
    return drafts
