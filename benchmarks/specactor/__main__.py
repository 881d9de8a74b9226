"""Drafting workers (SpecActor) on a virtual clock: `python -m benchmarks.specactor --json`

Real engines and drafters; the seconds of rounds and drafts are those of a 70B model on eight H100s
and of a 1B draft model on one, by the roofline, called projected. Policy and draft model are the
shipped ones, so that acceptance is theirs; each request counts 2,000 positions more than its own.

- `decoupled`: four workers of eight devices. Coupled, each drafts for its requests, then verifies;
  decoupled, one of them drafts for the other three, as chains that run ahead or as all cases one
  round ahead. `batch` is that of each of the three; all ways have the same requests, each with the
  best of its windows.
- `planner`: the plan that Algorithm 1 chooses by the prices and the observed acceptance, against
  the best of all that were tried.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import environment, workloads
from benchmarks.specactor.virtual_time import PricedDrafting, PricedEngine, PricedLink, VirtualTime
from reprise.models.formats import hf
from reprise.rl.engine.rollout_spec import RolloutSpec, draft_with
from reprise.rl.records.stats import EngineStats, RoundRecord
from reprise.rl.records.trajectory import Request, Trajectory
from reprise.rl.slots.config import EngineConfig
from reprise.sched.policies.specactor import Acceptance, prob_of, rate
from reprise.sched.simulator.roofline import ACCELERATORS, MODELS, Instance
from reprise.spec.buckets import bucket
from reprise.spec.budget.budget import FixedBudget
from reprise.spec.config import ChainConfig, SamplingConfig
from reprise.spec.decoupled.ahead import DraftingAhead, Enumerating, FreeRunning
from reprise.spec.decoupled.drafter import DecoupledDrafter, OnePlan
from reprise.spec.decoupled.messages import DraftPlan
from reprise.spec.draft_model.drafter import DraftModelDrafter
from reprise.spec.draft_model.enumeration import AheadDraftModel, EnumeratingDraftModel
from reprise.spec.drafter import Drafts, LiveSlots
from reprise.spec.verification.sampling import step_key

DRAFT_MODEL = environment.ROOT / "policies" / "tiny_draft"
WORKERS, DEVICES = 4, 8  # and devices of each
VERIFIER = Instance(ACCELERATORS["H100"], MODELS["Llama-3.1-70B"], DEVICES)
DRAFTER = Instance(ACCELERATORS["H100"], MODELS["Llama-3.2-1B"], 1)
PROMPT_POSITIONS = 2000  # of each request beside its own: real prompts
FAN_OUT = 6  # guesses of each next token
SECOND_CHOICES = 2  # draft tokens that a round may verify beside a window
DEADLINE = 0.1  # of a round, beside the expected delay of a block
COUPLED, FREE_RUNNING, ENUMERATION = "coupled", "free_running", "enumeration"
WINDOWS = {COUPLED: (1, 2, 3, 4), FREE_RUNNING: (3, 5), ENUMERATION: (3, 4)}
Tried = Mapping[tuple[str, int], "Played"]  # by way and window


# --- prices -------------------------------------------------------------------------------


def verify_price(record: RoundRecord, drafted: int) -> float:
    """Return the seconds of a round: its live requests, their draft tokens and prompts' chunks."""
    live, positions = len(record.request_ids_A), float(record.cached_tokens_A.sum())
    nodes = live + drafted + record.prompt_tokens
    rounds = int(record.rounds_A.max(initial=1))
    return rounds * verify_seconds(live, nodes / live, positions / live)


def verify_seconds(requests: float, nodes_each: float, positions: float = 0.0) -> float:
    held = requests * (positions + PROMPT_POSITIONS)
    return VERIFIER.round_seconds(requests, held, nodes_each)


def draft_seconds(requests: float, devices: float, nodes_each: float = 1.0) -> float:
    """Return the seconds of a pass of a draft model, which is on each of so many devices."""
    each = max(requests / devices, 1.0)
    return DRAFTER.round_seconds(each, each * PROMPT_POSITIONS, nodes_each)


def step_price(way: str, devices: float) -> Callable[[int, int], float]:
    """Return the seconds of a step of drafting workers by its requests and draft tokens of each."""

    def seconds(requests: int, window: int) -> float:
        if way == FREE_RUNNING:
            return window * draft_seconds(requests, devices)
        first_s = draft_seconds(requests, devices, window + 1)
        return first_s + window * draft_seconds(requests, devices, (window + 1) * FAN_OUT)

    return seconds


# --- rollouts -----------------------------------------------------------------------------


class Counted(DecoupledDrafter):
    """Counts drafts, over all requests and rounds."""

    drafted = 0

    def propose(self, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int) -> Drafts:
        drafts = super().propose(live, max_nodes_A, max_nodes)
        self.drafted += int((drafts.count_A > 0).sum())
        return drafts


