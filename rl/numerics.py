"""Whether the sampler and the trainer find the same bits, and why not."""

from __future__ import annotations

import dataclasses
from typing import Literal

from models.config import ModelConfig

INPUTS_MULTIPLE, HEAD_MULTIPLE = 16, 8  # of the kernels that sum in one order (models.kernels)


@dataclasses.dataclass(frozen=True)
class NumericsConfig:
    """Bits of log-probabilities (docs/architecture.md, Exactness).

    If all passes sum in one order, decoding, drafts, reuse and training find the same bits, in
    bfloat16 too: drafts change no token, and ratios of a batch's first update are 1. If they do
    not, `same_bits` True stops a run at its start, "auto" prints the reason, False does nothing.
    """

    same_bits: bool | Literal["auto"] = "auto"


def why_other_bits(
    model: ModelConfig, platform: str, engine_devices: int, weight_devices: int
) -> str | None:
    """Return why passes find other bits; None if all sum in one order.

    `engine_devices` serve one engine, `weight_devices` hold one copy of the trained weights.
    """
    if platform != "cpu":
        return f"expected a CPU, whose kernels sum in one order, got a {platform}"
    if engine_devices > 1 or weight_devices > 1:
        return (
            "expected one device for each engine and each copy of the weights, got "
            f"{engine_devices} and {weight_devices}"
        )
    rank = 0 if model.lora is None else model.lora.rank
    query_width = model.num_heads * model.head_dim
    widths = {"d_model": model.d_model, "d_ff": model.d_ff, "num_heads · head_dim": query_width}
    for name, width in (widths | {"Adapter.rank": rank}).items():
        if width % INPUTS_MULTIPLE:
            return f"expected a {name} that {INPUTS_MULTIPLE} divides, got {width}"
    if model.head_dim % HEAD_MULTIPLE:
        return f"expected a head size that {HEAD_MULTIPLE} divides, got {model.head_dim}"
    return None
