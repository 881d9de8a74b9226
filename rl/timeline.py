"""What a rollout phase did, round by round: plain records for metrics, pictures and pricing."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class RoundRecord:
    """One device call: its seconds on the engine's clock, its bucket, and who got what.

    Up to `ready_s` prompts were computed and rows moved, up to `drafted_s` guesses
    were made, up to `ended_s` they were verified and committed. `num_nodes` 1 is plain
    decoding, of as many rounds as the most that a request emitted. A = live requests.
    """

    began_s: float
    ready_s: float
    drafted_s: float
    ended_s: float
    num_slots: int
    num_nodes: int
    num_positions: int
    request_ids_A: np.ndarray
    cached_tokens_A: np.ndarray
    emitted_A: np.ndarray


@dataclasses.dataclass
class EngineStats:
    """Counts of one phase; `rounds[(slots, nodes, positions)]` prices it on other hardware."""

    fetches: int = 0
    tokens: int = 0
    prefilled_tokens: int = 0
    drafted_nodes: int = 0
    accepted_tokens: int = 0
    rounds: collections.Counter[tuple[int, int, int]] = dataclasses.field(
        default_factory=collections.Counter
    )
    timeline: list[RoundRecord] = dataclasses.field(default_factory=list)
