"""Plans of how many workers draft for the others, and how far (SpecActor, Algorithm 1).

    coupled     each worker drafts w tokens, then verifies them:   C(w) / (w · D(b) + V_w(b))
    decoupled   d of n workers draft for the others meanwhile:     T(w) / max(w · D(b·), V_w(b'))

D(b) are the seconds of a draft token for b requests, V_w(b) those of verifying w draft tokens of
each. Of R requests a worker has b = R / n, a verifying one b' = R / (n − d), a drafting one
b· = R / d. A draft token is accepted with probability p, so that a window brings

    C(w) = Σ_{i ≤ w} p^i,    T(w) = h · C(w) + 1 − h

tokens, h the share of rounds in which a draft is there. Chains that run ahead have one again if the
whole window and the token behind it were right, or a plain round's token is the one that was
drafted: h = p / (1 + p − p^(w+1)). Where all cases are drafted, h is profiled.

Deviations from the paper: a verifying worker without a draft decodes plainly instead of waiting, so
that a miss brings a token (the paper's τ_w has half of a partial acceptance in its place); d is a
number of workers for all together, not of devices for each verifier. Algorithm 2 plans a request as
if it were alone, b = 1, where a node hardly costs anything and all requests get the batch's window;
here its nodes and drafts are paid for at their price in the batch that they are verified with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from sched.policies.specactor import RequestPlan, sequential_tokens

DraftSeconds = Callable[[float], float]  # requests → seconds of a draft token
VerifySeconds = Callable[[float, int], float]  # (requests, draft tokens of each) → of a round


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """The profile of drafts: the probability of a draft token, and the share of rounds with one.

    `hits` None: chains that run ahead, for which it follows from p.
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
        """Return the plan of one request with the most tokens, less those that it costs the others.

            decoupled   1 + h · (C(w) − 1 − w · node) − w · draft             a round
            coupled     2 + k · (C(v) − 1 − v · node) − w · draft             two rounds

        Coupled rounds take turns: a plain one, during which a window is drafted, then one that
        verifies the v tokens that are left of it. A chain keeps v = w − 1 if the plain round's
        token was its first, k = p; of all cases the right one has v = w, k = h.
        """
        best = RequestPlan(0, False, 1 / prices.round_s)

        def gain(window: int) -> float:
            return sequential_tokens(self.p, window) - 1 - window * prices.node

        for w in windows:
            draft, h = w * prices.draft, self.share(w)
            left, k = (w - 1, self.p) if self.hits is None else (w, h)
            decoupled, coupled = 1 + h * gain(w) - draft, (2 + k * gain(left) - draft) / 2
            for is_decoupled, tokens in ((True, decoupled), (False, coupled)):
                if (found := tokens / prices.round_s) > best.tokens_per_s:
                    best = RequestPlan(w, is_decoupled, found)
        return best


@dataclasses.dataclass(frozen=True)
class Prices:
    """The tokens that a batch gets in the seconds of one more draft token, and of one more node.

    `round_s` are the seconds of its round. Both prices are means over the batch's own draft tokens:
    measured seconds go up in steps, at whose margin a node is free or as dear as hundreds.
    """

    round_s: float
    draft: float
    node: float


def batch_prices(
    batch: float,
    window: int,
    draft: DraftSeconds,
    verify: VerifySeconds,
    acceptance: Acceptance,
) -> Prices:
    """Return the prices in a batch of b requests, which all have windows of w draft tokens.

    tokens a second      R = b · T(w) / max(w · D(b), V_w(b))
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
    """`drafting_workers` of all (0: each drafts by itself), the window (0: nobody drafts).

    `tokens_per_s` are those of all requests together.
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
    """Return the plan with the most tokens per second, of these numbers of workers and windows.

    Of equal ones the first. Plain decoding, 0 and 0, is one of them.
    """
    best = WorkerPlan(0, 0, num_requests / verify(num_requests / num_workers, 0))
    given = draft, verify, acceptance
    windows = tuple(windows)
    for d in drafting_workers:
        for w in windows:
            found = rate(num_workers, num_requests, d, w, *given)
            if found > best.tokens_per_s:
                best = WorkerPlan(d, w, found)
    return best
