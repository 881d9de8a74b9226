"""The optimizer of all that is trained here: policies, critics and drafters."""

from __future__ import annotations

from typing import Any

import jax
import optax


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
    """Clip by the global norm (None: not at all), then AdamW; vectors (norms, biases) do not decay.

    `learning_rate` is a function of the steps taken before, `first_moment` the dtype of that mean.
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
    return optax.chain(clip, adamw)  # of one structure, so that a run can be resumed with either
