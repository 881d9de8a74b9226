"""Training: the optimizer, and the values that the backward pass keeps or computes again.

| name | kept | computed again |
|---|---|---|
| none | everything that gradients need | nothing |
| dots | results of products with weights, and the input of each layer | the rest of each layer |
| layer | the input of each layer | each layer |
| layer:N | the input of every N-th layer | each layer; all but the last of N layers twice |

N = √L keeps the fewest inputs for L layers. Kept inputs are split over `tensor`, and gathered for
their layers. Layer gradients can be added to totals as soon as they are computed (`adding`);
otherwise the compiler delays these sums to the end, and so keeps the gradients of all layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from reprise.models.config import Layer
from reprise.models.decoder.layers import PRODUCT
from reprise.models.layout import layers_per_input
from reprise.models.sharding import constrain

Step = Callable[[Any, jax.Array], tuple[jax.Array, Any]]


@struct.dataclass
class Adding:
    """A weight with total + gradient in place of its gradient.

    The gradient of `mark`, a float32 0, counts the NaN or infinite values of the weight gradient.
    """

    weight: Any
    total: Any
    mark: Any


def adding(weights: Any, totals: Any, marks: Any) -> Any:
    """Return weights that add their gradients to `totals` as they are computed, with `marks`.

    See `Adding`. `through_layers` adds the gradients of layers; other weights are returned as
    arrays.
    """
    tree = jax.tree.map(Adding, weights, totals, marks)

    def is_apart(x: Any) -> bool:
        return isinstance(x, Layer | Adding)

    return jax.tree.map(lambda x: x if isinstance(x, Layer) else _added(x), tree, is_leaf=is_apart)


@jax.custom_vjp
def _added_one(weight: jax.Array, total: jax.Array, mark: jax.Array) -> jax.Array:
    return weight


def _added_bwd(total: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None, jax.Array]:
    return total + gradient, None, jnp.sum(~jnp.isfinite(gradient), dtype=jnp.float32)


_added_one.defvjp(lambda weight, total, mark: (weight, total), _added_bwd)


def _added(tree: Any) -> Any:
    """Return a tree with each `Adding` replaced by its weight."""

    def one(x: Any) -> Any:
        return _added_one(x.weight, x.total, x.mark) if isinstance(x, Adding) else x

    return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, Adding))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def rounded_master(dtype: Any, rounded: jax.Array, master: jax.Array) -> jax.Array:
    """Return `rounded`, the rounded master weights of `dtype`, which get its gradient.

    So a loop over chunks rounds the weights once, and sums their gradient in float32.
    """
    return rounded


rounded_master.defvjp(
    lambda dtype, rounded, master: (rounded, None),
    lambda dtype, _, gradient: (None, gradient.astype(dtype)),
)


def through_layers(
    step: Step, layers: Sequence[Any], x_BTD: jax.Array, remat: str
) -> tuple[jax.Array, list[Any]]:
    """Apply `step(layer, x) -> (x, result)` layer by layer; return the last x and all results."""
    num_layers = layers_per_input(remat)

    def plain(layer: Any, x_BTD: jax.Array) -> tuple[jax.Array, Any]:
        return step(_added(layer), x_BTD)

    apply: Step = plain
    if remat == "dots":
        products = jax.checkpoint_policies.save_from_both_policies(
            jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
            jax.checkpoint_policies.save_only_these_names(PRODUCT),
        )
        apply = _at_once(_kept_in_parts(plain, policy=products))
    elif num_layers:
        apply = _at_once(_kept_in_parts(plain))

    def through(layers: Sequence[Any], x_BTD: jax.Array) -> tuple[jax.Array, list[Any]]:
        result = []
        for layer in layers:
            x_BTD, one = apply(layer, x_BTD)
            result.append(one)
        return x_BTD, result

    if num_layers < 2:
        return through(layers, x_BTD)
    several = _at_once(_kept_in_parts(through))
    all_results = []
    for i in range(0, len(layers), num_layers):
        x_BTD, result = several(tuple(layers[i : i + num_layers]), x_BTD)
        all_results += result
    return x_BTD, all_results


def _kept_in_parts(step: Step, **options: Any) -> Step:
    """Return `step` under `jax.checkpoint`, with its kept input also split over `tensor`."""

    def whole(layers: Any, x_BTD: jax.Array) -> tuple[jax.Array, Any]:
        return step(layers, constrain(x_BTD, "batch", None, None))

    checkpointed = jax.checkpoint(whole, **options)
    return lambda layers, x_BTD: checkpointed(layers, constrain(x_BTD, "batch", None, "features"))


def _at_once(step: Step) -> Step:
    """Return `step` with a barrier: its gradients are complete before the layer below starts.

    The scheduler would delay weight gradients to the end and keep recomputed values of all layers.
    """
    return lambda layers, x_BTD: step(*_tied(layers, x_BTD))


@jax.custom_vjp
def _tied(layers: Any, x_BTD: jax.Array) -> tuple[Any, jax.Array]:
    return layers, x_BTD


def _tied_bwd(_: None, gradients: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
    def without_total(x: Any) -> Any:
        return dataclasses.replace(x, total=None) if isinstance(x, Adding) else x

    known = jax.tree.map(without_total, gradients, is_leaf=lambda x: isinstance(x, Adding))
    return jax.lax.optimization_barrier(known)


_tied.defvjp(lambda *inputs: (inputs, None), _tied_bwd)


def clipped_adamw(
    learning_rate: optax.Schedule,
    *,
    b1: float,
    b2: float,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_grad_norm: float | None,
    first_moment: Any = None,
) -> optax.GradientTransformation:
    """Return AdamW after clipping by the global norm, or without clipping for None.

    Vectors (norms, biases) do not decay. `learning_rate` is a function of the number of earlier
    steps, and `first_moment` is the dtype of the first moment.
    """
    adamw = optax.adamw(
        learning_rate,
        b1=b1,
        b2=b2,
        eps=eps,
        mu_dtype=first_moment,
        weight_decay=weight_decay,
        mask=lambda params: jax.tree.map(lambda weight: weight.ndim > 1, params),
    )
    clip = optax.identity() if max_grad_norm is None else optax.clip_by_global_norm(max_grad_norm)
    return optax.chain(clip, adamw)  # one state structure, so that a run resumes with either
