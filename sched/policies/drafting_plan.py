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
number of workers for all together, not of devices for each verifier.
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

    def tokens(self, window: int) -> float:
        """Return T(w)."""
        p, h = self.p, self.hits
        if h is None:
            h = p / (1 + p - p ** (window + 1))
        return h * sequential_tokens(p, window) + 1 - h

    def own_plan(
        self, draft_s: float, verify: VerifySeconds, windows: Iterable[int]
    ) -> RequestPlan:
        """Return the fastest plan of one request (Algorithm 2 with the rates of this module).

        Decoupled it has T(w) tokens in max(w · D, V_w(1)). Otherwise rounds take turns: a plain
        one, in which the next window is drafted, then one that verifies what is left of it if the
        plain round's token was the one that was drafted: 2 − p + p · C(w − 1) tokens in V_0 + V_w.
        """
        best, p = RequestPlan(0, False, 1 / verify(1, 0)), self.p
        for w in windows:
            decoupled = self.tokens(w) / max(w * draft_s, verify(1, w))
            in_turns = 2 - p + p * sequential_tokens(p, w - 1)
            coupled = in_turns / (verify(1, 0) + max(verify(1, w), w * draft_s - verify(1, 0)))
            for is_decoupled, found in ((True, decoupled), (False, coupled)):
                if found > best.tokens_per_s:
                    best = RequestPlan(w, is_decoupled, found)
        return best


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
