"""The sizes of the rows, real and tiny, and how they are timed."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from benchmarks.accelerator.budget import Figures, Log
from benchmarks.compiled import QWEN3_0_6B
from benchmarks.turns import in_turns
from reprise.models.config import ModelConfig, leaves, param_specs
from reprise.models.decoder import transformer
from reprise.rl.slots.config import EngineConfig
from reprise.sched.simulator.roofline import ACCELERATORS, Accelerator

TINY_POLICY = ModelConfig(
    architecture="qwen3",
    vocab_size=64,
    d_model=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    d_ff=64,
    max_positions=512,
    qk_norm=True,
    tied_embeddings=True,
)


@dataclasses.dataclass(frozen=True)
class Grown:
    """How `policies/countdown` grows, and how it trains (`training.py`).

    Of the grown shape, `vocab_size` ids are the policy's 99 and others that are never drawn.
    """

    width: int = 8
    num_layers: int = 28
    head_width: int = 2
    vocab_size: int = 151936
    prompts_per_step: int = 16
    group_size: int = 8
    new_tokens: int = 1024
    slots: int = 64
    max_nodes: int = 8  # of a slot
    max_round_nodes: int = 256
    micro_batch_tokens: int = 16384
    budget: str = "goodput"  # of draft tokens
    steps: int = 3  # each is an epoch


@dataclasses.dataclass(frozen=True)
class Size:
    """The sizes of all rows; a gradient step has `train_rows` of `row_tokens`."""

    name: str = "real"
    model: ModelConfig = QWEN3_0_6B  # with random weights
    dtype: str = "bfloat16"
    grown: Grown = Grown()
    slots: int = 64
    live_positions: tuple[int, ...] = (2048, 8192)  # of each slot
    node_counts: tuple[int, ...] = (8, 4, 2)  # of a slot
    page_tokens: int = 128
    heads: tuple[int, int, int] = (32, 8, 128)  # query and key/value heads, and size, of an 8B
    attention_rows: tuple[int, int] = (2, 8192)  # rows and tokens of a row
    baseline: str = "cudnn"  # the implementation of `jax.nn.dot_product_attention`
    prompt_tokens: int = 128
    new_tokens: int = 128  # of every response that samplers draw
    row_tokens: int = 4096
    train_rows: int = 4
    repeats: int = 7
    passes: int = 10  # at most, whose bits are compared

    @property
    def node_count(self) -> int:
        return max(self.node_counts)

    @property
    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            slots=self.slots,
            min_slots=self.slots,
            max_nodes=self.node_count,
            page_tokens=self.page_tokens,
        )


TINY = Size(
    name="tiny",
    model=TINY_POLICY,
    dtype="float32",
    grown=Grown(
        width=1,
        num_layers=5,
        head_width=1,
        vocab_size=128,
        prompts_per_step=2,
        group_size=2,
        new_tokens=64,
        slots=4,
        max_nodes=4,
        max_round_nodes=8,
        micro_batch_tokens=256,
        budget="fixed:1",  # a table of seconds would find that drafts do not pay
        steps=2,
    ),
    slots=4,
    live_positions=(16, 48),
    node_counts=(4, 2),
    page_tokens=16,
    heads=(4, 2, 16),
    attention_rows=(1, 96),
    baseline="xla",
    prompt_tokens=6,
    new_tokens=16,
    row_tokens=64,
    train_rows=2,
    repeats=5,
    passes=3,
)
SIZES = {"real": Size(), "tiny": TINY}


def accelerator(kind: str | None = None) -> Accelerator | None:
    """Return the figures of a device by jax's name: "NVIDIA H100 80GB HBM3" is an H100."""
    kind = kind or jax.devices()[0].device_kind
    found = [device for name, device in ACCELERATORS.items() if re.search(rf"\b{name}\b", kind)]
    return found[0] if found else None


def num_weights(model: ModelConfig) -> int:
    """Count the weights that products read, hence not embeddings that are only looked up."""
    numbers = sum(int(np.prod(spec.shape)) for spec in leaves(param_specs(model)))
    return numbers if model.tied_embeddings else numbers - model.vocab_size * model.d_model


def random_weights(model: ModelConfig, dtype: str) -> transformer.Params:
    params = transformer.init(model, jax.random.key(0))
    return jax.tree.map(lambda p: p.astype(dtype), params)


def timed(call: Callable[[], Any], calls: int = 1) -> float:
    """Return the mean seconds of calls that are launched without waiting."""
    began_s = time.perf_counter()
    found = [call() for _ in range(calls)]
    jax.block_until_ready(found)
    return (time.perf_counter() - began_s) / calls


def turns_of(
    log: Log, kinds: Mapping[str, Callable[[], float]], repeats: int, warm: int = 1
) -> dict[str, np.ndarray]:
    """Return the seconds of each kind in turns, after a first call that compiles."""
    log.phase("compile")
    for call in kinds.values():
        call()
    log.phase("warm up")
    in_turns(kinds, warm, warm=0)
    log.phase("measure")
    return in_turns(kinds, repeats, warm=0)


def summary(seconds_T: np.ndarray, other_T: np.ndarray | None = None, name: str = "") -> Figures:
    """Return the median in ms with its quartiles, and the median of ratios to another kind."""

    def rounded(x: Any) -> float:
        return float(f"{float(x):.4g}")

    quartiles = [rounded(x) for x in 1e3 * np.quantile(seconds_T, [0.25, 0.75])]
    row: Figures = {"ms": rounded(1e3 * np.median(seconds_T)), "ms_quartiles": quartiles}
    row["repeats"] = len(seconds_T)
    return row if other_T is None else row | {name: rounded(np.median(seconds_T / other_T))}


def to_floor(seconds_T: np.ndarray, floor_s: float | None) -> Figures:
    if floor_s is None:
        return {"floor_ms": None, "to_floor": None}
    ratio = round(float(np.median(seconds_T)) / floor_s, 3)
    return {"floor_ms": round(1e3 * floor_s, 4), "to_floor": ratio}
