"""Two methods to draft ahead of a verifying worker, in steps that turn commits into blocks.

    free_running   a chain continues while its window is verified; rolled back if wrong (SpecActor)
    enumeration    one round ahead, for every number of accepted tokens and likely next tokens

A step is one pass over all requests that want drafts. The caller decides when to step. B = rows,
one per request, L = tokens of a row.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence

import numpy as np

from reprise.spec.decoupled.messages import Block, Commit
from reprise.spec.draft_model.enumeration import AheadDraftModel, EnumeratingDraftModel
from reprise.spec.drafter import PRIOR_DRAFTS, PRIOR_PROB, LiveSlots

SECOND = 0.5  # probability of a second choice if the first was wrong
DECAY = 0.999  # of the counts of draft tokens, per commit


@dataclasses.dataclass(eq=False)
class DraftedRequest:
    """A request: its row, its last commit, and the probabilities `prob` of tokens assumed since."""

    row: int
    commit: Commit
    prob: np.ndarray
    wants: bool = True  # a draft: set by a commit, cleared if no more can be drafted

    @property
    def committed(self) -> int:
        return self.commit.total_tokens

    @property
    def num_assumed(self) -> int:
        return len(self.prob)


class RequestTexts:
    """The requests of one drafting worker, in a table of rows like the table of an engine."""

    def __init__(self, num_rows: int, max_total_tokens: int) -> None:
        self._tokens_BL = np.zeros((num_rows, max_total_tokens + 1), np.int32)
        self._free = list(range(num_rows))[::-1]
        self.requests: dict[int, DraftedRequest] = {}

    def commit(self, commit: Commit) -> tuple[int, int] | None:
        """Add the tokens of a request; drop assumed tokens from the first difference on.

        Returns how many assumed tokens were right, and how many were decided; None if the commit
        does not follow from the known tokens, or no row is free and long enough.
        """
        request = self.requests.get(commit.request_id)
        total = commit.total_tokens
        before = 0 if request is None else request.committed
        if not commit.first <= before < total <= self._tokens_BL.shape[1]:
            return None
        if request is None:
            if not self._free:
                return None
            request = DraftedRequest(self._free.pop(), commit, np.zeros(0, np.float32))
            self.requests[commit.request_id] = request
        row_L = self._tokens_BL[request.row]
        known = min(request.num_assumed, total - before)
        new_T = commit.tokens[before - commit.first :]
        differs = np.flatnonzero(row_L[before:][:known] != new_T[:known])
        right = int(differs[0]) if len(differs) else known
        row_L[commit.first : total] = commit.tokens
        left = request.prob[total - before :] if right == known else request.prob[:0]
        above = request.prob[total - before - 1] if len(left) else 1.0
        request.prob = (left / max(above, 1e-12)).astype(np.float32)
        request.commit = commit
        request.wants = True
        return right, min(right + 1, known)

    def assume(self, request: DraftedRequest, tokens_N: np.ndarray, prob_N: np.ndarray) -> None:
        """Assume more draft tokens of a request, with the probabilities of their chain."""
        at = request.committed + request.num_assumed
        self._tokens_BL[request.row, at : at + len(tokens_N)] = tokens_N
        above = request.prob[-1] if request.num_assumed else 1.0
        request.prob = np.concatenate([request.prob, above * prob_N]).astype(np.float32)

    def assumed(self, request: DraftedRequest) -> np.ndarray:
        """Return the assumed draft tokens of a request."""
        row_L = self._tokens_BL[request.row]
        return row_L[request.committed : request.committed + request.num_assumed].copy()

    def close(self, request_ids: Sequence[int]) -> LiveSlots:
        """Free the rows of requests that have left; return the last state of these requests."""
        gone = [r for r in request_ids if r in self.requests]
        live = self.live(gone)
        self._free += [self.requests.pop(r).row for r in gone]
        return live

    def live(self, request_ids: Sequence[int]) -> LiveSlots:
        """Return these requests in the form that drafters read, with their assumed tokens."""
        rows = [self.requests[r] for r in request_ids]
        commits = [r.commit for r in rows]
        ids_A = np.array(request_ids, np.int64)
        assumed_A = np.array([r.num_assumed for r in rows], np.int32)
        left_A = np.array([c.remaining_tokens for c in commits], np.int32) - assumed_A
        processing_A3 = np.array([c.processing for c in commits], np.float32).reshape(-1, 3)
        return LiveSlots(
            rows_A=np.array([r.row for r in rows], np.int64),
            request_ids_A=ids_A,
            group_ids_A=ids_A,
            prompt_tokens_A=np.array([c.prompt_tokens for c in commits], np.int32),
            total_tokens_A=np.array([c.total_tokens for c in commits], np.int32) + assumed_A,
            remaining_tokens_A=left_A,
            tokens_BL=self._tokens_BL,
            processing_A3=processing_A3,
        )


class DraftingAhead(abc.ABC):
    """The drafts of one drafting worker for one rollout; the last step was `depth` tokens deep."""

    def __init__(self, drafter: AheadDraftModel, num_rows: int, max_total_tokens: int) -> None:
        self.texts = RequestTexts(num_rows, max_total_tokens)
        self.depth = 0
        self._drafter = drafter

    def update(self, commits: Sequence[Commit], closed: Sequence[int]) -> None:
        """Update requests from messages of verifying workers."""
        gone = self.texts.close(closed)
        if len(gone):
            self._drafter.finished(gone)
        acceptance = [self.texts.commit(commit) for commit in commits]
        seen = [pair for pair in acceptance if pair is not None and pair[1]]
        if seen:
            self._observe(np.array(seen))

    @abc.abstractmethod
    def step(self) -> list[Block]:
        """Draft once for all requests that want a draft; return the blocks, if any."""

    def _observe(self, acceptance_A2: np.ndarray) -> None:
        """Learn how many assumed tokens were right, and how many were decided."""
        return


class FreeRunning(DraftingAhead):
    """Chains that continue past the verified window, w draft tokens at a time, up to 2 w ahead."""

    def step(self) -> list[Block]:
        wanting = self._wanting()
        if not wanting:
            return []
        requests = [self.texts.requests[r] for r in wanting]
        live = self.texts.live(wanting)
        max_A = np.array([_window(request) for request in requests], np.int32)
        self.depth = int(max_A.max())
        drafts = self._drafter.propose(live, max_A, self.depth)
        blocks = []
        for a, (r, request) in enumerate(zip(wanting, requests, strict=True)):
            n = int(drafts.count_A[a])
            request.wants = n > 0
            if n:
                self.texts.assume(request, drafts.tokens_AN[a, :n], drafts.prob_AN[a, :n])
                tokens_N = self.texts.assumed(request)
                parents_N = np.arange(-1, len(tokens_N) - 1, dtype=np.int32)
                blocks.append(
                    Block(
                        r,
                        request.commit.round,
                        request.committed,
                        tokens_N,
                        parents_N,
                        request.prob.copy(),
                    )
                )
        return blocks

    def _observe(self, acceptance_A2: np.ndarray) -> None:
        self._drafter.observe_chains(acceptance_A2)

    def _wanting(self) -> list[int]:
        """Return the requests to draft for: at most a window ahead, or not ahead if coupled."""
        return [
            r
            for r, q in self.texts.requests.items()
            if q.num_assumed <= q.commit.plan.decoupled * q.commit.plan.window
            and q.wants
            and _window(q) > 0
        ]


class Enumerating(DraftingAhead):
    """Trees of all outcomes of the chains under verification, once for each commit.

    After i accepted draft tokens of a chain, each of the `fan_out` guesses of the next token has a
    chain of one window below, with second choices. A request without a chain has one case.
    """

    _drafter: EnumeratingDraftModel

    def __init__(
        self,
        drafter: EnumeratingDraftModel,
        num_rows: int,
        max_total_tokens: int,
        *,
        max_window: int,
        fan_out: int,
    ) -> None:
        super().__init__(drafter, num_rows, max_total_tokens)
        self._max_window = max_window
        self._fan_out = fan_out
        self._right = PRIOR_DRAFTS * PRIOR_PROB
        self._seen = float(PRIOR_DRAFTS)

    def step(self) -> list[Block]:
        items = self.texts.requests.items()
        wanting = [r for r, q in items if q.wants and _window(q) > 0 and _may_continue(q)]
        if not wanting:
            return []
        requests = [self.texts.requests[r] for r in wanting]
        chain_AK = np.full((len(requests), self._max_window), -1, np.int32)
        for a, request in enumerate(requests):
            chain = request.commit.chain[: self._max_window]
            chain_AK[a, : len(chain)] = chain
            request.wants = False
        self.depth = depth = max(_window(request) for request in requests)
        live = self.texts.live(wanting)
        tokens_AZFN, second_AZFK, prob_AZF = self._drafter.outcomes(
            live, chain_AK, depth, self._fan_out
        )
        p = self._right / self._seen
        blocks = []
        for a, (r, request) in enumerate(zip(wanting, requests, strict=True)):
            n = int((chain_AK[a] >= 0).sum())
            w = _window(request)
            tree = cases_tree(
                chain_AK[a, :n],
                tokens_AZFN[a, : n + 1, :, : 1 + w],
                second_AZFK[a, : n + 1, :, :w],
                prob_AZF[a, : n + 1],
                p,
            )
            blocks.append(Block(r, request.commit.round, request.committed, *tree))
        return blocks

    def update(self, commits: Sequence[Commit], closed: Sequence[int]) -> None:
        for commit in commits:
            self._count(commit)
        super().update(commits, closed)

    def _count(self, commit: Commit) -> None:
        """Count the draft tokens of a verified chain that were right, and that were decided."""
        request = self.texts.requests.get(commit.request_id)
        if request is None or commit.first != request.committed:
            return
        chain = request.commit.chain
        known = min(len(chain), len(commit.tokens))
        same = np.cumprod(chain[:known] == commit.tokens[:known])
        self._right, self._seen = (
            DECAY * x + y
            for x, y in ((self._right, same.sum()), (self._seen, min(same.sum() + 1, known)))
        )


def cases_tree(
    chain_K: np.ndarray,
    tokens_ZFN: np.ndarray,
    second_ZFK: np.ndarray,
    prob_ZF: np.ndarray,
    p: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a tree (tokens, parents, probabilities), likeliest first, of a chain and its cases.

    Each draft token of a chain is accepted with probability p. Guess f after i accepted tokens has
    probability p^i · (1 − p) · prob_ZF[i, f], without the factor 1 − p after the whole chain. The
    second choice for a token of a chain is a sibling of this token, with the parent probability
    times (1 − p) · `SECOND`.
    """
    K = len(chain_K)
    Z, F, N = tokens_ZFN.shape
    shape = Z, F, 2 * N - 1  # a guess, the chain below it, the second choices
    parents = np.empty(shape, np.int64)
    prob = np.empty(shape)
    first_ZF1 = K + (2 * N - 1) * np.arange(Z * F).reshape(Z, F, 1)
    parents[..., :N] = first_ZF1 + np.arange(N) - 1
    parents[..., 0] = (np.arange(Z) - 1)[:, None]
    parents[..., N:] = first_ZF1 + np.arange(N - 1)
    rejected_Z = np.where(np.arange(Z) < K, 1 - p, 1.0)
    of_case_ZF1 = ((p ** np.arange(Z) * rejected_Z)[:, None] * prob_ZF)[..., None]
    prob[..., :N] = of_case_ZF1 * p ** np.arange(N)
    prob[..., N:] = prob[..., : N - 1] * (1 - p) * SECOND
    tokens_M = np.concatenate([chain_K, np.concatenate([tokens_ZFN, second_ZFK], axis=2).ravel()])
    parents_M = np.concatenate([np.arange(K) - 1, parents.ravel()])
    prob_M = np.concatenate([p ** np.arange(1, K + 1), prob.ravel()])
    order_M = np.argsort(-prob_M, kind="stable")
    place_M = np.empty(len(order_M) + 1, np.int64)
    place_M[order_M] = np.arange(len(order_M))
    place_M[-1] = -1
    return (
        tokens_M[order_M].astype(np.int32),
        place_M[parents_M[order_M]].astype(np.int32),
        prob_M[order_M].astype(np.float32),
    )


def _may_continue(request: DraftedRequest) -> bool:
    """Return False if the plan of a request waits until its chain is verified."""
    return request.commit.plan.decoupled or not len(request.commit.chain)


def _window(request: DraftedRequest) -> int:
    """Return the number of draft tokens that may follow; the last response token is not drafted."""
    left = request.commit.remaining_tokens - request.num_assumed - 1
    return min(request.commit.plan.window, left)
