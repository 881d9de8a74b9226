"""The host's truth about a worker's slots: plain records, no devices.

A row outlives its request: until another prompt is written over it, it holds the
keys and values of its prompt, from which siblings may copy.
"""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

from rl.trajectory import FinishReason, Origin, Request, Trajectory
from spec.tree import SlotView


@dataclasses.dataclass
class Row:
    """The host's record of one slot. `length` counts its live cache positions."""

    request: Request | None = None
    prompt: tuple[int, ...] | None = None  # whose cache the row holds, also after its request
    last_token: int = 0
    length: int = 0
    limit: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    origins: list[int] = dataclasses.field(default_factory=list)

    def view(self) -> SlotView:
        assert self.request is not None
        r = self.request
        return SlotView(
            r.request_id,
            r.group_id,
            r.sample_index,
            r.prompt_ids,
            self.tokens,
            self.limit - len(self.tokens),
        )

    def commit(self, tokens: list[int], logprobs: list[float], drafted: bool) -> None:
        """Append what a round emitted; with drafts in its tree, all but the last were accepted."""
        self.tokens += tokens
        self.logprobs += logprobs
        self.last_token = tokens[-1]
        self.length += len(tokens)
        if drafted:
            self.origins += [Origin.ACCEPTED] * (len(tokens) - 1) + [Origin.BONUS]
        else:
            self.origins += [Origin.PLAIN] * len(tokens)

    def finish_reason(self, stop_ids: frozenset[int]) -> FinishReason | None:
        """Why the request has ended, None while it has not."""
        if self.tokens and self.last_token in stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.limit else None

    def retire(self, reason: FinishReason, policy_version: int) -> Trajectory:
        """The request's trajectory; the row is free, and still holds its prompt."""
        request, self.request = self.request, None
        assert request is not None
        return Trajectory(
            request_id=request.request_id,
            group_id=request.group_id,
            sample_index=request.sample_index,
            prompt_ids=np.asarray(request.prompt_ids, np.int32),
            response_ids=np.asarray(self.tokens, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            policy_versions=np.full(len(self.tokens), policy_version, np.int32),
            origins=np.asarray(self.origins, np.uint8),
            finish_reason=reason,
        )


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
