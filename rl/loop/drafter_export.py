"""Export of a run's learned drafter to a folder for serving engines, from any state of the run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from models import hf
from models.transformer import Params, param_specs
from rl.checkpoint import reader
from rl.checkpoint.reader import NoWholeCheckpointError
from rl.drafter_training import export as drafter_folder
from rl.learner.optimizer import SavedArrays
from rl.loop import drafter_run
from rl.loop.experiment import Inputs, TrainConfig
from rl.runtime.run_files import CHECKPOINTS, DRAFTER, POLICY
from spec.eagle.model import EagleWeights
from spec.eagle.training import DrafterState


@dataclasses.dataclass(frozen=True)
class Exported:
    """Description of an exported drafter, its steps of training, and the checkpoints it is from."""

    text: str
    num_steps: int
    source: Path
    warnings: tuple[str, ...]


def export(config: TrainConfig, inputs: Inputs, run: Path, target: Path) -> Exported:
    """Write the drafter of a running, stopped or finished run to `target`.

    Raises NoWholeCheckpointError, StructureMismatchError, and as `drafter_folder.write` does.
    """
    start = drafter_run.open_drafter(config, inputs)
    found, policy = _most_trained(run, inputs, start)
    return _write(config, inputs, found, start, policy, target)


def export_finished(
    config: TrainConfig, inputs: Inputs, run: Path, policy: Params, target: Path
) -> Exported:
    """Write the drafter of a run that has just ended with these weights of the policy."""
    start = drafter_run.open_drafter(config, inputs)
    return _write(config, inputs, _own(run, start), start, policy, target)


@dataclasses.dataclass(frozen=True, eq=False)
class _Found:
    """A drafter's training state without the optimizer's, and the checkpoints it is from."""

    state: Any
    source: Path
    warnings: tuple[str, ...]

    @property
    def num_steps(self) -> int:
        return int(self.state.step)


def _most_trained(run: Path, inputs: Inputs, start: EagleWeights) -> tuple[_Found, Params | None]:
    """Return the drafter, and the policy's parameters that it shares.

    A resumed run continues from the same one: after a kill the drafter's own checkpoints may be
    behind the run's or ahead of them.
    """
    own, both = None, None
    problems = []
    try:
        own = _own(run, start)
    except NoWholeCheckpointError as error:
        problems.append(error)
    try:
        both = _of_run(run, inputs, start)
    except NoWholeCheckpointError as error:
        problems.append(error)
    if both is not None:
        found, policy = both
        if own is not None and own.num_steps >= found.num_steps:
            found = own
        return found, policy
    if own is not None:
        return own, _finished_policy(run)
    raise NoWholeCheckpointError("\n".join(map(str, problems)), {})


def _own(run: Path, start: EagleWeights) -> _Found:
    """Read the drafter's own checkpoints."""
    folder = run / DRAFTER
    found = reader.restore(folder, _template(start), subset=True)
    return _Found(found.arrays, folder, found.warnings)


def _of_run(run: Path, inputs: Inputs, start: EagleWeights) -> tuple[_Found, Params]:
    """Read the run's checkpoints: drafter, and the policy's embedding and head without layers."""
    shared = dataclasses.replace(param_specs(inputs.model), layers=(), final_norm_D=None)
    shared = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), shared)
    template = SavedArrays(None, shared, (), drafter=_template(start))  # type: ignore[arg-type]
    folder = run / CHECKPOINTS
    found = reader.restore(folder, template, subset=True)
    return _Found(found.arrays.drafter, folder, found.warnings), found.arrays.params


def _template(start: EagleWeights) -> Any:
    """Return the structure of a drafter's training state without the optimizer's."""
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), start.params)
    return DrafterState(params, (), jax.ShapeDtypeStruct((), "int32"))  # type: ignore[arg-type]


def _finished_policy(run: Path) -> Params | None:
    return hf.load_pretrained(run / POLICY)[1] if (run / POLICY).is_dir() else None


def _write(
    config: TrainConfig,
    inputs: Inputs,
    found: _Found,
    start: EagleWeights,
    policy: Params | None,
    target: Path,
) -> Exported:
    drafter = dataclasses.replace(start, params=found.state.params)
    variant = config.drafter_training.variant
    text = drafter_folder.write(target, drafter, inputs.model, policy, inputs.policy, variant)
    return Exported(text, found.num_steps, found.source, found.warnings)
