"""A roofline model of the seconds of rounds, prefill and copies on an accelerator.

    round = √((weights / bandwidth)² + (2 · active weights · nodes / peak)²)
          + max(keys and values / bandwidth, attention / peak) + exchanges + overhead

Matrix products and attention run sequentially. Within matrix products, memory traffic and
operations overlap, but not fully if both take long, hence the root. Peaks are the manufacturers'
dense bfloat16 figures.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """A device; operations are dense bfloat16, link bytes are one-way between devices of a node."""

    name: str
    operations_per_s: float
    bytes_per_s: float
    memory_bytes: float
    host_bytes_per_s: float
    link_bytes_per_s: float = math.inf


# From the manufacturers' data sheets.
ACCELERATORS = {
    device.name: device
    for device in (
        Accelerator("H100", 989e12, 3.35e12, 80e9, 64e9, 450e9),
        Accelerator("H800", 989e12, 3.35e12, 80e9, 64e9, 200e9),
        Accelerator("H200", 989e12, 4.8e12, 141e9, 64e9, 450e9),
        Accelerator("A100", 312e12, 2.04e12, 80e9, 32e9, 300e9),
        Accelerator("B200", 2250e12, 8.0e12, 192e9, 64e9, 900e9),
        Accelerator("RTX 5090", 210e12, 1.79e12, 32e9, 64e9, 64e9),
        Accelerator("RTX 4090", 165e12, 1.01e12, 24e9, 32e9, 32e9),
        Accelerator("RTX 3090", 71e12, 936e9, 24e9, 32e9, 32e9),
        Accelerator("H20", 148e12, 4.0e12, 96e9, 64e9, 450e9),
        Accelerator("TPU v5e", 197e12, 819e9, 16e9, 16e9, 100e9),
        Accelerator("TPU v5p", 459e12, 2.765e12, 95e9, 32e9, 300e9),
        Accelerator("TPU v6e", 918e12, 1.64e12, 32e9, 32e9, 224e9),
    )
}


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that determine the cost of its rounds.

    Each node uses `active_params`. `expert_bytes` of the `weight_bytes` are in experts, and a node
    uses `experts_per_token` of `num_experts`. `attention_operations` counts one node that attends
    to one position, `kv_bytes` one position, both over all layers. Layers pass on `hidden` values
    of 16 bits.
    """

    name: str
    active_params: float
    weight_bytes: float
    num_layers: int
    kv_bytes: float
    attention_operations: float
    hidden: int
    expert_bytes: float = 0.0
    num_experts: int = 1
    experts_per_token: int = 1

    def moved_weight_bytes(self, num_nodes: float, num_ranks: int = 1) -> float:
        """Return the bytes that a rank reads for `num_nodes` of all ranks, with uniform experts."""
        if not self.expert_bytes:
            return self.weight_bytes
        missed = (1 - self.experts_per_token / self.num_experts) ** num_nodes
        return self.weight_bytes - self.expert_bytes * (1 - (1 - missed) / num_ranks)


def dense(
    name: str, params: float, layers: int, heads: int, kv_heads: int, head_dim: int
) -> ModelShape:
    """Return a dense model with 16-bit weights and cache; `params` excludes input embeddings."""
    kv_bytes, operations = (4.0 * layers * n * head_dim for n in (kv_heads, heads))
    return ModelShape(name, params, 2 * params, layers, kv_bytes, operations, heads * head_dim)


def latent(
    name: str, params: float, weight_bytes: float, layers: int, heads: int, hidden: int,
    expert_bytes: float, num_experts: int, experts_per_token: int,
) -> ModelShape:  # fmt: skip
    """Return a model with multi-head latent attention, 512 + 64 values per position and layer."""
    kv_bytes = layers * 576 * 2
    operations = layers * heads * 2 * (576 + 512)
    return ModelShape(
        name,
        params,
        weight_bytes,
        layers,
        kv_bytes,
        operations,
        hidden,
        expert_bytes,
        num_experts,
        experts_per_token,
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
        dense("Llama-3.2-1B", 1.24e9, 16, 32, 8, 64),
        dense("Llama-3.1-70B", 69.5e9, 80, 64, 8, 128),
        dense("Qwen2-VL-72B", 71.5e9, 80, 64, 8, 128),
        latent("Moonlight", 2.9e9, 32e9, 27, 16, 2048, 28.8e9, 64, 6),
        # expert bytes exclude attention, shared experts and a dense layer (9.3e9 parameters in 8
        # bits), and two vocabulary matrices in 16 bits
        latent("Kimi-K2", 32e9, 1.0e12, 61, 64, 7168, 0.986e12, 384, 8),
    )
}


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """The reached shares of the peaks, and the fixed seconds, the same for all models.

    The values are fitted to TLT's tables 2, 4 and 7 (plain rounds of 7B on one and two H100;
    speedups of trees on 32B by batch); `operations` is at the edge of the allowed range.
    """

    bandwidth: float = 0.78
    """The reached share of the bandwidth of memory and links."""
    operations: float = 0.8
    """The reached share of the arithmetic peak."""
    overhead_s: float = 0.9e-3
    """Fixed seconds of every round, also in a drafter."""
    layer_sync_s: float = 10e-6
    """Seconds that a layer split over several devices takes twice, besides its bytes; assumed."""
    memory: float = 0.9
    """The share of a device for weights, keys and values."""


