"""`python -m rl.export RUN --output DIR`: export a policy or drafter as a Hugging Face folder.

    python -m rl.export runs/own --output own-policy                the newest whole checkpoint
    python -m rl.export runs/own --step best --output own-policy    the best that was evaluated
    python -m rl.export policies/tiny --output tiny-bf16            a policy, as it is
    python -m rl.export runs/own --drafter --output own-drafter     the learned drafter

A policy folder has the weights (bfloat16, rounded once from the float32 of the run), the tokenizer
with its chat template, end tokens and sampling in generation_config.json, and a model card. A
drafter folder is in the layout of serving engines, which differ for the variants eagle and hass
(--engine); the drafter comes from the checkpoint that was trained longest, of the run or of the
drafter. The run may be running, stopped or finished; it is only read. The policy that the run
started from must not have moved, unless --policy names its new folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from reprise.models.config import LoraShape
from reprise.models.formats import hf
from reprise.models.hints import program
from reprise.rl.checkpoint import best
from reprise.rl.checkpoint.folders import list_steps
from reprise.rl.checkpoint.reader import NoWholeCheckpointError
from reprise.rl.data.tasks import TaskConfig
from reprise.rl.export import exports, model_card
from reprise.rl.export.exports import Layout
from reprise.rl.gin.loader import ConfigError, load
from reprise.rl.run import evaluation
from reprise.rl.runtime.exit_codes import EXIT_USAGE
from reprise.rl.runtime.progress import say
from reprise.rl.runtime.run_files import CHECKPOINTS, CONFIG_FILE
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import Inputs, open_inputs, open_policy


def main(argv: Sequence[str]) -> int:
    """Parse, check, export and print; return the exit code."""
    import jax

    args = command_line().parse_args(argv)
    jax.config.update("jax_platforms", "cpu")  # a run may be using the accelerator
    try:
        lines = _export_drafter(args) if args.drafter else _export(args)
    except (ValueError, OSError, ImportError, NoWholeCheckpointError) as error:
        say(f"error: {error}", sys.stderr)
        return EXIT_USAGE
    for line in lines:
        say(line)
    return 0


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the command arguments."""
    parser = argparse.ArgumentParser(
        prog=program("export"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("source", metavar="RUN", help="a run's folder, or a policy")
    add("--output", metavar="DIR", required=True, help="the folder to write")
    add("--step", default="newest", metavar="N", help="a number, newest (the default), or best")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    shard_help = f"of one file of weights (default: {hf.MAX_SHARD_BYTES:,})"
    default = hf.MAX_SHARD_BYTES
    add("--max_shard_bytes", type=_positive, default=default, metavar="N", help=shard_help)
    add("--policy", metavar="DIR", help="the present folder of the policy the run started from")
    add("--force", action="store_true", help="replace a policy that is in DIR already")
    add("--drafter", action="store_true", help="write the run's learned drafter instead")
    engine_help = "that loads the drafter; its output names the versions"
    add("--engine", choices=("sglang", "vllm"), default="sglang", help=engine_help)
    return parser


def _export(args: argparse.Namespace) -> list[str]:
    """Write a policy folder; return the lines to print."""
    source = Path(args.source)
    target = Path(os.path.abspath(args.output))
    if args.engine != "sglang":
        raise ConfigError("--engine is of drafters: leave it out without --drafter")
    layout = Layout(args.dtype, args.max_shard_bytes)
    exports.check_target(target, force=args.force)
    if (source / CONFIG_FILE).is_file():
        origin = _export_run(source, args.step, args.policy, target, layout)
    else:
        origin = _export_policy(source, args, target, layout)
    sizes = [file.stat().st_size for file in target.glob("*.safetensors")]
    files = f"{len(sizes)} file{'s' * (len(sizes) > 1)}"
    return [
        f"policy     {target}: {sum(sizes):,} bytes of {args.dtype} in {files}",
        f"weights    {origin}",
        f"card       {target / model_card.CARD}: read it before you share the policy",
    ]


def _export_run(run: Path, wanted: str, moved_to: str | None, target: Path, layout: Layout) -> str:
    step = best.chosen_step(run, wanted)
    config = load(TrainConfig, [run / CONFIG_FILE])
    try:
        inputs = _open(moved_to or config.policy.directory, config.task, config.policy.lora)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{error}; if the run's policy has moved, name it with --policy"
        ) from error
    exports.check_apart(target, inputs.policy, run)
    keep = list_steps(run / CHECKPOINTS)
    try:
        loaded = evaluation.load_checkpoint(run, inputs, step=step)
    except (OSError, ValueError) as error:
        if gone := set(keep) - set(list_steps(run / CHECKPOINTS)):
            raise ValueError(
                f"the run is running, and removed its checkpoint of step {max(gone)} while it was "
                "read: run the command again"
            ) from error
        raise
    _warn(loaded.warnings)
    inputs = dataclasses.replace(inputs, model=loaded.model)
    exports.write_checkpoint(config, inputs, loaded.params, (run, loaded.step), target, layout)
    return f"{run}, step {loaded.step:,}"


def _export_policy(policy: Path, args: argparse.Namespace, target: Path, layout: Layout) -> str:
    if args.step != "newest" or args.policy:
        raise ConfigError(
            f"--step and --policy are of runs: found no {CONFIG_FILE} in {policy}; name a run's "
            "folder, or leave them out"
        )
    inputs = _open(str(policy))
    exports.check_apart(target, inputs.policy)
    exports.write_policy(inputs, hf.load_pretrained(inputs.policy)[1], target, layout)
    return f"{inputs.policy}, as they are"


def _export_drafter(args: argparse.Namespace) -> list[str]:
    """Write a drafter folder; return the lines to print."""
    from reprise.rl.drafter_training import export as drafter_folder
    from reprise.rl.export import exports

    run = Path(args.source)
    target = Path(os.path.abspath(args.output))
    if not (run / CONFIG_FILE).is_file():
        raise ConfigError(f"--drafter: expected a run folder, found no {CONFIG_FILE} in {run}")
    parser = command_line()
    for name in ("step", "dtype", "max_shard_bytes", "policy", "force"):
        if getattr(args, name) != parser.get_default(name):
            raise ConfigError(f"--{name} is of policies: leave it out with --drafter")
    config = load(TrainConfig, [run / CONFIG_FILE])
    if not config.speculation.learns:
        raise ConfigError(
            f"{run} has no learned drafter to export (Speculation.sources="
            f"{config.speculation.sources}, Speculation.budget={config.speculation.budget!r}): "
            f"name a run with one, or train one on this run's rollouts: {program('train_drafter')}"
        )
    drafter_folder.check_target(target)
    inputs = open_inputs(config)
    exported = exports.write_drafter(config, inputs, run, target, engine=args.engine)
    _warn(exported.warnings)
    return [
        f"drafter    {target}: {exported.text}",
        f"trained    {exported.num_steps:,} steps, by {exported.source}",
        f"start      {drafter_folder.start_command(target, run.absolute() / CONFIG_FILE)}",
    ]


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        say(f"warning: {warning}", sys.stderr)


def _open(directory: str, task: TaskConfig | None = None, lora: LoraShape | None = None) -> Inputs:
    """Return the policy of a folder, without any examples."""
    return Inputs(*open_policy(directory, task, lora), (), 0)


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) < 2**63:
        raise argparse.ArgumentTypeError(f"expected a number of bytes above 0, got {text!r}")
    return int(text)
