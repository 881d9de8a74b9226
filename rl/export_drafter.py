"""`python -m rl.export_drafter RUN OUT`: a run's learned drafter, as serving engines read it.

    python -m rl.export_drafter runs/tlt_tiny_cpu-1 drafter

The run may be going on, stopped or finished, which leaves the same in RUN/drafter_model. Of its
whole checkpoints the one whose drafter was trained for longest counts: the drafter's own in
RUN/drafter, or the run's. Copies of the policy's embedding and head are those of the run's newest
checkpoint, or of RUN/policy, or left out. OUT gets the tokenizer's files too. The run's
config.gin and what it names must be where they were.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from models import hf
from models.transformer import Params, param_specs
from rl.checkpoint import checkpointer
from rl.checkpoint.checkpointer import NoWholeCheckpointError, StructureMismatchError
from rl.config.loader import ConfigError, load, parse_command_line
from rl.drafter_training import export as drafter_folder
from rl.learner.optimizer import TrainState
from rl.loop import drafter_run
from rl.loop.experiment import Inputs, TrainConfig, open_inputs
from rl.runtime.progress import say
from spec.eagle.model import EagleWeights
from spec.eagle.training import DrafterState

FOLDER = "drafter_model"  # in the folder of a finished run
EXIT_USAGE = 2


def main(argv: Sequence[str]) -> int:
    """Parse, check, export, print; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m rl.export_drafter",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument("out", metavar="OUT", help="a new folder, or a drafter's to replace")
    args, overrides = parse_command_line(parser, argv)
    if overrides:
        parser.error("a run brings its own configuration: --gin.Section.field has no place here")
    run, out = Path(args.run), Path(args.out).absolute()
    try:
        config = _configuration(run)
        drafter_folder.check_target(out)
        exported = export(config, open_inputs(config), run, out)
    except (
        ConfigError,
        ValueError,
        OSError,
        ImportError,
        NoWholeCheckpointError,
        StructureMismatchError,
    ) as error:
        say(f"error: {error}", sys.stderr)
        return EXIT_USAGE
    for warning in exported.warnings:
        say(f"warning: {warning}", sys.stderr)
    say(f"drafter    {out}: {exported.text}")
    say(f"trained    {exported.num_steps:,} steps, by {exported.source}")
    say(f"start      {drafter_folder.start_command(out, run.absolute() / 'config.gin')}")
    return 0


@dataclasses.dataclass(frozen=True)
class Exported:
    """What was exported, for how many steps it was trained, and by which checkpoints."""

    text: str
    num_steps: int
    source: Path
    warnings: tuple[str, ...]


def export(config: TrainConfig, inputs: Inputs, run: Path, target: Path) -> Exported:
    """Write the drafter of a run, wherever the run stands, to `target`.

    Raises NoWholeCheckpointError, StructureMismatchError, and as `drafter_folder.write` does.
    """
    start = drafter_run.open_drafter(config, inputs)
    found, policy = _most_trained(run, inputs, start)
    return _write(config, inputs, found, start, policy, target)


def export_finished(
    config: TrainConfig, inputs: Inputs, run: Path, policy: Params, target: Path
) -> Exported:
    """The same of a run that has just ended by these weights: its drafter was saved last."""
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


def _configuration(run: Path) -> TrainConfig:
    saved = run / "config.gin"
    if not saved.is_file():
        raise ConfigError(f"expected a run folder, found no config.gin in {run}")
    config = load(TrainConfig, [saved])
    if not config.speculation.learns:
        raise ConfigError(
            f"{run} has no learned drafter to export (Speculation.sources="
            f"{config.speculation.sources}, Speculation.budget={config.speculation.budget!r}): "
            "name a run with one, or train one on what this run wrote: python -m rl.train_drafter"
        )
    return config


def _most_trained(run: Path, inputs: Inputs, start: EagleWeights) -> tuple[_Found, Params | None]:
    """The drafter, and what it shares of the policy.

    A resumed run goes on from the same one: after a kill the drafter's own checkpoints may be
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
    """From the drafter's own checkpoints."""
    folder = run / drafter_run.FOLDER
    found = checkpointer.restore(folder, _template(start), subset=True)
    return _Found(found.arrays, folder, found.warnings)


def _of_run(run: Path, inputs: Inputs, start: EagleWeights) -> tuple[_Found, Params]:
    """From the run's checkpoints, and the policy's embedding and head: no layers."""
    shared = dataclasses.replace(param_specs(inputs.model), layers=(), final_norm_D=None)
    shared = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), shared)
    template = TrainState(None, shared, (), drafter=_template(start))  # type: ignore[arg-type]
    folder = run / "checkpoints"
    found = checkpointer.restore(folder, template, subset=True)
    return _Found(found.arrays.drafter, folder, found.warnings), found.arrays.params


def _template(start: EagleWeights) -> Any:
    """A drafter's training state as far as it is exported."""
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), start.params)
    return DrafterState(params, (), jax.ShapeDtypeStruct((), "int32"))  # type: ignore[arg-type]


def _finished_policy(run: Path) -> Params | None:
    return hf.load_pretrained(run / "policy")[1] if (run / "policy").is_dir() else None


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
