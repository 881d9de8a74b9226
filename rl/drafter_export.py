"""Export of a run's learned drafter to a folder for serving engines, at any stage of the run."""

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
from rl.config import Inputs, TrainConfig
from rl.drafter_run import open_drafter
from rl.drafter_training import export as drafter_folder
from rl.learner.optimizer import SavedArrays
from rl.runtime.run_files import CHECKPOINTS, DRAFTER, POLICY
from spec.eagle.training import DrafterState


@dataclasses.dataclass(frozen=True)
class Exported:
    """Description of an exported drafter, its training steps, its checkpoints and warnings."""

    text: str
    num_steps: int
    source: Path
    warnings: tuple[str, ...]


def export(
    config: TrainConfig, inputs: Inputs, run: Path, target: Path, policy: Params | None = None
) -> Exported:
    """Write the drafter of a run to `target`; a run that has just ended passes its `policy`.

    Otherwise the drafter's own checkpoints may be older or newer than the run's (after a kill),
    and the one trained longest counts: a resumed run continues from it too. Its embedding and head
    are the policy's of the run's newest checkpoint, else of the finished policy.
    Raises NoWholeCheckpointError, StructureMismatchError, and as `drafter_folder.write` does.
    """
    start = open_drafter(config, inputs)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), start.params)
    state: Any = DrafterState(shapes, (), jax.ShapeDtypeStruct((), "int32"))  # type: ignore[arg-type]
    states, problems = [], []
    try:
        own = reader.restore(run / DRAFTER, state, subset=True)
        states.append((own.arrays, run / DRAFTER, own.warnings))
    except NoWholeCheckpointError as error:
        if policy is not None:
            raise
        problems.append(str(error))
    if policy is None:
        shared = dataclasses.replace(param_specs(inputs.model), layers=(), final_norm_D=None)
        shared = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), shared)
        whole = SavedArrays(None, shared, (), drafter=state)  # type: ignore[arg-type]
        try:
            both = reader.restore(run / CHECKPOINTS, whole, subset=True)
            states.append((both.arrays.drafter, run / CHECKPOINTS, both.warnings))
            policy = both.arrays.params
        except NoWholeCheckpointError as error:
            problems.append(str(error))
            if (run / POLICY).is_dir():
                policy = hf.load_pretrained(run / POLICY)[1]
    if not states:
        raise NoWholeCheckpointError("\n".join(problems), {})
    trained, source, warnings = max(
        states, key=lambda found: int(found[0].step)
    )  # ties: the drafter's
    drafter = dataclasses.replace(start, params=trained.params)
    variant = config.drafter_training.variant
    text = drafter_folder.write(target, drafter, inputs.model, policy, inputs.policy, variant)
    return Exported(text, int(trained.step), source, warnings)
