"""What rounds, drafts and moves take on H100s: a 70B model verifies, a 1B model drafts."""

from __future__ import annotations

from collections.abc import Callable

from rl.engine.stats import RoundRecord
from rl.trajectory import PartialRequest
from sched.simulator.roofline import (
    ACCELERATORS,
    MODELS,
    Costs,
    Efficiency,
    Instance,
    RoundCost,
)

WORKERS, DEVICES = 4, 8  # and devices of each
VERIFIER = Instance(ACCELERATORS["H100"], MODELS["Llama-3.1-70B"], DEVICES, Efficiency())
DRAFTER = Instance(ACCELERATORS["H100"], MODELS["Llama-3.2-1B"], 1, Efficiency())
FAN_OUT = 6  # guesses of each next token
COUPLED, FREE_RUNNING, ENUMERATION = "coupled", "free_running", "enumeration"
PROMPT_POSITIONS = 2000  # that each request is taken to hold beside its own: real prompts


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


class PricedCosts(Costs):
    """The prices of a verifying worker, as a run's planner asks for them."""

    num_ranks, kv_tokens = 1, 2**30

    def round_cost(
        self, num_requests: float, num_nodes: float = 1.0, other_requests: float | None = None
    ) -> RoundCost:
        return RoundCost(verify_seconds(num_requests, num_nodes), 0.0)

    def prefill_seconds(self, tokens: int) -> float:
        return VERIFIER.prefill_seconds(tokens)

    def copy_seconds(self, tokens: int) -> float:
        return VERIFIER.copy_seconds(tokens)


def entry_price(partial: PartialRequest) -> float:
    """Return the seconds of a request's keys and values from the host, or of computing them."""
    held = PROMPT_POSITIONS + len(partial.token_ids)
    return min(VERIFIER.copy_seconds(held), VERIFIER.prefill_seconds(held))
