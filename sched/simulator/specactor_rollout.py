"""A rollout with a drafter beside the model, under SpecActor's modes of using its devices.

A trace (the lengths and the acceptance of all requests) is played in steps of `step_s`. In each,
a unit's round takes the seconds that its batch costs, and gives each request the tokens that its
acceptance is worth. A unit is the devices that hold one copy of the model, with those of its
drafter where it has its own. Modes are those of SpecActor's figure 13:

    plain          no drafts
    sequential     draft w tokens, then verify them, on the same devices (the paper: coupled)
    disaggregated  sequential, on devices of their own: one waits while the other works
    decoupled      draft on while verifying (sched.policies.specactor)

R = requests, U = units, M = methods of drafting.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

import numpy as np

from sched.policies.specactor import (
    DevicePlan,
    LinearTime,
    RequestPlan,
    assign_drafters,
    best_request_plan,
    sequential_tokens,
)
from sched.simulator.roofline import Instance

OBSERVED_TOKENS = 1000  # a request's acceptance counts as measured after these
SETTLING_TURNS = 4  # in which verifications and their batches settle
PLAIN, SEQUENTIAL, DISAGGREGATED, DECOUPLED = "plain", "sequential", "disaggregated", "decoupled"


@dataclasses.dataclass(frozen=True)
class RequestTrace:
    """The length of each response, and the acceptance of each method's draft tokens for it.

    `measured_R` is the first method's acceptance as observed over a request's first tokens,
    which reconfiguration relies on.
    """

    lengths_R: np.ndarray
    acceptance_RM: np.ndarray
    measured_R: np.ndarray
    prompt_tokens: int

    @property
    def mean_positions(self) -> float:
        """The positions that a request holds, averaged over its life and over all requests."""
        return self.prompt_tokens + float(self.lengths_R.mean()) / 2


@dataclasses.dataclass(frozen=True)
class Hardware:
    """`num_devices`, of which `verifier` takes several, and each method's drafter.

    None is a method on the host that takes no time: n-grams.
    """

    num_devices: int
    verifier: Instance
    drafters: Mapping[str, Instance | None]

    def draft_line(
        self, method: str, devices: int, most_batch: int, positions: float
    ) -> LinearTime:
        """Return the seconds of a draft token, on `devices` that share the requests."""
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
        """Return the seconds of a verification; each request holds `positions`."""
        instance = dataclasses.replace(self.verifier, num_devices=devices)
        return _line(lambda b: instance.round_seconds(b, b * positions, window + 1), most_batch)


def _line(seconds: Callable[[float], float], most_batch: int) -> LinearTime:
    """Return the line through a batch of 1 and the largest one."""
    first_s, last_s = seconds(1), seconds(most_batch)
    slope = (last_s - first_s) / max(most_batch - 1, 1)
    return LinearTime(slope, max(first_s - slope, 0.0))


@dataclasses.dataclass(frozen=True)
class Strategy:
    """The mode and plan of a rollout, which drafts by the first method of its hardware.

    `reconfigure` gives requests that are accepted less than the average plans of their own;
    `helpers` is how many requests at most each unit that has become free drafts for.
    """

    mode: str
    plan: DevicePlan
    reconfigure: bool = False
    helpers: int = 0


class SpecActorRollout:
    """One rollout; `seconds` plays it to its end."""

    def __init__(
        self, hardware: Hardware, trace: RequestTrace, strategy: Strategy, *, step_s: float = 0.5
    ) -> None:
        self._hardware, self._trace = hardware, trace
        self._strategy, self._step_s = strategy, step_s
        self._methods = list(hardware.drafters)
        shared = strategy.mode in (PLAIN, SEQUENTIAL)
        per_unit = strategy.plan.verify_devices + (0 if shared else strategy.plan.draft_devices)
        self.num_units = hardware.num_devices // per_unit
        R = len(trace.lengths_R)
        self._unit_R = np.arange(R) * self.num_units // R
        self._start_U = np.searchsorted(self._unit_R, np.arange(self.num_units))
        self._batch = math.ceil(R / self.num_units)
        draft_devices = strategy.plan.verify_devices if shared else strategy.plan.draft_devices
        self._positions = trace.mean_positions
        self._draft = self._draft_line(self._methods[0], draft_devices)
        self._verifier = dataclasses.replace(
            hardware.verifier, num_devices=strategy.plan.verify_devices
        )
        self.idle_fraction = 0.0
        self._window_R = np.full(R, 0 if strategy.mode == PLAIN else strategy.plan.window)
        self._decoupled_R = np.full(R, strategy.mode == DECOUPLED)
        self._plan_of = functools.cache(self._own_plan)
        self._mean_acceptance = float(trace.measured_R.mean())
        self._tokens_R, self._ahead_R = np.ones(R), np.zeros(R)
        self._set_tokens(np.arange(R))
        self._observed_R = np.full(R, not strategy.reconfigure)

    def _draft_line(self, method: str, devices: int) -> LinearTime:
        return self._hardware.draft_line(method, devices, self._batch, self._positions)

    def _own_plans(self, requests: np.ndarray) -> None:
        """Give plans of their own to the `requests` that are accepted less than the average."""
        for r in requests:
            p = round(float(self._trace.measured_R[r]), 2)
            if p < self._mean_acceptance:
                own = self._plan_of(p)
                self._window_R[r], self._decoupled_R[r] = own.window, own.decoupled
        self._set_tokens(requests)

    def _own_plan(self, p: float) -> RequestPlan:
        """Return a request's window and mode on the devices of the common plan (Algorithm 2)."""
        devices = self._strategy.plan
        return best_request_plan(
            p,
            self._draft_line(self._methods[0], devices.draft_devices),
            lambda window: self._hardware.verify_line(
                devices.verify_devices, window, self._batch, self._positions
            ),
        )

    def _set_tokens(self, requests: np.ndarray) -> None:
        """Set the tokens of a window, and the share of windows that are drafted ahead.

        Verifying a whole window gives the token after it. The window that was drafted ahead is
        kept if it begins with that token, which its own verification then need not find. With
        C(w) the tokens of a fresh window, and c the share of windows drafted ahead,

            c = p^(w+1) / (1 − p^w + p^(w+1)),   tokens = (1 − c) · C(w) + c · C(w − 1)
        """
        p_R, w_R = self._trace.acceptance_RM[requests, 0], self._window_R[requests]
        whole_R, left_R = p_R**w_R, np.maximum(1 - p_R, 1e-9)
        ahead_R = whole_R * p_R / (1 - whole_R + whole_R * p_R)
        ahead_R *= self._decoupled_R[requests] & (w_R > 0)
        fresh_R = (1 - p_R * whole_R) / left_R
        self._ahead_R[requests] = ahead_R
        self._tokens_R[requests] = fresh_R - ahead_R * whole_R

    def seconds(self) -> float:
        """Return the seconds from the first round to the end of the last request."""
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
            if self._strategy.helpers and busy < self.num_units:
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
        """Return which requests have room on their unit: the first ones, while memory lasts."""
        sums_R = np.cumsum(held_R)
        before_U = np.concatenate([[0.0], sums_R])[self._start_U]
        return sums_R - before_U[self._unit_R] <= self._verifier.kv_tokens

    def _rates(self, runs_R: np.ndarray, held_R: np.ndarray, batch_U: np.ndarray) -> np.ndarray:
        """Return the tokens per second of each request."""
        units_R, w_R = self._unit_R, self._window_R
        draft_U = np.array([self._draft(b) if b else 0.0 for b in batch_U])
        if self._strategy.mode == DECOUPLED:
            draft_R = w_R * draft_U[units_R]
        else:  # the whole batch waits for its longest window
            longest_U = np.zeros(self.num_units)
            np.maximum.at(longest_U, units_R, np.where(runs_R, w_R, 0))
            draft_R = (longest_U * draft_U)[units_R]
        nodes_R = w_R + 1.0 - self._ahead_R
        share_R = runs_R.astype(float)
        for _ in range(1 if self._strategy.mode != DECOUPLED else SETTLING_TURNS):
            verify_R = self._verify_seconds(share_R, share_R * nodes_R, share_R * held_R)[units_R]
            fresh_s, ahead_s = draft_R + verify_R, np.maximum(draft_R, verify_R)
            round_R = fresh_s + self._ahead_R * (ahead_s - fresh_s)
            if self._strategy.mode == DECOUPLED:
                # a request is in no verification while its next window is drafted
                share_R = runs_R * verify_R / np.maximum(round_R, 1e-9)
        return np.where(runs_R, self._tokens_R / np.maximum(round_R, 1e-9), 0.0)

    def _verify_seconds(
        self, share_R: np.ndarray, nodes_R: np.ndarray, held_R: np.ndarray
    ) -> np.ndarray:
        """Return each unit's verification time for its requests, their nodes and positions."""
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
        """Return {(request, method): free unit that drafts and verifies for it}: best-of-N."""
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
        return keep | assign_drafters(
            waiting, methods, freed, serving, load, self._strategy.helpers
        )

    def _help(
        self,
        rate_R: np.ndarray,
        held_R: np.ndarray,
        helping: Mapping[tuple[int, str], int],
    ) -> None:
        """Raise the rates of helped requests to that of their fastest helper."""
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
    """Return the tokens per second of one request at a helper's best sequential window."""
    return max(
        sequential_tokens(p, w) / (w * draft_s + verifier.round_seconds(batch, positions, w + 1))
        for w in (1, 2, 4, 8)
    )
