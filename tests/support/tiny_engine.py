"""A policy of one layer with random weights, and an engine with as few buckets as will do."""

import jax
import numpy as np

from models import transformer
from models.config import ModelConfig
from rl.engine.config import EngineConfig

MODEL = ModelConfig(
    architecture="llama",
    vocab_size=20,
    d_model=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    d_ff=16,
    max_positions=64,
)
# each bucket is a compilation
CONFIG = EngineConfig(
    slots=4,
    min_slots=4,
    min_positions=32,
    rounds_per_fetch=4,
    max_nodes=4,
    prefill_rows=2,
    prefill_chunk_tokens=8,
)


def make_params(seed=0, model=MODEL):
    rng = np.random.default_rng(seed)

    def one(spec):
        return (2 * (spec.scale or 0.5) * rng.standard_normal(spec.shape)).astype(np.float32)

    return jax.tree.map(one, transformer.param_specs(model))
