"""Gradients of micro-batches added up, and the check that stands before they are applied."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.sharding import constrain
from rl.learner import losses
from rl.learner.losses import TokenStatistics
from rl.learner.micro_batches import Packed, TrainSample


class NonFiniteUpdate(RuntimeError):
    """A loss or gradient that is not finite; its update was not applied.

    `state` is the state before the refused optimizer step, whole and usable;
    `samples` are the names of the samples at fault.
    """

    def __init__(self, message: str, state: Any, samples: tuple[str, ...]) -> None:
        super().__init__(message)
        self.state = state
        self.samples = samples


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Accumulator:
    """Float32 gradients and token statistics of the micro-batches of one optimizer step."""

    gradients: Any
    statistics: TokenStatistics


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Health:
    """Whether each row's loss, and the gradient of the micro-batch as a whole, are finite."""

    loss_B: jax.Array
    gradient: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Report:
    """What the host looks at before an optimizer step is applied."""

    grad_norm: jax.Array
    lr: jax.Array
    statistics: TokenStatistics


def laid_out(specs: Any, tree: Any) -> Any:
    """Pin a tree shaped like these parameters' specs to the sharding table."""
    return jax.tree.map(lambda spec, p: constrain(p, *spec.axes), specs, tree)


def zeros(specs: Any, statistics: TokenStatistics) -> Accumulator:
    """An accumulator of nothing; `statistics` are neutral ones."""
    gradients = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), specs)
    return Accumulator(laid_out(specs, gradients), statistics)


def add(
    accumulator: Accumulator,
    gradients: Any,
    statistics: TokenStatistics,
    finite_B: jax.Array,
    specs: Any,
) -> tuple[Accumulator, Health]:
    """One more micro-batch."""
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(gradients)]))
    total = jax.tree.map(jnp.add, accumulator.gradients, gradients)
    statistics = losses.add_statistics(accumulator.statistics, statistics)
    return Accumulator(laid_out(specs, total), statistics), Health(finite_B, finite)


def report(accumulator: Accumulator, lr: jax.Array) -> Report:
    """The gradient's norm before clipping, the learning rate to come, and the statistics."""
    squares = [jnp.sum(g * g) for g in jax.tree.leaves(accumulator.gradients)]
    return Report(jnp.sqrt(sum(squares)), lr, accumulator.statistics)


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
    """Raises NonFiniteUpdate, naming the fewest samples that can be at fault."""
    pairs = list(zip(packed, health, strict=True))
    bad = [i for p, h in pairs for i, ok in zip(p.sample_indices, h.loss_B, strict=False) if not ok]
    what = f"the {whose}loss"
    if not bad:
        if np.isfinite(report.grad_norm) and np.isfinite(report.statistics.sums["loss"]):
            return
        what = f"the {whose}gradient (norm {report.grad_norm})"
        bad = [i for p, h in pairs if not h.gradient for i in p.sample_indices]
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
    """The statistics of all optimizer steps together, on the host."""
    total = reports[0].statistics
    for report in reports[1:]:
        total = TokenStatistics(
            {name: total.sums[name] + value for name, value in report.statistics.sums.items()},
            {n: np.maximum(total.maxima[n], v) for n, v in report.statistics.maxima.items()},
        )
    return total
