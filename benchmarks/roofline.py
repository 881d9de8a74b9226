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
    return sum(_seconds(instance, record, scale) for record in rounds)


def cached_seconds(instance: Instance, rounds: Sequence[RoundRecord]) -> float:
    """The seconds of rounds, by the share of their nodes that tokens of cached responses had."""
    return sum(_seconds(instance, r) * r.cached_nodes / r.num_nodes for r in rounds)


def _seconds(instance: Instance, record: RoundRecord, scale: float = 1.0) -> float:
    live, nodes = len(record.request_ids_A), record.num_nodes / record.num_slots
    positions = scale * float(record.cached_tokens_A.sum())
    busy_R = [int((record.rounds_A > r).sum()) for r in range(int(record.rounds_A.max()))]
    return sum(instance.round_seconds(n, positions * n / live, nodes) for n in busy_R)


def phase_seconds(instance: Instance, stats: EngineStats) -> float:
    """All of a phase: rounds and prompts."""
    prefill_s = 0.0
    if stats.prefilled_tokens:
        prefill_s = instance.prefill_seconds(stats.prefilled_tokens)
    return rounds_seconds(instance, stats.timeline) + prefill_s


def round_times(instance: Instance, buckets: Sequence[tuple[int, int, int]]) -> RoundTimes:
    """The table that a budget would have measured there; caches half full.

    Buckets are (slots, nodes of all of them, positions).
    """
    seconds = {(b, n, s): instance.round_seconds(b, b * s / 2, n / b) for b, n, s in buckets}
    return RoundTimes(seconds)
