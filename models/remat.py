"""What the forward pass keeps of its layers, and what the backward pass computes again.

| name | kept | computed again |
|---|---|---|
| none | all that gradients need | nothing |
| dots | what products with weights return, and each layer's input | the rest of each layer |
| layer | each layer's input | each layer |
| layer:N | the input of every N-th layer | each layer, all but the last of N twice |

While the gradients of N layers are computed the inputs of these N are there too. With L layers
√L as N keeps the fewest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from models.layout import layers_kept_apart

Step = Callable[[Any, jax.Array], tuple[jax.Array, Any]]


def through_layers(
    step: Step, layers: Sequence[Any], x_BTD: jax.Array, remat: str
) -> tuple[jax.Array, list[Any]]:
    """Apply `step(layer, x) -> (x, found)` to layer after layer; return the last x, and all found.

    Raises ValueError for a name that is none of the table's.
    """
    apart = layers_kept_apart(remat)
    apply = step
    if remat == "dots":
        products = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        apply = _at_once(jax.checkpoint(step, policy=products))
    elif apart:
        apply = _at_once(jax.checkpoint(step))

    def through(layers: Sequence[Any], x_BTD: jax.Array) -> tuple[jax.Array, list[Any]]:
        found = []
        for layer in layers:
            x_BTD, one = apply(layer, x_BTD)
            found.append(one)
        return x_BTD, found

    if apart < 2:
        return through(layers, x_BTD)
    several = _at_once(jax.checkpoint(through))
    all_found = []
    for i in range(0, len(layers), apart):
        x_BTD, found = several(tuple(layers[i : i + apart]), x_BTD)
        all_found += found
    return x_BTD, all_found


def _at_once(step: Step) -> Step:
    """Return layers whose gradients are all computed before the layer below has its own.

    A scheduler would leave those of the weights to the end, and so keep for all layers what
    `jax.checkpoint` computes again for them.
    """
    return lambda layers, x_BTD: step(*_tied(layers, x_BTD))


@jax.custom_vjp
def _tied(layers: Any, x_BTD: jax.Array) -> tuple[Any, jax.Array]:
    return layers, x_BTD


_tied.defvjp(
    lambda *inputs: (inputs, None), lambda _, gradients: jax.lax.optimization_barrier(gradients)
)
