"""The shapes that tests share, since each is a compilation: three policies, two engines.

tests/test_shapes.py counts the others.
"""

import dataclasses

import jax
import numpy as np

from reprise.models.config import ModelConfig
from reprise.models.decoder import transformer
from reprise.rl.slots.config import EngineConfig

TINY = ModelConfig("llama", 20, 16, 1, 2, 1, 8, 16, max_positions=64)
# grouped queries, biases, a tied head
ODD = ModelConfig(
    "qwen2", 32, 16, 1, 4, 2, 8, 32, qkv_bias=True, tied_embeddings=True, max_positions=64
)
CHAT = ModelConfig("qwen3", 16, 16, 1, 2, 2, 8, 32, qk_norm=True, eos_token_ids=(15,))


class OneSize(EngineConfig):
    """Rounds with draft tokens have as many nodes as they can, and none compute prompts."""

    def node_sizes(self, num_slots):
        return super().node_sizes(num_slots)[-1:]


PLAIN = EngineConfig(
    slots=4,
    min_slots=4,
    page_tokens=32,
    rounds_per_fetch=4,
    max_nodes=4,
    prefill_rows=2,
    prefill_chunk_tokens=8,
)
SPEC = EngineConfig(
    slots=8,
    min_slots=8,
    page_tokens=64,
    rounds_per_fetch=8,
    max_nodes=8,
    prefill_rows=4,
    prefill_chunk_tokens=8,
)


def one_size(config):
    """Return the configuration with one program for rounds with drafts, instead of five."""
    return OneSize(**dataclasses.asdict(config))


def make_params(seed=0, model=TINY):
    rng = np.random.default_rng(seed)

    def one(spec):
        return (2 * (spec.scale or 0.5) * rng.standard_normal(spec.shape)).astype(np.float32)

    return jax.tree.map(one, transformer.param_specs(model))
