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
from spec.acceptance import PRIOR_DRAFTS, PRIOR_PROB
from spec.config import SamplingConfig
from spec.draft_cache.cache import DraftCache, Passes, Runner
from spec.draft_cache.drafter import CachingDrafter
from spec.draft_cache.drafting import Given
from spec.draft_model.config import ChainConfig, Proposal
from spec.draft_model.drafting import LACKING_TOKENS, ChainDrafting
from spec.draft_model.enumeration import Enumeration, enumerate_cases, unpack
from spec.drafter import Arguments, LiveSlots, Program, RoundsDrafter, Source


class DraftModelDrafter(CachingDrafter):
    """Chains of a draft model: its `likeliest` tokens, or its own draws (`shared_noise`).

    Shared noise is the noise that the policy will draw with (by position), so that a draft is
    accepted if both distributions map that noise to the same token. The probability of a
    `likeliest` draft token is the product of the model's probabilities at the sampling's
    temperature; with shared noise it is the product of the mean acceptances observed at each depth.
    Chains have at most `depth` draft tokens, which may be changed between rounds.

    `model` must have the vocabulary of the runner's, otherwise ValueError; `params` are on its
    devices.
    """

    source, lacking_tokens = Source.MODEL, LACKING_TOKENS
    may_be_paged = True

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
        self.depth = self.most_tokens = self.config.max_draft_tokens
        self._params, self._sampling, self._key = params, sampling, key
        self._proposal = proposal
        # `reach` cuts chains of shared noise: the model does not know their probabilities
        self._min_prob = self.config.min_prob if proposal == "likeliest" else 0.0
        drafting = ChainDrafting(model, sampling.scheme if proposal == "shared_noise" else None)
        cached = model, _passes(self.config), drafting, runner
        self._held = DraftCache(*cached, may_be_paged=self.may_be_paged)
        self._drafting, self._argument = drafting, runner.argument
        self._accepted_K = np.zeros(self.config.max_draft_tokens, np.int64)
        self._observed_K = np.zeros(self.config.max_draft_tokens, np.int64)

    def constants(self) -> Any:
        return self._params, np.float32(self._min_prob), self._key, self._mean_prob()

    def note_drafts(
        self, live: LiveSlots, rows_A: np.ndarray, tokens_AX: np.ndarray, count_A: np.ndarray
    ) -> None:
        self._held.rows.drafted(rows_A, tokens_AX, count_A)

    def in_rounds(self) -> RoundsDrafter | None:
        return self if self._held.passes.window_tokens >= LACKING_TOKENS else None

    # -- probabilities ---------------------------------------------------------------------

    def observe_chains(self, acceptance_A2: np.ndarray) -> None:
        """Count, by depth, chains accepted up to there, and those whose next token was accepted."""
        depth_K = np.arange(len(self._accepted_K))
        accepted_A1, seen_A1 = acceptance_A2[:, :1], acceptance_A2[:, 1:]
        self._accepted_K += (depth_K < accepted_A1).sum(axis=0)
        self._observed_K += ((depth_K <= accepted_A1) & (depth_K < seen_A1)).sum(axis=0)

    def _mean_prob(self) -> np.ndarray:
        rate_K = (self._accepted_K + PRIOR_DRAFTS * PRIOR_PROB) / (self._observed_K + PRIOR_DRAFTS)
        return np.cumprod(rate_K).astype(np.float32)

    def reach(self) -> int:
        """Return how many draft tokens are worth drafting: at least one, to keep observing."""
        if self._proposal == "likeliest":
            return self.depth
        return max(1, int((self._mean_prob()[: self.depth] >= self.config.min_prob).sum()))


def _passes(config: ChainConfig) -> Passes:
    """Return passes of chunks whose widths are each a quarter of the next, all above the window."""
    widths, width = [config.chunk_tokens], config.chunk_tokens // 4
    while width > config.window_tokens:
        widths.append(width)
        width //= 4
    return Passes(config.window_tokens, tuple(widths[::-1]), config.pass_tokens)


class AheadDraftModel(DraftModelDrafter):
    """A draft model of a drafting worker: texts end with draft tokens that nobody has verified.

    So what follows a chain says nothing about its acceptance; whoever knows tells `observe_chains`.
    """

    def note_drafts(
        self, live: LiveSlots, rows_A: np.ndarray, tokens_AX: np.ndarray, count_A: np.ndarray
    ) -> None:
        super().note_drafts(live, rows_A, tokens_AX, count_A)
        self._held.rows.drafted_B[rows_A] = 0


class EnumeratingDraftModel(AheadDraftModel):
    """A draft model that drafts for each case of the chains that are being verified."""

    may_be_paged = False  # nodes of a row see different numbers of its positions

    def outcomes(
        self, live: LiveSlots, chain_AK: np.ndarray, depth: int, fan_out: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (tokens_AZFN, second_AZFK, prob_AZF) of what may come of each request's chain.

        Behind i accepted tokens of it there are F guesses with their probability, each with a chain
        of `depth` tokens and a second choice for each of them; what lies behind that is 0.
        `chain_AK` is −1 behind a chain.
        """
        held, given = self._held, (self.constants(), self.features())
        A, K = chain_AK.shape
        count_A = (chain_AK >= 0).sum(axis=1)
        longest = int(live.total_tokens_A.max()) + K
        rows_A, _ = held.follow(live, live, longest, given)
        table_RX = held.ends(live, rows_A, np.ones(A, np.int32), self._sampling)
        chain_RK = np.full((len(held.rows), K), -1, np.int32)
        chain_RK[rows_A] = chain_AK
        enumeration = Enumeration(self._drafting, K, fan_out)
        args = given, held.taken(), table_RX, self._argument(chain_RK), np.int32(depth)
        held.arrays, packed = enumerate_cases(*args, enumeration=enumeration)
        self.note_drafts(live, rows_A, chain_AK, count_A.astype(np.int32))
        tokens_RZFN, second_RZFK, prob_RZF = unpack(packed)
        return tokens_RZFN[rows_A], second_RZFK[rows_A], prob_RZF[rows_A]

    def enumerating(
        self, num_slots: int, num_positions: int, window: int, fan_out: int
    ) -> Iterator[Program]:
        """Yield the steps of `outcomes` in this bucket, and makers of their arguments."""
        held, size = self._held, (num_slots, num_positions)

        def given() -> Given:
            return self.constants(), ()

        def cases() -> Arguments:
            chain_RK = self._argument(np.full((num_slots, window), -1, np.int32))
            args = given(), held.empty(*size), held.empty_ends(num_slots), chain_RK, np.int32(1)
            return args, {"enumeration": Enumeration(self._drafting, window, fan_out)}

        yield enumerate_cases, cases
        yield from held.programs(*size, given)
