"""Recorded rounds priced for an H100 with Qwen3-8B by `sched.simulator.roofline`: projected."""

from __future__ import annotations

from collections.abc import Sequence

from reprise.rl.records.stats import EngineStats, RoundRecord
from reprise.sched.simulator.roofline import ACCELERATORS, MODELS, Efficiency, Instance
from reprise.spec.round_times import RoundTimes

PRICED = Efficiency(0.7, 0.7, 100e-6)  # of published results
PRICED_8B = Instance(ACCELERATORS["H100"], MODELS["Qwen3-8B"], efficiency=PRICED)


def rounds_seconds(instance: Instance, rounds: Sequence[RoundRecord]) -> float:
    """Return the seconds of rounds; a record has as many as its longest request took part in."""
    return sum(_seconds(instance, record) for record in rounds)


def cached_seconds(instance: Instance, rounds: Sequence[RoundRecord]) -> float:
    """Return the seconds of rounds, by the share of their nodes for cached responses' tokens."""
    return sum(_seconds(instance, r) * r.cached_nodes / r.num_nodes for r in rounds)


def _seconds(instance: Instance, record: RoundRecord) -> float:
    live, nodes = len(record.request_ids_A), record.num_nodes / record.num_slots
    positions = float(record.cached_tokens_A.sum())
    busy_R = [int((record.rounds_A > r).sum()) for r in range(int(record.rounds_A.max()))]
    return sum(instance.round_seconds(n, positions * n / live, nodes) for n in busy_R)


def phase_seconds(instance: Instance, stats: EngineStats) -> float:
    """Return the seconds of all rounds and prompts of a phase."""
    prompts = stats.prefilled_tokens
    prefill_s = instance.prefill_seconds(prompts) if prompts else 0.0
    return rounds_seconds(instance, stats.timeline) + prefill_s


def round_times(instance: Instance, buckets: Sequence[tuple[int, int, int]]) -> RoundTimes:
    """Return a budget's table, caches half full.

    Buckets are (slots, nodes of all of them, positions).
    """
    return RoundTimes(
        {(b, n, s): instance.round_seconds(b, b * s / 2, n / b) for b, n, s in buckets}
    )
