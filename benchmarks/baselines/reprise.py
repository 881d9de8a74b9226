"""Our engine, driven as the others are: `python -m benchmarks.baselines.reprise`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.baselines import protocol
from benchmarks.shape import Shape
from reprise.models.config import ModelConfig
from reprise.models.formats import hf
from reprise.rl.engine.engine import Engine
from reprise.rl.python.generate import generate
from reprise.rl.records.trajectory import Request, Trajectory
from reprise.rl.slots.config import EngineConfig
from reprise.spec.config import SamplingConfig
from reprise.spec.verification.sampling import step_key


def model_config(shape: Shape) -> ModelConfig:
    return ModelConfig(
        architecture="qwen3",
        vocab_size=shape.vocab,
        d_model=shape.d_model,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        d_ff=shape.d_ff,
        rope_theta=1e6,
        tied_embeddings=shape.tied,
        qk_norm=True,
        max_positions=max(4096, shape.cache),
    )


def make_engine(shape: Shape, model: ModelConfig | None = None) -> Engine:
    """Return an engine of one batch."""
    config = EngineConfig(
        slots=shape.batch,
        min_slots=shape.batch,
        prefill_rows=16,
        prefill_chunk_tokens=shape.prompt,
    )
    return Engine(model or model_config(shape), config, dtype=jnp.dtype(shape.dtype))


def make_requests(shape: Shape) -> list[Request]:
    prompts = enumerate(shape.prompts())
    return [Request(i, tuple(p), max_new_tokens=shape.new_tokens) for i, p in prompts]


def generate_batch(
    engine: Engine, params: Any, requests: list[Request], seed: int, greedy: bool
) -> list[Trajectory]:
    """Generate one batch without end tokens, so that every response has its full length."""
    sampling = SamplingConfig(temperature=0.0 if greedy else 1.0)
    options: Any = {"key": step_key(0, seed), "engine": engine, "stop_token_ids": ()}
    return generate(engine.model, params, requests, sampling, **options)


class Reprise:
    name = "reprise"
    variants = ("pages",)
    packages = ("jax", "jaxlib", "numpy")

    def prepare(self, shape: Shape, policy: str, variant: str) -> None:
        self.requests = make_requests(shape)
        model, self.params = hf.load_pretrained(policy, dtype=jnp.dtype(shape.dtype))
        self.engine = make_engine(shape, model)
        jax.block_until_ready(self.params)

    def generate(self, seed: int, greedy: bool) -> tuple[list, list]:
        done = generate_batch(self.engine, self.params, self.requests, seed, greedy)
        return [t.response_ids for t in done], [t.logprobs for t in done]


if __name__ == "__main__":
    protocol.serve(Reprise())
