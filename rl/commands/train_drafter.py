"""`python -m rl.train_drafter`: train a learned drafter on responses that a policy has written.

    python -m rl.train_drafter runs/tiny_cpu-1 --policy runs/tiny_cpu-1/policy --out drafter
    python -m rl.train_drafter a.jsonl b.jsonl --policy DIR --out drafter --steps 5000

A trace is a run folder (its samples.jsonl; a run with Metrics.samples_per_step = -1 writes all
responses) or a file of lines {"prompt_ids": [...], "response_ids": [...]} or {"prompt": ...,
"completion": ...}. Texts are tokenized again, which may produce other tokens than were drawn. The
hidden states come from --policy: give the weights that the drafter will draft for.

A share of the prompts is held out; the drafter is evaluated on this share before and after
training. OUT is a folder that serving engines read, and that runs and further training (with a new
optimizer) start from (Drafter.directory). Ctrl-C and SIGTERM save the drafter, then exit with 75.
Training uses one device; from the section Drafter only the sizes of a step matter.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from reprise.models.config import ModelConfig, num_params
from reprise.models.decoder.transformer import Params
from reprise.models.formats import hf
from reprise.rl.assembly.drafter_run import first_drafter
from reprise.rl.drafter_training import export as drafter_folder
from reprise.rl.drafter_training import offline
from reprise.rl.drafter_training import traces as drafter_traces
from reprise.rl.drafter_training.config import shape_of
from reprise.rl.drafter_training.offline import OfflineConfig, OfflineTraining
from reprise.rl.drafter_training.traces import DrafterTraces, num_tokens
from reprise.rl.drafter_training.trainer import SUMS
from reprise.rl.gin.command_line import config_parser, parse_command_line
from reprise.rl.gin.loader import ConfigError, dump, load
from reprise.rl.learner.config import TrainerConfig
from reprise.rl.records.packing import Response
from reprise.rl.runtime import devices
from reprise.rl.runtime.exit_codes import EXIT_STOPPED, EXIT_USAGE
from reprise.rl.runtime.progress import say
from reprise.rl.runtime.signals import COMPILE_LIMIT_S, SAVING, Limits, Watch
from reprise.rl.settings.inputs import open_policy
from reprise.spec.config import MIN_TEMPERATURE
from reprise.spec.eagle import model as eagle
from reprise.spec.eagle.config import EagleConfig
from reprise.spec.eagle.files import Engine
from reprise.spec.eagle_training.training_data import pack

SAY_EVERY_STEPS = 50
MIN_VALUE_BYTES = 2  # smallest size of a value in hidden states


def main(argv: Sequence[str]) -> int:
    """Parse, check, train, evaluate and write; return the exit code."""
    parser = config_parser("train_drafter", __doc__)
    parser.add_argument("trace", nargs="*", metavar="TRACE", help="a run folder or .jsonl file")
    parser.add_argument("--policy", metavar="DIR", help="the policy whose states it learns from")
    parser.add_argument("--out", metavar="DIR", help="a new folder, or a drafter's to replace")
    parser.add_argument("--steps", type=int, default=1000, metavar="N", help="default 1000")
    parser.add_argument(
        "--eval_share", type=float, default=0.1, metavar="X", help="held out, of tokens; 0: none"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights, order and what is held out"
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, metavar="X", help="that rollouts will sample at"
    )
    engine_help = "that loads the drafter; the output names the versions"
    parser.add_argument("--engine", choices=("sglang", "vllm"), default="sglang", help=engine_help)
    parser.add_argument("--dry_run", action="store_true", help="check everything, touch no device")
    args, overrides = parse_command_line(parser, argv, OfflineConfig)
    try:
        job = _prepare(args, overrides)
    except (ValueError, OSError, ImportError) as error:
        say(f"error: {error}", sys.stderr)
        return EXIT_USAGE
    if args.dry_run:
        say(dump(job.config))
    _print_plan(job)
    if args.dry_run:
        return 0
    with Watch(Limits(hang_s=COMPILE_LIMIT_S), saving="what was learnt") as watch:
        return _train(job, watch)


@dataclasses.dataclass(frozen=True, eq=False)
class _Training:
    """A command with checked arguments and inputs."""

    config: OfflineConfig
    policy: Path
    model: ModelConfig
    shape: EagleConfig
    trace: DrafterTraces
    learned: list[Response]
    held_out: list[Response]
    out: Path
    steps: int
    seed: int
    temperature: float
    engine: Engine


def _prepare(args: argparse.Namespace, overrides: Sequence[str]) -> _Training:
    """Open and check everything that the command names, without touching a device."""
    for name in ("trace", "policy", "out"):
        if not getattr(args, name):
            flag = "a TRACE" if name == "trace" else f"--{name} DIR"
            raise ConfigError(f"expected {flag}, got none; see --help")
    if args.steps < 1:
        raise ConfigError(f"--steps: expected 1 or more, got {args.steps}")
    if not 0 <= args.eval_share < 1:
        raise ConfigError(
            f"--eval_share: expected a share from 0 to below 1, got {args.eval_share}"
        )
    if not 0 <= args.seed < 2**31:
        raise ConfigError(f"--seed: expected 0 … 2³¹−1, got {args.seed}")
    if args.temperature and not MIN_TEMPERATURE <= args.temperature < math.inf:
        raise ConfigError(
            f"--temperature: expected 0 or at least {MIN_TEMPERATURE}, got {args.temperature}"
        )
    config = load(OfflineConfig, args.gin_file, overrides)
    out = Path(args.out).absolute()
    drafter_folder.check_target(out)
    pack([], config.drafter.batch_rows, config.drafter.row_tokens)  # raises for short rows
    policy, model, tokenizer = open_policy(args.policy)
    shape = shape_of(config.drafter, config.drafter_training, model)
    trace = drafter_traces.read([Path(p) for p in args.trace], model, tokenizer)
    learned, held_out = drafter_traces.hold_out(trace.responses, args.eval_share, args.seed)
    sizes = _sizes_bytes(learned, shape, MIN_VALUE_BYTES)
    offline.check_room(sizes, config.data_buffer.max_bytes)
    return _Training(
        config=config,
        policy=policy,
        model=model,
        shape=shape,
        trace=trace,
        learned=learned,
        held_out=held_out,
        out=out,
        steps=args.steps,
        seed=args.seed,
        temperature=args.temperature,
        engine=args.engine,
    )


def _print_plan(job: _Training) -> None:
    trace = job.trace
    config = job.config
    model = job.model
    size = sum(math.prod(spec.shape) for spec in jax.tree.leaves(eagle.param_specs(job.shape)))
    tokens = sum(map(num_tokens, job.learned))
    max_mib = sum(_sizes_bytes(job.learned, job.shape, 4)) / 2**20
    epochs = job.steps * config.step_tokens / tokens
    start = config.drafter.directory or "random weights"
    left_out = f"left out: {trace.too_long} too long, {trace.too_short} too short"
    lines = {
        "policy": f"{job.policy}: {model.architecture}, {num_params(model):,} parameters",
        "drafter": f"{job.shape.design}, {size:,} parameters, from {start}",
        "trace": f"{_counts(trace.responses)}; {left_out}; {trace.num_texts} of texts",
        "held out": _counts(job.held_out),
        "steps": f"{job.steps:,} of {config.step_tokens:,} tokens at most, {epochs:.1f} epochs",
        "states": f"{max_mib:,.1f} MiB in float32, of which the host keeps "
        f"{config.data_buffer.max_bytes / 2**20:,.1f} (DataBuffer.max_bytes) at a time",
    }
    for name, text in lines.items():
        say(f"# {name:9s} {text}")


def _counts(responses: Sequence[Response]) -> str:
    return f"{len(responses):,} sequences, {sum(map(num_tokens, responses)):,} tokens"


def _sizes_bytes(responses: Sequence[Response], shape: EagleConfig, value_bytes: int) -> list[int]:
    return [offline.num_bytes(r, shape, value_bytes) for r in responses]


def _train(job: _Training, watch: Watch) -> int:
    try:
        devices.found()
        training, policy = _open(job)
    except (ValueError, OSError) as error:
        say(f"error: {error}", sys.stderr)
        return EXIT_USAGE
    if warning := devices.warning():
        say(f"warning: {warning}", sys.stderr)
    if job.held_out:
        say(f"before  {_said(training.evaluate(job.held_out))}")
    watch.at("training")
    done = training.train(job.learned, job.steps, watch.asked, _Speaker(job.steps))
    if not done:
        say("stopped before the first step: nothing is saved", sys.stderr)
        return EXIT_STOPPED
    watch.at(SAVING)
    variant = job.config.drafter_training.variant
    text = drafter_folder.write(
        job.out,
        training.drafter,
        job.model,
        policy,
        job.policy,
        variant,
        job.engine,
    )
    stopped = done < job.steps
    if job.held_out and not stopped:
        say(f"after   {_said(training.evaluate(job.held_out))}")
    say(f"drafter {job.out}: {text}, {done:,} of {job.steps:,} steps")
    say(f"start   {drafter_folder.start_command(job.out)} --gin.DrafterTraining.variant={variant}")
    say("        with learned among the Speculation.sources of the run")
    return EXIT_STOPPED if stopped else 0


def _open(job: _Training) -> tuple[OfflineTraining, Params]:
    """Load the policy and the drafter to start from."""
    dtype = TrainerConfig().dtype  # the dtype that runs compute in
    max_bytes = job.config.data_buffer.max_bytes
    sizes = _sizes_bytes(job.learned, job.shape, jnp.dtype(dtype).itemsize)
    offline.check_room(sizes, max_bytes)
    _, params = hf.load_pretrained(job.policy, dtype=dtype)
    texts = (response.tokens for response in job.learned)
    options = job.config.drafter
    training = job.config.drafter_training
    start = first_drafter(options, training, job.model, job.seed, texts)
    arguments = {"seed": job.seed, "temperature": job.temperature, "dtype": dtype}
    return OfflineTraining(job.config, job.model, params, start, **arguments), params


class _Speaker:
    """Prints means over the last steps every `SAY_EVERY_STEPS`."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._rows: list[dict[str, float]] = []

    def __call__(self, step: int, row: dict[str, float]) -> None:
        self._rows.append(row)
        if step % SAY_EVERY_STEPS and step < self._num_steps:
            return
        rows = self._rows
        self._rows = []
        means = {name: sum(r[name] for r in rows) / len(rows) for name in rows[0]}
        skipped = int(sum(r["skipped"] for r in rows))
        more = f"  {skipped} steps skipped: gradients not finite" if skipped else ""
        width = len(str(self._num_steps))
        say(f"step {step:>{width}}/{self._num_steps}  {_said(means)}{more}")


def _said(metrics: Mapping[str, float]) -> str:
    columns = {"loss": SUMS[0], "top-1": SUMS[1], "top-3": SUMS[2], "agreement": SUMS[3]}
    return "  ".join(f"{title} {metrics[name]:.3f}" for title, name in columns.items())
