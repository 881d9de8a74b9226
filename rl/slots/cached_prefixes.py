"""Earlier responses that requests start from, up to the first token that is not kept.

A request starts from its cached response of an earlier epoch (`rl.speculation.reuse`), from its
early tokens, or from both, the cached response first. These tokens are verified in chunks with a
draw after each token, before the row joins the rounds; or, if nodes take fewer seconds
(`spec.round_times.RoundTimes.chunks_pay`), in rounds, as chains of nodes. With the same noise, a
token is kept if the policy draws it again; otherwise a rule decides in the round. With the same
noise, a row may also decode instead (`watch`) if a pass does not pay (`spec.reuse.chunk_price`);
the tokens that it draws are then compared with the cached tokens.
B = slots, L = response tokens, A = live requests, N = draft tokens of a request, M = nodes,
X = tokens of chunks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numba
import numpy as np

from reprise.rl.records.stats import CachedCounts
from reprise.rl.records.trajectory import PartialRequest, Prefix, Request
from reprise.rl.slots.ending import Endings
from reprise.spec.drafter import Drafts, LiveSlots, Source
from reprise.spec.reuse.agreement import FIRST_RATE, Correction, expected_tokens
from reprise.spec.reuse.chunk_price import ChunkPrice
from reprise.spec.reuse.prefix_rule import PrefixRule
from reprise.spec.verification.nodes import KEPT, NOT_GIVEN
from reprise.spec.verification.sampling import NOISE_NAMES

PRIOR_KEPT = 9.0
PRIOR_TOKENS = 10.0  # kept and verified tokens assumed at the start of a rollout


class CachedPrefixes:
    """The chains of B rows; row b may still keep tokens `emitted … end_B[b]` of its chain.

    `end_B` is 0 without an active chain. Without a `rule`, cached responses are not used; `counts`
    covers only cached responses. Chains are verified `in_chunks` or as nodes; chains of rows in
    `watched_B` are only compared. `price` decides on passes of chunks (without a price, every pass
    runs); early tokens are expected to miss at `early_miss_rate`.
    """

    def __init__(
        self,
        rule: PrefixRule | None,
        endings: Endings,
        counts: CachedCounts,
        num_slots: int,
        longest: int,
        *,
        in_chunks: bool = False,
        price: ChunkPrice | None = None,
        begun_counts: CachedCounts | None = None,
        early_miss_rate: float = FIRST_RATE,
    ) -> None:
        self.in_chunks = in_chunks
        self.price = price
        self._rule = rule
        self._endings = endings
        self.counts = counts
        self._begun_counts = begun_counts or CachedCounts()
        self._early_miss_rate = early_miss_rate
        self.tokens_BL = np.zeros((num_slots, longest), np.int32)
        self.min_logprobs_BL = np.zeros((num_slots, longest), np.float32)
        self.end_B = np.zeros(num_slots, np.int32)
        self.total_reused_B = np.zeros(num_slots, np.int32)  # response tokens kept from the cache
        self.begun_BL = np.zeros((num_slots, longest), np.int32)
        self.begun_tokens_B = np.zeros(num_slots, np.int32)
        self.of_begun_B = np.zeros(num_slots, bool)  # the chain has early tokens
        self.watched_B = np.zeros(num_slots, bool)  # the row decodes, and may draw its chain
        self.rate_B = np.zeros(num_slots, np.float32)  # miss rate of cached tokens
        self._corrections = Correction(), Correction()  # rates of cached and of early tokens

    @property
    def chunks_end_B(self) -> np.ndarray:
        """Return `end_B` of the chains that chunks decide on, 0 for other rows."""
        return np.where(self.watched_B, 0, self.end_B)

    def watch(self, row: int) -> None:
        """Have a row decode; its chain is only compared with the tokens that the row draws."""
        assert not self.ruled(np.array([row])).any(), "a rule has to decide"
        self.watched_B[row] = True

    def play(self, requests: Sequence[Request], num_slots: int, num_positions: int) -> None:
        """Price tokens by playing all requests of the rollout, if passes are priced."""
        if self.price is None:
            return
        pairs = [self._last(r) for r in requests]
        known = [length for length, rate in pairs if length]
        usual = sum(known) // max(len(known), 1)  # for requests without a last response
        length_N = np.array([length or usual for length, _ in pairs])
        self.price.play(length_N, np.array([rate for _, rate in pairs]), num_slots, num_positions)

    def _last(self, request: Request) -> tuple[int, float]:
        """Return the length of the last response to a request, 0 without one, and its miss rate."""
        cached = request.cached if self._rule is not None else None
        return (len(cached.tokens), cached.miss_rate) if cached is not None else (0, 1.0)

    def expected_tokens(
        self, rows: Sequence[int], emitted_B: np.ndarray, limit_B: np.ndarray
    ) -> np.ndarray:
        """Return the expected tokens of the next chunk of each row; 0 for rows without a chain."""
        assert self.price is not None
        end_B = np.minimum(self.end_B, limit_B)
        left_R = np.clip(end_B - emitted_B, 0, self.price.chunk_tokens)[rows]
        cached, begun = (correction.factor for correction in self._corrections)
        rate_R = np.where(
            self.of_begun_B[rows], self._early_miss_rate * begun, self.rate_B[rows] * cached
        )
        return expected_tokens(rate_R, left_R)

    @property
    def given(self) -> bool:
        """Return whether rounds receive tokens that a rule may keep."""
        return self._rule is not None and not self._rule.mode.couples_noise

    def ruled(self, rows: np.ndarray) -> np.ndarray:
        """Return whether a rule decides on the next token of each row; bool."""
        return self.goes_on(rows) & ~self.of_begun_B[rows] & self.given

    def enter(self, row: int, partial: PartialRequest, ends: int) -> None:
        """Put a request into a row; resume its chain if all its tokens so far were kept.

        `ends` is the number of its rule in `Endings`.
        """
        request = partial.request
        prefix = partial.prefix
        response = _NONE
        self.end_B[row] = 0
        self.total_reused_B[row] = 0
        self.of_begun_B[row] = False
        self.watched_B[row] = False
        self.rate_B[row] = FIRST_RATE if request.cached is None else request.cached.miss_rate
        if prefix is not None:
            self.total_reused_B[row] = prefix.reused_tokens
            response = prefix.response_ids
        begun = self._usable(request, ends, np.asarray(request.begun, np.int32))
        self.begun_BL[row, : len(begun)], self.begun_tokens_B[row] = begun, len(begun)
        if not self._start_cached(row, partial, ends, begun):
            self._resume_begun(row, response)

    def _start_cached(
        self, row: int, partial: PartialRequest, ends: int, begun: np.ndarray
    ) -> bool:
        """Start the chain of the cached response of a row; return False if it cannot be used."""
        request = partial.request
        rule = self._rule
        if rule is None or request.cached is None or partial.num_tokens > self.total_reused_B[row]:
            return False
        tokens = self._usable(request, ends, request.cached.tokens)
        n = len(tokens)
        if n <= partial.num_tokens:
            return False
        if not self.given and len(begun) and begun.tolist() != tokens[: len(begun)].tolist():
            return False  # newer weights drew other tokens
        self.tokens_BL[row, :n] = tokens
        self.end_B[row] = n
        if self.given:
            name = request.request_id % NOISE_NAMES  # requests started ahead draw as in the step
            self.min_logprobs_BL[row, :n] = rule.min_logprobs(name, request.cached, n)
        return True

    def _usable(self, request: Request, ends: int, tokens: np.ndarray) -> np.ndarray:
        """Return the tokens up to the end of the response."""
        tokens = tokens[: request.limit(self._endings.sampling)]
        return tokens[: self._endings.read(ends, tokens)[0]]

    def _resume_begun(self, row: int, response: np.ndarray) -> None:
        """Start the chain of early tokens if they start with the response so far."""
        n = len(response)
        begun = self.begun_BL[row, : self.begun_tokens_B[row]]
        if n < len(begun) and np.array_equal(begun[:n], response):
            self.tokens_BL[row, : len(begun)], self.end_B[row] = begun, len(begun)
            self.of_begun_B[row] = True

    def most_gained(self, waiting: PartialRequest) -> int:
        """Return how many tokens of a waiting request chunks may verify."""
        cached = waiting.request.cached
        begun = waiting.request.begun
        max_length = max(0 if cached is None else len(cached.tokens), len(begun))
        return max(0, max_length - waiting.num_tokens) if self.in_chunks else 0

    def goes_on(self, rows: np.ndarray) -> np.ndarray:
        """Return whether each row may still keep tokens of its chain; bool."""
        return self.chunks_end_B[rows] > 0

    def draft(self, live: LiveSlots, most_A: np.ndarray, drafts: Drafts) -> None:
        """Write chains of up to `most_A` tokens to the drafts of their requests."""
        rates = [_kept_rate(self.counts), _kept_rate(self._begun_counts)]
        emitted_A = live.total_tokens_A - live.prompt_tokens_A
        rows_A = live.rows_A
        source = int(Source.CACHED)
        rate_A = np.where(self.of_begun_B[rows_A], rates[1], rates[0])
        most_A = np.minimum(most_A, self.chunks_end_B[rows_A] - emitted_A)
        _draft(self.tokens_BL, rows_A, emitted_A, most_A, rate_A, source, drafts)

    def give(self, nodes_5M: np.ndarray, emitted_B: np.ndarray) -> None:
        """Write the tokens that may be kept after each node, and their bounds, to `nodes_5M`."""
        end_B = np.where(self.of_begun_B, 0, self.end_B).astype(np.int32)
        _give(nodes_5M, emitted_B, end_B, self.tokens_BL, self.min_logprobs_BL)

    def give_chunks(self, chunks_TX: np.ndarray, prompt_tokens_B: np.ndarray) -> np.ndarray:
        """Return the tokens that may be kept after each chunk token, and their bounds; [2, X]."""
        inputs_2X = np.full((2, chunks_TX[:, 2:].size), NOT_GIVEN, np.int32)
        end_B = np.where(self.of_begun_B | (not self.given), 0, self.end_B).astype(np.int32)
        _give_chunks(
            chunks_TX, prompt_tokens_B, end_B, self.tokens_BL, self.min_logprobs_BL, inputs_2X
        )
        return inputs_2X

    def stand(
        self,
        chunks_TX: np.ndarray,
        drawn_X: np.ndarray,
        kind_X: np.ndarray,
        prompt_tokens_B: np.ndarray,
        emitted_B: np.ndarray,
        limit_B: np.ndarray,
    ) -> np.ndarray:
        """Return the kinds of draws after chunk tokens; 0 past the first mismatch of a row."""
        ruled_B = self.given & ~self.of_begun_B
        end_B = np.minimum(self.end_B, limit_B)
        return _stand(
            chunks_TX, drawn_X, kind_X, prompt_tokens_B, emitted_B, end_B, ruled_B, self.tokens_BL
        )

    def commit(
        self,
        tokens_BN: np.ndarray,
        count_B: np.ndarray,
        reused_B: np.ndarray,
        emitted_B: np.ndarray,
        stopped_B: np.ndarray,
    ) -> np.ndarray:
        """Commit the tokens of a fetch, after `emitted_B`; return how many given tokens were kept.

        A chain stops at the first token that is not kept, or with its response; early tokens may
        resume after a cached response.
        """
        agreeing_B = _agreeing(tokens_BN, count_B, emitted_B, self.tokens_BL, self.end_B)
        if self.price is not None:
            self._correct(agreeing_B, count_B, emitted_B)
        ruled_B = ~self.of_begun_B & self.given
        given_B = np.where(ruled_B, np.minimum(reused_B, count_B), 0).astype(np.int32)
        reused_B = np.where(ruled_B, given_B, agreeing_B)
        self.total_reused_B += np.where(self.of_begun_B, 0, reused_B).astype(np.int32)
        total_B = emitted_B + count_B
        over_B = (reused_B < count_B) | (total_B >= self.end_B) | stopped_B
        for row in np.nonzero(over_B & (self.end_B > 0) & (count_B > 0))[0].tolist():
            before = int(emitted_B[row])
            now = int(count_B[row])
            is_begun = bool(self.of_begun_B[row])
            counts = self._begun_counts if is_begun else self.counts
            reused = before + int(reused_B[row]) if is_begun else int(self.total_reused_B[row])
            counts.add(int(self.end_B[row]), reused)
            self.end_B[row] = 0
            if not is_begun and self.begun_tokens_B[row] and not stopped_B[row]:
                emitted = self.tokens_BL[row, :before], tokens_BN[row, :now]
                self._resume_begun(row, np.concatenate(emitted))
        return given_B

    def _correct(self, agreeing_B: np.ndarray, count_B: np.ndarray, emitted_B: np.ndarray) -> None:
        """Correct the expected miss rates by a fetch with `agreeing_B` tokens that agree."""
        compared_B = np.where(self.end_B, np.minimum(count_B, self.end_B - emitted_B), 0)
        missed_B = agreeing_B < compared_B
        decided_B = agreeing_B + missed_B
        for is_begun, correction in enumerate(self._corrections):
            of_B = (self.of_begun_B == is_begun) & (compared_B > 0)
            rate_B = self._early_miss_rate if is_begun else self.rate_B
            correction.observe(int(missed_B[of_B].sum()), float((rate_B * decided_B)[of_B].sum()))

    def reused(self, row: int, partial: PartialRequest, prefix: Prefix) -> Prefix:
        """Return `prefix` with the number of reused tokens and the scores of kept tokens."""
        n = int(self.total_reused_B[row])
        assert partial.request.cached is not None or n == 0
        scores = None if partial.request.cached is None else partial.request.cached.scores
        prefix = dataclasses.replace(prefix, reused_tokens=n)
        if not self.given or scores is None:
            return prefix
        emission = prefix.emission_logprobs.copy()
        versions = prefix.policy_versions.copy()
        emission[:n] = scores.emission_logprobs[:n]
        versions[:n] = scores.policy_versions[:n]
        return dataclasses.replace(prefix, emission_logprobs=emission, policy_versions=versions)

    def keep(self, rows: Sequence[int]) -> None:
        """Move row `rows[i]` to row i."""
        for name, array in vars(self).items():
            if isinstance(array, np.ndarray):
                setattr(self, name, array[np.asarray(rows)])

    def widen(self, num_slots: int) -> None:
        """Append rows without a request."""
        now = len(self.end_B)
        self.keep([*range(now), *[0] * (num_slots - now)])
        self.end_B[now:] = self.total_reused_B[now:] = self.begun_tokens_B[now:] = 0


_NONE = np.zeros(0, np.int32)


def _kept_rate(counts: CachedCounts) -> float:
    return (counts.kept_tokens + PRIOR_KEPT) / (counts.decided_tokens + PRIOR_TOKENS)


@numba.njit(cache=True, nogil=True)
def _draft(tokens_BL, rows_A, emitted_A, most_A, rate_A, source, drafts):  # type: ignore[no-untyped-def]
    for a in range(len(rows_A)):
        prob = 1.0
        for n in range(max(most_A[a], 0)):
            prob *= rate_A[a]
            drafts.tokens_AN[a, n] = tokens_BL[rows_A[a], emitted_A[a] + n]
            drafts.parents_AN[a, n] = n - 1
            drafts.prob_AN[a, n] = prob
            drafts.sources_AN[a, n] = source
            drafts.count_A[a] = n + 1


@numba.njit(cache=True, nogil=True)
def _give(nodes_5M, emitted_B, end_B, tokens_BL, min_BL):  # type: ignore[no-untyped-def]
    depth = 0
    for m in range(nodes_5M.shape[1]):
        b = nodes_5M[1, m]
        if b >= len(end_B):  # padding
            break
        depth = 0 if nodes_5M[2, m] < 0 else depth + 1
        at = emitted_B[b] + depth
        if at < end_B[b]:
            nodes_5M[3, m] = tokens_BL[b, at]
            nodes_5M[4, m] = min_BL[b, at : at + 1].view(np.int32)[0]


@numba.njit(cache=True, nogil=True)
def _give_chunks(chunks_TX, prompt_B, end_B, tokens_BL, min_BL, given_2X):  # type: ignore[no-untyped-def]
    C = chunks_TX.shape[1] - 2
    for t in range(len(chunks_TX)):
        b = chunks_TX[t, 0]
        for c in range(C if b >= 0 else 0):
            at = chunks_TX[t, 1] + c + 1 - prompt_B[b]
            if 0 <= at < end_B[b]:
                given_2X[0, t * C + c] = tokens_BL[b, at]
                given_2X[1, t * C + c] = min_BL[b, at : at + 1].view(np.int32)[0]


@numba.njit(cache=True, nogil=True)
def _stand(chunks_TX, drawn_X, kind_X, prompt_B, emitted_B, end_B, ruled_B, tokens_BL):  # type: ignore[no-untyped-def]
    C = chunks_TX.shape[1] - 2
    result_X = np.zeros_like(kind_X)
    at_B = emitted_B.copy()
    for t in range(len(chunks_TX)):
        b = chunks_TX[t, 0]
        for c in range(C if b >= 0 else 0):
            x = t * C + c
            at = chunks_TX[t, 1] + c + 1 - prompt_B[b]
            if at != at_B[b] or at >= end_B[b]:
                continue
            result_X[x] = kind_X[x]
            is_right = kind_X[x] == KEPT if ruled_B[b] else drawn_X[x] == tokens_BL[b, at]
            at_B[b] = at + 1 if is_right else -1
    return result_X


@numba.njit(cache=True, nogil=True)
def _agreeing(tokens_BN, count_B, emitted_B, tokens_BL, end_B):  # type: ignore[no-untyped-def]
    agreeing_B = np.zeros(len(end_B), np.int32)
    for b in range(len(end_B)):
        for n in range(min(count_B[b], end_B[b] - emitted_B[b])):
            if tokens_BN[b, n] != tokens_BL[b, emitted_B[b] + n]:
                break
            agreeing_B[b] += 1
    return agreeing_B
