"""A budget for the most tokens per second, given a table of measured round times.

A round of M nodes costs the seconds in the table, and gives each request one token plus its
accepted draft tokens. A = live requests, B = slots, N = draft tokens, S = cache positions.
"""

from __future__ import annotations

import numpy as np

from reprise.spec.budget.aimd import Aimd
from reprise.spec.budget.budget import (
    Backoff,
    Budget,
    DraftDecision,
    FixedBudget,
    PlainSpell,
    Sizes,
    best_by_size,
    best_trees,
    plain,
)
from reprise.spec.budget.config import LEARNED, MODEL, parse_budget
from reprise.spec.drafter import (
    Acceptance,
    Drafts,
    LiveSlots,
    PerRequest,
    RequestIndex,
    Source,
    sums,
)
from reprise.spec.round_times import RoundTimes

DEVICE_SOURCES = {LEARNED: Source.LEARNED, MODEL: Source.MODEL}


class DeviceDraftGate:
    """A gate that skips a device drafter while rounds without it yield more tokens per second.

        (A + Σ s_a probability) / (round + drafts)
        against (A + Σ s_a probability of others) / (round + drafts of others)

    A draft token that other drafters propose with a lower probability counts for this drafter. A
    drafter that does not pay is skipped for a `Backoff`.
    """

    def __init__(self) -> None:
        self._waits = {name: Backoff() for name in DEVICE_SOURCES}
        self._left = dict.fromkeys(DEVICE_SOURCES, 0)  # rounds left in the current wait

    def skips(self) -> frozenset[str]:
        """Return the drafters to skip in the next round."""
        self._left = {name: max(left - 1, 0) for name, left in self._left.items()}
        return frozenset(name for name, left in self._left.items() if left)

    def observe(
        self,
        times: RoundTimes,
        live: LiveSlots,
        drafts: Drafts,
        taken_A: np.ndarray,
        scale_A: np.ndarray,
        bucket: tuple[int, int, int],
    ) -> None:
        """Compare for a round of this bucket (slots, nodes, positions) with these draft tokens."""
        num_slots, _, num_positions = bucket
        depths_of = {name: times.draft_depths(name) for name in DEVICE_SOURCES}
        round_s = times(*bucket, float(live.total_tokens_A.mean()))
        if round_s is None or not any(depths_of.values()):
            return
        taken_AN = np.arange(drafts.max_nodes) < taken_A[:, None]
        worth_AN = np.where(taken_AN, drafts.prob_AN, 0.0) * scale_A[:, None]
        draft_s = dict[str, float]()
        own_worth = dict[str, float]()
        for name, source in DEVICE_SOURCES.items():
            own_AN = drafts.sources_AN == source
            depths = depths_of[name]
            if depths and not self._left[name] and (own_AN & taken_AN).any():
                draft_s[name] = times.draft(name, num_slots, depths[-1], num_positions)
                own_worth[name] = float(worth_AN[own_AN].sum())
        all_s = round_s + sum(draft_s.values())
        tokens = len(live) + float(worth_AN.sum())
        for name in draft_s:
            if tokens / all_s >= (tokens - own_worth[name]) / (all_s - draft_s[name]):
                self._waits[name] = Backoff()
            else:
                self._left[name] = self._waits[name].lengthen()


BETTER = 1.03  # speedup over plain decoding that drafts must promise at the start
DECAY = 0.9
ALL_DECAY = 0.99  # per round, of the acceptance counts of a request and of all requests
REFUSED_ROUNDS = 16, 256  # min and max rounds until refused drafts are requested again
SAMPLED = 4  # drafts are then requested for one in 4 groups
REPEATS = 8  # fetches that draft on the device between two choices by the host
MIN_SHARE = 0.75  # share of the requests that must remain for a repeat
PRIOR_NODES = 2.0  # weight of the prior of a request, in expected draft tokens


