"""Low-rank adapters next to frozen weights: W x + (alpha / rank) · B (A x), by arXiv 2106.09685.

An adapter is a tree like `Params` with `LowRank` leaves, and None for weights without an adapter.
`models.config.with_adapters` pairs it with the weights of a policy, and every forward pass applies
it (`models.decoder.layers.linear`). Base weights are stored once, whatever the number of adapters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from reprise.models.config import (
    LORA_TARGETS,
    Adapted,
    Layer,
    LowRank,
    ModelConfig,
    Params,
    lora_specs,
)
from reprise.models.decoder import transformer
from reprise.models.decoder.layers import dense
from reprise.models.sharding import param_shardings, put


def init(config: ModelConfig, key: jax.Array, mesh: Mesh | None = None) -> Params:
    """Return a float32 adapter that changes nothing: A is random, B is 0."""
    specs = lora_specs(config)
    adapter: Params = transformer.init_from(specs, key)
    return adapter if mesh is None else jax.tree.map(put, adapter, param_shardings(mesh, specs))


def cut_to(adapter: Params, rank: int, targets: Sequence[str] = ()) -> Params:
    """Return an adapter with A and B set to 0 beyond `rank`; training keeps these zeros.

    The gradient of each factor is a product with the other factor. Weights outside `targets`
    (`LORA_TARGETS`) get rank 0; empty `targets` means all targets.
    """
    chosen = targets or tuple(LORA_TARGETS)
    trained = {f for target, fields in LORA_TARGETS.items() if target in chosen for f in fields}

    def one(field: str, low: LowRank | None) -> LowRank | None:
        if low is None:
            return None
        ranks = rank if field in trained else 0
        mask_R = (jnp.arange(low.down_RI.shape[0]) < ranks).astype(low.down_RI.dtype)
        return LowRank(low.down_RI * mask_R[:, None], low.up_OR * mask_R)

    def cut(layer: Layer) -> Layer:
        return Layer(**{name: one(name, low) for name, low in vars(layer).items()})

    layers = tuple(map(cut, adapter.layers))
    return dataclasses.replace(adapter, layers=layers, head_VD=one("head_VD", adapter.head_VD))


def with_places(config: ModelConfig, places: int) -> ModelConfig:
    """Return the config of a policy with room for `places` adapters of its rank."""
    assert config.lora is not None, "without adapters all weights are trained"
    return dataclasses.replace(config, lora=dataclasses.replace(config.lora, places=places))


def no_adapters(config: ModelConfig, dtype: Any) -> Params:
    """Return the zero adapters of a config with places, which change nothing yet."""
    return jax.tree.map(lambda spec: jnp.zeros(spec.shape, dtype), lora_specs(config))


@partial(jax.jit, donate_argnames="places")
def put_adapter(places: Params, adapter: Params, place: jax.Array) -> Params:
    """Return the adapters of all places, with `adapter` at `place`.

    B is finite in every place, because rows of other places multiply it by 0. If B has a value that
    is not finite, A becomes NaN, and so do the results of the rows with this adapter.
    """

    def one(wide: LowRank, low: LowRank) -> LowRank:
        at = place * low.down_RI.shape[0]
        dtype = wide.down_RI.dtype
        down_RI = low.down_RI.astype(dtype)
        up_OR = low.up_OR.astype(dtype)
        is_finite_OR = jnp.isfinite(up_OR)
        down_RI = jnp.where(jnp.all(is_finite_OR), down_RI, jnp.nan)
        up_OR = jnp.where(is_finite_OR, up_OR, 0)
        return LowRank(
            jax.lax.dynamic_update_slice(wide.down_RI, down_RI, (at, 0)),
            jax.lax.dynamic_update_slice(wide.up_OR, up_OR, (0, at)),
        )

    put_in: Params = jax.tree.map(one, places, adapter, is_leaf=lambda x: isinstance(x, LowRank))
    return put_in


def for_rows(config: ModelConfig, params: Params, place_X: jax.Array) -> Params:
    """Return weights for a batch with one adapter per row, from the places int32 [X].

    The products of a row with the ranks of other places are replaced by 0, even if they are NaN.
    With one place nothing changes.
    """
    if config.lora is None or config.lora.places == 1:
        return params
    ranks = jnp.arange(config.lora.places * config.lora.rank) // config.lora.rank
    keeps_XR = place_X[:, None] == ranks

    def one(x: Any) -> Any:
        return dataclasses.replace(x, keeps_XR=keeps_XR) if is_adapted(x) else x

    chosen: Params = jax.tree.map(one, params, is_leaf=is_adapted)
    return chosen


def is_adapted(x: Any) -> bool:
    return isinstance(x, Adapted)


def trained_part(params: Params) -> Params:
    """Return the weights of a policy that training changes: the adapter if it has one, else all."""
    adapter: Params = jax.tree.map(
        lambda x: x.low if is_adapted(x) else None, params, is_leaf=is_adapted
    )
    return adapter if jax.tree.leaves(adapter) else params


def merge(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """Return plain weights and their config.

    An adapted head that was tied to the embedding becomes a separate weight.
    """
    if is_adapted(params.head_VD):
        params = dataclasses.replace(params, head_VD=transformer.head_weight(params))
        config = dataclasses.replace(config, tied_embeddings=False)
    merged = jax.tree.map(lambda x: dense(x) if is_adapted(x) else x, params, is_leaf=is_adapted)
    return dataclasses.replace(config, lora=None), merged
