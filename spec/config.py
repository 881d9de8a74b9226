"""The configuration of sampling."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

Draw = Literal["cdf", "gumbel"]
LEAST_TEMPERATURE = 1e-4  # divided by far less, logits overflow float32


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """The distribution and the scheme that tokens are drawn by.

    temperature 0 takes the most likely token. top_k 0 and top_p 1 are off; ties at
    the threshold are all kept. `draw` names the scheme: `cdf` inverts the
    cumulative distribution of blocks of tokens, then that inside the block, at one
    uniform each per position; `gumbel` takes the argmax of logits plus Gumbel noise
    per token.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 256
    draw: Draw = "cdf"

    def __post_init__(self) -> None:
        t = self.temperature
        if not (t == 0 or t >= LEAST_TEMPERATURE) or not math.isfinite(t):
            raise ValueError(
                f"temperature must be 0 (greedy) or at least {LEAST_TEMPERATURE}, got {t}"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or positive, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.draw not in ("cdf", "gumbel"):
            raise ValueError(f"draw must be 'cdf' or 'gumbel', got {self.draw!r}")
