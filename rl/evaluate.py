"""`python -m rl.evaluate`: mean reward and pass@k of a policy on tasks.

    python -m rl.evaluate --policy policies/tiny                the tasks of configs/tiny_cpu.gin
    python -m rl.evaluate --run runs/tiny_cpu-1                 the newest whole checkpoint
    python -m rl.evaluate --run runs/tiny_cpu-1 --policy DIR    the same questions, other weights

A run brings its own configuration: task, reward and sampling are the run's, unless
--gin.Section.field=value says otherwise. Questions are generated from another seed
than training's, and those that training's examples hold too are left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl.config.command_line import config_parser, parse_command_line
from rl.config.loader import ConfigError, load
from rl.loop import evaluation
from rl.loop.evaluation import EvaluationConfig, Questions
from rl.loop.experiment import Inputs, TrainConfig, open_inputs
from rl.runtime.exit_codes import EXIT_FAILED, EXIT_USAGE
from rl.runtime.progress import Progress, progress, say
from rl.runtime.run_files import CONFIG_FILE

DEFAULT_CONFIG = "configs/tiny_cpu.gin"


def main(argv: Sequence[str]) -> int:
    """Parse, check, ask, print; returns the exit code."""
    parser = config_parser("rl.evaluate", __doc__)
    parser.add_argument("--policy", metavar="DIR", help="evaluate this folder or GGUF file")
    parser.add_argument(
        "--run",
        metavar="RUN",
        help="a run folder: its configuration, and its newest checkpoint",
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON line too")
    parser.add_argument("--output", metavar="FILE", help="write the result to FILE, as JSON")
    args, overrides = parse_command_line(parser, argv, EvaluationConfig)
    try:
        job = _prepare(args, overrides)
    except (ConfigError, ValueError, OSError, ImportError) as error:
        say(f"error: {error}", sys.stderr)
        return EXIT_USAGE
    return _run(args, job)


@dataclasses.dataclass(frozen=True, eq=False)
class _Evaluation:
    """A checked command; `run` is None where --policy has the weights."""

    config: EvaluationConfig
    inputs: Inputs
    questions: Questions
    run: Path | None
    training_is_known: bool


def _prepare(args: argparse.Namespace, overrides: Sequence[str]) -> _Evaluation:
    """Open and check all that the command names; touches no device."""
    run = Path(args.run) if args.run else None
    training, config = _configurations(run, args.gin_file, overrides)
    if run is None and not args.policy:
        raise ConfigError("expected --policy DIR (a Hugging Face folder) or --run RUN, got neither")
    if args.output and not Path(args.output).absolute().parent.is_dir():
        raise ConfigError(f"--output: there is no folder {Path(args.output).absolute().parent}")
    config = evaluation.as_evaluation(config, args.policy or config.policy.directory)
    inputs = open_inputs(config)
    questions = evaluation.choose(inputs, config.evaluate, training)
    return _Evaluation(
        config, inputs, questions, None if args.policy else run, training is not None
    )


def _configurations(
    run: Path | None, files: Sequence[str], overrides: Sequence[str]
) -> tuple[TrainConfig | None, EvaluationConfig]:
    """(what the run trained on, None where no run is named; the evaluation's own)."""
    if run is None:
        return None, load(EvaluationConfig, files or [DEFAULT_CONFIG], overrides)
    saved = run / CONFIG_FILE
    if not saved.is_file():
        raise ConfigError(f"--run: expected a run folder, found no config.gin in {run}")
    return load(TrainConfig, [saved]), load(EvaluationConfig, [saved, *files], overrides)


def _run(args: argparse.Namespace, job: _Evaluation) -> int:
    """Load the weights, ask, print."""
    from rl.checkpoint.reader import NoWholeCheckpointError, StructureMismatchError
    from rl.loop.setup import run_mesh
    from rl.rewards.process import RewardWorkerError
    from rl.runtime import devices

    total = len(job.questions.examples) * job.config.evaluate.samples
    with progress() as show:
        try:
            mesh = run_mesh(job.config)
            params, source = _weights(job, mesh, show)
        except (ValueError, OSError, NoWholeCheckpointError, StructureMismatchError) as error:
            show.message(f"error: {error}")
            return EXIT_USAGE
        if warning := devices.warning():
            show.message(f"warning: {warning}")
        show.message(f"{len(job.questions.examples)} questions, {total} responses")
        try:
            responses = evaluation.respond(
                job.config,
                job.inputs,
                job.questions.examples,
                params,
                mesh,
                lambda finished, tokens: show.rollout(finished, total, tokens),
            )
        except RewardWorkerError as error:
            show.message(f"error: {error}")
            return EXIT_FAILED
    figures = source | evaluation.result(
        job.config, job.questions, responses, job.training_is_known
    )
    say(table(figures))
    if args.output:
        Path(args.output).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if args.json:
        say(json.dumps(figures))
    return 0


def _weights(job: _Evaluation, mesh: Any, show: Progress) -> tuple[Any, dict[str, Any]]:
    """The parameters, and where they come from."""
    import jax.numpy as jnp

    from models import hf

    if job.run is None:
        params = hf.load_pretrained(job.inputs.policy, mesh, dtype=jnp.float32)[1]
        return params, {"policy": str(job.inputs.policy), "checkpoint_step": None}
    params, step, warnings = evaluation.load_checkpoint(job.run, job.inputs.model, mesh)
    for warning in warnings:
        show.message(f"warning: {warning}")
    return params, {"policy": str(job.run), "checkpoint_step": step}


def table(result: dict[str, Any]) -> str:
    """A result for reading."""
    ks = list(result["overall"]["pass_at_k"])
    header = ["task", "prompts", "reward", *(f"pass@{k}" for k in ks), "length", "truncated"]
    rows = [header]
    for task, row in [*result["tasks"].items(), ("all", result["overall"])]:
        reward = "-" if row["mean_reward"] is None else f"{row['mean_reward']:.3f}"
        passes = [f"{row['pass_at_k'][k]:.3f}" for k in ks]
        length, cut = f"{row['mean_length_tokens']:.1f}", f"{row['truncated_share']:.3f}"
        rows.append([task, str(row["prompts"]), reward, *passes, length, cut])
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    step = result["checkpoint_step"]
    head = [f"policy     {result['policy']}" + ("" if step is None else f", step {step}")]
    head += [f"questions  {_origin(result)}", ""]
    tail = []
    if failures := result["overall"]["reward_failures"]:
        tail = [f"{failures} responses could not be scored; they count as not correct"]
    return "\n".join(head + lines + tail)


def _origin(result: dict[str, Any]) -> str:
    """Say where the questions come from, and whether training has seen them."""
    text = f"generated from seed {result['seed']} (files as they stand)"
    seen = {task: row["seen_in_training"] for task, row in result["tasks"].items()}
    if any(count is None for count in seen.values()):
        return text + "; training's are not known: name them with --run"
    held = [f"{task} ({count} prompts)" for task, count in seen.items() if count]
    if not held:
        return text + ", none of them in training's examples"
    return text + "; TRAINING SAW all that there are of " + ", ".join(held)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
