"""`python -m rl.evaluate`: mean reward and pass@k of a policy, with 95% intervals.

    python -m rl.evaluate --policy policies/tiny                the tasks of configs/tiny_cpu.gin
    python -m rl.evaluate --run runs/tiny_cpu-1                 the newest whole checkpoint
    python -m rl.evaluate --run runs/tiny_cpu-1 --step best     the best one, or --step 100
    python -m rl.evaluate --run runs/tiny_cpu-1 --policy DIR    the same questions, other weights

With --run, sets, reward and sampling come from the run, unless --gin.Eval.field=value changes them.
Without Eval.sets the questions come from the tasks of the run, generated with another seed than in
training; questions that training has are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from reprise.models.config import ModelConfig
from reprise.rl.checkpoint.best import chosen_step
from reprise.rl.data.tasks import open_tasks
from reprise.rl.environments.supported import check_supported
from reprise.rl.exchange.responses import Scorer
from reprise.rl.gin.command_line import config_parser, parse_command_line
from reprise.rl.gin.loader import ConfigError, load
from reprise.rl.rewards.config import validate
from reprise.rl.run import evaluation
from reprise.rl.run.evaluation import Answers, plus_minus
from reprise.rl.runtime.exit_codes import EXIT_FAILED, EXIT_USAGE
from reprise.rl.runtime.progress import Progress, aligned, progress, say
from reprise.rl.runtime.run_files import CONFIG_FILE
from reprise.rl.settings import identity
from reprise.rl.settings.checks import check_correct_by, check_layout, check_lengths, check_stops
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.eval_sets import open_sets
from reprise.rl.settings.inputs import Inputs, open_policy

OnRound = Callable[[int, int], None]

DEFAULT_CONFIG = "configs/tiny_cpu.gin"


def main(argv: Sequence[str]) -> int:
    """Parse, check, evaluate, print; return the exit code."""
    parser = config_parser("evaluate", __doc__)
    parser.add_argument("--policy", metavar="DIR", help="evaluate this folder or GGUF file")
    parser.add_argument("--run", metavar="RUN", help="a run folder: its config, a checkpoint of it")
    parser.add_argument(
        "--step", default="newest", metavar="STEP", help="with --run: newest, best, or a kept step"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON line too")
    parser.add_argument("--output", metavar="FILE", help="write the result to FILE, as JSON")
    args, overrides = parse_command_line(parser, argv, TrainConfig)
    try:
        job = _prepare(args, overrides)
    except (ValueError, OSError, ImportError) as error:
        say(f"error: {error}", sys.stderr)
        return EXIT_USAGE
    return _run(args, job)


@dataclasses.dataclass(frozen=True, eq=False)
class _Evaluation:
    """A checked command; `run` is None with --policy, `step` None means the newest step."""

    config: TrainConfig
    inputs: Inputs
    run: Path | None
    step: int | None
    training_is_known: bool


def _prepare(args: argparse.Namespace, overrides: Sequence[str]) -> _Evaluation:
    """Open and check every argument; touch no device."""
    run = Path(args.run) if args.run else None
    training, config = _configurations(run, args.gin_file, overrides)
    if run is None and not args.policy:
        raise ConfigError("expected --policy DIR (a Hugging Face folder) or --run RUN, got neither")
    if args.step != "newest" and (run is None or args.policy):
        raise ConfigError("--step: expected a --run, whose checkpoint it names, and no --policy")
    step = chosen_step(run, args.step) if run is not None else None
    if args.output and not Path(args.output).absolute().parent.is_dir():
        raise ConfigError(f"--output: there is no folder {Path(args.output).absolute().parent}")
    if not config.eval.num_prompts:
        raise ConfigError("Eval.num_prompts is 0, which evaluates nothing: set it to 1 or more")
    directory = args.policy or config.policy.directory
    lora = config.policy.lora
    policy, model, tokenizer = open_policy(directory, config.task, None if args.policy else lora)
    check_supported(config, model)
    check_lengths(config, model)
    check_layout(config, model)
    check_stops(config.eval.sampling(config.sampling), model, tokenizer)
    check_correct_by(config)
    validate(config.reward)
    inputs = Inputs(policy, model, tokenizer, (), 0)
    evals = open_sets(
        config.eval,
        config.task,
        config.rollout.max_prompt_tokens,
        lambda example: inputs.encode(example, config.task),
        None if training is None else partial(open_tasks, training.task, training.run.seed),
        keeps_seen=True,
    )
    inputs = dataclasses.replace(inputs, evals=evals)
    return _Evaluation(config, inputs, None if args.policy else run, step, training is not None)


def _configurations(
    run: Path | None, files: Sequence[str], overrides: Sequence[str]
) -> tuple[TrainConfig | None, TrainConfig]:
    """Return the configurations of the run (None without --run) and of the evaluation."""
    if run is None:
        return None, load(TrainConfig, files or [DEFAULT_CONFIG], overrides)
    saved = run / CONFIG_FILE
    if not saved.is_file():
        raise ConfigError(f"--run: expected a run folder, found no config.gin in {run}")
    return load(TrainConfig, [saved]), load(TrainConfig, [saved, *files], overrides)


def _run(args: argparse.Namespace, job: _Evaluation) -> int:
    """Load the weights, evaluate, print."""
    from reprise.rl.checkpoint.reader import NoWholeCheckpointError, StructureMismatchError
    from reprise.rl.placement.meshes import engine_mesh, open_mesh
    from reprise.rl.records.trajectory import NonFiniteLogits
    from reprise.rl.rewards.pool import RewardPool
    from reprise.rl.rewards.process import RewardWorkerError
    from reprise.rl.runtime import devices

    errors = NoWholeCheckpointError, RewardWorkerError, StructureMismatchError
    evals = job.inputs.evals
    total = evals.num_questions * job.config.eval.samples
    tasks = tuple(dict.fromkeys(evals.specs))
    with progress() as show, contextlib.ExitStack() as stack:
        try:
            # a function that cannot be called is found before the weights are loaded
            pool = stack.enter_context(RewardPool(job.config.reward, tasks=tasks))
            new_scorer = stack.enter_context(_open_scorer(job))
            mesh, rounding = open_mesh(job.config, job.inputs.model)
            mesh = engine_mesh(job.config, job.inputs.model, mesh)
            model, params, source = _weights(job, mesh, show)
            job = dataclasses.replace(job, inputs=dataclasses.replace(job.inputs, model=model))
        except (ValueError, OSError, *errors) as error:
            show.message(f"error: {error}")
            return EXIT_USAGE
        if warning := devices.warning():
            show.message(f"warning: {warning}")
        for remark in filter(None, (*evals.remarks(), rounding)):
            show.message(remark)
        show.message(f"{evals.num_questions} questions, {total} responses")
        try:

            def on_round(finished: int, tokens: int) -> None:
                show.rollout(finished, total, tokens)

            scorer = new_scorer(job.inputs.tokenizer, pool, lambda: None, job.config.eval.samples)
            answers = _respond(job, params, mesh, scorer, on_round)
        except (RewardWorkerError, NonFiniteLogits) as error:
            show.message(f"error: {error}")
            return EXIT_FAILED
    figures = source | evaluation.result(job.config, answers, job.training_is_known)
    say(table(figures))
    if args.output:
        Path(args.output).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if args.json:
        say(json.dumps(figures))
    return 0


def _open_scorer(job: _Evaluation) -> contextlib.AbstractContextManager[Callable[..., Scorer]]:
    """Open the environments of episodes, if any; return the class of scorers."""
    config = job.config
    if not config.environment.enabled:
        return contextlib.nullcontext(Scorer)
    from reprise.rl.environments.episode_scorer import open_scorer

    return open_scorer(
        config.environment,
        config.task,
        job.inputs.tokenizer,
        job.inputs.evals.sets[0].examples[0],
        rows=config.engine.max_slots,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
    )


def _respond(
    job: _Evaluation, params: Any, mesh: Any, scorer: Scorer, on_round: OnRound
) -> list[Answers]:
    """Return the answers of these weights, on a separate engine."""
    from reprise.rl.learner.trainer import cast_params
    from reprise.rl.placement.engines import engine_settings
    from reprise.rl.workers.engines import make_engine

    config = job.config
    inputs = job.inputs
    engine = make_engine(engine_settings(config, inputs.model, drafts=False), mesh)
    weights = cast_params(params, engine.dtype)
    return evaluation.respond(engine, weights, config, inputs, scorer, on_round)


def _weights(
    job: _Evaluation, mesh: Any, show: Progress
) -> tuple[ModelConfig, Any, dict[str, Any]]:
    """Return the shape and parameters of the policy, and a record of their source."""
    import jax.numpy as jnp

    from reprise.models.formats import hf

    if job.run is None:
        params = hf.load_pretrained(job.inputs.policy, mesh, dtype=jnp.float32)[1]
        return job.inputs.model, params, {"policy": str(job.inputs.policy), "checkpoint_step": None}
    loaded = evaluation.load_checkpoint(job.run, job.inputs, mesh, job.step)
    now = identity.user_contents(job.config, "Reward.functions")
    for warning in (*loaded.warnings, *identity.check_rewards(loaded.contents, now)):
        show.message(f"warning: {warning}")
    return loaded.model, loaded.params, {"policy": str(job.run), "checkpoint_step": loaded.step}


def table(result: dict[str, Any]) -> str:
    """Return a result as text, with a row for each set."""
    overall = result["overall"]
    passes = [name for name in overall if name.startswith("pass@") and name[5:].isdecimal()]
    rows = [["set", "questions", "reward", *passes, "length", "truncated"]]
    for name, row in [*result["sets"].items(), ("all", overall)]:
        figures = [plus_minus(row, figure) for figure in ("mean_reward", *passes)]
        length = f"{row['mean_length']:.1f}"
        cut = f"{row['truncated']:.3f}"
        rows.append([name, str(row["questions"]), *figures, length, cut])
    step = result["checkpoint_step"]
    head = [f"policy     {result['policy']}" + ("" if step is None else f", step {step}")]
    head += [f"questions  {_origin(result)}", ""]
    tail = ["", "± is half of the 95% interval over questions; `all` weighs every set the same"]
    if failures := overall["failures"]:
        tail += [f"{failures} responses could not be scored; they count as not correct"]
    return "\n".join(head + aligned(rows) + tail)


def _origin(result: dict[str, Any]) -> str:
    """Return a sentence on the source of the questions, and on questions seen in training."""
    text = f"generated from seed {result['seed']} (files as they stand)"
    seen = {name: row["seen_in_training"] for name, row in result["sets"].items()}
    if any(count is None for count in seen.values()):
        return text + "; training's are not known: name them with --run"
    sizes = {name: row["questions"] for name, row in result["sets"].items()}
    held = [f"{count} of {sizes[name]} of {name}" for name, count in seen.items() if count]
    if not held:
        return text + ", none of them in training's examples"
    return text + "; TRAINING SAW " + ", ".join(held)