@dataclasses.dataclass(frozen=True)
class RoundCost:
    """The seconds of a round, linear in the live positions."""

    fixed_s: float
    per_position_s: float

    def __call__(self, positions: float) -> float:
        return self.fixed_s + self.per_position_s * positions

    def integral(self, positions: float, growth: float, rounds: float) -> float:
        """Return the seconds of `rounds` rounds that each add `growth` positions at the end."""
        base, slope = self._at(positions, growth)
        return rounds * (base + slope * rounds / 2)

    def rounds(self, positions: float, growth: float, seconds: float) -> float:
        """Return the number of rounds that fit in `seconds`, the inverse of `integral`."""
        base, slope = self._at(positions, growth)
        # solve slope/2 · k² + base · k = seconds, in the form without cancellation
        return 2 * seconds / (base + math.sqrt(base * base + 2 * slope * seconds))

    def _at(self, positions: float, growth: float) -> tuple[float, float]:
        """Return the seconds of a round half a round ago, and the increase per round."""
        slope = self.per_position_s * growth
        return self.fixed_s + self.per_position_s * positions - slope / 2, slope


class Costs(Protocol):
    """The seconds and the capacity of one worker."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def kv_tokens(self) -> int: ...

    def round_cost(
        self, num_requests: float, num_nodes: float = 1.0, other_requests: float | None = None
    ) -> RoundCost: ...

    def prefill_seconds(self, tokens: int) -> float: ...

    def copy_seconds(self, tokens: int) -> float: ...

    def round_seconds(self, num_requests: float, positions: float, num_nodes: float = 1) -> float:
        return self.round_cost(num_requests, num_nodes)(positions)

    def prefers_copy(self, tokens: int) -> bool:
        """Return whether copying keys and values from the host is faster than recomputing them."""
        return self.copy_seconds(tokens) < self.prefill_seconds(tokens)


@dataclasses.dataclass(frozen=True)
class Instance(Costs):
    """The devices of one worker, which holds a copy of a model, or one rank of a copy.

    Each of `num_ranks` ranks has separate requests, cache and weights, except that it holds only a
    part of the experts, and runs them for the nodes of all ranks.
    """

    device: Accelerator
    model: ModelShape
    num_devices: int = 1
    efficiency: Efficiency = Efficiency()
    num_ranks: int = 1

    @property
    def kv_tokens(self) -> int:
        """Return the number of positions that fit besides the weights."""
        room = self.efficiency.memory * self.num_devices * self.device.memory_bytes
        remote_bytes = self.model.expert_bytes * (1 - 1 / self.num_ranks)
        return max(0, int((room - self.model.weight_bytes + remote_bytes) / self.model.kv_bytes))

    @property
    def _bytes_per_s(self) -> float:
        return self.num_devices * self.device.bytes_per_s * self.efficiency.bandwidth

    @property
    def _operations_per_s(self) -> float:
        return self.num_devices * self.device.operations_per_s * self.efficiency.operations

    def _linear_seconds(self, num_nodes: float, other_nodes: float) -> float:
        """Return the seconds without attention, given the nodes of this rank and of the others."""
        moved = self.model.moved_weight_bytes(num_nodes + other_nodes, self.num_ranks)
        moved_s = moved / self._bytes_per_s
        computed_s = 2 * self.model.active_params * num_nodes / self._operations_per_s
        return math.hypot(moved_s, computed_s) + self._exchange_seconds(num_nodes)

    def _exchange_seconds(self, num_nodes: float) -> float:
        """Return the seconds of two exchanges per layer: sums, and nodes sent to experts."""
        devices = self.num_devices
        ranks = self.num_ranks
        efficiency = self.efficiency
        if devices * ranks == 1:
            return 0.0
        copies = 2 * (devices - 1) / devices
        copies += (1 - 1 / ranks) * self.model.experts_per_token
        moved_s = 2 * self.model.hidden * copies / self.device.link_bytes_per_s
        each_s = efficiency.layer_sync_s + num_nodes * moved_s / efficiency.bandwidth
        return 2 * self.model.num_layers * each_s

    def round_cost(
        self, num_requests: float, num_nodes: float = 1.0, other_requests: float | None = None
    ) -> RoundCost:
        """Return the cost of a round of `num_requests` trees of `num_nodes`, root included.

        `other_requests` run on the other ranks; the default is the same number on each rank.
        """
        model = self.model
        nodes = num_requests * num_nodes
        if other_requests is None:
            other_requests = (self.num_ranks - 1) * num_requests
        linear_s = self._linear_seconds(nodes, other_requests * num_nodes)
        read_s = model.kv_bytes / self._bytes_per_s
        computed_s = model.attention_operations * num_nodes / self._operations_per_s
        return RoundCost(linear_s + self.efficiency.overhead_s, max(read_s, computed_s))

    def prefill_seconds(self, tokens: int) -> float:
        """Return the seconds to prefill a row; a position attends to half the row on average."""
        attention = tokens * self.model.attention_operations * tokens / 2
        attention_s = attention / self._operations_per_s
        return self._linear_seconds(tokens, 0.0) + attention_s + self.efficiency.overhead_s

    def copy_seconds(self, tokens: int) -> float:
        """Return the seconds to copy keys and values of `tokens` positions from the host."""
        return tokens * self.model.kv_bytes / (self.num_devices * self.device.host_bytes_per_s)
