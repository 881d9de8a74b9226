"""Units that have become free draft and verify for the last requests: best-of-N, and its costs.

A helper begins when its drafter's weights and the request's keys and values are there
(section 4.3); one unit gets these one after the other. From then on the request is as fast as
the fastest of its own unit and its helpers. What it gains until then is verified with the
helper's first window.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from sched.policies.specactor import (
    RequestPlan,
    assign_drafters,
    best_helper_plan,
    sequential_tokens,
)
from sched.policies.specactor_profile import Profile, expected_remaining_tokens, worth_helping
from sched.simulator.specactor_hardware import Hardware, RequestTrace

WINDOWS = (1, 2, 4, 8)  # of a helper
GRAIN_TOKENS = 256  # in which helpers' plans count positions


@dataclasses.dataclass(frozen=True)
class Running:
    """A moment of a rollout: what its requests have, and how fast they are."""

    now_s: float
    alive_R: np.ndarray
    held_R: np.ndarray  # positions; 0 of those that have ended
    tokens_per_s_R: np.ndarray


class Helpers:
    """Which free unit helps which request by which method, and since when.

    The first method of the hardware serves everybody; helpers draft by the others. A unit has
    room for `most_requests`, and for as many as fit into its memory when all go to the limit.
    """

    def __init__(
        self, hardware: Hardware, trace: RequestTrace, profile: Profile, most_requests: int
    ) -> None:
        self._hardware, self._trace, self._profile = hardware, trace, profile
        self._most_requests = most_requests
        self._methods = list(hardware.drafters)
        self._units: dict[tuple[int, str], int] = {}
        self._ready_s: dict[tuple[int, str], float] = {}
        self._loaded: set[tuple[int, str]] = set()  # (unit, method)
        self._until_s: dict[int, float] = {}  # a unit's last copies end
        self._plan_of = functools.cache(self._make_plan)

    def end(self, alive_R: np.ndarray) -> bool:
        """Let go of requests that have ended, and return whether there were any."""
        ended = [key for key in self._units if not alive_R[key[0]]]
        for key in ended:
            del self._units[key], self._ready_s[key]
        return bool(ended)

    def assign(self, free_units: Sequence[int], running: Running) -> None:
        """Give requests to units on which none of their own runs (Algorithm 3)."""
        serving: dict[str, set[int]] = {}
        load: dict[int, int] = {}
        for (_, method), unit in self._units.items():
            serving.setdefault(method, set()).add(unit)
            load[unit] = load.get(unit, 0) + 1
        ended_tokens = self._trace.lengths_R[~running.alive_R]

        @functools.cache
        def remaining_tokens(request: int) -> float:
            tokens = running.held_R[request] - self._trace.prompt_tokens
            return expected_remaining_tokens(tokens, ended_tokens, self._trace.limit_tokens)

        def helps(request: int, method: str, unit: int, batch: int) -> bool:
            needed = batch * (self._trace.prompt_tokens + self._trace.limit_tokens)
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

        added = assign_drafters(
            {
                r: self._profile.p_of_request(r, self._methods[0])
                for r in np.flatnonzero(running.alive_R).tolist()
            },
            self._methods[1:],
            [unit for unit in free_units if unit not in load],
            serving,
            load,
            self._most_requests,
            helps,
        )
        for key, unit in added.items():
            self._add(key, unit, running)

    def _add(self, key: tuple[int, str], unit: int, running: Running) -> None:
        """Begin to help a request: it costs the drafter's weights, keys and values."""
        request, method = key
        cost_s = self._load_seconds(unit, method)
        cost_s += self._hardware.kv_seconds(method, float(running.held_R[request]))
        ready_s = max(running.now_s, self._until_s.get(unit, 0.0)) + cost_s
        self._units[key], self._ready_s[key] = unit, ready_s
        self._until_s[unit] = ready_s
        self._loaded.add((unit, method))

    def _load_seconds(self, unit: int, method: str) -> float:
        loaded = (unit, method) in self._loaded
        return 0.0 if loaded else self._hardware.load_seconds(method)

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
            round_s = self._round_seconds(method, batch, positions, window)
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

    def _round_seconds(self, method: str, batch: int, positions: float, window: int) -> float:
        verify_s = self._hardware.verifier.round_seconds(batch, positions, window + 1)
        return window * self._draft_seconds(method, batch, positions) + verify_s
