"""A rollout with a drafter beside the model, under SpecActor's modes of using its devices.

A trace (the lengths and the acceptance of all requests) is played in steps of `step_s`. In each, a
unit's round takes the seconds that its batch costs, and gives each request the tokens of its
acceptance. Decisions use what rounds have shown (`Profile`), never acceptance itself. A unit is the
devices that hold one copy of the model, with those of its drafter if it has separate ones. Modes
are those of SpecActor's figure 13:

    plain          no drafts
    sequential     draft w tokens, then verify them, on the same devices (the paper: coupled)
    disaggregated  sequential, on separate devices: one waits while the other works
    decoupled      draft on while verifying:  τ_w / max(w·D, V_w)

R = requests, M = methods of drafting, U = units.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from benchmarks.simulator.specactor_devices import (
    DevicePlan,
    Hardware,
    RequestTrace,
    best_helper_plan,
    expected_remaining_tokens,
)
from reprise.sched.policies.specactor import (
    Profile,
    Reconfiguration,
    RequestPlan,
    assign_drafters,
    best_request_plan,
    sequential_tokens,
    worth_helping,
)

SETTLING_TURNS = 4  # in which verifications and their batches settle
PLAIN, SEQUENTIAL, DISAGGREGATED, DECOUPLED = "plain", "sequential", "disaggregated", "decoupled"
WINDOWS = (1, 2, 4, 8)  # of a helper
GRAIN_TOKENS = 256  # granularity of positions in helpers' plans


# --- helpers ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Running:
    """A moment of a rollout: the positions of its requests (0: ended), and their rates."""

    now_s: float
    alive_R: np.ndarray
    held_R: np.ndarray
    tokens_per_s_R: np.ndarray


class Helpers:
    """Best of N: which free unit helps which request by which method, and since when.

    A helper begins when its drafter's weights and the request's keys and values are there
    (section 4.3); one unit gets these one after the other. From then on the request is as fast as
    the fastest of its own unit and its helpers. The first method of the hardware serves all
    requests; helpers draft by the others. A unit has room for `max_requests`, and for those that
    fit into its memory if all reach the limit.
    """

    def __init__(
        self, hardware: Hardware, trace: RequestTrace, profile: Profile, max_requests: int
    ) -> None:
        self._hardware, self._trace, self._profile = hardware, trace, profile
        self._max_requests = max_requests
        self._methods = list(hardware.drafters)
        self._units: dict[tuple[int, str], int] = {}
        self._ready_s: dict[tuple[int, str], float] = {}
        self._loaded: set[tuple[int, str]] = set()  # (unit, method)
        self._until_s: dict[int, float] = {}  # a unit's last copies end
        self._plan_of = functools.cache(self._make_plan)

    def end(self, alive_R: np.ndarray) -> bool:
        """Release requests that have ended, and return whether there were any."""
        ended = [key for key in self._units if not alive_R[key[0]]]
        for key in ended:
            del self._units[key], self._ready_s[key]
        return bool(ended)

    def assign(self, free_units: Sequence[int], running: Running) -> None:
        """Give requests to units without requests of their own (Algorithm 3)."""
        serving: dict[str, set[int]] = {}
        load: dict[int, int] = {}
        for (_, method), unit in self._units.items():
            serving.setdefault(method, set()).add(unit)
            load[unit] = load.get(unit, 0) + 1
        trace, ended_tokens = self._trace, self._trace.lengths_R[~running.alive_R]

        @functools.cache
        def remaining_tokens(request: int) -> float:
            tokens = running.held_R[request] - trace.prompt_tokens
            return expected_remaining_tokens(tokens, ended_tokens, trace.limit_tokens)

        def helps(request: int, method: str, unit: int, batch: int) -> bool:
            needed = batch * (trace.prompt_tokens + trace.limit_tokens)
            if (request, method) in self._units or needed > self._hardware.helper_tokens(method):
                return False
            held = float(running.held_R[request])
            waits_s = max(self._until_s.get(unit, 0.0) - running.now_s, 0.0)
            load_s = self._load_seconds(unit, method) if batch == 1 else 0.0
            return worth_helping(
                remaining_tokens(request),
                float(running.tokens_per_s_R[request]),
                self._plan(method, batch, batch * held).tokens_per_s,
                waits_s + load_s + self._hardware.kv_seconds(method, held),
            )

        alive = np.flatnonzero(running.alive_R).tolist()
        added = assign_drafters(
            {r: self._profile.p_of_request(r, self._methods[0]) for r in alive},
            self._methods[1:],
            [unit for unit in free_units if unit not in load],
            serving,
            load,
            self._max_requests,
            helps,
        )
        for key, unit in added.items():
            self._add(key, unit, running)

    def _add(self, key: tuple[int, str], unit: int, running: Running) -> None:
        request, method = key
        cost_s = self._load_seconds(unit, method)
        cost_s += self._hardware.kv_seconds(method, float(running.held_R[request]))
        ready_s = max(running.now_s, self._until_s.get(unit, 0.0)) + cost_s
        self._units[key], self._ready_s[key] = unit, ready_s
        self._until_s[unit] = ready_s
        self._loaded.add((unit, method))

    def _load_seconds(self, unit: int, method: str) -> float:
        return 0.0 if (unit, method) in self._loaded else self._hardware.load_seconds(method)

    def rates(self, running: Running, step_s: float) -> np.ndarray:
        """Return the tokens per second of each request over the next step, with its helpers."""
        own_R, end_s = running.tokens_per_s_R, running.now_s + step_s
        rate_R = own_R.copy()
        batches: dict[tuple[int, str], list[int]] = {}
        for (request, method), unit in self._units.items():
            if self._ready_s[request, method] < end_s:
                batches.setdefault((unit, method), []).append(request)
        for (_, method), requests in batches.items():
            m, batch = self._methods.index(method), len(requests)
            positions = float(running.held_R[requests].sum())
            window = self._plan(method, batch, positions).window
            verify_s = self._hardware.verifier.round_seconds(batch, positions, window + 1)
            round_s = window * self._draft_seconds(method, batch, positions) + verify_s
            for r in requests:
                p = float(self._trace.acceptance_RM[r, m])
                helped = sequential_tokens(p, window) / round_s
                share = min((end_s - self._ready_s[r, method]) / step_s, 1.0)
                rate_R[r] = max(rate_R[r], own_R[r] + share * (helped - own_R[r]))
        return rate_R

    def _plan(self, method: str, batch: int, positions: float) -> RequestPlan:
        return self._plan_of(method, batch, round(positions / GRAIN_TOKENS))

    def _make_plan(self, method: str, batch: int, grains: int) -> RequestPlan:
        """Return a helper's window by the method's profile, to which helpers add nothing here."""
        p, positions = self._profile.p_of_method(method), float(grains * GRAIN_TOKENS)
        return best_helper_plan(
            p,
            self._draft_seconds(method, batch, positions),
            lambda w: self._hardware.verifier.round_seconds(batch, positions, w + 1),
            WINDOWS,
        )

    def _draft_seconds(self, method: str, batch: int, positions: float) -> float:
        """Return the seconds of a draft token, on all devices of a unit."""
        drafter = self._hardware.drafters[method]
        if drafter is None:
            return 0.0
        each = max(batch / self._hardware.verifier.num_devices, 1.0)
        return drafter.round_seconds(each, each * positions / batch)


# --- the rollout ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Strategy:
    """The mode and plan of a rollout, which drafts by the first method of its hardware.

    Every `reconfigure_tokens` tokens requests that are accepted less than the average get their own
    plans; 0: never. Each free unit drafts for at most `helpers` requests.
    """

    mode: str
    plan: DevicePlan
    reconfigure_tokens: int = 0
    helpers: int = 0


class SpecActorRollout:
    """One rollout; `seconds` plays it to its end. `seed` draws which draft tokens are right."""

    def __init__(
        self,
        hardware: Hardware,
        trace: RequestTrace,
        strategy: Strategy,
        *,
        step_s: float = 0.5,
        seed: int = 0,
    ) -> None:
        self._trace, self._strategy, self._step_s = trace, strategy, step_s
        self._verifier = dataclasses.replace(
            hardware.verifier, num_devices=strategy.plan.verify_devices
        )
        self._hardware = dataclasses.replace(hardware, verifier=self._verifier)
        methods = list(hardware.drafters)
        self._method = methods[0]
        self._rng = np.random.default_rng((seed, 1))  # another stream than a trace's of this seed
        self._profile = Profile(dict(zip(methods, trace.profiled_M.tolist(), strict=True)))
        self._place(len(trace.lengths_R))
        self._set_lines()
        self.idle_fraction = 0.0

    def _place(self, R: int) -> None:
        """Divide devices into units, requests between these, and give all the common plan."""
        strategy = self._strategy
        shared = strategy.mode in (PLAIN, SEQUENTIAL)
        per_unit = strategy.plan.verify_devices + (0 if shared else strategy.plan.draft_devices)
        self.num_units = self._hardware.num_devices // per_unit
        self._unit_R = np.arange(R) * self.num_units // R
        self._start_U = np.searchsorted(self._unit_R, np.arange(self.num_units))
        self._window_R = np.full(R, 0 if strategy.mode == PLAIN else strategy.plan.window)
        self._decoupled_R = np.full(R, strategy.mode == DECOUPLED)
        self._seen_R = np.zeros(R)  # draft tokens not yet in the profile
        self._tokens_R, self._ahead_R, self._seen_share_R = np.ones(R), np.zeros(R), np.zeros(R)
        self._set_tokens(np.arange(R))

    def _set_lines(self) -> None:
        """Make the lines of drafting and verifying for plans."""
        strategy, hardware = self._strategy, self._hardware
        batch = math.ceil(len(self._unit_R) / self.num_units)
        positions, devices = self._trace.mean_positions, strategy.plan.verify_devices
        shared = strategy.mode in (PLAIN, SEQUENTIAL)
        draft_devices = devices if shared else strategy.plan.draft_devices
        self._draft = hardware.draft_line(self._method, draft_devices, batch, positions)
        common = RequestPlan(strategy.plan.window, strategy.mode == DECOUPLED, 0.0)
        self._reconfiguration = Reconfiguration(
            self._method,
            common,
            lambda p: best_request_plan(
                p,
                self._draft,
                lambda window: hardware.verify_line(devices, window, batch, positions),
            ),
            strategy.reconfigure_tokens or 2**31,
        )

    def _profile_rounds(self, requests: np.ndarray) -> None:
        """Add these requests' rounds to the profile: draws of their acceptance."""
        seen_N = self._seen_R[requests].astype(int)
        self._seen_R[requests] -= seen_N
        accepted_N = self._rng.binomial(seen_N, self._trace.acceptance_RM[requests, 0])
        for r, accepted, seen in zip(requests.tolist(), accepted_N, seen_N, strict=True):
            self._profile.observe(r, self._method, int(accepted), int(seen))

    def _reconfigure(self, before_R: np.ndarray, tokens_R: np.ndarray, alive_R: np.ndarray) -> None:
        """Give plans to the requests that are due."""
        is_due_R = self._reconfiguration.is_due(before_R, tokens_R)
        due = np.flatnonzero(is_due_R & alive_R)
        self._profile_rounds(due)
        for r in due.tolist():
            own = self._reconfiguration.plan_when_due(r, before_R[r], tokens_R[r], self._profile)
            if own is not None:
                self._window_R[r], self._decoupled_R[r] = own.window, own.decoupled
        self._set_tokens(due)

    def _set_tokens(self, requests: np.ndarray) -> None:
        """Set the tokens of a window, and the shares of drafted ahead windows and of seen tokens.

        Verifying a whole window gives the token after it. The window drafted ahead is kept if it
        begins with that token, which its own verification then need not find. With C(w) the tokens
        of a fresh window, and c the share of windows drafted ahead,

            c = p^(w+1) / (1 − p^w + p^(w+1)),   tokens = (1 − c) · C(w) + c · C(w − 1)

        Each token judges a draft token, except the one after a whole window.
        """
        p_R, w_R = self._trace.acceptance_RM[requests, 0], self._window_R[requests]
        whole_R, left_R = p_R**w_R, np.maximum(1 - p_R, 1e-9)
        ahead_R = whole_R * p_R / (1 - whole_R + whole_R * p_R)
        ahead_R *= self._decoupled_R[requests] & (w_R > 0)
        fresh_R = (1 - p_R * whole_R) / left_R
        self._ahead_R[requests] = ahead_R
        tokens_R = fresh_R - ahead_R * whole_R
        self._tokens_R[requests] = tokens_R
        unseen_R = np.where(self._decoupled_R[requests] & (w_R > 0), 0.0, whole_R / tokens_R)
        self._seen_share_R[requests] = 1 - unseen_R

    def seconds(self) -> float:
        """Return the seconds from the first round to the end of the last request."""
        trace, step_s = self._trace, self._step_s
        left_R = trace.lengths_R.astype(float)
        tokens_R = np.zeros(len(left_R))
        now_s, idle_s = 0.0, 0.0
        helpers = Helpers(self._hardware, trace, self._profile, self._strategy.helpers)
        busy_before = self.num_units
        while True:
            alive_R = left_R > 0
            before_R, tokens_R = tokens_R, trace.lengths_R - left_R
            held_R = np.where(alive_R, trace.prompt_tokens + tokens_R, 0.0)
            runs_R = alive_R & self._fits(held_R)
            self._reconfigure(before_R, tokens_R, alive_R)
            batch_U = np.bincount(self._unit_R, runs_R, self.num_units)
            is_busy_U = np.bincount(self._unit_R, alive_R, self.num_units) > 0
            busy = int(is_busy_U.sum())
            if not busy:
                break
            rate_R = self._rates(runs_R, np.where(runs_R, held_R, 0.0), batch_U)
            self._seen_R += rate_R * step_s * self._seen_share_R
            running = Running(now_s, alive_R, held_R, rate_R)
            if self._strategy.helpers and busy < self.num_units:
                if helpers.end(alive_R) or busy < busy_before:
                    self._profile_rounds(np.flatnonzero(alive_R))
                    rate_R = helpers.rates(running, step_s)
                    with_help = dataclasses.replace(running, tokens_per_s_R=rate_R)
                    helpers.assign(np.flatnonzero(~is_busy_U).tolist(), with_help)
                rate_R = helpers.rates(running, step_s)
            busy_before = busy
            left_R -= rate_R * step_s
            now_s += step_s
            idle_s += step_s * (1 - busy / self.num_units)
        self.idle_fraction = idle_s / now_s
        return now_s

    def _fits(self, held_R: np.ndarray) -> np.ndarray:
        """Return which requests have room on their unit: the first ones until memory is full."""
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
