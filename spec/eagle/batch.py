"""What drafters learn from: sequences with the policy's hidden states, packed into batches."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class HiddenStates:
    """One prompt and response, and the policy's hidden states at all of its tokens but the last.

    `tokens_T` int32, `hidden_TW` [T − 1, W] in the policy's dtype (spec.eagle.model says what W
    holds).
    """

    tokens_T: np.ndarray
    prompt_tokens: int
    hidden_TW: np.ndarray
    policy_version: int

    @property
    def num_bytes(self) -> int:
        return self.tokens_T.nbytes + self.hidden_TW.nbytes


class HiddenStateSink(Protocol):
    """Who takes sequences from rollouts. Any thread may call it."""

    def wants(self, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens is of use: taking it from a device costs time."""
        ...

    def add(self, sequence: HiddenStates) -> None: ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DrafterBatch:
    """Rows of sequences, one after another; [B, T] each, states [B, T, W].

    `sequence_BT` numbers the sequences of a row from 1 (0: padding), `positions_BT` the tokens of
    a sequence from 0. Entry t (spec.eagle.model) is of the columns t … t + 2; `counts_BT` says for
    which t its loss counts: all three columns are of one sequence, and x_{t+2} is a response token.
    A sequence's last column has states of zero: they are not known.
    """

    tokens_BT: Any
    hidden_BTW: Any
    positions_BT: Any
    sequence_BT: Any
    counts_BT: Any
