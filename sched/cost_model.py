"""Seconds of rounds, prefill and copies on an accelerator, by a roofline.

    round = max(bytes moved / bandwidth, operations / peak) + overhead

Bytes are all weights that a round meets and every live key and value; operations two per
active weight and node, and those of attention. Peaks are the makers' dense bfloat16
figures; `Efficiency` says what share of them is reached.
"""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One device: dense bfloat16 operations, memory bytes, and bytes from the host, per second."""

    name: str
    operations_per_s: float
    bytes_per_s: float
    memory_bytes: float
    host_bytes_per_s: float


# Makers' data sheets.
ACCELERATORS = {
    device.name: device
    for device in (
        Accelerator("H100", 989e12, 3.35e12, 80e9, 64e9),
        Accelerator("H800", 989e12, 3.35e12, 80e9, 64e9),
        Accelerator("A100", 312e12, 2.04e12, 80e9, 32e9),
        Accelerator("H20", 148e12, 4.0e12, 96e9, 64e9),
        Accelerator("TPU v5e", 197e12, 819e9, 16e9, 16e9),
        Accelerator("TPU v5p", 459e12, 2.765e12, 95e9, 32e9),
    )
}


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """What rounds of a model cost.

    `active_params` are met by each node. With experts, `expert_bytes` of the `weight_bytes`
    lie in them, and a node meets `experts_per_token` of `num_experts`. `attention_operations`
    are those of one node with one position, `kv_bytes` those of one position, all layers.
    """

    name: str
    active_params: float
    weight_bytes: float
    num_layers: int
    kv_bytes: float
    attention_operations: float
    expert_bytes: float = 0.0
    num_experts: int = 1
    experts_per_token: int = 1
    replicated_bytes: float = 0.0  # of `weight_bytes`: whole on every device of an instance

    def moved_weight_bytes(self, num_nodes: float) -> float:
        """Weights that a round of so many nodes reads, experts drawn evenly."""
        if not self.expert_bytes:
            return self.weight_bytes
        missed = (1 - self.experts_per_token / self.num_experts) ** num_nodes
        return self.weight_bytes - self.expert_bytes * missed


def dense(
    name: str, params: float, layers: int, heads: int, kv_heads: int, head_dim: int
) -> ModelShape:
    """A dense model of 16-bit weights and cache; `params` without what is only looked up."""
    return ModelShape(
        name,
        params,
        2 * params,
        layers,
        4.0 * layers * kv_heads * head_dim,
        4.0 * layers * heads * head_dim,
    )


# From the models' published configurations.
MODELS = {
    shape.name: shape
    for shape in (
        dense("Qwen2.5-0.5B", 0.49e9, 24, 14, 2, 64),
        dense("Qwen2.5-1.5B", 1.54e9, 28, 12, 2, 128),
        dense("Qwen2.5-7B", 7.07e9, 28, 28, 4, 128),
        dense("Qwen2.5-32B", 32.0e9, 64, 40, 8, 128),
        dense("Qwen3-1.7B", 1.72e9, 28, 16, 8, 128),
        dense("Qwen3-8B", 7.57e9, 36, 32, 8, 128),
        dense("Qwen3-14B", 14.0e9, 40, 40, 8, 128),
        dense("Qwen2-VL-72B", 71.5e9, 80, 64, 8, 128),
        # multi-head latent attention: 512 + 64 values a position and layer
        ModelShape(
            name="Moonlight",
            active_params=2.9e9,
            weight_bytes=32e9,
            num_layers=27,
            kv_bytes=27 * 576 * 2,
            attention_operations=27 * 16 * 2 * (576 + 512),
            expert_bytes=28.8e9,
            num_experts=64,
            experts_per_token=6,
        ),
        ModelShape(
            name="Kimi-K2",
            active_params=32e9,
            weight_bytes=1.0e12,
            num_layers=61,
            kv_bytes=61 * 576 * 2,
            attention_operations=61 * 64 * 2 * (576 + 512),
            expert_bytes=0.98e12,
            num_experts=384,
            experts_per_token=8,
            # attention of 6.2e9 parameters in 8 bits and two vocabulary matrices in 16
            replicated_bytes=11e9,
        ),
    )
}


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """What is reached of the peaks, and what a round takes besides.

    `layer_sync_s` is taken twice a layer where several devices share one: two reductions.
    """

    bandwidth: float = 0.7
    operations: float = 0.7
    overhead_s: float = 100e-6
    layer_sync_s: float = 10e-6
    memory: float = 0.9  # of a device, for weights, keys and values


@dataclasses.dataclass(frozen=True)
class RoundCost:
    """Seconds of a round as a function of live positions: max of two lines, and a constant."""

    memory_s: float
    memory_s_per_position: float
    compute_s: float
    compute_s_per_position: float
    overhead_s: float

    def __call__(self, positions: float) -> float:
        return self.overhead_s + max(
            self.memory_s + self.memory_s_per_position * positions,
            self.compute_s + self.compute_s_per_position * positions,
        )

    def integral(self, positions: float, growth: float, rounds: float) -> float:
        """Seconds of so many rounds, each of which adds `growth` positions at its end.

        For whole rounds it is their sum but for the round in which the two lines cross: the
        fluid is half a round behind.
        """
        total = self.overhead_s * rounds
        for start, length, base, slope in self._pieces(positions, growth):
            if rounds <= start:
                break
            span = min(rounds - start, length)
            total += span * (base + slope * span / 2)
        return total

    def rounds(self, positions: float, growth: float, seconds: float) -> float:
        """The rounds that fit in so many seconds: the inverse of `integral`."""
        done = 0.0
        for _, length, base, slope in self._pieces(positions, growth):
            base += self.overhead_s
            whole = length * (base + slope * length / 2) if length < math.inf else math.inf
            if seconds >= whole:
                done += length
                seconds -= whole
                continue
            # slope/2 · k² + base · k = seconds, in the form that loses no digits
            return done + 2 * seconds / (base + math.sqrt(base * base + 2 * slope * seconds))
        return done

    def _pieces(self, positions: float, growth: float) -> list[tuple[float, float, float, float]]:
        """(first round, rounds, seconds there, growth of these a round), without the overhead."""
        positions -= growth / 2
        memory = self.memory_s + self.memory_s_per_position * positions
        compute = self.compute_s + self.compute_s_per_position * positions
        memory_slope = self.memory_s_per_position * growth
        compute_slope = self.compute_s_per_position * growth
        above = (memory, memory_slope) >= (compute, compute_slope)
        high, low = (memory, memory_slope), (compute, compute_slope)
        if not above:
            high, low = low, high
        if low[1] <= high[1]:
            return [(0.0, math.inf, *high)]
        crossing = (high[0] - low[0]) / (low[1] - high[1])
        return [
            (0.0, crossing, *high),
            (crossing, math.inf, low[0] + low[1] * crossing, low[1]),
        ]


@dataclasses.dataclass(frozen=True)
class Instance:
    """One replica of a model on `num_devices` devices."""

    device: Accelerator
    model: ModelShape
    num_devices: int = 1
    efficiency: Efficiency = Efficiency()

    @property
    def kv_tokens(self) -> int:
        """Positions that fit beside the weights."""
        room = self.efficiency.memory * self.num_devices * self.device.memory_bytes
        copies = (self.num_devices - 1) * self.model.replicated_bytes
        return max(0, int((room - self.model.weight_bytes - copies) / self.model.kv_bytes))

    @property
    def _bytes_per_s(self) -> float:
        return self.num_devices * self.device.bytes_per_s * self.efficiency.bandwidth

    @property
    def _operations_per_s(self) -> float:
        return self.num_devices * self.device.operations_per_s * self.efficiency.operations

    def round_cost(self, num_requests: float, num_nodes: float = 1.0) -> RoundCost:
        """A round of `num_requests` trees of `num_nodes`, root included."""
        model, nodes = self.model, num_requests * num_nodes
        sync_s = 2 * model.num_layers * self.efficiency.layer_sync_s * (self.num_devices > 1)
        return RoundCost(
            model.moved_weight_bytes(nodes) / self._bytes_per_s,
            model.kv_bytes / self._bytes_per_s,
            2 * model.active_params * nodes / self._operations_per_s,
            model.attention_operations * num_nodes / self._operations_per_s,
            self.efficiency.overhead_s + sync_s,
        )

    def round_seconds(self, num_requests: float, positions: float, num_nodes: float = 1) -> float:
        return self.round_cost(num_requests, num_nodes)(positions)

    def prefill_seconds(self, tokens: int, rows: int = 1) -> float:
        """A pass over `rows` of `tokens` each; a position attends to half of its row."""
        attention = self.model.attention_operations * tokens / 2
        operations = rows * tokens * (2 * self.model.active_params + attention)
        moved_s = self.model.moved_weight_bytes(rows * tokens) / self._bytes_per_s
        return max(moved_s, operations / self._operations_per_s) + self.efficiency.overhead_s

    def copy_seconds(self, tokens: int) -> float:
        """Keys and values of so many positions from the host."""
        return tokens * self.model.kv_bytes / (self.num_devices * self.device.host_bytes_per_s)

    def prefers_copy(self, tokens: int) -> bool:
        """Whether keys and values are had sooner from the host than by computing them."""
        return self.copy_seconds(tokens) < self.prefill_seconds(tokens)
