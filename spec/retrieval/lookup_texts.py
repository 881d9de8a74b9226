"""The texts that the device looks draft tokens up in: what a request's prompt was answered with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from spec.drafter import LiveSlots
from spec.retrieval.device_lookup import CONTEXT_TOKENS, NO_TOKEN
from spec.tails import tails
from spec.tree import PADDING

NUM_TOKENS = 1024  # of a text


class LookupTexts:
    """A request's own last response, last epoch's to its prompt (the best first), and siblings'.

    `last` is by request id, `past` by group; siblings may have ended or not. Each piece starts
    with its prompt's tail: so first tokens have a context too. A text that does not fit loses
    its last pieces. What is expected next is the own last response at the same place.
    """

    def __init__(
        self,
        past: Mapping[int, Sequence[np.ndarray]] | None = None,
        *,
        last: Mapping[int, np.ndarray] | None = None,
        siblings: bool = True,
        num_tokens: int = NUM_TOKENS,
    ) -> None:
        self.num_tokens = num_tokens
        self._past, self._last, self._siblings = past or {}, last or {}, siblings
        self._settled: dict[int, np.ndarray] = {}  # of a group: what grows no more

    def fill(self, live: LiveSlots, num_slots: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`spec.retrieval.device_lookup.Texts` of all slots as host arrays; L = `num_tokens`."""
        L = self.num_tokens
        text_BL, next_B = (
            np.full((num_slots, L), PADDING, np.int32),
            np.full(num_slots, L, np.int32),
        )
        groups: dict[int, list[int]] = {}
        for a, group in enumerate(live.group_ids_A.tolist()):
            groups.setdefault(group, []).append(a)
        for group, members in groups.items():
            shared = self._shared(group, live, members)
            for a in members:
                row, last = live.rows_A[a], self._last.get(int(live.request_ids_A[a]))
                start = 0
                if last is not None:
                    tail = live.prompt(a)[-CONTEXT_TOKENS:]
                    own = np.concatenate([tail, last, [PADDING]])[:L]
                    text_BL[row, : len(own)], start = own, len(own)
                    expected = len(tail) + int(live.total_tokens_A[a] - live.prompt_tokens_A[a])
                    next_B[row] = expected if expected < len(own) else L
                text_BL[row, start : start + len(shared)] = shared[: L - start]
        return text_BL, contexts(live, num_slots), next_B

    def _shared(self, group: int, live: LiveSlots, members: Sequence[int]) -> np.ndarray:
        """What all live requests of a group look up; whole pieces of siblings."""
        pieces = [self._of(group, live, members[0])[: self.num_tokens]]
        size = len(pieces[0])
        for a in members if self._siblings else ():
            piece = _piece(live, a)
            size += len(piece)
            if size > self.num_tokens:
                break
            pieces.append(piece)
        return np.concatenate(pieces)

    def finished(self, live: LiveSlots) -> None:
        """These responses have ended: siblings go on drafting from them."""
        for a, group in enumerate(live.group_ids_A.tolist()):
            if self._siblings:
                settled = self._of(group, live, a)
                self._settled[group] = np.concatenate([settled, _piece(live, a)])

    def _of(self, group: int, live: LiveSlots, a: int) -> np.ndarray:
        if group not in self._settled:
            tail = live.prompt(a)[-CONTEXT_TOKENS:]
            pieces = [np.concatenate([tail, r, [PADDING]]) for r in self._past.get(group, ())]
            self._settled[group] = np.concatenate([np.empty(0, np.int32), *pieces])
        return self._settled[group]


def _piece(live: LiveSlots, a: int) -> np.ndarray:
    start = max(0, int(live.prompt_tokens_A[a]) - CONTEXT_TOKENS)
    end = int(live.total_tokens_A[a])
    piece = np.empty(end - start + 1, np.int32)
    piece[:-1], piece[-1] = live.tokens_BL[live.rows_A[a], start:end], PADDING
    return piece


def contexts(live: LiveSlots, num_slots: int) -> np.ndarray:
    """The last CONTEXT_TOKENS tokens of each slot's request, `NO_TOKEN` before them; [B, K]."""
    context_BK = np.full((num_slots, CONTEXT_TOKENS), NO_TOKEN, np.int32)
    mine = live.tokens_BL[live.rows_A], live.total_tokens_A
    context_BK[live.rows_A] = tails(*mine, CONTEXT_TOKENS, NO_TOKEN)
    return context_BK
