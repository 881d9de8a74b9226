"""Training data of drafters: sequences with the policy's hidden states, packed into batches.

A sequence longer than a row is cut into windows that overlap by two tokens: an entry spans three
columns, so each response token counts once. Windows keep the rotary positions of the sequence, but
their entries attend within the window. Windows without an entry that counts are left out.
Source: TLT, section 4.2 (Sequence Packing).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class HiddenStates:
    """One prompt and response, with the policy's hidden states at all tokens but the last.

    `hidden_TW` [T − 1, W] has the policy's dtype; W is `EagleConfig.hidden_width`.
    """

    tokens_T: np.ndarray
    prompt_tokens: int
    hidden_TW: np.ndarray
    policy_version: int

    @property
    def num_bytes(self) -> int:
        return self.tokens_T.nbytes + self.hidden_TW.nbytes


class HiddenStateSink(Protocol):
    """A receiver of the sequences of rollouts. Any thread may call it."""

    def wants(self, request_id: int, num_tokens: int) -> bool:
        """Return whether a request's sequence of this length is worth a copy from the device."""
        ...

    def add(self, sequence: HiddenStates) -> None: ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DrafterBatch:
    """Rows of sequences, one after another; all [B, T], states [B, T, W].

    `sequence_BT` numbers the sequences of a row from 1 (0: padding), `positions_BT` the tokens of a
    sequence from 0. Entry t (spec.eagle.model) spans the columns t … t + 2; `counts_BT` marks
    entries whose loss counts: within one sequence, and x_{t+2} is a response token. The states of a
    sequence's last column are zero.
    """

    tokens_BT: Any
    hidden_BTW: Any
    positions_BT: Any
    sequence_BT: Any
    counts_BT: Any


OVERLAP_TOKENS = 2  # of a window with the next: entry t spans the columns t … t + 2


@dataclasses.dataclass(frozen=True)
class _Window:
    """Tokens `start` … `stop` − 1 of sequence `index`; a whole sequence is one window."""

    index: int
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


def pack(
    sequences: Sequence[HiddenStates],
    num_rows: int,
    row_tokens: int,
    max_batches: int | None = None,
) -> list[DrafterBatch]:
    """Pack sequences into few rows: the longest first, each into the first row with room.

    Returns numpy batches [num_rows, row_tokens] with each sequence once. Rows are dealt to the
    batches in turn, so that each has long and short sequences. `max_batches` leaves out the
    emptiest rows beyond them. Raises ValueError if windows would not advance.
    """
    windows = _windows(sequences, row_tokens)
    windows.sort(key=lambda w: -w.num_tokens)
    free = np.full(len(windows), row_tokens)
    rows: list[list[_Window]] = []
    for window in windows:
        r = int(np.argmax(free >= window.num_tokens))  # a row that is empty has room
        if r == len(rows):
            rows.append([])
        rows[r].append(window)
        free[r] -= window.num_tokens
    if max_batches is not None:
        fullest = np.argsort(free[: len(rows)], kind="stable")[: max_batches * num_rows]
        rows = [rows[r] for r in sorted(fullest.tolist())]
    return _batches(sequences, rows, num_rows, row_tokens)


def _windows(sequences: Sequence[HiddenStates], row_tokens: int) -> list[_Window]:
    if row_tokens <= OVERLAP_TOKENS:
        raise ValueError(
            f"expected row_tokens above {OVERLAP_TOKENS}, since a prediction takes three tokens, "
            f"got {row_tokens}"
        )
    windows = []
    for index, sequence in enumerate(sequences):
        num_tokens = len(sequence.tokens_T)
        for start in range(0, num_tokens - OVERLAP_TOKENS, row_tokens - OVERLAP_TOKENS):
            stop = min(start + row_tokens, num_tokens)
            if stop > sequence.prompt_tokens:
                windows.append(_Window(index, start, stop))
    return windows


def _batches(
    sequences: Sequence[HiddenStates], rows: list[list[_Window]], num_rows: int, row_tokens: int
) -> list[DrafterBatch]:
    num_batches = -(-len(rows) // num_rows)
    return [
        _batch(sequences, rows[i::num_batches], num_rows, row_tokens) for i in range(num_batches)
    ]


def _batch(
    sequences: Sequence[HiddenStates], rows: list[list[_Window]], num_rows: int, row_tokens: int
) -> DrafterBatch:
    shape, states = (num_rows, row_tokens), sequences[0].hidden_TW
    tokens_BT, positions_BT, sequence_BT = (np.zeros(shape, np.int32) for _ in range(3))
    hidden_BTW = np.zeros((*shape, states.shape[1]), states.dtype)
    counts_BT = np.zeros(shape, np.bool_)
    for b, row in enumerate(rows):
        end = 0
        for number, window in enumerate(row, 1):
            source, begin, end = sequences[window.index], end, end + window.num_tokens
            tokens_BT[b, begin:end] = source.tokens_T[window.start : window.stop]
            # the last column's states are not used, even if the window is cut and they are known
            hidden_BTW[b, begin : end - 1] = source.hidden_TW[window.start : window.stop - 1]
            positions_BT[b, begin:end] = np.arange(window.start, window.stop)
            sequence_BT[b, begin:end] = number
            # entry t, whose token x_{t+2} is a response token of this window
            first = max(window.start, source.prompt_tokens - OVERLAP_TOKENS)
            counts_BT[b, begin + first - window.start : end - OVERLAP_TOKENS] = True
    return DrafterBatch(tokens_BT, hidden_BTW, positions_BT, sequence_BT, counts_BT)
