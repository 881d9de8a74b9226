"""The distributions of drawn responses, for data that return with only the log-probs.

Tinker's `Datum` has log-probs, but not the temperature, top-k or top-p of their distribution; the
ratio of a loss compares two policies only if both are processed in the same way.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from reprise.spec.config import SamplingConfig

MAX_BYTES = 2**26  # of remembered responses: up to 8 million tokens
ENTRY_BYTES = 500  # of the Python objects of a response

_Key = tuple[int, bytes, int, float]  # length and digest of a prompt; the first token, its log-prob
Matches = list[tuple[slice, SamplingConfig]]


@dataclasses.dataclass(frozen=True, eq=False)
class _Response:
    tokens: np.ndarray  # int32 [n]
    logprobs: np.ndarray  # float32 [n]
    sampling: SamplingConfig

    @property
    def num_bytes(self) -> int:
        return self.tokens.nbytes + self.logprobs.nbytes + ENTRY_BYTES

    @property
    def is_processed(self) -> bool:
        """False for the plain distribution: temperature 1 without top-k or top-p, or greedy.

        Greedy responses have the log-probs of the plain distribution.
        """
        s = self.sampling
        return s.temperature > 0 and (s.temperature != 1 or s.top_k > 0 or s.top_p < 1)

    def num_same(self, targets: np.ndarray, logprobs: np.ndarray) -> int:
        """Return the number of leading places with the same tokens and log-probs."""
        n = min(len(self.tokens), len(targets))
        differ = (self.tokens[:n] != targets[:n]) | (self.logprobs[:n] != logprobs[:n])
        return int(np.argmax(differ)) if differ.any() else n


class DrawnResponses:
    """The newest responses of a policy, up to `max_bytes`, with their sampling."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._responses: dict[_Key, list[_Response]] = {}
        self._order = collections.deque[_Key]()  # of all responses, the oldest first
        self._lengths = collections.Counter[int]()  # of prompts
        self._num_processed = 0

    def note(self, prompt: Any, tokens: Any, logprobs: Any, sampling: SamplingConfig) -> None:
        """Remember a response and its log-probs; the oldest responses make room.

        A response of the plain distribution, the default of a datum, is kept only while processed
        responses are.
        """
        response = _Response(np.array(tokens, np.int32), np.array(logprobs, np.float32), sampling)
        if not (response.is_processed or self._num_processed):
            return
        digest = hashlib.blake2b(np.asarray(prompt, np.int32).tobytes(), digest_size=16).digest()
        key = len(prompt), digest, int(response.tokens[0]), float(response.logprobs[0])
        self._responses.setdefault(key, []).append(response)
        self._order.append(key)
        self._count(key, response, 1)
        while self.num_bytes > self._max_bytes:
            self._drop()

    def _drop(self) -> None:
        key = self._order.popleft()
        responses = self._responses[key]
        self._count(key, responses.pop(0), -1)
        if not responses:
            del self._responses[key]

    def _count(self, key: _Key, response: _Response, change: int) -> None:
        self.num_bytes += change * response.num_bytes
        self._num_processed += change * response.is_processed
        self._lengths[key[0]] += change
        if not self._lengths[key[0]]:
            del self._lengths[key[0]]

    def find(self, tokens: Any, targets: Any, logprobs: Any) -> Matches:
        """Return the places of a datum that hold responses with these log-probs, and the sampling.

        A datum starts with the prompt of a response, and holds the response up to the first token
        or log-prob that differs. Nothing is looked up while all responses have the plain
        distribution, which is the default of a datum.
        """
        if not self._num_processed:
            return []
        ids = np.asarray(tokens, np.int32)
        drawn = np.asarray(targets, np.int32)
        values = np.asarray(logprobs, np.float32)
        digest = hashlib.blake2b(digest_size=16)
        matches: Matches = []
        at = 0
        for length in sorted(n for n in self._lengths if n <= len(ids)):
            digest.update(ids[at:length].tobytes())
            at = length
            start = length - 1
            key = length, digest.digest(), int(drawn[start]), float(values[start])
            if responses := self._responses.get(key):
                num_places, sampling = _best_match(responses, drawn[start:], values[start:])
                matches.append((slice(start, start + num_places), sampling))
        return matches

    def note_scored(self, data: Sequence[Any], logprobs: Sequence[np.ndarray]) -> None:
        """Remember log-probs that a policy computed for data, with the distributions of `find`."""
        if not self._num_processed:
            return
        for datum, values in zip(data, logprobs, strict=True):
            if datum.sampling is not None or datum.logprobs is None:
                continue
            for part, sampling in self.find(datum.tokens, datum.targets, datum.logprobs):
                prompt = datum.tokens[: part.start + 1]
                self.note(prompt, datum.targets[part], values[part], sampling)


def _best_match(
    responses: Sequence[_Response], targets: np.ndarray, logprobs: np.ndarray
) -> tuple[int, SamplingConfig]:
    """Return the number of places of the response that agrees longest, and its sampling.

    Ties go to a response of the plain distribution: log-probs that are equal in both are 0.
    """

    def rank(response: _Response) -> tuple[int, bool]:
        return response.num_same(targets, logprobs), not response.is_processed

    best = max(responses, key=rank)
    return best.num_same(targets, logprobs), best.sampling
