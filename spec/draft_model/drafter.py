"""Drafts from a smaller model with the policy's tokenizer, which has a cache of its own.

Each round runs the tokens that the cache lacks through the model, then drafts a chain from every
request's last token. The entries of accepted draft tokens are in the cache already; those of
rejected ones are overwritten. So a round costs one short pass, one pass a draft token, and one
fetch. Source: the draft model of SpecActor and others; draws with shared noise are ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from models import transformer
from models.config import ModelConfig
from models.kv_cache import KVCache
from spec.config import SamplingConfig
from spec.draft_cache.cache import Absorb, DraftCache, Runner
from spec.draft_model.config import ChainConfig, Proposal
from spec.draft_model.rounds import LACKING_TOKENS, ChainRounds
from spec.draft_model.steps import catch_up, draft_chains, unpack
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

PRIOR_DRAFTS = 8  # the weight of `shared_noise_prob`, in observed drafts


class DraftModelDrafter(Drafter):
    """Chains of a draft model: its `likeliest` tokens, or its own draws (`shared_noise`).

    Shared noise is the noise that the policy will draw with (by position), so that a draft is
    accepted if both distributions map that noise to the same token. The probability of a
    `likeliest` draft token is the product of the model's probabilities at the sampling's
    temperature; with shared noise it is the product of the mean acceptances observed at each depth.
    Chains have at most `depth` draft tokens, which may be changed between rounds.

    `model` must have the vocabulary of the runner's, otherwise ValueError; `params` are on its
    devices. Call all methods under its mesh or default device. One drafter serves one rollout of
    one worker.
    """

    def __init__(
        self,
        model: ModelConfig,
        params: transformer.Params,
        config: ChainConfig | None = None,
        *,
        runner: Runner,
        sampling: SamplingConfig,
        key: jax.Array,
        proposal: Proposal = "likeliest",
    ) -> None:
        if model.vocab_size != runner.model.vocab_size:
            raise ValueError(
                "expected a draft model with the policy's vocabulary of "
                f"{runner.model.vocab_size}, got "
                f"{model.vocab_size}: take one of the same tokenizer, its embedding cut or padded"
            )
        if proposal not in ("likeliest", "shared_noise"):
            raise ValueError(f"proposal must be 'likeliest' or 'shared_noise', got {proposal!r}")
        self.config = config or ChainConfig()
        self.depth = self.config.max_draft_tokens
        self._model, self._params = model, params
        self._proposal = proposal
        self._scheme = sampling.draw if proposal == "shared_noise" else None
        # the host cuts chains of shared noise: the model does not know their probabilities
        self._min_prob = self.config.min_prob if proposal == "likeliest" else 0.0
        self._key = key
        self._sampling = sampling
        self._held = DraftCache(model, self.config.passes, runner)
        self._absorb = Absorb(catch_up, self._chunk_arguments)
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
        num_positions = int((some.total_tokens_A + most_A).max())
        rows_A, acceptance_A2 = self._held.follow(live, some, num_positions, self._absorb)
        self._observe(acceptance_A2)
        table_BX = self._held.ends(some, rows_A, most_A, self._sampling)
        args, options = self._chain_arguments(self._held.taken(), table_BX)
        self._held.arrays, packed = draft_chains(*args, **options)
        tokens_AK, prob_AK = (x_BK[rows_A] for x_BK in unpack(packed))
        count_A = np.minimum(most_A, tokens_AK.shape[1])
        self._held.rows.drafted(rows_A, tokens_AK, count_A)
        if self._proposal == "shared_noise":
            prob_AK = np.broadcast_to(self._mean_prob()[: tokens_AK.shape[1]], tokens_AK.shape)
        else:
            count_A = np.minimum(count_A, (prob_AK >= self.config.min_prob).sum(axis=1))
        parents_AK = np.broadcast_to(np.arange(tokens_AK.shape[1]) - 1, tokens_AK.shape)
        return fill(drafts, asked_A, tokens_AK, parents_AK, prob_AK, count_A)

    def finished(self, live: LiveSlots) -> None:
        rows = self._held.rows
        held = live.take(rows.has(live))
        if len(held):
            self._observe(rows.follow(held)[1])
            rows.ended(held)

    # -- rounds on the device ----------------------------------------------------------

    source = Source.MODEL

    def in_rounds(self) -> RoundsDrafter | None:
        return self if self._held.passes.window_tokens >= LACKING_TOKENS else None

    @property
    def most_tokens(self) -> int:
        return self.config.max_draft_tokens

    @property
    def num_positions(self) -> int:
        return self._held.num_positions

    def enter_rounds(self, live: LiveSlots, most_tokens: int, num_positions: int) -> RoundsInput:
        held = self._held
        rows_A, acceptance_A2 = held.follow(live, live, num_positions, self._absorb)
        self._observe(acceptance_A2)
        most_A = np.full(len(live), most_tokens)
        return self._rounds_input(held.taken(), held.ends(live, rows_A, most_A, self._sampling))

    def leave_rounds(self, live: LiveSlots, cache: KVCache, acceptance_X2: np.ndarray) -> None:
        self._held.arrays = cache
        self._held.complete(live, LACKING_TOKENS)
        self._observe(acceptance_X2)

    def empty_rounds(self, num_slots: int, num_positions: int) -> RoundsInput:
        held = self._held
        return self._rounds_input(held.empty(num_slots, num_positions), held.empty_ends(num_slots))

    def _rounds_input(self, cache: KVCache, table_RX: Any) -> RoundsInput:
        constants = self._params, np.float32(self._min_prob), self._key, self._mean_prob()
        drafting = ChainRounds(self._model, self._scheme)
        return RoundsInput(drafting, cache, constants, table_RX, self._longest_chain())

    def programs(self, num_slots: int, num_positions: int) -> Iterator[Program]:
        """Yield the jitted steps of rollouts in this bucket, and makers of their arguments.

        Later drafters on the same device use the same programs if their `config`, `proposal` and
        scheme of draws are equal.
        """
        held, size = self._held, (num_slots, num_positions)
        yield (
            draft_chains,
            lambda: self._chain_arguments(held.empty(*size), held.empty_ends(num_slots)),
        )
        yield from held.programs(*size, self._absorb)

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

    # -- arguments of the programs ---------------------------------------------------

    def _chain_arguments(self, cache: KVCache, table_BX: Any) -> Arguments:
        args = self._params, cache, table_BX, np.float32(self._min_prob), self._key
        most_tokens = self.config.max_draft_tokens
        return args, {"config": self._model, "scheme": self._scheme, "most_tokens": most_tokens}

    def _chunk_arguments(self, cache: KVCache, table_PX: Any) -> Arguments:
        return (self._params, cache, table_PX), {"config": self._model}
