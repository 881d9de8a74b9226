"""A draft model as a drafter, as callers set it."""

from __future__ import annotations

import dataclasses
from typing import Literal

Proposal = Literal["likeliest", "shared_noise"]


@dataclasses.dataclass(frozen=True)
class ChainConfig:
    """Sizes of a draft model's passes and chains.

    The first pass of a chain has `window_tokens` a row; earlier tokens come in chunks of up to
    `chunk_tokens`, about `pass_tokens` a pass. Chains have up to `max_draft_tokens` draft tokens
    and end when their probability falls below `min_prob`.
    """

    window_tokens: int = 2
    chunk_tokens: int = 128
    pass_tokens: int = 512
    max_draft_tokens: int = 16
    min_prob: float = 0.0

    def __post_init__(self) -> None:
        if self.max_draft_tokens < 1:
            raise ValueError(f"max_draft_tokens must be at least 1, got {self.max_draft_tokens}")
        if not 0 <= self.min_prob <= 1:
            raise ValueError(f"expected min_prob in [0, 1], got {self.min_prob}")
