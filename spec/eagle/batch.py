"""Training data of drafters: sequences with the policy's hidden states, and batches of them."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class HiddenStates:
    """One prompt and response, with the policy's hidden states at all tokens but the last.

    `tokens_T` is int32, `hidden_TW` [T − 1, W] has the policy's dtype; W is
    `EagleConfig.hidden_width`.
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
        """Return whether a request's sequence of this length is worth copying from the device."""
        ...

    def add(self, sequence: HiddenStates) -> None: ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DrafterBatch:
    """Rows of sequences, one after another; all [B, T], states [B, T, W].

    `sequence_BT` numbers the sequences of a row from 1 (0: padding), `positions_BT` the tokens of
    a sequence from 0. Entry t (spec.eagle.model) spans the columns t … t + 2; `counts_BT` marks the
    entries whose loss counts: all three columns belong to one sequence, and x_{t+2} is a response
    token. The states of a sequence's last column are not known, and are zero.
    """

    tokens_BT: Any
    hidden_BTW: Any
    positions_BT: Any
    sequence_BT: Any
    counts_BT: Any
