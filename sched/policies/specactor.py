"""SpecActor's decisions: the number of drafting workers, the window, the method per request.

    coupled     each worker drafts w tokens, then verifies:       C(w) / (w · D(b) + V_w(b))
    decoupled   d of n workers draft while the others verify:     T(w) / max(w · D(b·), V_w(b'))

D(b) is the time of a draft token for b requests, and V_w(b) the time to verify w draft tokens of
each. With R requests, a worker has b = R / n, a verifying worker b' = R / (n − d), and a drafting
worker b· = R / d. A draft token is accepted with probability p, so a window yields

    C(w) = Σ_{i ≤ w} p^i,    T(w) = h · C(w) + 1 − h

tokens; h is the share of rounds with a draft. A chain that runs ahead has a draft for the next
round if the whole window and the token after it were right, or if the token of a plain round equals
the drafted token: h = p / (1 + p − p^(w+1)). If all cases are drafted, h is profiled.

Deviations from the paper (section 4): a verifying worker without a draft decodes plainly instead of
waiting, so a miss yields one token; d counts drafting workers for all verifying workers together.
Algorithm 2 plans a request as if it were the only request; here the batch sets the prices of nodes
and drafts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

MAX_WINDOW = 32  # maximum draft tokens of a plan
PRIOR_TOKENS = 23.0  # of a beta prior with a standard deviation of 0.1 over requests, at p = 0.6
EVERY_TOKENS = 1000  # section 4.1

Seconds = Callable[[float], float]  # batch → seconds
DraftSeconds = Callable[[float], float]  # requests → seconds of a draft token
VerifySeconds = Callable[[float, int], float]  # (requests, draft tokens of each) → seconds
Tokens = TypeVar("Tokens", float, np.ndarray)


# --- windows of one request -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RequestPlan:
    """The window and the mode of one request."""

    window: int
    decoupled: bool
    tokens_per_s: float


def sequential_tokens(p: float, window: int) -> float:
    """Return C(w), the tokens of a verified window, including one token of the verifier."""
    return sum(p**a for a in range(window + 1))


def decoupled_tokens(p: float, window: int) -> float:
    """Return τ_w of the paper, the tokens of a window verified while the next is drafted.

    A rejection discards the next window, so a partial acceptance counts half:

        τ_w = Σ_{a<w} p^a (1−p) (a+1)/2 + w p^w
    """
    partial = sum(p**a * (1 - p) * (a + 1) / 2 for a in range(window))
    return partial + window * p**window


def prob_of(mean_tokens: float, window: int) -> float:
    """Return the p with `mean_tokens` per window, the inverse of `sequential_tokens`."""
    if not 1 <= mean_tokens <= window + 1:
        raise ValueError(
            f"expected 1 … {window + 1} tokens of {window} draft tokens, got {mean_tokens}"
        )
    low = 0.0
    high = 1.0
    for _ in range(60):
        middle = (low + high) / 2
        is_low = sequential_tokens(middle, window) < mean_tokens
        low, high = (middle, high) if is_low else (low, middle)
    return high


def best_request_plan(
    p: float, drafting: Seconds, verify: Callable[[int], Seconds], batch: float = 1
) -> RequestPlan:
    """Return the fastest plan among all sequential and decoupled windows and plain decoding."""
    best = RequestPlan(0, False, 1 / verify(0)(batch))  # plain decoding
    for window in range(1, MAX_WINDOW + 1):
        draft_s = window * drafting(batch)
        verify_s = verify(window)(batch)
        sequential = sequential_tokens(p, window) / (draft_s + verify_s)
        decoupled = decoupled_tokens(p, window) / max(draft_s, verify_s)
        if sequential > best.tokens_per_s:
            best = RequestPlan(window, False, sequential)
        if decoupled > best.tokens_per_s:
            best = RequestPlan(window, True, decoupled)
    return best


def rank_methods(
    acceptance: Mapping[str, float],
    draft: Mapping[str, Seconds],
    verify: Callable[[int], Seconds],
    batch: float = 1,
) -> list[str]:
    """Return the drafting methods, fastest first at their p; this is the draft ladder (4.2)."""
    return sorted(
        acceptance,
        key=lambda m: -best_request_plan(acceptance[m], draft[m], verify, batch).tokens_per_s,
    )


# --- drafting workers (Algorithm 1) -----------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Prices:
    """The tokens that a batch gets in the seconds of one more draft token, and of one more node.

    Both prices are means over the draft tokens of the batch, since measured seconds grow in steps.
    """

    round_s: float
    draft: float
    node: float


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """The profile of drafts: p of a draft token, and the share `hits` of rounds with a draft.

    For chains that run ahead, `hits` is None and the share follows from p.
    """

    p: float
    hits: float | None = None

    def share(self, window: int) -> float:
        """Return h."""
        if self.hits is not None:
            return self.hits
        return self.p / (1 + self.p - self.p ** (window + 1))

    def tokens(self, window: int) -> float:
        """Return T(w)."""
        h = self.share(window)
        return h * sequential_tokens(self.p, window) + 1 - h

    def own_plan(self, prices: Prices, windows: Iterable[int]) -> RequestPlan:
        """Return the request plan with the most tokens, less the tokens it costs other requests.

            decoupled   1 + h · (C(w) − 1 − w · node) − w · draft             per round
            coupled     2 + k · (C(v) − 1 − v · node) − w · draft             per two rounds

        Coupled rounds alternate: a window is drafted during a plain round, and the next round
        verifies the remaining v tokens. A chain keeps v = w − 1 if the token of the plain round was
        its first token, k = p; if all cases are drafted, the right case has v = w, k = h.
        """
        best = RequestPlan(0, False, 1 / prices.round_s)

        def gain(window: int) -> float:
            return sequential_tokens(self.p, window) - 1 - window * prices.node

        for w in windows:
            draft = w * prices.draft
            h = self.share(w)
            left, k = (w - 1, self.p) if self.hits is None else (w, h)
            decoupled = 1 + h * gain(w) - draft
            coupled = (2 + k * gain(left) - draft) / 2
            for is_decoupled, tokens in ((True, decoupled), (False, coupled)):
                if (per_s := tokens / prices.round_s) > best.tokens_per_s:
                    best = RequestPlan(w, is_decoupled, per_s)
        return best


def batch_prices(
    batch: float, window: int, draft: DraftSeconds, verify: VerifySeconds, acceptance: Acceptance
) -> Prices:
    """Return the prices in a batch of b requests that all have windows of w draft tokens.

    tokens per second    R = b · T(w) / max(w · D(b), V_w(b))
    a draft token        R · (D(b) − D(1)) / (b − 1)
    a verified node      R · (V_w(b) − V_0(b)) / (b · w)
    """
    round_s = max(window * draft(batch), verify(batch, window))
    tokens_per_s = batch * acceptance.tokens(window) / round_s
    draft_s = (draft(batch) - draft(1)) / (batch - 1) if batch > 1 else 0.0
    node_s = (verify(batch, window) - verify(batch, 0)) / (batch * window)
    return Prices(round_s, *(tokens_per_s * max(s, 0.0) for s in (draft_s, node_s)))


@dataclasses.dataclass(frozen=True)
class WorkerPlan:
    """The number of drafting workers (0 if each worker drafts), and the window (0 for no drafts).

    `tokens_per_s` is the rate of all requests together.
    """

    drafting_workers: int
    window: int
    tokens_per_s: float


def rate(
    num_workers: int,
    num_requests: float,
    drafting_workers: int,
    window: int,
    draft: DraftSeconds,
    verify: VerifySeconds,
    acceptance: Acceptance,
) -> float:
    """Return the tokens per second of all requests under a plan."""
    each = num_requests / (num_workers - drafting_workers)
    verify_s = verify(each, window)
    if not window:
        return num_requests / verify_s
    if not drafting_workers:
        tokens = sequential_tokens(acceptance.p, window)
        return num_requests * tokens / (window * draft(each) + verify_s)
    draft_s = window * draft(num_requests / drafting_workers)
    return num_requests * acceptance.tokens(window) / max(draft_s, verify_s)


def plan_workers(
    num_workers: int,
    num_requests: float,
    draft: DraftSeconds,
    verify: VerifySeconds,
    acceptance: Acceptance,
    *,
    drafting_workers: Iterable[int],
    windows: Iterable[int],
) -> WorkerPlan:
    """Return the fastest plan among `drafting_workers`, `windows` and plain decoding."""
    best = WorkerPlan(0, 0, num_requests / verify(num_requests / num_workers, 0))
    windows = tuple(windows)
    for d in drafting_workers:
        for w in windows:
            per_s = rate(num_workers, num_requests, d, w, draft, verify, acceptance)
            if per_s > best.tokens_per_s:
                best = WorkerPlan(d, w, per_s)
    return best


# --- decisions while a rollout runs (Algorithms 2 and 3) --------------------------------


class Profile:
    """Counts of accepted and seen draft tokens, per request and method, and per method.

    A draft token is *seen* if all earlier tokens in its window were accepted. The acceptance
    `mean_p` of earlier steps is the prior (section 4.2):

        p of a method             (accepted + k · mean_p) / (seen + k)
        p of request and method   (accepted + k · p of the method) / (seen + k),  k = prior_tokens
    """

    def __init__(self, mean_p: Mapping[str, float], prior_tokens: float = PRIOR_TOKENS) -> None:
        self._mean_p = dict(mean_p)
        self._prior_tokens = prior_tokens
        self._of_method = dict.fromkeys(mean_p, (0, 0))
        self._of_request: dict[tuple[int, str], tuple[int, int]] = {}

    def observe(self, request: int, method: str, accepted: int, seen: int) -> None:
        """Add draft tokens from rounds of this request."""
        if not 0 <= accepted <= seen:
            raise ValueError(f"expected at most {seen} accepted of {seen} seen, got {accepted}")
        before = self._of_request.get((request, method), (0, 0))
        self._of_request[request, method] = (before[0] + accepted, before[1] + seen)
        before = self._of_method[method]
        self._of_method[method] = (before[0] + accepted, before[1] + seen)

    def p_of_method(self, method: str) -> float:
        """Return the acceptance of draft tokens by this method, over all requests."""
        return self._p(self._of_method[method], self._mean_p[method])

    def p_of_request(self, request: int, method: str) -> float:
        """Return the acceptance of draft tokens by this method for a request."""
        counted = self._of_request.get((request, method), (0, 0))
        return self._p(counted, self.p_of_method(method))

    def forget(self, request: int) -> None:
        """Drop a finished request; the counts of its methods remain."""
        for method in self._mean_p:
            self._of_request.pop((request, method), None)

    def _p(self, counted: tuple[int, int], prior_p: float) -> float:
        accepted, seen = counted
        return (accepted + self._prior_tokens * prior_p) / (seen + self._prior_tokens)


class Reconfiguration:
    """Individual plans for requests with below-average acceptance (Algorithm 2).

    After every `every_tokens` tokens, a request gets `own_plan(p)`, the fastest plan at its
    profiled p, if p is below the p of its method, else `common`, the plan of the batch. Plans are
    cached by p in hundredths.
    """

    def __init__(
        self,
        method: str,
        common: RequestPlan,
        own_plan: Callable[[float], RequestPlan],
        every_tokens: int = EVERY_TOKENS,
    ) -> None:
        if every_tokens < 1:
            raise ValueError(f"expected every_tokens of at least 1, got {every_tokens}")
        self._method = method
        self._common = common
        self._every_tokens = every_tokens
        self._plan_at = functools.cache(lambda hundredths: own_plan(hundredths / 100))

    def is_due(self, before_tokens: Tokens, tokens: Tokens) -> bool | np.ndarray:
        """Return ⌊tokens / every_tokens⌋ > ⌊before_tokens / every_tokens⌋, also for arrays."""
        return tokens // self._every_tokens > before_tokens // self._every_tokens

    def plan_when_due(
        self, request: int, before_tokens: float, tokens: float, profile: Profile
    ) -> RequestPlan | None:
        """Return the new plan of a request that had `before_tokens`, or None if no plan is due."""
        if not self.is_due(before_tokens, tokens):
            return None
        p = profile.p_of_request(request, self._method)
        if p >= profile.p_of_method(self._method):
            return self._common
        return self._plan_at(round(100 * p))


def worth_helping(
    remaining_tokens: float, tokens_per_s: float, helped_tokens_per_s: float, costs_s: float
) -> bool:
    """Return whether remaining / rate > costs + remaining / helped rate (section 4.3).

    Helping a request that does not run is always worth it.
    """
    helped_s = costs_s + remaining_tokens / helped_tokens_per_s
    return tokens_per_s <= 0 or remaining_tokens / tokens_per_s > helped_s


def assign_drafters(
    acceptance: Mapping[int, float],
    methods: Sequence[str],
    freed: Sequence[int],
    serving: Mapping[str, set[int]],
    load: Mapping[int, int],
    max_batch: int,
    helps: Callable[[int, str, int, int], bool] = lambda request, method, worker, batch: True,
) -> dict[tuple[int, str], int]:
    """Return the added {(request, method): worker that drafts for the request} (Algorithm 3).

    Freed workers go to the method with the fewest workers. The workers of a method then take
    requests, the lowest acceptance first, up to `max_batch` each. `serving` holds the workers of
    each method, and `load` the number of requests per worker so far. A method skips a request if
    `helps(request, method, worker, batch)` is false, where `batch` includes this request.
    """
    workers = {method: set(serving.get(method, ())) for method in methods}
    loads = dict(load)
    for worker in freed:
        method = min(methods, key=lambda m: (len(workers[m]), methods.index(m)))
        workers[method].add(worker)
    added: dict[tuple[int, str], int] = {}
    for method in methods:
        waiting = sorted(acceptance, key=lambda r: (-acceptance[r], -r))  # lowest acceptance last
        for worker in sorted(workers[method]):
            while waiting and loads.get(worker, 0) < max_batch:
                request = waiting.pop()
                batch = loads.get(worker, 0) + 1
                if helps(request, method, worker, batch):
                    added[request, method] = worker
                    loads[worker] = batch
    return added
