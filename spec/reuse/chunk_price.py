"""The price of chunk passes that verify cached tokens, compared to rounds, in measured seconds.

If the policy must draw cached tokens again, no token depends on how it is verified. Rows with
cached tokens that do not pay for a pass decode instead, and drafters may propose these tokens. A
pass of t seconds that yields e tokens (`spec.reuse.agreement.expected_tokens`, plus 1 for each live
row of the same program) pays if

    MARGIN · t  <  e · value,      value = plain seconds of a token / gain of drafts

With B slots, a token takes t(B) / requests. If all requests of a rollout are known, a simulation of
their last lengths, with and without the tokens expected to agree, gives the price of an agreeing
token: if only short responses agree, the longest responses take the same number of rounds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from reprise.spec.round_times import RoundTimes

MARGIN = 1.05
DECAY = 0.95  # of earlier rounds in the gain, per fetch


class Pass(NamedTuple):
    """A pass of `num_chunks` chunks; `is_beside`: with a plain round of the live rows."""

    num_chunks: int
    is_beside: bool


class Bucket(NamedTuple):
    """The batch of a worker: slots, positions, busy rows, and live rows."""

    slots: int
    positions: int
    busy: int
    live: int


class ChunkPrice:
    """The prices of passes of a rollout; decisions depend only on tokens and the table."""

    def __init__(self, times: RoundTimes, chunk_tokens: int) -> None:
        self._times = times
        self.chunk_tokens = chunk_tokens
        self._slots = times.chunk_slots
        self._known: dict[tuple[Pass, int, int], float | None] = {}  # earlier look-ups
        self._plain_s = self._rounds_s = 0.0
        self._token_s: float | None = None  # the value of a request token in this rollout

    def play(
        self, length_N: np.ndarray, rate_N: np.ndarray, num_slots: int, num_positions: int
    ) -> None:
        """Estimate the value of a token by simulating all requests of the rollout.

        `length_N` holds their last lengths, `rate_N` the miss rates (1 without a cached response).
        """
        rounds = self._times.rounds.items()
        sizes = {b: s for (b, m, n), s in rounds if (m, n) == (b, num_positions)}
        agreeing_N = spread_agreement(length_N, rate_N)
        if num_slots not in sizes or not agreeing_N.any():
            return
        ordered = sorted(sizes.items())

        def plain_s(num_rows: int) -> float:
            return next(s for b, s in ordered if b >= num_rows)

        saved_s = played_s(length_N, num_slots, plain_s)
        saved_s -= played_s(length_N - agreeing_N, num_slots, plain_s)
        self._token_s = saved_s / float(agreeing_N.sum())

    def has_passes(self, num_slots: int) -> bool:
        """Return whether passes with `num_slots` slots are measured."""
        return num_slots in self._slots

    @property
    def gain(self) -> float:
        """Return the speedup of rounds over plain rounds so far, by the table; at least 1."""
        return max(1.0, self._plain_s / self._rounds_s) if self._rounds_s else 1.0

    def observe(self, tokens_per_request: float, num_rounds: int, at: tuple[int, int, int]) -> None:
        """Learn from the rounds of a fetch; `at` is (slots, nodes, positions)."""
        slots, _, positions = at
        plain_s = self._times(slots, slots, positions) or 0.0
        round_s = self._times(*at) or plain_s
        self._plain_s = DECAY * self._plain_s + tokens_per_request * plain_s
        self._rounds_s = DECAY * self._rounds_s + num_rounds * round_s

    def value(self, at: Bucket) -> float:
        """Return the seconds that rounds take per token of a request."""
        token_s = self._token_s
        if token_s is None:
            token_s = (self._times(at.slots, at.slots, at.positions) or 0.0) / max(at.busy, 1)
        return token_s / self.gain

    def best_pass(
        self,
        expected_R: np.ndarray,
        at: Bucket,
        alone: Sequence[int],
        beside: Sequence[int],
    ) -> Pass | None:
        """Return the pass with the most tokens per second, or None if it does not pay.

        `expected_R` holds the expected tokens from a chunk of each row, in descending order. The
        last two arguments are the possible chunk counts of passes without and with a plain round.
        """
        sums_R = np.append(0.0, np.cumsum(expected_R))
        best = None
        best_rate = 0.0
        options = [Pass(n, True) for n in beside]
        for one in [*options, *(Pass(n, False) for n in alone)]:
            seconds = self._seconds(one, at)
            if seconds is None:
                continue
            num_rows = min(one.num_chunks, len(expected_R))
            rate = (float(sums_R[num_rows]) + one.is_beside * max(at.live - num_rows, 0)) / seconds
            if rate > best_rate:
                best = one
                best_rate = rate
        return best if best_rate * self.value(at) > MARGIN else None

    def may_pay(self, expected_R: np.ndarray, at: Bucket, sizes: Sequence[int]) -> np.ndarray:
        """Return for each row whether a pass full of similar rows would pay; bool [R]."""
        seconds = {n: self._seconds(Pass(n, is_beside=False), at) for n in sizes}
        rate = max((n / s for n, s in seconds.items() if s is not None), default=0.0)
        return expected_R * rate * self.value(at) > MARGIN

    def _seconds(self, one: Pass, at: Bucket) -> float | None:
        """Return the seconds of a pass, its fetch included."""
        key = one, at.slots, at.positions
        if key not in self._known:
            tokens = one.num_chunks * self.chunk_tokens
            seconds = self._times.chunks(at.slots, tokens, at.positions, is_beside=one.is_beside)
            host_s = self._times.fetch(at.slots)
            self._known[key] = None if seconds is None else seconds + host_s
        return self._known[key]


GOLDEN = 0.6180339887498949


def spread_agreement(length_N: np.ndarray, rate_N: np.ndarray) -> np.ndarray:
    """Return counts of tokens that agree up to a first difference, spread over the quantiles.

    P(at least k tokens agree) = (1 − h)^k, at multiples of the golden ratio modulo 1.
    """
    u_N = np.arange(1, len(length_N) + 1) * GOLDEN % 1
    keeps_N = np.clip(1 - rate_N, 1e-9, 1 - 1e-9)
    return np.minimum(np.floor(np.log(u_N) / np.log(keeps_N)), length_N).astype(int)


def played_s(length_N: np.ndarray, num_slots: int, plain_s: Callable[[int], float]) -> float:
    """Return the seconds of plain rounds for requests that start in order as slots become free.

    `plain_s` returns the seconds of a round with a given number of live rows.
    """
    first = length_N[:num_slots].tolist()
    rest = length_N[num_slots:].tolist()
    ends = [int(n) for n in first]
    full_rounds = 0
    heapq.heapify(ends)
    for length in rest:
        full_rounds = heapq.heappop(ends)
        heapq.heappush(ends, full_rounds + int(length))
    seconds = full_rounds * plain_s(num_slots)
    now = full_rounds
    while ends:
        num_rows = len(ends)
        end = heapq.heappop(ends)
        seconds += (end - now) * plain_s(num_rows) if end > now else 0.0
        now = max(now, end)
    return seconds
