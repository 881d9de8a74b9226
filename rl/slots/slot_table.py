"""The authoritative state of the slots of a worker: plain arrays on the host, no devices.

A row outlives its request: the cache holds the prompt of a row until another prompt overwrites it.
B = slots, L = tokens of a request, N = tokens of a fetch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numba
import numpy as np

from reprise.rl.records.trajectory import (
    FinishReason,
    Origin,
    PartialRequest,
    Prefix,
    Prompt,
    Request,
    Trajectory,
    of_prefix,
)
from reprise.rl.slots.cached_prefixes import CachedPrefixes
from reprise.rl.slots.ending import Endings
from reprise.spec.config import SamplingConfig
from reprise.spec.drafter import LiveSlots
from reprise.spec.verification.sampling import noise_names


class KnownPrompt(NamedTuple):
    """The number of a prompt, its first `Prompt` object, and its tokens."""

    number: int
    prompt: Prompt
    tokens: np.ndarray


class Prompts:
    """The (prompt, adapter) pairs of a rollout, numbered in order of appearance.

    Comparing, hashing or copying thousands of tokens takes longer than a round, so each prompt is
    identified by its first object.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Prompt, int], KnownPrompt] = {}
        self._by_id: dict[tuple[int, int], KnownPrompt] = {}

    def of(self, request: Request) -> KnownPrompt:
        prompt = request.prompt_ids
        adapter = request.adapter
        known = self._by_id.get((id(prompt), adapter)) or self._known.get((prompt, adapter))
        if known is None:
            known = KnownPrompt(len(self._known), prompt, np.array(prompt, np.int32))
            self._known[prompt, adapter] = self._by_id[id(prompt), adapter] = known
        return known


