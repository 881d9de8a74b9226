"""What is generated: the shape of the model and of the batch, shared by all systems.

Needs the standard library only, so that baselines in environments of their own
can read it.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from typing import Any


@dataclasses.dataclass(frozen=True)
class Shape:
    """A Qwen3-like decoder with random weights, and a batch of equally long responses.

    `cache` is how many positions each row's cache has; it must hold the prompt and
    the new tokens.
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
        """`batch` different random prompts, the same in every system."""
        rng = random.Random(0)
        return [[rng.randrange(self.vocab) for _ in range(self.prompt)] for _ in range(self.batch)]


def add_flags(parser: argparse.ArgumentParser, without: tuple[str, ...] = ()) -> None:
    """One flag for each field of `Shape` that is not in `without`."""
    for field in dataclasses.fields(Shape):
        if field.name in without:
            continue
        if field.name == "tied":
            parser.add_argument(
                "--tied", action=argparse.BooleanOptionalAction, default=True, help="tie the head"
            )
        elif field.name == "dtype":
            parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
        else:
            parser.add_argument(f"--{field.name}", type=int, default=field.default)


def from_flags(arguments: argparse.Namespace, **changes: Any) -> Shape:
    """The shape that the flags give; `changes` stand for flags that were left out."""
    names = {field.name for field in dataclasses.fields(Shape)} - set(changes)
    return Shape(**{name: getattr(arguments, name) for name in names}, **changes)
