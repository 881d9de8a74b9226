"""Requests in, trajectories out: the plain host-side records of a rollout.

Invariant: a trajectory is a function of (policy, step key, request, sampling)
alone. Nothing here depends on a slot, a batch or a worker.
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np


class Origin(enum.IntEnum):
    """How a response token came to be."""

    PLAIN = 0  # drawn at the root of a tree that held no draft
    ACCEPTED = 1  # a draft that equalled the draw
    BONUS = 2  # the draw at the last accepted node of a tree with drafts
    REUSED = 3  # taken over from an earlier rollout


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end token was drawn; it is the last response id
    LENGTH = "length"  # max_new_tokens reached: truncated


@dataclasses.dataclass(frozen=True)
class Request:
    """One response to be generated.

    `request_id` names the noise: the same id under the same step key draws the
    same uniforms wherever and whenever it runs. Ids are unique within a call.
    `max_new_tokens` of None means the sampling's own limit.
    """

    request_id: int
    prompt_ids: tuple[int, ...]
    group_id: int = 0
    sample_index: int = 0
    max_new_tokens: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Trajectory:
    """One finished response, with everything that training needs of it.

    `response_ids` int32 [n] include the end token; `logprobs` float32 [n] are
    those of the processed distribution (after temperature, top-k and top-p) in
    the pass that emitted the token; `policy_versions` int32 [n]; `origins`
    uint8 [n] hold `Origin` values.
    """

    request_id: int
    group_id: int
    sample_index: int
    prompt_ids: np.ndarray
    response_ids: np.ndarray
    logprobs: np.ndarray
    policy_versions: np.ndarray
    origins: np.ndarray
    finish_reason: FinishReason
    reward: float | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.response_ids)

    @property
    def truncated(self) -> bool:
        return self.finish_reason is FinishReason.LENGTH