class SlotTable:
    """B rows; a row without a request is free. `tokens_BL` holds prompt, then response.

    The cache holds all tokens of a row except the last, which is the root of the next tree. A row
    that lacks `missing_tokens_B` tokens in the cache has a request, but takes no part in rounds.
    """

    def __init__(
        self,
        num_slots: int,
        max_tokens: int,
        endings: Endings | None = None,
        cached: CachedPrefixes | None = None,
        *,
        keeps_responses: bool = False,
        num_adapters: int = 1,
    ) -> None:
        B = num_slots
        L = max_tokens
        self.num_slots = num_slots
        self.num_adapters = num_adapters
        self.keeps_responses = keeps_responses  # in free rows, for prompts that continue them
        self.endings = endings or Endings(SamplingConfig())
        self.cached = cached  # None: cached responses are not used
        # whether cached responses are verified in chunks that draw
        self.verifies_in_chunks = cached is not None and cached.in_chunks
        self.started: list[PartialRequest | None] = [None] * B  # requests as they entered rows
        self.known_prompts = Prompts()
        self.prompts: list[int | None] = [None] * B  # the prompt that a row holds in full
        self.prompt_B = np.zeros(B, np.int64)  # of the request, or of the last request
        self.adapter_B = np.zeros(B, np.int64)  # of the request, or of the last request
        self.retained_tokens_B = np.zeros(B, np.int32)  # held in the cache of a free row
        self.tokens_BL = np.zeros((B, L), np.int32)
        self.logprobs_BL = np.zeros((B, L), np.float32)
        self.origins_BL = np.zeros((B, L), np.uint8)
        self.prompt_tokens_B = np.zeros(B, np.int32)
        self.total_tokens_B = np.ones(B, np.int32)
        self.limit_B = np.zeros(B, np.int32)  # of response tokens, for this chunk
        self.final_B = np.zeros(B, np.int32)  # of response tokens, in total
        self.busy_B = np.zeros(B, bool)
        self.missing_tokens_B = np.zeros(B, np.int32)  # keys and values still to compute
        self.entered_B = np.zeros(B, np.int64)  # order of admission
        self._num_entered = 0
        self._live: LiveSlots | None = None  # as last returned, while the rows are the same
        self.request_ids_B = np.zeros(B, np.int64)
        self.seed_B = np.zeros(B, np.int32)  # −1: the noise of the rollout
        self.group_ids_B = np.zeros(B, np.int64)
        self.rule_B = np.zeros(B, np.int32)  # of `endings`; `state_B` is the state of the text
        self.state_B = np.zeros(B, np.int32)
        self.stopped_B = np.zeros(B, bool)  # by an end token, a stop string, or logits
        self.not_finite_B = np.zeros(B, bool)  # stopped by logits that are not finite
        self.processing_B3 = np.ones((B, 3), np.float32)  # temperature, top_k, top_p

    @property
    def num_busy(self) -> int:
        return int(self.busy_B.sum())

    @property
    def live_B(self) -> np.ndarray:
        """Return the rows that take part in rounds."""
        return self.busy_B & (self.missing_tokens_B == 0)

    @property
    def cached_tokens_B(self) -> np.ndarray:
        """Return the live cache positions of complete rows, which cover all tokens but the last."""
        return self.total_tokens_B - 1

    @property
    def known_tokens_B(self) -> np.ndarray:
        """Return the cache positions that a row needs to join, including tokens it may keep."""
        if not self.verifies_in_chunks:
            return self.cached_tokens_B
        assert self.cached is not None
        known_B = self.prompt_tokens_B + np.minimum(self.cached.chunks_end_B, self.limit_B) - 1
        return np.maximum(self.cached_tokens_B, known_B)

    @property
    def verifies_B(self) -> np.ndarray:
        """Return the rows that lack only tokens that draws in chunks decide on."""
        if not self.verifies_in_chunks:
            return np.zeros(self.num_slots, bool)
        unsure_B = self.known_tokens_B - self.cached_tokens_B
        return self.busy_B & (unsure_B > 0) & (self.missing_tokens_B == unsure_B)

    @property
    def num_prompts_missing(self) -> int:
        """Return how many rows lack tokens of their prompt."""
        if not self.missing_tokens_B.any():  # as in most rounds
            return 0
        return int((self.busy_B & (self.missing_tokens_B > 0) & ~self.verifies_B).sum())

    @property
    def emitted_B(self) -> np.ndarray:
        return self.total_tokens_B - self.prompt_tokens_B

    def free_rows(self) -> list[int]:
        return np.nonzero(~self.busy_B)[0].tolist()

    def oldest_first(self) -> list[int]:
        """Return the busy rows in order of admission."""
        (rows,) = np.nonzero(self.busy_B)
        return rows[np.argsort(self.entered_B[rows])].tolist()

    def lacking(self) -> dict[int, int]:
        """Return rows that lack tokens, in order of admission, mapped to their prompts."""
        if not self.missing_tokens_B.any():  # as in most rounds
            return {}
        (rows,) = np.nonzero(self.busy_B & (self.missing_tokens_B > 0))
        rows = rows[np.argsort(self.entered_B[rows])]  # in order of admission
        return dict(zip(rows.tolist(), self.prompt_B[rows].tolist(), strict=True))

    def filled(self, row: int, num_tokens: int) -> int:
        """Record that the cache of a row holds `num_tokens`; return how many of these it lacked."""
        before = int(self.missing_tokens_B[row])
        if num_tokens >= self.prompt_tokens_B[row] - 1:
            self.prompts[row] = int(self.prompt_B[row])
        sure = int(self.total_tokens_B[row]) - 1
        known = int(self.known_tokens_B[row]) if self.verifies_in_chunks else sure
        missing = known - min(num_tokens, sure)  # draws decide on the rest
        self.missing_tokens_B[row] = missing
        return before - missing

    def enter(self, row: int, partial: PartialRequest, filled_tokens: int | None = None) -> None:
        """Put a request into a row that holds its first `filled_tokens` tokens (None means all)."""
        request = partial.request
        prefix = partial.prefix
        endings = self.endings
        sampling = request.sampling or endings.sampling
        n = end = len(request.prompt_ids)
        self.started[row] = partial
        self.prompts[row] = None
        known = self.known_prompts.of(request)
        self.adapter_B[row] = request.adapter
        self.seed_B[row] = -1 if request.seed is None else request.seed
        self.retained_tokens_B[row] = 0
        self.prompt_B[row] = known.number
        self.tokens_BL[row, :n] = known.tokens
        if prefix is not None:
            end = n + len(prefix.response_ids)
            self.tokens_BL[row, n:end] = prefix.response_ids
            self.logprobs_BL[row, n:end] = prefix.logprobs
            self.origins_BL[row, n:end] = prefix.origins
        self.prompt_tokens_B[row] = n
        self.total_tokens_B[row] = end
        self.limit_B[row] = self.final_B[row] = request.limit(endings.sampling)
        self.rule_B[row] = rule = endings.enter(request.sampling)
        _, self.state_B[row], self.stopped_B[row] = endings.read(rule, self.tokens_BL[row, n:end])
        self.processing_B3[row] = sampling.temperature, sampling.top_k, sampling.top_p
        self.not_finite_B[row] = False
        if partial.max_tokens is not None:
            self.extend(row, partial.max_tokens)
        self.busy_B[row] = True
        self._live = None
        self._num_entered += 1
        self.entered_B[row] = self._num_entered
        self.request_ids_B[row] = request.request_id
        self.group_ids_B[row] = request.group_id
        if self.cached is not None:
            self.cached.enter(row, partial, rule)
            self._look_ahead(row)
        self.filled(row, end - 1 if filled_tokens is None else filled_tokens)

    def _look_ahead(self, row: int) -> None:
        """Schedule cached tokens that a row may keep to be verified in chunks that draw."""
        assert self.cached is not None
        first = int(self.prompt_tokens_B[row])
        now = int(self.total_tokens_B[row])
        end = int(self.known_tokens_B[row]) + 1
        self.tokens_BL[row, now:end] = self.cached.tokens_BL[row, now - first : end - first]
        self.missing_tokens_B[row] = end - now

    def decode_instead(self, row: int) -> None:
        """Have a row decode instead of verifying its cached tokens in chunks."""
        assert self.cached is not None
        held = int(self.known_tokens_B[row] - self.missing_tokens_B[row])
        self.cached.watch(row)
        self.missing_tokens_B[row] = int(self.known_tokens_B[row]) - held

    def tokens_if_verified(self, row: int) -> int:
        """Return the positions that a row needs if it verifies all of its cached tokens."""
        assert self.cached is not None
        kept_tokens = min(int(self.cached.end_B[row]), int(self.limit_B[row]))
        return int(self.prompt_tokens_B[row]) + kept_tokens

    def verify_again(self, row: int) -> None:
        """Have a decoding row verify the rest of its cached tokens in chunks."""
        assert self.cached is not None
        self.cached.watched_B[row] = False
        self._look_ahead(row)

    def commit(
        self,
        tokens_BN: np.ndarray,
        logprobs_BN: np.ndarray,
        count_B: np.ndarray,
        drafted_B: np.ndarray,
        reused_B: np.ndarray,
    ) -> np.ndarray:
        """Append the first `count_B` tokens of each slot, up to its end; return the numbers added.

        A response stops at the first token with a log-probability that is not finite, which no
        token drawn from finite logits has. The first `reused_B` tokens were kept from a cached
        response; if a slot had draft tokens, its other tokens except the last were accepted.
        """
        drawn_B = count_B
        count_B = count_B.copy()
        self.endings.cut(tokens_BN, count_B, self.rule_B, self.state_B, self.stopped_B)
        is_same = self.endings.unknown_to_device or np.array_equal(count_B, drawn_B)
        assert is_same, "the device went on behind an end that it knows"
        if not np.isfinite(logprobs_BN).all():
            self._end_not_finite(logprobs_BN, count_B)
        if self.cached is not None:
            reused_B = self.cached.commit(
                tokens_BN, count_B, reused_B, self.emitted_B, self.stopped_B
            )
        _append(
            tokens_BN,
            logprobs_BN,
            count_B,
            drafted_B,
            reused_B,
            self.tokens_BL,
            self.logprobs_BL,
            self.origins_BL,
            self.total_tokens_B,
        )
        if self.verifies_in_chunks:
            for row in np.nonzero(self.missing_tokens_B * count_B)[0].tolist():
                self._look_ahead(row)
        return count_B

    def _end_not_finite(self, logprobs_BN: np.ndarray, count_B: np.ndarray) -> None:
        """Lower `count_B` to the tokens up to the first with logits that are not finite."""
        bad_BN = ~np.isfinite(logprobs_BN) & (np.arange(logprobs_BN.shape[1]) < count_B[:, None])
        bad_B = bad_BN.any(axis=1)
        count_B[bad_B] = bad_BN[bad_B].argmax(axis=1) + 1
        self.not_finite_B |= bad_B
        self.stopped_B |= bad_B

    def ended_rows(self) -> list[int]:
        """Return the busy rows with a complete response."""
        is_whole_B = self.stopped_B | (self.emitted_B >= self.final_B)
        return np.nonzero(self.busy_B & is_whole_B)[0].tolist()

    def chunk_ended_rows(self) -> list[int]:
        """Return the rows with a complete chunk of an incomplete response."""
        if (self.limit_B == self.final_B).all():  # whole requests have no chunks
            return []
        emitted_B = self.emitted_B
        is_whole_B = self.stopped_B | (emitted_B >= self.final_B)
        return np.nonzero(self.busy_B & (emitted_B >= self.limit_B) & ~is_whole_B)[0].tolist()

    def extend(self, row: int, max_tokens: int) -> None:
        """Allow the request of a row `max_tokens` more tokens."""
        self.limit_B[row] = min(self.final_B[row], self.emitted_B[row] + max_tokens)
        if self.known_tokens_B[row] > self.cached_tokens_B[row]:
            self._look_ahead(row)

    def retire(self, row: int, policy_version: int) -> Trajectory:
        """Free the row, which still holds its prompt; return the trajectory of the request."""
        left = self.leave(row, policy_version)
        assert left.prefix is not None
        reason = FinishReason.STOP if self.stopped_B[row] else FinishReason.LENGTH
        if self.not_finite_B[row]:
            reason = FinishReason.NOT_FINITE
            self.not_finite_B[row] = False
        return of_prefix(left.request, dataclasses.replace(left.prefix, finish_reason=reason))

    def preempt(self, row: int, policy_version: int) -> PartialRequest:
        """Free the row; return its request, with the tokens left as its `max_tokens`."""
        left = int(self.limit_B[row] - self.emitted_B[row])
        return dataclasses.replace(self.leave(row, policy_version), max_tokens=left)

    def leave(self, row: int, policy_version: int) -> PartialRequest:
        """Free the row, which keeps its cache entries; return its request and response so far."""
        left = self.so_far(row, policy_version)
        self.started[row] = None
        self.busy_B[row] = False
        self.endings.leave(int(self.rule_B[row]))
        if self.prompts[row] is not None:
            keeps = self.keeps_responses and not self.missing_tokens_B[row]
            end_B = self.total_tokens_B if keeps else self.prompt_tokens_B
            self.retained_tokens_B[row] = end_B[row] - 1
        return left

    def forget(self, row: int) -> None:
        """Record that the cache of a row holds nothing."""
        self.prompts[row] = None
        self.retained_tokens_B[row] = 0

    def expire(self, request_ids: Collection[int]) -> None:
        """Have new prompts overwrite the rows of these finished requests before other free rows."""
        is_last_B = np.isin(self.request_ids_B, list(request_ids))
        self.entered_B[is_last_B & ~self.busy_B] = 0

    def reusable_tokens(self, request: Request, rows: Sequence[int]) -> np.ndarray:
        """Return how many leading prompt tokens of a request each free row holds; int [R].

        The last prompt token does not count, since it is the root of the first round. With
        `keeps_responses` a prompt may continue the tokens of a row. A prompt that shares less than
        half of these tokens leaves the row to a better match.
        """
        number, _, tokens_T = self.known_prompts.of(request)
        if not self.keeps_responses:
            holds_R = np.array([self.prompts[row] == number for row in rows], bool)
            return np.where(holds_R, len(tokens_T) - 1, 0)
        rows_R = np.asarray(rows, int)
        tokens_T = tokens_T[:-1]
        retained_R = np.where(
            self.adapter_B[rows_R] == request.adapter, self.retained_tokens_B[rows_R], 0
        )
        shared_R = np.minimum(retained_R, len(tokens_T))
        width = int(shared_R.max(initial=0))
        differs_RT = self.tokens_BL[rows_R, :width] != tokens_T[:width]
        differs_RT |= np.arange(width) >= shared_R[:, None]
        common_R = np.argmax(np.pad(differs_RT, ((0, 0), (0, 1)), constant_values=True), axis=1)
        return np.where(2 * common_R >= retained_R, common_R, 0)

    def so_far(self, row: int, policy_version: int) -> PartialRequest:
        """Return the request of a busy row, with its response so far."""
        started = self.started[row]
        assert started is not None
        first = int(self.prompt_tokens_B[row])
        end = int(self.total_tokens_B[row])
        response = self.tokens_BL[row, first:end].copy()
        logprobs = self.logprobs_BL[row, first:end].copy()
        emission = logprobs
        versions = np.full(len(response), policy_version, np.int32)
        prefix = started.prefix
        if prefix is not None:
            known = len(prefix.response_ids)
            emission = np.concatenate([prefix.emission_logprobs, logprobs[known:]])
            versions[:known] = prefix.policy_versions
        origins = self.origins_BL[row, first:end].copy()
        response_so_far = Prefix(response, logprobs, emission, versions, origins, 0, None)
        if self.cached is not None:
            response_so_far = self.cached.reused(row, started, response_so_far)
        return PartialRequest(started.request, response_so_far)

    def response(self, request_id: int, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a response from `first` on, and log-probs; none without a row."""
        (rows,) = np.nonzero(self.busy_B & (self.request_ids_B == request_id))
        b = int(rows[0]) if len(rows) else 0
        end = int(self.total_tokens_B[b]) if len(rows) else 0
        at = slice(int(self.prompt_tokens_B[b]) + first, end)
        return self.tokens_BL[b, at], self.logprobs_BL[b, at]

    def live(self) -> LiveSlots:
        """Return the rows that take part in rounds, as drafters see them.

        Arrays that a round cannot change stay the same objects until a request enters or leaves, so
        that a `RequestIndex` need not compare them.
        """
        (rows,) = np.nonzero(self.live_B)
        before = self._live
        if before is None or not np.array_equal(rows, before.rows_A):
            self._live = self.view(rows)
        else:
            self._live = dataclasses.replace(
                before,
                total_tokens_A=self.total_tokens_B[rows],
                remaining_tokens_A=(self.limit_B - self.emitted_B)[rows],
            )
        return self._live

    def view(self, rows: np.ndarray) -> LiveSlots:
        """Return these rows, which must be busy, as drafters see them."""
        return LiveSlots(
            rows_A=rows.astype(np.int32),
            request_ids_A=self.request_ids_B[rows],
            group_ids_A=self.group_ids_B[rows],
            prompt_tokens_A=self.prompt_tokens_B[rows],
            total_tokens_A=self.total_tokens_B[rows],
            remaining_tokens_A=(self.limit_B - self.emitted_B)[rows],
            tokens_BL=self.tokens_BL,
            processing_A3=self.processing_B3[rows],
        )

    def most_useful(self, wanted: Collection[int]) -> list[int]:
        """Return all rows, busy rows first, then rows that hold a `wanted` prompt."""
        pairs = zip(self.busy_B.tolist(), self.prompts, strict=True)
        rank = [(not busy, prompt not in wanted) for busy, prompt in pairs]
        return sorted(range(self.num_slots), key=rank.__getitem__)

    def _arrays(self) -> dict[str, np.ndarray]:
        return {name: x for name, x in vars(self).items() if isinstance(x, np.ndarray)}

    def keep(self, rows: Sequence[int]) -> None:
        """Move row `rows[i]` to row i; drop all other rows."""
        self._live = None
        self.num_slots = len(rows)
        self.started = [self.started[b] for b in rows]
        self.prompts = [self.prompts[b] for b in rows]
        for name, array in self._arrays().items():
            setattr(self, name, array[np.asarray(rows)])
        if self.cached is not None:
            self.cached.keep(rows)

    def widen(self, num_slots: int) -> None:
        """Append free rows, up to `num_slots`."""
        self._live = None
        more = num_slots - self.num_slots
        self.num_slots = num_slots
        self.started += [None] * more
        self.prompts += [None] * more
        for name, array in self._arrays().items():
            new = np.zeros((more, *array.shape[1:]), array.dtype)
            setattr(self, name, np.concatenate([array, new]))
        self.total_tokens_B[num_slots - more :] = 1
        if self.cached is not None:
            self.cached.widen(num_slots)

    def device_columns(self) -> np.ndarray:
        """Return int32 [B, columns], in the order of `rl.slot_memory.cache_ops.COLUMNS`."""
        cached_tokens_B = self.cached_tokens_B
        columns = (
            self.tokens_BL[np.arange(self.num_slots), cached_tokens_B],
            cached_tokens_B,
            self.emitted_B,
            self.limit_B,
            self.live_B,
            np.where(self.busy_B, noise_names(self.request_ids_B), 0),
            np.where(self.busy_B, self.seed_B, -1),
            np.where(self.busy_B, self.processing_B3[:, 1], 0),
            self.adapter_B % self.num_adapters,
        )
        return np.stack(columns, axis=1).astype(np.int32)

    def device_processing(self) -> np.ndarray:
        """Return temperature and top_p of each row, float32 [B, 2]; 1 for free rows."""
        return np.where(self.busy_B[:, None], self.processing_B3[:, ::2], np.float32(1))


PLAIN, ACCEPTED, BONUS, REUSED = map(int, Origin)


@numba.njit(cache=True, nogil=True)
def _append(  # type: ignore[no-untyped-def]
    tokens_BN,
    logprobs_BN,
    count_B,
    drafted_B,
    reused_B,
    tokens_BL,
    logprobs_BL,
    origins_BL,
    total_B,
):
    for b in range(len(total_B)):
        for n in range(count_B[b]):
            at = total_B[b] + n
            tokens_BL[b, at] = tokens_BN[b, n]
            logprobs_BL[b, at] = logprobs_BN[b, n]
            origin = BONUS if n == count_B[b] - 1 else ACCEPTED
            origin = origin if drafted_B[b] else PLAIN
            origins_BL[b, at] = REUSED if n < reused_B[b] else origin
        total_B[b] += count_B[b]
