"""What recorded rounds would cost on an accelerator: a roofline, called projected.

seconds = max(bytes / bandwidth, operations / peak) + overhead, with the bytes of all
weights once and of every live key and value, two operations per weight and node, and
four per layer, query head, head width, node and live position of its slot. Peaks are the
makers' dense bfloat16 figures, of which `UTILISATION` is taken; 16-bit weights and cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rl.timeline import EngineStats, RoundRecord
from spec.budget import RoundTimes

UTILISATION = 0.7  # of peak operations and of bandwidth alike
OVERHEAD_S = 100e-6  # launch, sampling and host of a round
BYTES = 2


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """Peak dense bfloat16 operations and memory bytes, both per second."""

    name: str
    operations_per_s: float
    bytes_per_s: float


@dataclasses.dataclass(frozen=True)
class PolicyShape:
    """What a round's cost depends on; `num_params` are the weights that a node meets."""

    name: str
    num_params: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


H100 = Accelerator("H100 SXM", 989e12, 3.35e12)
TPU_V5E = Accelerator("TPU v5e", 197e12, 819e9)
QWEN3_1_7B = PolicyShape("Qwen3-1.7B", 1.72e9, 28, 16, 8, 128)
QWEN3_8B = PolicyShape("Qwen3-8B", 7.57e9, 36, 32, 8, 128)  # its untied embedding is only read from


def round_seconds(
    device: Accelerator,
    policy: PolicyShape,
    num_live: int,
    num_nodes: int,
    live_positions: float,
) -> float:
    """A round of `num_live` trees of `num_nodes`, over `live_positions` positions in all."""
    kv_bytes = 2 * policy.num_layers * policy.num_kv_heads * policy.head_dim * BYTES
    moved = policy.num_params * BYTES + live_positions * kv_bytes
    attention = 4 * policy.num_layers * policy.num_heads * policy.head_dim * live_positions
    operations = (2 * policy.num_params * num_live + attention) * num_nodes
    busy_s = max(moved / device.bytes_per_s, operations / device.operations_per_s)
    return busy_s / UTILISATION + OVERHEAD_S


def rounds_seconds(
    device: Accelerator, policy: PolicyShape, rounds: Sequence[RoundRecord], scale: float = 1.0
) -> float:
    """The rounds of a phase; a record is as many rounds as its longest request took part in.

    `scale` multiplies cache lengths: the tiny policy's responses stand for longer ones.
    """
    total = 0.0
    for record in rounds:
        live = len(record.request_ids_A)
        positions = scale * float(record.cached_tokens_A.sum())
        for r in range(int(record.rounds_A.max())):
            busy = int((record.rounds_A > r).sum())
            total += round_seconds(device, policy, busy, record.num_nodes, positions * busy / live)
    return total


def pass_seconds(device: Accelerator, policy: PolicyShape, rows: int, length: int) -> float:
    """A pass over `rows` of `length` positions, padding included: prefill or packed verification.

    A position attends to half of its row.
    """
    attention = 2 * policy.num_layers * policy.num_heads * policy.head_dim * length
    operations = rows * length * (2 * policy.num_params + attention)
    moved_s = policy.num_params * BYTES / device.bytes_per_s
    return max(moved_s, operations / device.operations_per_s) / UTILISATION + OVERHEAD_S


def phase_seconds(
    device: Accelerator, policy: PolicyShape, stats: EngineStats
) -> tuple[float, float]:
    """(all of a phase, its verification passes): rounds, passes and prefill."""
    passes_s = sum(
        count * pass_seconds(device, policy, *shape)
        for shape, count in stats.verified.passes.items()
    )
    prefill_s = 0.0
    if stats.prefilled_tokens:
        prefill_s = pass_seconds(device, policy, 1, stats.prefilled_tokens)
    return rounds_seconds(device, policy, stats.timeline) + passes_s + prefill_s, passes_s


def round_times(
    device: Accelerator, policy: PolicyShape, buckets: list[tuple[int, int, int]]
) -> RoundTimes:
    """The table that a budget would have measured there; caches half full."""
    seconds = {(b, n, s): round_seconds(device, policy, b, n, b * s / 2) for b, n, s in buckets}
    return RoundTimes(seconds, {key: value for key, value in seconds.items() if key[1] > 1})
