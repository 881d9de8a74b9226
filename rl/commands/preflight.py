"""`python -m rl.preflight`: compile the programs of a configuration for devices that may be absent.

The report says whether the run fits, which arrays stay on a device, and which program needs most,
without the devices and without the policy weights: a folder with config.json is enough, and the
shipped configurations include such folders. Sizes of "auto" (Engine.slots, Engine.pages and
Trainer.micro_batch_tokens) are computed, and printed as lines of a configuration. Targets:
v5p:2x2x4, v5e:4x4, v6e:4x4, h100:1x1x8 (slices, hosts, devices), cpu:8. The exit status is 0 if the
run fits, 2 if not, as for `python -m rl.train --dry_run`.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from reprise.models.config import ModelConfig
from reprise.models.formats import hf
from reprise.models.hints import program
from reprise.rl.gin.command_line import config_parser, parse_command_line
from reprise.rl.gin.loader import load
from reprise.rl.preflight import targets
from reprise.rl.rewards.config import validate
from reprise.rl.runtime.devices import keep_order
from reprise.rl.runtime.exit_codes import EXIT_USAGE
from reprise.rl.runtime.progress import say
from reprise.rl.runtime.run_files import resolve_path
from reprise.rl.settings.checks import check_sections
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.user_names import check_user_names

DEFAULT_CONFIG = "configs/tiny_cpu.gin"  # as in rl.train
SHIPPED = Path("configs/real")  # shapes of published policies


def main(argv: Sequence[str]) -> int:
    """Parse the command line, compile and report; return the exit code."""
    parser = config_parser("preflight", __doc__)
    parser.add_argument(
        "--target", required=True, metavar="KIND:TOPOLOGY", help="as v5p:2x2x4, h100:1x1x8, cpu:8"
    )
    parser.add_argument(
        "--programs",
        choices=("largest", "all"),
        default="largest",
        help="compile the largest program of each kind (default), or all",
    )
    parser.add_argument(
        "--layers",
        choices=("few", "all"),
        default="few",
        help="compile deep models at two small depths and extrapolate (default), or whole",
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args, overrides = parse_command_line(parser, argv, TrainConfig)
    try:
        target = targets.parse_target(args.target)
        files = args.gin_file or [DEFAULT_CONFIG]
        config = load(TrainConfig, files, overrides)
        model = policy_shape(config.policy.directory, files)
        model = dataclasses.replace(model, lora=config.policy.lora)
        check_sections(config, model)
        validate(config.reward)
        check_user_names(config)
        targets.prepare(target)
        keep_order(config.numerics.same_bits)
        return _preflight(config, model, target, args)
    except (ValueError, OSError, ImportError) as error:
        say(f"error: {error}", sys.stderr)
        return EXIT_USAGE


def policy_shape(directory: str, gin_files: Sequence[str]) -> ModelConfig:
    """Return the shape of a policy, from its folder or from a folder of the same name.

    The latter has no weights, and is next to a configuration file or in configs/real.
    """
    policy = resolve_path(directory)
    name = Path(directory).name
    nearby = [resolve_path(file).parent / name for file in gin_files]
    places = policy, *nearby, resolve_path(SHIPPED / name)
    return hf.shape(next((folder for folder in places if folder.exists()), policy))


def _preflight(
    config: TrainConfig, model: ModelConfig, target: targets.Target, args: Namespace
) -> int:
    from reprise.rl.preflight import report, sizes
    from reprise.rl.preflight.fit import Fitting

    say(f"compiling for {target.count} devices of {target.name}: tracing the programs", sys.stderr)
    compile_for = targets.devices_of(target)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # libtpu's handler prints pages of stack traces
    fitting = Fitting(
        target,
        compile_for,
        all_programs=args.programs == "all",
        all_layers=args.layers == "all",
        on_compiled=lambda name, done, total: say(
            f"{done} of {total} compiled: {name}", sys.stderr
        ),
    )
    values = dict[str, int]()
    if config.open_sizes:
        values = sizes.find(fitting, config, model)
        config = config.with_sizes(values)
    fit = fitting.fit(config, model)
    say("\n".join([*report.lines_of(fit), *report.lines_of_sizes(values)]))
    if not fit.fits:
        say(f"error: {report.refusal(fit)}", sys.stderr)
    say(f"policy, tokenizer and task files are not read: {program('train')} --dry_run does")
    if args.json:
        say(json.dumps(report.as_json(fit) | {"sizes": values}))
    return 0 if fit.fits else EXIT_USAGE
