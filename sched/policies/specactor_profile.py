"""Decisions of SpecActor while a rollout runs: plans by profiled acceptance, and what help saves.

A draft token is *seen* when all before it in its window were accepted, so that the verifier says
whether it is right: a window of w of which a < w are accepted shows a + 1, a whole one w.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

from sched.policies.specactor import RequestPlan

# The weight of a beta law with a standard deviation of 0.1 over requests, at p = 0.6.
PRIOR_TOKENS = 23.0
EVERY_TOKENS = 1000  # section 4.1
Tokens = TypeVar("Tokens", float, np.ndarray)


class Profile:
    """Counts of accepted and seen draft tokens, of each request by method and of each method.

    The acceptance of earlier steps, `mean_p`, stands for what was not seen yet (section 4.2):

        p of a method             (accepted + k · mean_p) / (seen + k)
        p of a request's method   (accepted + k · p of the method) / (seen + k),  k = prior_tokens
    """

    def __init__(self, mean_p: Mapping[str, float], prior_tokens: float = PRIOR_TOKENS) -> None:
        self._mean_p, self._prior_tokens = dict(mean_p), prior_tokens
        self._of_method = dict.fromkeys(mean_p, (0, 0))
        self._of_request: dict[tuple[int, str], tuple[int, int]] = {}

    def observe(self, request: int, method: str, accepted: int, seen: int) -> None:
        """Add draft tokens of this request's rounds."""
        if not 0 <= accepted <= seen:
            raise ValueError(f"expected at most {seen} accepted of {seen} seen, got {accepted}")
        before = self._of_request.get((request, method), (0, 0))
        self._of_request[request, method] = (before[0] + accepted, before[1] + seen)
        before = self._of_method[method]
        self._of_method[method] = (before[0] + accepted, before[1] + seen)

    def p_of_method(self, method: str) -> float:
        """Return the acceptance of all requests' draft tokens by this method."""
        return self._p(self._of_method[method], self._mean_p[method])

    def p_of_request(self, request: int, method: str) -> float:
        """Return the acceptance of a request's draft tokens by this method."""
        counted = self._of_request.get((request, method), (0, 0))
        return self._p(counted, self.p_of_method(method))

    def forget(self, request: int) -> None:
        """Drop a request that has ended; its method keeps what was seen."""
        for method in self._mean_p:
            self._of_request.pop((request, method), None)

    def _p(self, counted: tuple[int, int], prior_p: float) -> float:
        accepted, seen = counted
        return (accepted + self._prior_tokens * prior_p) / (seen + self._prior_tokens)


class Reconfiguration:
    """Plans of their own for requests that are accepted less than the average (Algorithm 2).

    Each time that a request has passed `every_tokens` more tokens it gets `own_plan(p)`, the
    fastest at its profiled p and a batch of 1, or `common`, the plan of the batch, where its p is
    not below the method's. Plans go by p in hundredths.
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
        self._method, self._common, self._every_tokens = method, common, every_tokens
        self._plan_at = functools.cache(lambda hundredths: own_plan(hundredths / 100))

    def is_due(self, before_tokens: Tokens, tokens: Tokens) -> bool | np.ndarray:
        """Return ⌊tokens / every_tokens⌋ > ⌊before_tokens / every_tokens⌋, of arrays too."""
        return tokens // self._every_tokens > before_tokens // self._every_tokens

    def plan_when_due(
        self, request: int, before_tokens: float, tokens: float, profile: Profile
    ) -> RequestPlan | None:
        """Return the plan of a request that had `before_tokens`, if due; None: it stays."""
        if not self.is_due(before_tokens, tokens):
            return None
        p = profile.p_of_request(request, self._method)
        if p >= profile.p_of_method(self._method):
            return self._common
        return self._plan_at(round(100 * p))


def expected_remaining_tokens(tokens: float, ended_tokens: np.ndarray, limit_tokens: int) -> float:
    """Return how many tokens a request that has `tokens` is expected to get yet.

    The mean over the rollout's ended responses that were longer, and one that goes to the limit:

        (Σ_{longer} (length − tokens) + limit − tokens) / (number of the longer ones + 1)
    """
    longer = ended_tokens[ended_tokens > tokens]
    return float((longer - tokens).sum() + limit_tokens - tokens) / (len(longer) + 1)


def worth_helping(
    remaining_tokens: float, tokens_per_s: float, helped_tokens_per_s: float, costs_s: float
) -> bool:
    """Return whether remaining / rate > costs + remaining / helped rate.

    The costs are those of section 4.3: loading the drafter, and the keys and values. A request
    that does not run at present is always worth it.
    """
    helped_s = costs_s + remaining_tokens / helped_tokens_per_s
    return tokens_per_s <= 0 or remaining_tokens / tokens_per_s > helped_s