class Goodput(Budget):
    """A budget for the number of best draft tokens that yields the most tokens per second.

        tokens(M) = A + Σ s_a probability of the M − B best
        M = argmax tokens(M) / seconds(B, M, S)

    `spec.budget.budget.best` selects the best. `s_a` is the ratio of accepted to expected draft
    tokens of a request so far, shrunk towards the ratio of all requests; it is 1 for cached
    responses. Drafting starts once it promises a speedup of `BETTER`, and stops when plain decoding
    promises more. Since drafts cost host time, they are then requested only after a `PlainSpell`,
    and for one in `SAMPLED` groups, until drafting would pay for these groups.
    """

    def __init__(self, times: RoundTimes) -> None:
        self._times = times
        index = RequestIndex()
        self._accepted = PerRequest(index, 0.0)
        self._expected = PerRequest(index, 0.0)
        self._all_accepted = self._all_expected = 0.0
        self._speculating = False
        self._repeats = 0  # remaining fetches that draft on the device
        self._chosen = 0, 0, 0  # slots, nodes and requests of the last choice
        self._refused = PlainSpell(index, *REFUSED_ROUNDS)
        self._num_refused = 0  # consecutive refusals
        self._share = 1.0  # of the live requests with drafts requested
        self._gate = DeviceDraftGate()

    def skips(self, live: LiveSlots, num_slots: int, num_positions: int) -> frozenset[str]:
        return self._gate.skips()

    def limits(self, live: LiveSlots, num_slots: int) -> np.ndarray:
        self._share = 1.0
        if self._refused.lasts(live, num_slots):
            return np.zeros(len(live), np.int32)
        wanted_A = np.ones(len(live), bool)
        if self._num_refused:
            groups = np.unique(live.group_ids_A)
            some = groups[self._num_refused % SAMPLED :: SAMPLED]
            wanted_A = np.isin(live.group_ids_A, some if len(some) else groups)
            self._share = float(wanted_A.mean())
        return np.where(wanted_A, 2**30, 0).astype(np.int32)

    def scale(self, live: LiveSlots) -> np.ndarray:
        """Return s_a = (accepted + prior · s) / (expected + prior), with s of all requests."""
        overall = (self._all_accepted + PRIOR_NODES) / (self._all_expected + PRIOR_NODES)
        accepted_A = self._accepted.get(live)
        expected_A = self._expected.get(live)
        return (accepted_A + PRIOR_NODES * overall) / (expected_A + PRIOR_NODES)

    def choose_on_device(
        self, live: LiveSlots, max_tokens: int, sizes: Sizes, num_slots: int
    ) -> DraftDecision | None:
        """Repeat the last choice for a few fetches, while most of its requests remain."""
        slots, num_nodes, requests = self._chosen
        if not self._repeats or num_slots != slots or len(live) < MIN_SHARE * requests:
            return None
        self._repeats -= 1
        return best_trees(num_nodes, num_slots, max_tokens, self.scale(live))

    def choose(
        self, live: LiveSlots, drafts: Drafts, sizes: Sizes, num_slots: int, num_positions: int
    ) -> DraftDecision:
        live_tokens = float(live.total_tokens_A.mean())
        plain_s = self._times(num_slots, num_slots, num_positions, live_tokens)
        if plain_s is None:
            raise KeyError(
                f"no measured time of a plain round of {num_slots} slots and {num_positions} "
                "positions: measure the engine's rounds (rl.warm_up.round_times) before the rollout"
            )
        scale_A = self.scale(live)
        self._repeats = 0
        cached_A = drafts.cached_A
        scale_A[cached_A] = 1.0  # cached responses do not measure the acceptance of drafters
        share = 1.0 if cached_A.any() else self._share
        seconds = {num_slots: plain_s}
        for size in sizes if drafts.count_A.any() else ():
            round_s = self._times(num_slots, size, num_positions, live_tokens)
            if round_s is not None:
                seconds[size] = round_s
        taken_SA, accepted_S = best_by_size(drafts, scale_A, num_slots, list(seconds), share)
        tokens_S = 1 + accepted_S / (share * len(live))
        rate_S = tokens_S * plain_s / np.fromiter(seconds.values(), float)
        s = int(rate_S.argmax())
        best = list(seconds)[s]
        best_rate = float(rate_S[s])
        taken_A = taken_SA[s]
        bucket = num_slots, best, num_positions
        self._gate.observe(self._times, live, drafts, taken_A, scale_A, bucket)
        self._speculating = best > num_slots and (self._speculating or best_rate > BETTER)
        if not self._speculating:
            self._num_refused += 1
            return self._refused.begin(live, num_slots)
        self._refused.end()
        self._num_refused = 0
        if share < 1:  # the other groups draft from the next round on
            return plain(num_slots)
        self._repeats = REPEATS
        self._chosen = (num_slots, best, len(live))
        return DraftDecision(best, taken_A)

    def observe(self, live: LiveSlots, drafts: Drafts, acceptance: Acceptance) -> None:
        accepted_A, expected_A = sums(drafts, acceptance)
        self._accepted.set(live, DECAY * self._accepted.get(live) + accepted_A)
        self._expected.set(live, DECAY * self._expected.get(live) + expected_A)
        self._all_accepted = ALL_DECAY * self._all_accepted + float(accepted_A.sum())
        self._all_expected = ALL_DECAY * self._all_expected + float(expected_A.sum())


def make_budget(policy: str, times: RoundTimes | None) -> Budget:
    """Return the budget that `policy` names, for one rollout; for `bandit` see `BanditBudget`."""
    name, size = parse_budget(policy)
    if name == "aimd":
        return Aimd(times)
    if name == "goodput":
        assert times is not None, "goodput needs the measured seconds of a round"
        return Goodput(times)
    assert name in ("off", "fixed"), f"no budget of one rollout is called {policy}"
    return FixedBudget(size)
