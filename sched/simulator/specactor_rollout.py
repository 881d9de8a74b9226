"""A rollout with a drafter beside the model, under SpecActor's ways of using its devices.

A trace (lengths and acceptance of every request, by unit) is played in steps of `step_s`: in
each, a unit's round takes what its batch costs, and brings each request what its acceptance is
worth. A unit is the devices that hold one copy of the model, and those of its drafter where it
has its own. Ways of drafting are those of SpecActor's figure 13:

    plain          no drafts
    sequential        draft w tokens, then verify them, on the same devices
    disaggregated  the same on devices of their own: one waits while the other works
    decoupled      draft on while verifying (sched.simulator.specactor)

R = requests, U = units, M = methods of drafting.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np

from sched.simulator.roofline import Instance
from sched.simulator.specactor import (
    DevicePlan,
    LinearTime,
    RequestPlan,
    assign_drafters,
    own_plan,
    sequential_tokens,
)

OBSERVED_TOKENS = 1000  # after so many a request's acceptance is taken as measured
SETTLING = 4  # turns in which the seconds of verifications and who is in them settle
PLAIN, SEQUENTIAL, DISAGGREGATED, DECOUPLED = "plain", "sequential", "disaggregated", "decoupled"


@dataclasses.dataclass(frozen=True)
class RequestTrace:
    """Tokens to come of each request, and how often each method's drafts are right for it.

    `measured_R` is the first method's as it is seen over a request's first tokens: what a
    reconfiguration goes by.
    """

    lengths_R: np.ndarray
    acceptance_RM: np.ndarray
    measured_R: np.ndarray
    prompt_tokens: int


@dataclasses.dataclass(frozen=True)
class Hardware:
    """`num_devices`, of which `verifier` takes several; a drafter's model by method.

    None is a method on the host, which takes no time: n-grams.
    """

    num_devices: int
    verifier: Instance
    drafters: Mapping[str, Instance | None]

    def draft_line(
        self, method: str, devices: int, most_batch: int, positions: float
    ) -> LinearTime:
        """Seconds of a drafted token, on so many devices that share the requests."""
        drafter = self.drafters[method]
        if drafter is None:
            return LinearTime(0.0, 0.0)

        def seconds(batch: float) -> float:
            each = batch / devices
            return drafter.round_seconds(each, each * positions)

        return _line(seconds, most_batch)

    def verify_line(
        self, devices: int, window: int, most_batch: int, positions: float
    ) -> LinearTime:
        """Seconds of a verification; each request holds `positions`."""
        instance = dataclasses.replace(self.verifier, num_devices=devices)
        return _line(lambda b: instance.round_seconds(b, b * positions, window + 1), most_batch)


def _line(seconds: Callable[[float], float], most_batch: int) -> LinearTime:
    """Through a batch of 1 and the largest one."""
    first_s, last_s = seconds(1), seconds(most_batch)
    slope = (last_s - first_s) / max(most_batch - 1, 1)
    return LinearTime(slope, max(first_s - slope, 0.0))


@dataclasses.dataclass(frozen=True)
class Way:
    """How a rollout drafts: the method is the first of the hardware's.

    `reconfigure`: requests that are accepted less than the average get plans of their own;
    `helpers`: so many requests at most are drafted for by each unit that has become free.
    """

    mode: str
    plan: DevicePlan
    reconfigure: bool = False
    helpers: int = 0


class SpecActorRollout:
    """One rollout; `seconds` plays it to its end."""

    def __init__(
        self, hardware: Hardware, trace: RequestTrace, way: Way, *, step_s: float = 0.5
    ) -> None:
        self._hardware, self._trace, self._way, self._step_s = hardware, trace, way, step_s
        self._methods = list(hardware.drafters)
        shared = way.mode in (PLAIN, SEQUENTIAL)
        per_unit = way.plan.verify_devices + (0 if shared else way.plan.draft_devices)
        self.num_units = hardware.num_devices // per_unit
        R = len(trace.lengths_R)
        self._unit_R = np.arange(R) * self.num_units // R
        self._start_U = np.searchsorted(self._unit_R, np.arange(self.num_units))
        self._batch = math.ceil(R / self.num_units)
        draft_devices = way.plan.verify_devices if shared else way.plan.draft_devices
        # of a request, in the mean of its life and of all
        self._positions = trace.prompt_tokens + float(trace.lengths_R.mean()) / 2
        self._draft = self._draft_line(self._methods[0], draft_devices)
        self._verifier = dataclasses.replace(hardware.verifier, num_devices=way.plan.verify_devices)
        self.idle_fraction = 0.0
        self._window_R = np.full(R, 0 if way.mode == PLAIN else way.plan.window)
        self._decoupled_R = np.full(R, way.mode == DECOUPLED)
        self._plans: dict[float, RequestPlan] = {}
        self._mean_acceptance = float(trace.measured_R.mean())
        self._tokens_R, self._ahead_R = np.ones(R), np.zeros(R)
        self._set_tokens(np.arange(R))
        self._observed_R = np.full(R, not way.reconfigure)

    def _draft_line(self, method: str, devices: int) -> LinearTime:
        return self._hardware.draft_line(method, devices, self._batch, self._positions)

    def _own_plans(self, requests: np.ndarray) -> None:
        """Of those of `requests` that were accepted less than the average of all."""
        for r in requests:
            own = self._plan_of(round(float(self._trace.measured_R[r]), 2))
            if own is not None:
                self._window_R[r], self._decoupled_R[r] = own.window, own.decoupled
        self._set_tokens(requests)

    def _plan_of(self, p: float) -> RequestPlan | None:
        """Of a request with this acceptance; None: that of all."""
        if p >= self._mean_acceptance:
            return None
        if p not in self._plans:
            self._plans[p] = own_plan(p, self._way.plan, self._draft_of, self._verify_of)
        return self._plans[p]

    def _draft_of(self, devices: int) -> LinearTime:
        return self._draft_line(self._methods[0], devices)

    def _verify_of(self, devices: int, window: int) -> LinearTime:
        return self._hardware.verify_line(devices, window, self._batch, self._positions)

    def _set_tokens(self, requests: np.ndarray) -> None:
        """Tokens of a window, and the share of windows that are drafted ahead.

        Verifying a whole window gives the token after it: what was drafted ahead is kept where
        it begins with that one, which its own verification then need not find. With C(w) the
        tokens of a window that is drafted anew, and c the share of those drafted ahead,

            c = p^(w+1) / (1 − p^w + p^(w+1)),   tokens = (1 − c) · C(w) + c · C(w − 1)
        """
        p_R, w_R = self._trace.acceptance_RM[requests, 0], self._window_R[requests]
        whole_R, left_R = p_R**w_R, np.maximum(1 - p_R, 1e-9)
        ahead_R = whole_R * p_R / (1 - whole_R + whole_R * p_R)
        ahead_R *= self._decoupled_R[requests] & (w_R > 0)
        anew_R = (1 - p_R * whole_R) / left_R
        self._ahead_R[requests] = ahead_R
        self._tokens_R[requests] = anew_R - ahead_R * whole_R

    def seconds(self) -> float:
        """From the first round to the end of the last request."""
        trace, step_s = self._trace, self._step_s
        left_R = trace.lengths_R.astype(float)
        now_s, idle_s = 0.0, 0.0
        helping: dict[tuple[int, str], int] = {}
        busy_before = self.num_units
        while True:
            alive_R = left_R > 0
            held_R = np.where(alive_R, trace.prompt_tokens + trace.lengths_R - left_R, 0.0)
            runs_R = alive_R & self._fits(held_R)
            observed_R = alive_R & ~self._observed_R
            observed_R &= held_R - trace.prompt_tokens >= OBSERVED_TOKENS
            if observed_R.any():
                self._observed_R |= observed_R
                self._own_plans(np.flatnonzero(observed_R))
            batch_U = np.bincount(self._unit_R, runs_R, self.num_units)
            busy = int((np.bincount(self._unit_R, alive_R, self.num_units) > 0).sum())
            if not busy:
                break
            rate_R = self._rates(runs_R, np.where(runs_R, held_R, 0.0), batch_U)
            if self._way.helpers and busy < self.num_units:
                if busy < busy_before or any(not alive_R[r] for r, _ in helping):
                    helping = self._assign(alive_R, helping)
                self._help(rate_R, held_R, helping)
            busy_before = busy
            left_R -= rate_R * step_s
            now_s += step_s
            idle_s += step_s * (1 - busy / self.num_units)
        self.idle_fraction = idle_s / now_s
        return now_s

    def _fits(self, held_R: np.ndarray) -> np.ndarray:
        """Which requests have room on their unit: the first of each, as long as memory lasts."""
        sums_R = np.cumsum(held_R)
        before_U = np.concatenate([[0.0], sums_R])[self._start_U]
        return sums_R - before_U[self._unit_R] <= self._verifier.kv_tokens

    def _rates(self, runs_R: np.ndarray, held_R: np.ndarray, batch_U: np.ndarray) -> np.ndarray:
        """Tokens per second of each request."""
        units_R, w_R = self._unit_R, self._window_R
        draft_U = np.array([self._draft(b) if b else 0.0 for b in batch_U])
        if self._way.mode == DECOUPLED:
            draft_R = w_R * draft_U[units_R]
        else:  # all of a batch wait for its longest window
            longest_U = np.zeros(self.num_units)
            np.maximum.at(longest_U, units_R, np.where(runs_R, w_R, 0))
            draft_R = (longest_U * draft_U)[units_R]
        nodes_R = w_R + 1.0 - self._ahead_R
        share_R = runs_R.astype(float)
        for _ in range(1 if self._way.mode != DECOUPLED else SETTLING):
            verify_R = self._verify_seconds(share_R, share_R * nodes_R, share_R * held_R)[units_R]
            anew_s, ahead_s = draft_R + verify_R, np.maximum(draft_R, verify_R)
            round_R = anew_s + self._ahead_R * (ahead_s - anew_s)
            if self._way.mode == DECOUPLED:
                # while its next window is drafted, a request is in no verification
                share_R = runs_R * verify_R / np.maximum(round_R, 1e-9)
        return np.where(runs_R, self._tokens_R / np.maximum(round_R, 1e-9), 0.0)

    def _verify_seconds(
        self, share_R: np.ndarray, nodes_R: np.ndarray, held_R: np.ndarray
    ) -> np.ndarray:
        """Of each unit's verifications, from its requests, their nodes and their positions."""
        batch_U, nodes_U, positions_U = (
            np.bincount(self._unit_R, x_R, self.num_units) for x_R in (share_R, nodes_R, held_R)
        )
        verify_U = np.zeros(self.num_units)
        for u in np.flatnonzero(batch_U):
            b = batch_U[u]
            verify_U[u] = self._verifier.round_seconds(b, positions_U[u], nodes_U[u] / b)
        return verify_U

    def _assign(
        self, alive_R: np.ndarray, helping: Mapping[tuple[int, str], int]
    ) -> dict[tuple[int, str], int]:
        """Best-of-N: which free unit drafts and verifies for which request, by which method."""
        busy_U = np.bincount(self._unit_R, alive_R, self.num_units) > 0
        keep = {key: unit for key, unit in helping.items() if alive_R[key[0]]}
        serving: dict[str, set[int]] = {}
        load: dict[int, int] = {}
        for (_, method), unit in keep.items():
            serving.setdefault(method, set()).add(unit)
            load[unit] = load.get(unit, 0) + 1
        freed = [u for u in np.flatnonzero(~busy_U).tolist() if u not in load]
        waiting = {
            int(r): float(self._trace.acceptance_RM[r, 0])
            for r in np.flatnonzero(alive_R)
            if not any((int(r), method) in keep for method in self._methods)
        }
        methods = self._methods[1:]
        return keep | assign_drafters(waiting, methods, freed, serving, load, self._way.helpers)

    def _help(
        self,
        rate_R: np.ndarray,
        held_R: np.ndarray,
        helping: Mapping[tuple[int, str], int],
    ) -> None:
        """A helped request goes at the rate of whichever unit is the furthest with it."""
        by_unit: dict[tuple[int, str], list[int]] = {}
        for (r, method), unit in helping.items():
            if held_R[r]:
                by_unit.setdefault((unit, method), []).append(r)
        for (_, method), requests in by_unit.items():
            m, b = self._methods.index(method), len(requests)
            draft_s = self._draft_line(method, self._verifier.num_devices)(b)
            positions = float(held_R[requests].sum())
            for r in requests:
                p = round(float(self._trace.acceptance_RM[r, m]), 2)
                helped = _helper_rate(self._verifier, draft_s, p, b, positions)
                rate_R[r] = max(rate_R[r], helped)


def _helper_rate(
    verifier: Instance, draft_s: float, p: float, batch: int, positions: float
) -> float:
    """Tokens per second of one request at the best sequential window of a helper."""
    return max(
        sequential_tokens(p, w) / (w * draft_s + verifier.round_seconds(batch, positions, w + 1))
        for w in (1, 2, 4, 8)
    )
