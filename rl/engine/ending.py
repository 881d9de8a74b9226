"""Where responses end: end tokens, and strings that the text of a response completes.

A function of a response's tokens alone. The device knows the end tokens of all requests; the host
finds the rest as tokens are committed, and drops later ones. R = rules, S = states of an automaton
that reads the text's bytes, E = end tokens, B = slots, N = tokens of a fetch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import numba
import numpy as np

from models.token_bytes import TokenBytes
from spec.config import SamplingConfig

NO_TEXT = TokenBytes(np.empty(0, np.uint8), np.zeros(1, np.int64))
NO_TOKEN = -1
IDS_MULTIPLE = 8  # a few more end tokens, as an evaluation may have, compile nothing


def padded_ids(ids: Collection[int]) -> np.ndarray:
    """Return end tokens in an array of few possible lengths; int32 [E]."""
    ids = sorted(set(ids))
    room = max(1, -(-len(ids) // IDS_MULTIPLE)) * IDS_MULTIPLE
    return np.array([*ids, *[NO_TOKEN] * (room - len(ids))], np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class _Rules:
    """All rules, for compiled code: `next_SC` by byte; rule r starts in state `start_R[r]`.

    State 0 belongs to rules without strings.
    """

    ids_RE: np.ndarray
    start_R: np.ndarray
    next_SC: np.ndarray
    complete_S: np.ndarray

    def plus(self, ids: Collection[int], strings: Sequence[str]) -> _Rules:
        """Return these rules and one more."""
        new_E, (R, E), S = padded_ids(ids), self.ids_RE.shape, len(self.next_SC)
        ids_RE = np.full((R + 1, max(E, len(new_E))), NO_TOKEN, np.int32)
        ids_RE[:R, :E], ids_RE[R, : len(new_E)] = self.ids_RE, new_E
        next_SC, complete_S = _automaton([text.encode() for text in strings])
        start = S if strings else 0
        return _Rules(
            ids_RE,
            np.append(self.start_R, np.int32(start)),
            np.concatenate([self.next_SC, next_SC + np.int32(S)]) if strings else self.next_SC,
            np.concatenate([self.complete_S, complete_S]) if strings else self.complete_S,
        )


_NO_RULES = _Rules(
    np.empty((0, 1), np.int32),
    np.empty(0, np.int32),
    np.zeros((1, 256), np.int32),
    np.zeros(1, bool),
)


class Endings:
    """The rules of one rollout, one for each sampling that its requests have.

    `stop_ids` and the stops of `sampling`, the rollout's own, hold for all. Raises ValueError for
    stop strings without `words`, the text of the tokens.
    """

    def __init__(
        self,
        sampling: SamplingConfig,
        stop_ids: Collection[int] = (),
        words: TokenBytes | None = None,
    ) -> None:
        self.sampling = sampling
        self._stop_ids = {*stop_ids, *sampling.stop_ids}
        self._texts = words
        self._numbers: dict[SamplingConfig, int] = {}
        self._rules = _NO_RULES
        self.unknown_to_device = False  # whether there are ends that only the host finds
        self.rule(sampling)

    def rule(self, sampling: SamplingConfig | None) -> int:
        """Return the number of a sampling's rule; None is the rollout's own sampling."""
        sampling = sampling or self.sampling
        number = self._numbers.get(sampling)
        if number is None:
            strings = list(dict.fromkeys((*self.sampling.stop, *sampling.stop)))
            if strings and self._texts is None:
                raise ValueError(
                    f"Sampling.stop has {strings[0]!r}, and the text of tokens is not known: "
                    "expected a tokenizer with the rollout, for example "
                    "generate(…, tokenizer=tokenizer)"
                )
            number = self._numbers[sampling] = len(self._numbers)
            self._rules = self._rules.plus({*self._stop_ids, *sampling.stop_ids}, strings)
            self.unknown_to_device |= bool(strings or {*sampling.stop_ids} - self._stop_ids)
        return number

    def read(self, rule: int, tokens: np.ndarray) -> tuple[int, int, bool]:
        """Return (tokens up to the end, state after them, whether the response ends there)."""
        count_B, stopped_B = np.array([len(tokens)], np.int32), np.zeros(1, bool)
        state_B = self._rules.start_R[rule : rule + 1].copy()
        tokens_BN = np.ascontiguousarray(tokens, np.int32)[None]
        self.cut(tokens_BN, count_B, np.array([rule], np.int32), state_B, stopped_B)
        return int(count_B[0]), int(state_B[0]), bool(stopped_B[0])

    def cut(
        self,
        tokens_BN: np.ndarray,
        count_B: np.ndarray,
        rule_B: np.ndarray,
        state_B: np.ndarray,
        stopped_B: np.ndarray,
    ) -> None:
        """Lower `count_B` to the tokens up to each end, set `stopped_B`, advance `state_B`."""
        rules, texts = self._rules, self._texts or NO_TEXT
        _cut(
            tokens_BN,
            count_B,
            rule_B,
            state_B,
            stopped_B,
            rules.ids_RE,
            rules.next_SC,
            rules.complete_S,
            texts.bytes_N,
            texts.starts,
        )


def _automaton(strings: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Aho and Corasick's automaton: (next state [S, 256], if a string is complete [S])."""
    edges: list[dict[int, int]] = [{}]
    complete = [False]
    for text in strings:
        state = 0
        for byte in text:
            if byte not in edges[state]:
                edges.append({})
                complete.append(False)
                edges[state][byte] = len(edges) - 1
            state = edges[state][byte]
        complete[state] = True
    next_SC, complete_S = np.zeros((len(edges), 256), np.int32), np.array(complete)
    queue = [(0, 0)]  # (state, state of its longest proper suffix): shorter texts first
    for state, back in queue:
        if state:
            next_SC[state] = next_SC[back]
            complete_S[state] |= complete_S[back]
        for byte, child in edges[state].items():
            queue.append((child, int(next_SC[back, byte]) if state else 0))
            next_SC[state, byte] = child
    return next_SC, complete_S


@numba.njit(cache=True, nogil=True)
def _cut(  # type: ignore[no-untyped-def]
    tokens_BN, count_B, rule_B, state_B, stopped_B, ids_RE, next_SC, complete_S, bytes_N, starts
):
    for b in range(len(count_B)):
        state, rule = state_B[b], rule_B[b]
        for n in range(count_B[b]):
            token, ends = tokens_BN[b, n], False
            if state != 0 and token + 1 < len(starts):
                for i in range(starts[token], starts[token + 1]):
                    state = next_SC[state, bytes_N[i]]
                    ends = ends or complete_S[state]
            for e in range(ids_RE.shape[1]):
                ends = ends or token == ids_RE[rule, e]
            if ends:
                count_B[b], stopped_B[b] = n + 1, True
                break
        state_B[b] = state