@dataclasses.dataclass(frozen=True, eq=False)
class Played:
    """A rollout: its responses, projected seconds, and each verifying worker's counts."""

    responses: dict[int, Trajectory]
    seconds: float
    stats: Sequence[EngineStats]
    drafting_busy: float = 0.0
    drafted_rounds: Sequence[int] = ()

    @property
    def _requests_rounds(self) -> int:
        return sum(int(r.rounds_A.sum()) for s in self.stats for r in s.timeline)

    @property
    def p(self) -> float:
        """Return accepted draft tokens over these and the rounds of requests."""
        accepted = sum(s.accepted_tokens for s in self.stats)
        return accepted / max(accepted + self._requests_rounds, 1)

    def draft_p(self, window: int) -> float:
        """Return the probability of a draft token that gives the tokens of a round seen here."""
        tokens = sum(s.tokens for s in self.stats) / max(self._requests_rounds, 1)
        return prob_of(min(max(tokens, 1.0), window + 1.0), window)

    @property
    def hits(self) -> float:
        """Return the share of requests' rounds that had a draft."""
        return sum(self.drafted_rounds) / max(self._requests_rounds, 1)


class Bench:
    """The shipped policy and draft model; rollouts share compiled programs."""

    def __init__(self, max_new_tokens: int) -> None:
        self.policy, self.params = hf.load_pretrained(workloads.BASE_POLICY)
        self.draft = hf.load_pretrained(DRAFT_MODEL)
        self.sampling = SamplingConfig(max_new_tokens=max_new_tokens, draw="gumbel")
        self.longest_tokens, self.key = 128 + max_new_tokens, step_key(0, 0)

    def requests(self, count: int) -> tuple[Request, ...]:
        """Return so many requests, of different prompts as far as there are any."""
        rows = workloads.questions(count)
        return workloads.group_requests(rows, math.ceil(count / len(rows)))[:count]

    def engine(self, requests: int, time: VirtualTime, price: Any, more: int = 0) -> PricedEngine:
        slots = bucket(requests, 1)
        size = {"slots": slots, "min_slots": slots}
        config = EngineConfig(**size, rounds_per_fetch=1, max_nodes=16, max_round_nodes=16 * slots)
        engine = PricedEngine(self.policy, config)
        engine.expect(slots, self.longest_tokens + more)
        engine.set_price(time, price)
        return engine

    def drafter(self, kind: Any, runner: PricedEngine, window: int) -> Any:
        chain = ChainConfig(max_draft_tokens=window, chunk_tokens=64)
        options: Any = {"runner": runner, "sampling": self.sampling, "key": self.key}
        return kind(*self.draft, chain, **options, proposal="shared_noise")

    def ahead(self, way: str, home: PricedEngine, window: int) -> DraftingAhead:
        size = home.config.slots, home.longest_tokens
        if way == FREE_RUNNING:
            return FreeRunning(self.drafter(AheadDraftModel, home, window), *size)
        drafter = self.drafter(EnumeratingDraftModel, home, window)
        return Enumerating(drafter, *size, max_window=window, fan_out=FAN_OUT)

    def coupled(self, requests: Sequence[Request], window: int) -> Played:
        """Play workers with a draft model each; without one if the window is 0."""
        time = VirtualTime()

        def price(record: RoundRecord, drafted: int) -> float:
            live = len(record.request_ids_A)
            drafting_s = window * draft_seconds(live, DEVICES) if drafted else 0.0
            return verify_price(record, drafted) + drafting_s

        shares = shares_of(requests, WORKERS)
        engines = [self.engine(len(share), time, price) for share in shares]
        drafters = [self.drafter(DraftModelDrafter, e, window) if window else None for e in engines]
        return self._play(time, engines, shares, drafters, window)

    def ahead_of(self, requests: Sequence[Request], window: int, way: str) -> Played:
        """Play verifying workers for which a draft model on one worker drafts: some devices each.

        A round waits for blocks as long as their expected delay.
        """
        step_s = step_price(way, DEVICES / min(len(requests), WORKERS - 1))
        time, shares = VirtualTime(), shares_of(requests, WORKERS - 1)
        engines = [self.engine(len(share), time, verify_price) for share in shares]
        each = len(requests) / len(engines)
        late_s = step_s(math.ceil(each), window) - verify_seconds(each, window + 1)
        deadline_s = max(0.0, late_s) + DEADLINE * verify_seconds(each, 1)
        plans, workers, drafters = OnePlan(DraftPlan(window), deadline_s), [], []
        for share in shares:
            home = self.engine(len(share), time, verify_price, more=2 * window)
            workers.append(PricedDrafting(self.ahead(way, home, window), step_s, time))
            drafters.append(Counted([PricedLink(workers[-1])], plans, self.sampling))
        played = self._play(time, engines, shares, drafters, window)
        return dataclasses.replace(
            played,
            drafting_busy=sum(w.busy_s for w in workers) / (played.seconds * len(workers)),
            drafted_rounds=[drafter.drafted for drafter in drafters],
        )

    def _play(
        self,
        time: VirtualTime,
        engines: Sequence[PricedEngine],
        shares: Sequence[Sequence[Request]],
        drafters: Sequence[Any],
        window: int,
    ) -> Played:
        done: dict[int, Trajectory] = {}

        def job(i: int) -> None:
            drafts = draft_with(drafters[i], FixedBudget(window + SECOND_CHOICES if window else 0))
            stops = self.policy.eos_token_ids
            spec = RolloutSpec(self.params, self.sampling, self.key, stops, drafts=drafts)
            done.update({t.request_id: t for t in engines[i].run(spec, shares[i])})

        jobs = [lambda i=i: job(i) for i in range(len(engines))]
        return Played(done, time.run(jobs), [e.stats for e in engines])


