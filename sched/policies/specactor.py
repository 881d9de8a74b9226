"""SpecActor's plans: how many devices draft, how far ahead, and which drafter serves whom.

Section 4 of the paper. Drafting a token for b requests takes D(b) seconds, verifying windows of
w tokens V_w(b); both are lines in b. A draft token is accepted with probability p.

    sequential:  draft w tokens, then verify:   tokens / (w·D + V_w)      (the paper: coupled)
    decoupled:   draft on while verifying:      τ_w / max(w·D, V_w)

A rejection throws away the window that was drafted ahead, so that in decoupled drafting a
partial acceptance counts half:  τ_w = Σ_{a<w} p^a (1−p) (a+1)/2 + w p^w.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

MOST_WINDOW = 32  # no plan drafts further ahead


@dataclasses.dataclass(frozen=True)
class LinearTime:
    """Seconds as a function of the batch: `per_request_s` · b + `fixed_s`."""

    per_request_s: float
    fixed_s: float

    def __call__(self, batch: float) -> float:
        return self.per_request_s * batch + self.fixed_s


Seconds = Callable[[float], float]  # batch → seconds, as of `LinearTime`
DraftTime = Callable[[int], LinearTime]  # devices → seconds of one token
VerifyTime = Callable[[int, int], LinearTime]  # (devices, window) → seconds of a verification


@dataclasses.dataclass(frozen=True)
class DevicePlan:
    """Devices that draft and that verify, and the window; `tokens_per_s` of one request."""

    draft_devices: int
    verify_devices: int
    window: int
    tokens_per_s: float


@dataclasses.dataclass(frozen=True)
class RequestPlan:
    """The window and the mode of one request."""

    window: int
    decoupled: bool
    tokens_per_s: float


def decoupled_tokens(p: float, window: int) -> float:
    """Return τ_w, the tokens of a window while the next one is drafted already."""
    partial = sum(p**a * (1 - p) * (a + 1) / 2 for a in range(window))
    return partial + window * p**window


def sequential_tokens(p: float, window: int) -> float:
    """Return the tokens of a window that is drafted, then verified; one is the verifier's own."""
    return sum(p**a for a in range(window + 1))


def prob_of(mean_tokens: float, window: int) -> float:
    """Return the p at which a window brings `mean_tokens`: `sequential_tokens` inverted."""
    if not 1 <= mean_tokens <= window + 1:
        raise ValueError(
            f"expected 1 … {window + 1} tokens of {window} draft tokens, got {mean_tokens}"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        is_low = sequential_tokens(middle, window) < mean_tokens
        low, high = (middle, high) if is_low else (low, middle)
    return high


def plan(
    batch: int,
    num_devices: int,
    verify_sizes: Iterable[int],
    draft: DraftTime,
    verify: VerifyTime,
    p: float,
) -> DevicePlan:
    """Return the fastest decoupled plan for `batch` requests on `num_devices` (Algorithm 1).

    `verify_sizes` are the devices that one copy of the model may take. A verifier shares
    g_d + g_v devices with its drafters, and with them the requests that fall to these. Windows
    beyond what keeps drafting and verification equally busy are not considered.
    """
    best = DevicePlan(0, 0, 0, 0.0)
    for verify_devices in verify_sizes:
        for draft_devices in range(1, verify_devices + 1):
            share = math.ceil((draft_devices + verify_devices) * batch / num_devices)
            drafting = draft(draft_devices)
            for window in range(1, MOST_WINDOW + 1):
                verifying = verify(verify_devices, window)
                if window > _longest_window(drafting, verifying):
                    break
                seconds = max(window * drafting(share), verifying(share))
                rate = decoupled_tokens(p, window) / seconds
                if rate > best.tokens_per_s:
                    best = DevicePlan(draft_devices, verify_devices, window, rate)
    return best


def _longest_window(drafting: LinearTime, verifying: LinearTime) -> int:
    """Return max(⌈V′ / D′⌉, ⌈β / α⌉), of the ratios that are defined."""
    ratios = [
        above / below
        for above, below in (
            (verifying.per_request_s, drafting.per_request_s),
            (verifying.fixed_s, drafting.fixed_s),
        )
        if below > 0
    ]
    return math.ceil(max(ratios, default=MOST_WINDOW))


def best_request_plan(
    p: float, drafting: Seconds, verify: Callable[[int], Seconds], batch: float = 1
) -> RequestPlan:
    """Return the better of the best sequential and the best decoupled window."""
    best = RequestPlan(0, False, 1 / verify(0)(batch))  # plain decoding
    for window in range(1, MOST_WINDOW + 1):
        draft_s, verify_s = window * drafting(batch), verify(window)(batch)
        sequential = sequential_tokens(p, window) / (draft_s + verify_s)
        decoupled = decoupled_tokens(p, window) / max(draft_s, verify_s)
        if sequential > best.tokens_per_s:
            best = RequestPlan(window, False, sequential)
        if decoupled > best.tokens_per_s:
            best = RequestPlan(window, True, decoupled)
    return best


def best_helper_plan(
    p: float, draft_s: float, verify_s: Callable[[int], float], windows: Iterable[int]
) -> RequestPlan:
    """Return the best sequential window of a helper (section 4.2), which is never plain.

    `draft_s` are the seconds of one draft token of its batch, `verify_s` those of a window.
    """

    def plan_of(window: int) -> RequestPlan:
        seconds = window * draft_s + verify_s(window)
        return RequestPlan(window, False, sequential_tokens(p, window) / seconds)

    return max(map(plan_of, windows), key=lambda found: found.tokens_per_s)


def rank_methods(
    acceptance: Mapping[str, float],
    draft: Mapping[str, Seconds],
    verify: Callable[[int], Seconds],
    batch: float = 1,
) -> list[str]:
    """Return the drafting methods, the fastest first: the draft ladder of section 4.2.

    `acceptance` is each method's p. The ladder needs drafting and verification seconds only, so
    that it is made beforehand; the acceptance observed lately then picks the method. Ties go to
    the first.
    """
    return sorted(
        acceptance,
        key=lambda m: -best_request_plan(acceptance[m], draft[m], verify, batch).tokens_per_s,
    )


def assign_drafters(
    acceptance: Mapping[int, float],
    methods: Sequence[str],
    freed: Sequence[int],
    serving: Mapping[str, set[int]],
    load: Mapping[int, int],
    most_batch: int,
    helps: Callable[[int, str, int, int], bool] = lambda request, method, worker, batch: True,
) -> dict[tuple[int, str], int]:
    """Return {(request, method): freed worker that drafts for it}, as added (Algorithm 3).

    Freed workers go to the method that has fewest; then each method's workers take requests,
    those with the lowest acceptance first, up to `most_batch` each. `serving` and `load` are the
    workers of each method and their requests so far. A method passes over a request where
    `helps(request, method, worker, the worker's requests with this one)` is false.
    """
    workers = {method: set(serving.get(method, ())) for method in methods}
    loads = dict(load)
    for worker in freed:
        method = min(methods, key=lambda m: (len(workers[m]), methods.index(m)))
        workers[method].add(worker)
    added: dict[tuple[int, str], int] = {}
    for method in methods:
        waiting = sorted(acceptance, key=lambda r: (-acceptance[r], -r))  # the least is last
        for worker in sorted(workers[method]):
            while waiting and loads.get(worker, 0) < most_batch:
                request, batch = waiting.pop(), loads.get(worker, 0) + 1
                if helps(request, method, worker, batch):
                    added[request, method] = worker
                    loads[worker] = batch
    return added
