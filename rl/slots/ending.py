"""Where responses end: end tokens, and strings that the text of a response completes.

The end of a response depends only on its tokens. The device knows the end tokens that all requests
share; the host finds other stops as tokens are committed, and drops later tokens. R = rules,
S = states of an automaton that reads the bytes of a text, E = end tokens, B = slots, N = tokens of
a fetch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Self

import numba
import numpy as np

from reprise.models.text.token_bytes import TokenBytes
from reprise.spec.config import SamplingConfig

NO_TEXT = TokenBytes(np.empty(0, np.uint8), np.zeros(1, np.int64))
NO_TOKEN = -1
IDS_MULTIPLE = 8  # so that a few more end tokens, as in an evaluation, compile nothing


def padded_ids(ids: Collection[int]) -> np.ndarray:
    """Return end tokens, padded so that few array lengths occur; int32 [E]."""
    ids = sorted(set(ids))
    room = max(1, -(-len(ids) // IDS_MULTIPLE)) * IDS_MULTIPLE
    return np.array([*ids, *[NO_TOKEN] * (room - len(ids))], np.int32)


Automaton = tuple[np.ndarray, np.ndarray]  # next state by byte, whether a string is complete
NO_STATES = np.zeros((0, 256), np.int16), np.zeros(0, bool)


@dataclasses.dataclass(frozen=True)
class _Ends:
    """The end tokens and the strings of a rule."""

    ids: frozenset[int]
    strings: tuple[str, ...]


@dataclasses.dataclass(eq=False)
class _Rule:
    """A rule, and the number of running requests that use it."""

    ends: _Ends
    num_requests: int = 0

    def __post_init__(self) -> None:
        strings = [text.encode() for text in self.ends.strings]
        self.automaton = _automaton(strings) if strings else None


@dataclasses.dataclass(frozen=True, eq=False)
class _Tables:
    """All rules as arrays, for compiled code.

    `next_SC` gives the next state by byte. The states of rule r start at `first_R[r]` and are
    counted from there; `first_R` is −1 for rules without strings.
    """

    ids_RE: np.ndarray
    first_R: np.ndarray
    next_SC: np.ndarray
    complete_S: np.ndarray

    @classmethod
    def of(cls, rules: Sequence[_Rule | None]) -> Self:
        ids = [padded_ids(() if rule is None else rule.ends.ids) for rule in rules]
        ids_RE = np.full((len(rules), max(map(len, ids))), NO_TOKEN, np.int32)
        first_R = np.full(len(rules), -1, np.int32)
        parts = [NO_STATES]
        num_states = 0
        for r, rule in enumerate(rules):
            ids_RE[r, : len(ids[r])] = ids[r]
            if rule is not None and rule.automaton is not None:
                parts.append(rule.automaton)
                first_R[r], num_states = num_states, num_states + len(rule.automaton[0])
        next_SC, complete_S = (np.concatenate(x) for x in zip(*parts, strict=True))
        return cls(ids_RE, first_R, next_SC, complete_S)


class Endings:
    """The rules of one rollout: a rule for each set of stops that its running requests have.

    `stop_ids` and the stops of `sampling`, the sampling of the rollout, apply to all requests and
    are rule 0. Raises ValueError for stop strings without `words`, the text of the tokens.
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
        self._rules = list[_Rule | None]()
        self._numbers: dict[_Ends, int] = {}
        self.enter(sampling)

    def enter(self, sampling: SamplingConfig | None) -> int:
        """Register a request; return the number of its rule, valid until `leave`.

        None is the sampling of the rollout. Raises ValueError as `check` does.
        """
        ends = self.check(sampling)
        number = self._numbers.get(ends)
        if number is None:
            number = self._add(ends)
        rule = self._rules[number]
        assert rule is not None
        rule.num_requests += 1
        return number

    def leave(self, number: int) -> None:
        """Record that a request with this rule no longer runs."""
        rule = self._rules[number]
        assert rule is not None and rule.num_requests > 0
        rule.num_requests -= 1

    def check(self, sampling: SamplingConfig | None) -> _Ends:
        """Return the stops of a request. Raises ValueError for strings without token texts."""
        sampling = sampling or self.sampling
        strings = tuple(dict.fromkeys((*self.sampling.stop, *sampling.stop)))
        if strings and self._texts is None:
            raise ValueError(
                f"Sampling.stop has {strings[0]!r}, and the text of tokens is not known: "
                "expected a tokenizer with the rollout, for example "
                "generate(…, tokenizer=tokenizer)"
            )
        return _Ends(frozenset((*self._stop_ids, *sampling.stop_ids)), strings)

    @property
    def num_bytes(self) -> int:
        """The size of the tables, in bytes."""
        return sum(x.nbytes for x in vars(self._tables).values())

    def _add(self, ends: _Ends) -> int:
        """Remove rules that no request uses, then add a rule in the first free place."""
        for number, rule in enumerate(self._rules):
            if rule is not None and not rule.num_requests:
                del self._numbers[rule.ends]
                self._rules[number] = None
        if None not in self._rules:
            self._rules.append(None)
        number = self._numbers[ends] = self._rules.index(None)
        self._rules[number] = _Rule(ends)
        self._tables = _Tables.of(self._rules)
        # whether only the host finds some of the stops
        self.unknown_to_device = any(e.strings or e.ids - self._stop_ids for e in self._numbers)
        return number

    def read(self, rule: int, tokens: np.ndarray) -> tuple[int, int, bool]:
        """Return (tokens up to the end, state after these tokens, whether the response stops)."""
        count_B = np.array([len(tokens)], np.int32)
        stopped_B = np.zeros(1, bool)
        state_B = np.zeros(1, np.int32)
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
        """Lower `count_B` to the tokens up to each end; set `stopped_B` and advance `state_B`."""
        tables = self._tables
        texts = self._texts or NO_TEXT
        _cut(
            tokens_BN,
            count_B,
            rule_B,
            state_B,
            stopped_B,
            tables.ids_RE,
            tables.first_R,
            tables.next_SC,
            tables.complete_S,
            texts.bytes_N,
            texts.starts,
        )


def _automaton(strings: Sequence[bytes]) -> Automaton:
    """Return an Aho-Corasick automaton: next states, int16 [S, 256]; complete states, bool [S]."""
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
    next_SC = np.zeros((len(edges), 256), np.int16)
    complete_S = np.array(complete)
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
    tokens_BN,
    count_B,
    rule_B,
    state_B,
    stopped_B,
    ids_RE,
    first_R,
    next_SC,
    complete_S,
    bytes_N,
    starts,
):
    for b in range(len(count_B)):
        if not count_B[b]:  # its rule may have been removed
            continue
        state = state_B[b]
        rule = rule_B[b]
        first = first_R[rule]
        for n in range(count_B[b]):
            token = tokens_BN[b, n]
            ends = False
            if first >= 0 and token + 1 < len(starts):
                for i in range(starts[token], starts[token + 1]):
                    state = next_SC[first + state, bytes_N[i]]
                    ends = ends or complete_S[first + state]
            for e in range(ids_RE.shape[1]):
                ends = ends or token == ids_RE[rule, e]
            if ends:
                count_B[b] = n + 1
                stopped_B[b] = True
                break
        state_B[b] = state
