"""The sizes of the parts, random policies, and timing in turns."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import transformer
from models.config import ModelConfig
from models.params import leaves, param_specs
from sched.simulator.roofline import ACCELERATORS, Accelerator

Row = dict[str, Any]
Rows = Iterator[Row]
# Qwen3-0.6B's published configuration; the weights are random
QWEN3_0_6B = ModelConfig(
    *("qwen3", 151936, 1024, 28, 16, 8, 128, 3072),
    rope_theta=1e6,
    qk_norm=True,
    tied_embeddings=True,
    max_positions=40960,
)
TINY_POLICY = ModelConfig(
    *("qwen3", 64, 32, 1, 2, 1, 16, 64), qk_norm=True, tied_embeddings=True, max_positions=512
)


@dataclasses.dataclass(frozen=True)
class Size:
    """The sizes of all parts; a gradient step has `train_rows` of `row_tokens`."""

    name: str
    model: ModelConfig
    dtype: str
    slots: int
    live_positions: tuple[int, ...]  # of each slot
    page_tokens: int
    heads: tuple[int, int, int]  # query heads, key/value heads and head size of attention
    attention_rows: tuple[int, int]  # rows and tokens of a row
    baseline: str  # the implementation of `jax.nn.dot_product_attention`
    prompt_tokens: int
    new_tokens: int  # of the longest response
    row_tokens: int
    train_rows: int
    flip_tokens: int
    flip_seeds: int
    repeats: int = 7
    node_count: int = 8  # of a slot

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize


SIZES = {
    size.name: size
    for size in (
        Size(
            name="real",
            model=QWEN3_0_6B,
            dtype="bfloat16",
            slots=64,
            live_positions=(2048, 8192),
            page_tokens=128,
            heads=(32, 8, 128),  # of an 8B policy
            attention_rows=(2, 8192),
            baseline="cudnn",
            prompt_tokens=128,
            new_tokens=512,
            row_tokens=4096,
            train_rows=4,
            flip_tokens=192,
            flip_seeds=2,
        ),
        Size(
            name="tiny",
            model=TINY_POLICY,
            dtype="float32",
            slots=4,
            live_positions=(16, 48),
            page_tokens=16,
            heads=(4, 2, 16),
            attention_rows=(1, 96),
            baseline="xla",
            prompt_tokens=6,
            new_tokens=16,
            row_tokens=64,
            train_rows=2,
            flip_tokens=16,
            flip_seeds=1,
            repeats=5,
            node_count=4,
        ),
    )
}


def accelerator() -> Accelerator | None:
    """Return the known figures of jax's device, or None."""
    return figures_of(jax.devices()[0].device_kind)


def figures_of(kind: str) -> Accelerator | None:
    """Return a device's figures by jax's name for it: "NVIDIA H100 80GB HBM3" is H100."""
    found = [device for name, device in ACCELERATORS.items() if re.search(rf"\b{name}\b", kind)]
    return found[0] if found else None


def num_weights(model: ModelConfig) -> int:
    """Count the weights that products read, hence not embeddings that are only looked up."""
    numbers = sum(int(np.prod(spec.shape)) for spec in leaves(param_specs(model)))
    return numbers if model.tied_embeddings else numbers - model.vocab_size * model.d_model


def random_weights(model: ModelConfig, dtype: str) -> transformer.Params:
    """Return random weights on the device."""
    params = transformer.init(model, jax.random.key(0))
    return jax.tree.map(lambda p: p.astype(dtype), params)


def timed(call: Callable[[], Any], calls: int = 1) -> float:
    """Return the mean seconds of calls that are launched without waiting."""
    began_s = time.perf_counter()
    found = [call() for _ in range(calls)]
    jax.block_until_ready(found)
    return (time.perf_counter() - began_s) / calls


def in_turns(kinds: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, np.ndarray]:
    """Return the seconds of each kind, turn by turn, after two turns that warm up.

    Every other turn runs backwards, so that no kind always follows the same one.
    """
    assert repeats >= 5, "medians of at least five"
    seconds = {name: np.zeros(repeats + 2) for name in kinds}
    for turn in range(repeats + 2):
        for name in list(kinds)[:: -1 if turn % 2 else 1]:
            seconds[name][turn] = kinds[name]()
    return {name: taken_T[2:] for name, taken_T in seconds.items()}


def summary(seconds_T: np.ndarray, other_T: np.ndarray | None = None, name: str = "") -> Row:
    """Return the median in ms with its quartiles, and the median of ratios to another kind."""
    row: Row = {
        "ms": _rounded(1e3 * np.median(seconds_T)),
        "ms_quartiles": [_rounded(x) for x in 1e3 * np.quantile(seconds_T, [0.25, 0.75])],
        "repeats": len(seconds_T),
    }
    if other_T is not None:
        row[name] = _rounded(np.median(seconds_T / other_T))
    return row


def _rounded(x: Any) -> float:
    return float(f"{float(x):.4g}")
