"""Recorded rounds priced for an accelerator by `sched.simulator.roofline`: called projected."""

from __future__ import annotations

from collections.abc import Sequence

from rl.engine.stats import EngineStats, RoundRecord
from sched.simulator.roofline import ACCELERATORS, MODELS, Efficiency, Instance
from spec.round_times import RoundTimes

H100, TPU_V5E = ACCELERATORS["H100"], ACCELERATORS["TPU v5e"]
PRICED = Efficiency(0.7, 0.7, 100e-6)  # what published results were priced with
QWEN3_1_7B, QWEN3_8B = MODELS["Qwen3-1.7B"], MODELS["Qwen3-8B"]


def rounds_seconds(instance: Instance, rounds: Sequence[RoundRecord], scale: float = 1.0) -> float:
    """The rounds of a phase; a record is as many rounds as its longest request took part in.

    `scale` multiplies cache lengths: the tiny policy's responses stand for longer ones.
    """
    total = 0.0
    for record in rounds:
        live, nodes = len(record.request_ids_A), record.num_nodes / record.num_slots
        positions = scale * float(record.cached_tokens_A.sum())
        for r in range(int(record.rounds_A.max())):
            busy = int((record.rounds_A > r).sum())
            total += instance.round_seconds(busy, positions * busy / live, nodes)
    return total


def phase_seconds(instance: Instance, stats: EngineStats) -> tuple[float, float]:
    """(all of a phase, its verification passes): rounds, passes with their padding, prefill."""
    passes_s = sum(
        count * instance.prefill_seconds(length, rows)
        for (rows, length), count in stats.verified.passes.items()
    )
    prefill_s = 0.0
    if stats.prefilled_tokens:
        prefill_s = instance.prefill_seconds(stats.prefilled_tokens)
    return rounds_seconds(instance, stats.timeline) + passes_s + prefill_s, passes_s


def round_times(instance: Instance, buckets: Sequence[tuple[int, int, int]]) -> RoundTimes:
    """The table that a budget would have measured there; caches half full."""
    seconds = {(b, n, s): instance.round_seconds(b, b * s / 2, n) for b, n, s in buckets}
    return RoundTimes(seconds)
