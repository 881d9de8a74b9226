"""AdamW with a schedule and clipping, and the training state."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

from reprise.models import sharding
from reprise.models.decoder.training import clipped_adamw
from reprise.models.decoder.transformer import Params
from reprise.rl.learner.config import OptimizerConfig


@struct.dataclass
class CriticState:
    """The float32 weights of a critic (`rl.learner.critic.Critic`), and their optax state."""

    params: Any
    opt_state: Any


@struct.dataclass
class TrainState:
    """Optimizer steps taken (int32), float32 master parameters, optax state, and a critic."""

    step: jax.Array
    params: Params
    opt_state: Any
    critic: CriticState | None = None


@struct.dataclass
class SavedArrays:
    """The arrays of a checkpoint; field names are paths on disk."""

    step: jax.Array
    params: Params
    opt_state: Any
    critic: CriticState | None = None
    behind: Params | None = None  # stale weights that generate the next step, if rollouts run ahead
    drafter: Any = None  # the training state of a learned drafter

    OPTIONAL: ClassVar = (".critic", ".behind", ".drafter")  # not needed to resume
    OF_TRAINING: ClassVar = (".opt_state", ".critic", ".behind")  # needed only to resume

    @classmethod
    def of(cls, state: TrainState, behind: Params | None, drafter: Any) -> SavedArrays:
        return cls(**vars(state), behind=behind, drafter=drafter)

    @property
    def state(self) -> TrainState:
        return TrainState(self.step, self.params, self.opt_state, self.critic)


def learning_rate(config: OptimizerConfig, total_steps: int, step: jax.Array) -> jax.Array:
    """Return peak · min(1, (step + 1) / warm-up) · decay(x); x is the share done after the warm-up.

    decay: 1, 1 − x, or (1 + cos πx) / 2. The rate of the first step is above 0.
    """
    warmup = config.warmup_steps
    rise = jnp.minimum(1.0, (step + 1) / warmup) if warmup else 1.0
    done = jnp.clip((step - warmup) / max(total_steps - warmup, 1), 0.0, 1.0)
    decay = {
        "constant": jnp.ones_like(done),
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + jnp.cos(jnp.pi * done)),
    }[config.schedule]
    return config.learning_rate * rise * decay


def make_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """Return AdamW with the settings of `config`, over a run of `total_steps` optimizer steps."""
    return clipped_adamw(
        lambda step: learning_rate(config, total_steps, step),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        first_moment=jnp.dtype(config.first_moment),
    )


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """Return the float32 state before the first step; a float32 tree is used as the weights."""
    params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    return settle(TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params)))


def state_shapes(specs: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """Return the shapes of `init_state` for weights of these `ParamSpec`, under the mesh in use."""
    step = sharding.whole_shapes(jax.ShapeDtypeStruct((), jnp.int32))
    return TrainState(step, *trained_shapes(specs, optimizer))


def trained_shapes(specs: Any, optimizer: optax.GradientTransformation) -> tuple[Any, Any]:
    """Return the shapes of float32 weights, and of their optax state."""
    params = sharding.shapes(specs, jnp.float32)
    alike = jax.tree.structure(params)

    def one(part: Any) -> Any:
        if jax.tree.structure(part) != alike:
            return sharding.whole_shapes(part)
        return jax.tree.map(
            lambda x, p: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=p.sharding), part, params
        )

    state = jax.eval_shape(optimizer.init, params)
    return params, jax.tree.map(one, state, is_leaf=lambda x: jax.tree.structure(x) == alike)


def settle(tree: Any) -> Any:
    """Return the arrays with shardings spelt as jit spells them, scalars on every device.

    P(None) and P() mean the same, but jit compiles a program for each.
    """
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return tree

    def one(x: jax.Array) -> jax.Array:
        entries = list(x.sharding.spec) if isinstance(x.sharding, NamedSharding) else []
        while entries and entries[-1] is None:
            entries.pop()
        where = NamedSharding(mesh, PartitionSpec(*entries))
        if x.is_fully_addressable and not where.is_fully_addressable:
            # each process has the whole array; device_put would compare all copies first
            host = np.asarray(x)
            return jax.make_array_from_process_local_data(where, host, host.shape)
        return jax.device_put(x, where)

    return jax.tree.map(one, tree)
