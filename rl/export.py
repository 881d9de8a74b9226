"""`python -m rl.export RUN --output DIR`: a run's policy as a Hugging Face folder.

    python -m rl.export runs/own --output own-policy                the newest whole checkpoint
    python -m rl.export runs/own --step best --output own-policy    the best that was evaluated
    python -m rl.export policies/tiny --output tiny-bf16            a policy, as it is

The folder has the weights (bfloat16, rounded once from the run's float32), the tokenizer with its
chat template, end tokens and sampling in generation_config.json, and a model card: README.md says
what was run. The run may be going on, stopped or finished, and is only read. The policy that it
began with must be where it was, or named with --policy.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from models import hf
from rl.checkpoint import best
from rl.checkpoint.folders import list_steps
from rl.checkpoint.reader import NoWholeCheckpointError, StructureMismatchError
from rl.config.loader import ConfigError, load
from rl.loop import evaluation, model_card, policy_export
from rl.loop.experiment import Inputs, TrainConfig, open_policy
from rl.loop.policy_export import Layout
from rl.runtime.exit_codes import EXIT_USAGE
from rl.runtime.progress import say
from rl.runtime.run_files import CHECKPOINTS, CONFIG_FILE


def main(argv: Sequence[str]) -> int:
    """Parse, check, export and print; return the exit code."""
    args = command_line().parse_args(argv)
    try:
        lines = _export(args)
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
    for line in lines:
        say(line)
    return 0


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m rl.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("source", metavar="RUN", nargs="?", help="a run's folder, or a policy")
    source.add_argument("--run", metavar="RUN", help="the same")
    parser.add_argument("--output", metavar="DIR", required=True, help="the folder to write")
    parser.add_argument(
        "--step",
        default="newest",
        metavar="N",
        help="a step's number, newest (the default), or best by the run's evaluations",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--max_shard_bytes",
        type=_positive,
        default=hf.MAX_SHARD_BYTES,
        metavar="N",
        help=f"of one file of weights (default: {hf.MAX_SHARD_BYTES:,})",
    )
    parser.add_argument(
        "--policy", metavar="DIR", help="where the policy that the run began with is now"
    )
    parser.add_argument(
        "--force", action="store_true", help="replace a policy that is in DIR already"
    )
    return parser


def _export(args: argparse.Namespace) -> list[str]:
    """Write the folder and return what is to be said of it."""
    source, target = Path(args.source or args.run), Path(os.path.abspath(args.output))
    layout = Layout(args.dtype, args.max_shard_bytes)
    policy_export.check_target(target, force=args.force)
    if (source / CONFIG_FILE).is_file():
        origin = _export_run(source, args.step, args.policy, target, layout)
    elif args.run:
        raise ConfigError(f"--run: expected a run folder, found no {CONFIG_FILE} in {source}")
    else:
        origin = _export_policy(source, args, target, layout)
    files = sorted(target.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    return [
        f"policy     {target}: {size:,} bytes of {args.dtype} in {len(files)} file"
        + "s" * (len(files) > 1),
        f"weights    {origin}",
        f"card       {target / model_card.CARD}: read it before you share the policy",
    ]


def _export_run(run: Path, wanted: str, moved_to: str | None, target: Path, layout: Layout) -> str:
    step = best.chosen_step(run, wanted)
    config = load(TrainConfig, [run / CONFIG_FILE])
    try:
        inputs = _opened(moved_to or config.policy.directory)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{error}; if the run's policy has moved, name it with --policy"
        ) from error
    policy_export.check_apart(target, inputs.policy, run)
    kept = list_steps(run / CHECKPOINTS)
    try:
        params, found, warnings = evaluation.load_checkpoint(run, inputs.model, step=step)
    except (OSError, ValueError) as error:
        if gone := set(kept) - set(list_steps(run / CHECKPOINTS)):
            raise NoWholeCheckpointError(
                f"the run goes on, and removed its checkpoint of step {max(gone)} while it was "
                "read: run the command again",
                {},
            ) from error
        raise
    for warning in warnings:
        say(f"warning: {warning}", sys.stderr)
    policy_export.write_checkpoint(config, inputs, params, (run, found), target, layout)
    return f"{run}, step {found:,}"


def _export_policy(policy: Path, args: argparse.Namespace, target: Path, layout: Layout) -> str:
    if args.step != "newest" or args.policy:
        raise ConfigError(
            f"--step and --policy are of runs: found no {CONFIG_FILE} in {policy}; name a run's "
            "folder, or leave them out"
        )
    inputs = _opened(str(policy))
    policy_export.check_apart(target, inputs.policy)
    policy_export.write_policy(inputs, hf.load_pretrained(inputs.policy)[1], target, layout)
    return f"{inputs.policy}, as they are"


def _opened(directory: str) -> Inputs:
    """Return the policy of a folder, for which no tasks are needed."""
    return Inputs(*open_policy(directory), (), 0)


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) < 2**63:
        raise argparse.ArgumentTypeError(f"expected a number of bytes above 0, got {text!r}")
    return int(text)


if __name__ == "__main__":
    import jax

    jax.config.update("jax_platforms", "cpu")  # a run may be using the accelerator
    sys.exit(main(sys.argv[1:]))
