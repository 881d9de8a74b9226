"""The requests of a drafting worker: their tokens, and draft tokens that it assumes.

B = rows, one per request, L = tokens of a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from spec.decoupled.messages import Commit, DraftPlan
from spec.drafter import LiveSlots


@dataclasses.dataclass(eq=False)
class DraftedRequest:
    """A request: its row, its `committed` tokens, and the assumed ones after them.

    `prob` are the estimated probabilities of the assumed ones, each with those before it.
    """

    row: int
    prompt_tokens: int
    committed: int = 0
    remaining: int = 0
    round: int = 0
    plan: DraftPlan = DraftPlan(1)  # noqa: RUF009  an immutable tuple
    chain: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    processing: tuple[float, float, float] = (1.0, 0.0, 1.0)
    prob: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.float32))
    wants: bool = False  # a draft: a commit has come since no more could be drafted

    @property
    def ahead(self) -> int:
        """Draft tokens that are assumed to be accepted."""
        return len(self.prob)


class RequestTexts:
    """The requests of one drafting worker, in a table of rows as engines have one."""

    def __init__(self, num_rows: int, longest_tokens: int) -> None:
        self._tokens_BL = np.zeros((num_rows, longest_tokens + 1), np.int32)
        self._free = list(range(num_rows))[::-1]
        self.requests: dict[int, DraftedRequest] = {}

    def commit(self, commit: Commit) -> tuple[int, int] | None:
        """Add a request's tokens; drop the assumed ones from the first difference on.

        Returns how many assumed tokens were right, and how many were decided; None if the commit
        does not follow from the known tokens, or there is no row for it, or none long enough.
        """
        request = self.requests.get(commit.request_id)
        if commit.total_tokens > self._tokens_BL.shape[1]:
            return None
        if request is None:
            if commit.first or not self._free:
                return None
            request = DraftedRequest(self._free.pop(), commit.prompt_tokens)
            self.requests[commit.request_id] = request
        elif commit.first > request.committed:
            return None
        elif commit.total_tokens <= request.committed:
            return None  # a repeated commit
        row_L = self._tokens_BL[request.row]
        first, total = commit.first, commit.total_tokens
        assumed = request.committed + request.ahead
        new_T = commit.tokens[request.committed - first :]
        known = min(assumed, total) - request.committed
        differs = np.flatnonzero(row_L[request.committed :][:known] != new_T[:known])
        right = int(differs[0]) if len(differs) else known
        whole = right == known
        row_L[first:total] = commit.tokens
        above = request.prob[total - request.committed - 1] if whole and total < assumed else 1.0
        left = request.prob[total - request.committed :] if whole else request.prob[:0]
        request.prob = (left / max(above, 1e-12)).astype(np.float32)
        request.committed, request.remaining = total, commit.remaining_tokens
        request.round, request.plan, request.chain = commit.round, commit.plan, commit.chain
        request.processing, request.wants = commit.processing, True
        return right, min(right + 1, known)

    def assume(self, request: DraftedRequest, tokens_N: np.ndarray, prob_N: np.ndarray) -> None:
        """Assume more draft tokens of a request, with the probabilities of a chain."""
        at = request.committed + request.ahead
        self._tokens_BL[request.row, at : at + len(tokens_N)] = tokens_N
        above = request.prob[-1] if request.ahead else 1.0
        request.prob = np.concatenate([request.prob, above * prob_N]).astype(np.float32)

    def assumed(self, request: DraftedRequest) -> np.ndarray:
        """Return the assumed draft tokens of a request."""
        row_L = self._tokens_BL[request.row]
        return row_L[request.committed : request.committed + request.ahead].copy()

    def close(self, request_ids: Sequence[int]) -> LiveSlots:
        """Free the rows of requests that have left; return them as they were."""
        gone = [r for r in request_ids if r in self.requests]
        live = self.live(gone)
        self._free += [self.requests.pop(r).row for r in gone]
        return live

    def live(self, request_ids: Sequence[int]) -> LiveSlots:
        """Return these requests as a drafter reads them, with their assumed tokens."""
        rows = [self.requests[r] for r in request_ids]
        total_A = [r.committed + r.ahead for r in rows]
        left_A = [r.remaining - r.ahead for r in rows]
        ids_A = np.array(request_ids, np.int64)
        return LiveSlots(
            rows_A=np.array([r.row for r in rows], np.int64),
            request_ids_A=ids_A,
            group_ids_A=ids_A,
            prompt_tokens_A=np.array([r.prompt_tokens for r in rows], np.int32),
            total_tokens_A=np.array(total_A, np.int32),
            remaining_tokens_A=np.array(left_A, np.int32),
            tokens_BL=self._tokens_BL,
            processing_A3=np.array([r.processing for r in rows], np.float32).reshape(-1, 3),
        )
