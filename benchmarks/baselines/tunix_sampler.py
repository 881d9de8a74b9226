"""The sampler of google-tunix (0.1.7): `python -m benchmarks.baselines.tunix_sampler`.

Runs in an environment of its own, which needs `google-tunix` and nothing of ours
but this folder. Variants: the generator behind its one random draw a step.
threefry is jax's default; the other two make the noise cheaper.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params as qwen3_params

from benchmarks.baselines import protocol
from benchmarks.shape import Shape


class NumberTokenizer:
    """Prompts are numbers; padding and end lie outside the vocabulary, so are never drawn."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int], **_: Any) -> str:
        return ""

    def bos_id(self) -> int:
        return 0  # falsy: the sampler then adds none

    def eos_id(self) -> int:
        return self.vocab + 1

    def pad_id(self) -> int:
        return self.vocab


class Tunix:
    name = "tunix"
    variants = ("threefry2x32", "rbg", "unsafe_rbg")
    packages = ("google-tunix", "jax", "jaxlib", "flax", "numpy")

    def prepare(self, shape: Shape, policy: str, variant: str) -> None:
        self.shape, self.impl = shape, variant
        dtype = jnp.dtype(shape.dtype)
        config = qwen3.ModelConfig(
            num_layers=shape.layers,
            vocab_size=shape.vocab,
            embed_dim=shape.d_model,
            hidden_dim=shape.d_ff,
            num_heads=shape.heads,
            head_dim=shape.head_dim,
            num_kv_heads=shape.kv_heads,
            rope_theta=1_000_000,
            norm_eps=1e-6,
            use_tied_embedding=shape.tied,
            dtype=dtype,
            param_dtype=dtype,
        )
        model = qwen3_params.create_model_from_safe_tensors(policy, config, dtype=dtype)
        cache = CacheConfig(shape.cache, shape.layers, shape.kv_heads, shape.head_dim)
        self.sampler = Sampler(model, NumberTokenizer(shape.vocab), cache)
        self.prompts = [" ".join(map(str, prompt)) for prompt in shape.prompts()]

    def generate(self, seed: int, greedy: bool) -> tuple[list, list | None]:
        out = self.sampler(
            self.prompts,
            max_generation_steps=self.shape.new_tokens,
            max_prompt_length=self.shape.prompt,
            return_logprobs=True,
            temperature=0.0 if greedy else 1.0,
            top_p=None if greedy else 1.0,
            seed=jax.random.key(seed, impl=self.impl),
        )
        return out.tokens, out.logprobs


if __name__ == "__main__":
    protocol.serve(Tunix())
