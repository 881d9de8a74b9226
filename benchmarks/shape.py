"""The shape of a model and of a batch, for all samplers; needs the standard library only."""

from __future__ import annotations

import dataclasses
import random


@dataclasses.dataclass(frozen=True)
class Shape:
    """A Qwen3-like decoder with random weights, and a batch of equally long responses.

    `cache` are the positions of a row: those of the prompt and the new tokens at least.
    """

    layers: int = 4
    d_model: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    d_ff: int = 704
    vocab: int = 4096
    tied: bool = True
    batch: int = 16
    prompt: int = 32
    new_tokens: int = 128
    cache: int = 160
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.cache < self.prompt + self.new_tokens:
            raise ValueError(
                f"cache={self.cache} must hold prompt + new_tokens = "
                f"{self.prompt + self.new_tokens} positions: raise --cache"
            )

    @property
    def total_new_tokens(self) -> int:
        return self.batch * self.new_tokens

    def prompts(self) -> list[list[int]]:
        """Return `batch` different random prompts, the same in every system."""
        rng = random.Random(0)
        return [[rng.randrange(self.vocab) for _ in range(self.prompt)] for _ in range(self.batch)]


# Flags of programs that measure a batch.
BATCH = {name: getattr(Shape(), name) for name in ("prompt", "new_tokens", "cache", "dtype")}
