"""The requests and devices of a rollout with a drafter beside the model, and SpecActor's planner.

R = requests, M = methods of drafting.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from reprise.sched.policies.specactor import (
    MAX_WINDOW,
    RequestPlan,
    decoupled_tokens,
    sequential_tokens,
)
from reprise.sched.simulator.roofline import Instance


@dataclasses.dataclass(frozen=True)
class LinearTime:
    """Seconds as a function of the batch: `per_request_s` · b + `fixed_s`."""

    per_request_s: float
    fixed_s: float

    def __call__(self, batch: float) -> float:
        return self.per_request_s * batch + self.fixed_s


def line(seconds: Callable[[float], float], max_batch: int) -> LinearTime:
    """Return the line through a batch of 1 and the largest one."""
    first_s, last_s = seconds(1), seconds(max_batch)
    slope = (last_s - first_s) / max(max_batch - 1, 1)
    return LinearTime(slope, max(first_s - slope, 0.0))


@dataclasses.dataclass(frozen=True)
class RequestTrace:
    """The length of each response, and the acceptance of each method's draft tokens for it.

    Acceptance decides the tokens of rounds, and no decision: `profiled_M` is each method's in
    earlier steps. Responses have at most `limit_tokens`.
    """

    lengths_R: np.ndarray
    acceptance_RM: np.ndarray
    profiled_M: np.ndarray
    prompt_tokens: int
    limit_tokens: int

    @property
    def mean_positions(self) -> float:
        """The positions that a request holds, averaged over its life and over all requests."""
        return self.prompt_tokens + float(self.lengths_R.mean()) / 2


@dataclasses.dataclass(frozen=True)
class Hardware:
    """`num_devices`, of which `verifier` takes several, and each method's drafter.

    A drafter of None is a method on the host that takes no time: n-grams. Each device sends
    `network_bytes_per_s` to other workers.
    """

    num_devices: int
    verifier: Instance
    drafters: Mapping[str, Instance | None]
    network_bytes_per_s: float = math.inf

    def draft_line(self, method: str, devices: int, max_batch: int, positions: float) -> LinearTime:
        """Return the seconds of a draft token, on `devices` that share the requests."""
        drafter = self.drafters[method]
        if drafter is None:
            return LinearTime(0.0, 0.0)

        def seconds(batch: float) -> float:
            each = batch / devices
            return drafter.round_seconds(each, each * positions)

        return line(seconds, max_batch)

    def verify_line(
        self, devices: int, window: int, max_batch: int, positions: float
    ) -> LinearTime:
        """Return the seconds of a verification; each request holds `positions`."""
        instance = dataclasses.replace(self.verifier, num_devices=devices)
        return line(lambda b: instance.round_seconds(b, b * positions, window + 1), max_batch)

    def load_seconds(self, method: str) -> float:
        """Return the seconds of loading the drafter's weights from the host (4.3: scale)."""
        drafter = self.drafters[method]
        if drafter is None:
            return 0.0
        return drafter.model.weight_bytes / drafter.device.host_bytes_per_s

    def kv_seconds(self, method: str, positions: float) -> float:
        """Return the seconds until a helper holds a request's keys and values (4.3: KVCache).

        The verifier's are copied from the request's unit or recomputed, whichever takes less (the
        paper does both at once); the drafter, which is new to the request, recomputes them.
        """
        verifier, drafter, tokens = self.verifier, self.drafters[method], math.ceil(positions)
        sent = tokens * verifier.model.kv_bytes
        sent_s = sent / (verifier.num_devices * self.network_bytes_per_s)
        copy_s = max(verifier.copy_seconds(tokens), sent_s)
        draft_s = 0.0 if drafter is None else drafter.prefill_seconds(tokens)
        return min(copy_s, verifier.prefill_seconds(tokens)) + draft_s

    def helper_tokens(self, method: str) -> int:
        """Return the positions that fit on a unit that helps by this method, beside its drafter."""
        verifier, drafter = self.verifier, self.drafters[method]
        if drafter is None:
            return verifier.kv_tokens
        kv_bytes = verifier.model.kv_bytes
        room = verifier.kv_tokens * kv_bytes - verifier.num_devices * drafter.model.weight_bytes
        return max(0, int(room / (kv_bytes + drafter.model.kv_bytes)))


# --- the planner of the paper -----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DevicePlan:
    """Devices that draft and that verify, and the window; `tokens_per_s` of one request."""

    draft_devices: int
    verify_devices: int
    window: int
    tokens_per_s: float


def plan(
    batch: int,
    num_devices: int,
    verify_sizes: Iterable[int],
    draft: Callable[[int], LinearTime],  # of a number of devices
    verify: Callable[[int, int], LinearTime],  # of (devices, window)
    p: float,
) -> DevicePlan:
    """Return the fastest decoupled plan for `batch` requests on `num_devices` (Algorithm 1).

    `verify_sizes` are the devices that one copy of the model may take. A verifier shares
    g_d + g_v devices with its drafters, and with them the requests of these. Windows beyond
    max(⌈V′ / D′⌉, ⌈β / α⌉), which keeps drafting and verification equally busy, are not considered.
    """
    best = DevicePlan(0, 0, 0, 0.0)
    for verify_devices in verify_sizes:
        for draft_devices in range(1, verify_devices + 1):
            share = math.ceil((draft_devices + verify_devices) * batch / num_devices)
            drafting = draft(draft_devices)
            for window in range(1, MAX_WINDOW + 1):
                verifying = verify(verify_devices, window)
                ratios = [
                    above / below
                    for above, below in (
                        (verifying.per_request_s, drafting.per_request_s),
                        (verifying.fixed_s, drafting.fixed_s),
                    )
                    if below > 0
                ]
                if window > math.ceil(max(ratios, default=MAX_WINDOW)):
                    break
                seconds = max(window * drafting(share), verifying(share))
                rate = decoupled_tokens(p, window) / seconds
                if rate > best.tokens_per_s:
                    best = DevicePlan(draft_devices, verify_devices, window, rate)
    return best


def best_helper_plan(
    p: float, draft_s: float, verify_s: Callable[[int], float], windows: Iterable[int]
) -> RequestPlan:
    """Return the best sequential window of a helper (section 4.2), which is never plain.

    `draft_s` is the time of one draft token of its batch, `verify_s` that of a window.
    """

    def plan_of(window: int) -> RequestPlan:
        seconds = window * draft_s + verify_s(window)
        return RequestPlan(window, False, sequential_tokens(p, window) / seconds)

    return max(map(plan_of, windows), key=lambda plan: plan.tokens_per_s)


def expected_remaining_tokens(tokens: float, ended_tokens: np.ndarray, limit_tokens: int) -> float:
    """Return the expected number of tokens that a request with `tokens` has left.

    The mean over the rollout's longer ended responses, and one that reaches the limit:

        (Σ_{longer} (length − tokens) + limit − tokens) / (number of the longer ones + 1)
    """
    longer = ended_tokens[ended_tokens > tokens]
    return float((longer - tokens).sum() + limit_tokens - tokens) / (len(longer) + 1)