def shares_of(requests: Sequence[Request], count: int) -> list[Sequence[Request]]:
    """Return the requests of each of so many workers, of those that have some."""
    return [share for i in range(count) if (share := requests[i::count])]


# --- figures ------------------------------------------------------------------------------


def differing(one: Mapping[int, Trajectory], other: Mapping[int, Trajectory]) -> int:
    """Return how many responses are not the same, token for token."""
    assert one.keys() == other.keys(), "the same requests"
    return sum(not np.array_equal(one[r].response_ids, other[r].response_ids) for r in one)


def play_all(bench: Bench, requests: Sequence[Request]) -> tuple[Tried, dict[str, Any]]:
    """Play every way with every window, and plain decoding; return them, and figures of each."""
    plain = bench.coupled(requests, 0)
    tried: dict[tuple[str, int], Played] = {}
    figures: dict[str, Any] = {"plain": {"projected_s": round(plain.seconds, 4)}}
    for way, window in ((way, window) for way, windows in WINDOWS.items() for window in windows):
        more = () if way == COUPLED else (way,)
        played = (bench.coupled if way == COUPLED else bench.ahead_of)(requests, window, *more)
        tried[way, window] = played
        figures[f"{way}, window {window}"] = {
            "projected_s": round(played.seconds, 4),
            "accepted": round(played.p, 3),
            "rounds_with_draft": round(played.hits, 3),
            "drafting_busy": round(played.drafting_busy, 3),
            "responses_that_differ": differing(plain.responses, played.responses),
        }
    return tried, figures


def best_of(tried: Tried, way: str) -> tuple[int, float]:
    """Return the fastest window of a way, and its seconds."""
    seconds = {window: p.seconds for (name, window), p in tried.items() if name == way}
    window = min(seconds, key=seconds.__getitem__)
    return window, seconds[window]


def planned(tried: Tried, num_requests: int) -> tuple[str, int]:
    """Return the way and window that the model of Algorithm 1 rates highest, of those tried.

    Acceptance is what one window of each way has shown, which a run sees whatever its window.
    """
    p = tried[COUPLED, WINDOWS[COUPLED][-1]].draft_p(WINDOWS[COUPLED][-1])
    hits = tried[ENUMERATION, WINDOWS[ENUMERATION][0]].hits
    verifying = WORKERS - 1
    step = {way: step_price(way, DEVICES / verifying) for way in (FREE_RUNNING, ENUMERATION)}

    def rated(way: str, window: int) -> float:
        acceptance = Acceptance(p, hits if way == ENUMERATION else None)

        def draft(requests: float) -> float:
            if way == COUPLED:
                return draft_seconds(requests, DEVICES)
            return step[way](round(num_requests / verifying), window) / window

        def verify(requests: float, w: int) -> float:
            return verify_seconds(requests, w + 1)

        drafting = 0 if way == COUPLED else 1
        return rate(WORKERS, num_requests, drafting, window, draft, verify, acceptance)

    return max(tried, key=lambda plan: rated(*plan))


def decoupled(bench: Bench, batch: int) -> dict[str, Any]:
    """Return the figures of one batch."""
    requests = bench.requests((WORKERS - 1) * batch)
    tried, figures = play_all(bench, requests)
    coupled, coupled_s = best_of(tried, COUPLED)
    found: dict[str, Any] = {"batch": batch, "requests": len(requests), "coupled_window": coupled}
    for way in (FREE_RUNNING, ENUMERATION):
        window, seconds = best_of(tried, way)
        found |= {f"{way}_window": window, f"{way}_against_coupled": round(coupled_s / seconds, 3)}
    choice, least_s = planned(tried, len(requests)), min(p.seconds for p in tried.values())
    found["planner"] = {
        "choice": f"{choice[0]}, window {choice[1]}",
        "against_best_tried": round(tried[choice].seconds / least_s, 3),
        "against_coupled": round(coupled_s / tried[choice].seconds, 3),
    }
    differ = sum(f.get("responses_that_differ", 0) for f in figures.values())
    environment.progress(found)
    return found | {"responses_that_differ": differ, "plans": figures}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    bench = Bench(arguments.max_new_tokens)
    return {
        "verifier": "Llama-3.1-70B on 8 H100",
        "drafter": "Llama-3.2-1B on each of 8 H100",
        "max_new_tokens": arguments.max_new_tokens,
        "decoupled": [decoupled(bench, batch) for batch in arguments.batches],
    }


if __name__ == "__main__":
    environment.run(__doc__, measure, batches=(1, 8, 32, 64), max_new_tokens=192)
