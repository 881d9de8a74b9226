"""The jitted functions of one optimizer step, and the check before it is applied.

    start → accumulate, once per micro-batch → join → inspect → check, on the host → apply

Policy and critic share these functions: a `Network`, their static argument, holds the differences.
With several copies of the weights (the mesh axis `data`), each copy sums the gradients of its rows,
in arrays with a leading axis of copies. `join` adds these sums up, once per optimizer step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

from reprise.models import sharding
from reprise.models.config import ModelConfig
from reprise.models.decoder.training import adding
from reprise.models.layout import RULES
from reprise.models.sharding import constrain, replicated, ways_in_use
from reprise.rl.batches.micro_batches import MicroBatch, Packed, TrainSample
from reprise.rl.learner.config import OptimizerConfig, TrainSpec
from reprise.rl.learner.optimizer import CriticState, TrainState, learning_rate, make_optimizer
from reprise.rl.losses import losses
from reprise.rl.losses.losses import TokenStatistics
from reprise.rl.runtime.devices import in_turn

State = TypeVar("State", TrainState, CriticState)
T = TypeVar("T")
_COPIES = RULES["copies"]  # the mesh axis of copies of the weights


class Call(NamedTuple):
    """A jitted function with its arguments (arrays or shapes) and its static arguments."""

    step: Any
    args: tuple[Any, ...]
    static: dict[str, Any]

    def lower(self) -> Any:
        return self.step.lower(*self.args, **self.static)


class NonFiniteUpdate(RuntimeError):
    """A loss or gradient that is not finite; its update was not applied.

    `state` is the whole state before the step; `samples` are the names of the samples at fault.
    """

    def __init__(self, message: str, state: Any, samples: tuple[str, ...]) -> None:
        super().__init__(message)
        self.state = state
        self.samples = samples


class NonFiniteWeights(RuntimeError):
    """Weights that are not finite, which are neither saved nor trained on."""


@struct.dataclass
class Accumulator:
    """Float32 gradients and token statistics of the micro-batches of one optimizer step."""

    gradients: Any
    statistics: TokenStatistics


@struct.dataclass
class Health:
    """Flags for finite values: the loss of each sample, and the gradient of the whole micro-batch.

    `outputs` are the values of a loss by sample. With several copies of the weights, all arrays
    have a leading axis of copies.
    """

    loss_B: jax.Array
    gradient: jax.Array
    outputs: Any = None


@struct.dataclass
class Report:
    """The figures that the host checks before an optimizer step is applied."""

    grad_norm: jax.Array
    lr: jax.Array
    statistics: TokenStatistics


@struct.dataclass
class StepScalars:
    """The traced scalars of one optimizer step: the divisors of the losses of policy and critic.

    `unmoved`: the policy has not been updated with this batch yet.
    """

    normaliser: Any
    num_tokens: Any
    unmoved: Any


@dataclasses.dataclass(frozen=True)
class Network:
    """The static part of one trained network.

    `loss` returns (loss, (statistics, finite_B, outputs)) of one micro-batch, for the trained
    weights and the frozen weights, which may be None.
    """

    specs: Callable[[ModelConfig], Any]
    loss: Callable[[Any, Any, MicroBatch, StepScalars, TrainSpec], Any]
    optimizer: Callable[[TrainSpec], OptimizerConfig]
    no_statistics: Callable[[TrainSpec], TokenStatistics]

    def constrain(self, recipe: TrainSpec, tree: Any) -> Any:
        """Pin a tree shaped like the weights of the network to the sharding table."""
        specs = self.specs(recipe.model)
        return jax.tree.map(lambda spec, p: constrain(p, *spec.axes), specs, tree)


_STATIC = ("network", "recipe")


@partial(jax.jit, static_argnames=_STATIC)
def start(*, network: Network, recipe: TrainSpec) -> Accumulator:
    """Return an empty accumulator."""

    def empty() -> Accumulator:
        specs = network.specs(recipe.model)
        gradients = jax.tree.map(lambda spec: jnp.zeros(spec.shape, jnp.float32), specs)
        return Accumulator(network.constrain(recipe, gradients), network.no_statistics(recipe))

    return _by_copy(empty)


def empty_shapes(*, network: Network, recipe: TrainSpec) -> Accumulator:
    """Return the shapes of the result of `start`, under the mesh in use."""
    gradients = sharding.shapes(network.specs(recipe.model), jnp.float32)
    statistics = sharding.whole_shapes(jax.eval_shape(partial(network.no_statistics, recipe)))
    total = Accumulator(gradients, statistics)
    copies = ways_in_use("copies")

    def one(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        where = NamedSharding(jax.sharding.get_mesh(), PartitionSpec(_COPIES, *x.sharding.spec))
        return jax.ShapeDtypeStruct((copies, *x.shape), x.dtype, sharding=where)

    return total if copies == 1 else jax.tree.map(one, total)


def _by_copy(function: Callable[..., T], whole: Any = (), sums: Any = (), rows: Any = ()) -> T:
    """Call a function of the arguments `whole`, `sums` and `rows` for each copy of the weights.

    Each call gets the sums and rows of its copy; results have a leading axis of copies. With one
    copy the function is called directly.
    """
    if ways_in_use("copies") == 1:
        return function(*whole, *sums, *rows)

    def one(whole: Any, sums: Any, rows: Any) -> Any:
        sums = jax.tree.map(lambda x: x[0], sums)
        return jax.tree.map(lambda x: x[None], function(*whole, *sums, *rows))

    split = PartitionSpec(_COPIES)
    specs: dict[str, Any] = {"in_specs": (PartitionSpec(), split, split), "out_specs": split}
    mapped = jax.shard_map(one, **specs, axis_names={_COPIES}, check_vma=False)
    return mapped(whole, sums, rows)


def join(accumulator: Accumulator) -> Accumulator:
    """Return the sums over all copies of the weights, in each copy; `accumulator` is consumed."""
    return accumulator if ways_in_use("copies") == 1 else joined(accumulator)


@partial(jax.jit, donate_argnames=("accumulator",))
def joined(accumulator: Accumulator) -> Accumulator:
    """Return `join` for several copies."""

    def one(total: Accumulator) -> Accumulator:
        gradients, sums = jax.lax.psum((total.gradients, total.statistics.sums), _COPIES)
        maxima = jax.tree.map(lambda x: jax.lax.pmax(x, _COPIES), total.statistics.maxima)
        return Accumulator(gradients, TokenStatistics(sums, maxima))

    return _by_copy(one, sums=(accumulator,))


def whole(tree: Any) -> Any:
    """Return sums after `join`, which are equal in all copies, without the axis of copies."""
    if ways_in_use("copies") == 1:
        return tree

    def one(tree: Any) -> Any:
        return jax.tree.map(lambda x: x[0], tree)

    specs: dict[str, Any] = {"in_specs": PartitionSpec(_COPIES), "out_specs": PartitionSpec()}
    return jax.shard_map(one, **specs, axis_names={_COPIES}, check_vma=False)(tree)


@partial(jax.jit, static_argnames=_STATIC, donate_argnames=("accumulator",))
def accumulate(
    params: Any,
    accumulator: Accumulator,
    batch: MicroBatch,
    scalars: StepScalars,
    frozen: Any = None,
    *,
    network: Network,
    recipe: TrainSpec,
) -> tuple[Accumulator, Health]:
    """Add the gradient of a micro-batch to the accumulator, in float32; compiled once."""

    def one(
        params: Any, scalars: StepScalars, frozen: Any, before: Accumulator, batch: MicroBatch
    ) -> tuple[Accumulator, Health]:
        def loss_of(params: Any, marks: Any) -> Any:
            params = adding(params, before.gradients, marks)
            return network.loss(params, frozen, batch, scalars, recipe)

        marks = jax.tree.map(lambda _: jnp.float32(0), params)
        gradients = jax.grad(loss_of, argnums=(0, 1), has_aux=True)
        (sums, not_finite), (statistics, finite_B, outputs) = gradients(params, marks)
        finite = sum(jax.tree.leaves(not_finite)) == 0
        statistics = losses.add_statistics(before.statistics, statistics)
        health = replicated(Health(finite_B, finite, outputs))
        return Accumulator(network.constrain(recipe, sums), replicated(statistics)), health

    total, health = _by_copy(one, (params, scalars, frozen), (accumulator,), (batch,))
    return total, replicated(health)


@partial(jax.jit, static_argnames=_STATIC)
def inspect(
    accumulator: Accumulator, step: jax.Array, *, network: Network, recipe: TrainSpec
) -> Report:
    """Return the gradient norm before clipping, the upcoming learning rate, and the statistics."""
    lr = learning_rate(network.optimizer(recipe), recipe.total_steps, step)
    total = whole(accumulator)
    squares = [jnp.sum(g * g) for g in jax.tree.leaves(total.gradients)]
    return replicated(Report(jnp.sqrt(sum(squares)), lr, total.statistics))


@partial(jax.jit, static_argnames=_STATIC, donate_argnames=("state",))
def apply(
    state: State, gradients: Any, commit: jax.Array, *, network: Network, recipe: TrainSpec
) -> State:
    """Take one optimizer step; with `commit` False return the state unchanged."""
    optimizer = make_optimizer(network.optimizer(recipe), recipe.total_steps)
    changes, opt_state = optimizer.update(whole(gradients), state.opt_state, state.params)
    params = network.constrain(recipe, optax.apply_updates(state.params, changes))
    stepped: dict[str, Any] = {"step": state.step + 1} if isinstance(state, TrainState) else {}
    after = dataclasses.replace(state, params=params, opt_state=opt_state, **stepped)
    return jax.tree.map(lambda new, old: jnp.where(commit, new, old), after, state)


@jax.jit
def all_finite(params: Any) -> jax.Array:
    """Return whether all weights are finite, in one pass over the weights."""
    return replicated(jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(params)]).all())


def calls(
    state: State,
    batch: MicroBatch,
    scalars: StepScalars,
    step: jax.Array,
    frozen: Any = None,
    **static: Any,
) -> list[Call]:
    """Return the calls after `start`, and the check before a save, for lowering.

    The arrays may be shapes.
    """
    total: Accumulator = empty_shapes(**static)
    every = [
        Call(accumulate, (state.params, total, batch, scalars, frozen), static),
        Call(apply, (state, total.gradients, np.bool_(False)), static),
        Call(inspect, (total, step), static),
        Call(all_finite, (state.params,), {}),
    ]
    if ways_in_use("copies") > 1:
        every.append(Call(joined, (total,), {}))
    return every


def run_once(
    state: State,
    batch: MicroBatch,
    scalars: StepScalars,
    step: jax.Array,
    frozen: Any = None,
    **static: Any,
) -> State:
    """Run each compiled function on an empty batch; the donated state is returned unchanged."""
    one, _ = in_turn(accumulate(state.params, start(**static), batch, scalars, frozen, **static))
    summed = in_turn(join(one))
    in_turn(inspect(summed, step, **static))
    unchanged = in_turn(apply(state, summed.gradients, np.bool_(False), **static))
    in_turn(all_finite(unchanged.params))
    return unchanged


def check(
    state: Any,
    report: Report,
    health: Sequence[Health],
    samples: Sequence[TrainSample],
    packed: Sequence[Packed],
    where: str,
    *,
    whose: str = "",
) -> None:
    """Raise NonFiniteUpdate if a value is not finite, naming the fewest samples at fault."""
    pairs = list(zip(packed, health, strict=True))
    bad = [i for p, h in pairs for i in p.sample_indices[~h.loss_B.reshape(-1)[p.places]]]
    what = f"the {whose}loss"
    if not bad:
        if np.isfinite(report.grad_norm) and np.isfinite(report.statistics.sums["loss"]):
            return
        what = f"the {whose}gradient (norm {report.grad_norm})"
        bad = [i for p, h in pairs if not np.all(h.gradient) for i in p.sample_indices]
        bad = bad or list(range(len(samples)))
    names = tuple(samples[i].name for i in sorted(bad))
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    raise NonFiniteUpdate(
        f"{where}: {what} is not finite in {len(names)} of {len(samples)} samples: {shown}. "
        "The update was not applied. Look at these samples' log-probs and rewards; a lower "
        f"{'Critic' if whose else 'Optimizer'}.learning_rate often helps",
        state,
        names,
    )


def summed(reports: Sequence[Report]) -> TokenStatistics:
    """Return the statistics of all optimizer steps together, on the host."""
    total = reports[0].statistics
    for report in reports[1:]:
        total = TokenStatistics(
            {name: total.sums[name] + value for name, value in report.statistics.sums.items()},
            {n: np.maximum(total.maxima[n], v) for n, v in report.statistics.maxima.items()},
        )
    return total
