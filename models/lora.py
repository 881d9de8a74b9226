"""Low-rank adapters next to frozen weights: W x + (alpha / rank) · B (A x), by arXiv 2106.09685.

An adapter is a tree like `Params` whose leaves are `LowRank`, None for weights without one.
`models.config.with_adapters` puts it next to a policy's weights, and every forward pass applies it
(`models.layers.linear`): base weights are stored once, whatever the number of adapters.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from models import hf, transformer
from models.config import Adapted, LowRank, ModelConfig, Params, lora_specs, with_adapters
from models.layers import dense
from models.sharding import param_shardings, put


def init(config: ModelConfig, key: jax.Array, mesh: Mesh | None = None) -> Params:
    """Return a float32 adapter that changes nothing: A is random, B is 0."""
    specs = lora_specs(config)
    adapter: Params = transformer.init_from(specs, key)
    return adapter if mesh is None else jax.tree.map(put, adapter, param_shardings(mesh, specs))


def cut_to(adapter: Params, rank: int) -> Params:
    """Return an adapter whose A and B are 0 beyond `rank`, and stay so in training.

    The gradient of each is a product with the other.
    """

    def one(low: LowRank) -> LowRank:
        kept_R = (jnp.arange(low.down_RI.shape[0]) < rank).astype(low.down_RI.dtype)
        return LowRank(low.down_RI * kept_R[:, None], low.up_OR * kept_R)

    cut: Params = jax.tree.map(one, adapter, is_leaf=lambda x: isinstance(x, LowRank))
    return cut


def is_adapted(x: Any) -> bool:
    return isinstance(x, Adapted)


def trained_part(params: Params) -> Params:
    """Return the weights of a policy that training changes: its adapter, or all without one."""
    adapter: Params = jax.tree.map(
        lambda x: x.low if is_adapted(x) else None, params, is_leaf=is_adapted
    )
    return adapter if jax.tree.leaves(adapter) else params


def merge(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """Return plain weights, and their config.

    An adapted head that was tied to the embedding becomes a weight itself.
    """
    if is_adapted(params.head_VD):
        params = dataclasses.replace(params, head_VD=transformer.head_weight(params))
        config = dataclasses.replace(config, tied_embeddings=False)
    merged = jax.tree.map(lambda x: dense(x) if is_adapted(x) else x, params, is_leaf=is_adapted)
    return dataclasses.replace(config, lora=None), merged


def load_merged(
    folder: Path, config: ModelConfig, adapter: Params, mesh: Mesh | None = None
) -> tuple[ModelConfig, Params]:
    """Return the policy of a folder in float32 with an adapter merged into it, and its config."""
    assert config.lora is not None
    base = hf.load_pretrained(folder, mesh, dtype=jnp.float32)[1]
    return merge(config, with_adapters(base, adapter, config.lora))
