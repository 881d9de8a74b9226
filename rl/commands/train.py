"""`python -m rl.train`: train a policy on verifiable tasks.

Without arguments, the command runs configs/tiny_cpu.gin. A run has one folder: config.gin
(resolved, can be run again), metrics.jsonl, samples.jsonl, TensorBoard events, checkpoints, and at
the end the policy as a Hugging Face folder, with its drafter if the run has trained a drafter.
Ctrl-C, SIGTERM and SIGHUP save the last whole step and exit with 75.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from reprise.models.hints import program
from reprise.rl.gin.command_line import config_parser, parse_command_line
from reprise.rl.gin.loader import ConfigError, dump, load
from reprise.rl.metrics.writer import check_installed
from reprise.rl.rewards.check import MAX_ROWS, check_rewards
from reprise.rl.runtime import devices, host_memory
from reprise.rl.runtime.exit_codes import EXIT_USAGE
from reprise.rl.runtime.progress import say
from reprise.rl.runtime.run_files import CHECKPOINTS, CONFIG_FILE
from reprise.rl.settings import identity, run_folder
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import Inputs, open_inputs
from reprise.rl.settings.unused import unused_settings

DEFAULT_CONFIG = "configs/tiny_cpu.gin"
_ROWS_AT_START = 64  # rows of the task with answers to check; --dry_run checks more


def main(argv: Sequence[str]) -> int:
    """Parse, resolve, check, run; return the exit code."""
    host_memory.bound_arenas()
    parser = config_parser("train", __doc__)
    parser.add_argument("--dry_run", action="store_true", help="check everything, touch no device")
    parser.add_argument("--show_config", action="store_true", help="print all settings, resolved")
    parser.add_argument("--resume", action="store_true", help="go on with the run in Run.directory")
    parser.add_argument(
        "--allow_changes",
        action="store_true",
        help="with --resume: go on although task, reward, policy or the like differ",
    )
    args, overrides = parse_command_line(parser, argv, TrainConfig)
    try:
        config, before, folder, inputs = _checked(args, overrides)
    except (ValueError, OSError, ImportError) as error:
        say(f"error: {error}", sys.stderr)
        return EXIT_USAGE
    if args.show_config:
        say(dump(config))
    if args.dry_run:
        from reprise.rl.run.dry_run import print_plan

        return print_plan(config, inputs, folder)
    if args.resume and run_folder.is_finished(folder, config):
        say(
            f"{folder} is done, all {config.run.steps} steps: to go on raise Run.steps; "
            f"{program('report')} {shlex.quote(str(folder))}",
            sys.stderr,
        )
        return 0
    if config.open_sizes:
        from reprise.rl.preflight import sizes

        try:
            config = config.with_sizes(sizes.find_here(config, inputs.model))
        except ValueError as error:
            say(f"error: {error}", sys.stderr)
            return EXIT_USAGE
    if config.cluster.num_trainers > 1:
        from reprise.rl.run.launch import launch

        return launch(config, folder, resume=args.resume)
    from reprise.rl.run import run_process

    return run_process.run(config, inputs, folder, before)


def _checked(
    args: argparse.Namespace, overrides: Sequence[str]
) -> tuple[TrainConfig, TrainConfig | None, Path, Inputs]:
    """Return configuration, configuration so far, folder and inputs of a run, all checked.

    Prints the changes and warnings. Raises ValueError, OSError or ImportError.
    """
    config, before = _resolve(args.gin_file or [], overrides, resume=args.resume)
    devices.keep_order(config.numerics.same_bits)
    _refuse_open_sizes_of_several(config)
    if not args.resume:
        config.cluster.refuse_unused()
    if config.cluster.kind != "spmd":
        devices.refuse_several_processes()
    changes = [] if before is None else run_folder.changes(before, config)
    run_folder.refuse_another_experiment(changes, allow=args.allow_changes)
    folder = run_folder.check(config, resume=args.resume)
    check_installed(config.metrics)
    inputs = open_inputs(config)
    if args.resume:
        step, then = identity.saved_contents(folder / CHECKPOINTS)
        others = identity.changes(then, inputs.contents)
        run_folder.refuse_other_contents(others, step, allow=args.allow_changes)
        changes = [*changes, *others]
    warnings = [
        *unused_settings(config),
        *_reward_findings(config, inputs, args),
        *run_folder.remarks(changes, config),
    ]
    for text in [*(f"changed       {c}" for c in changes), *(f"warning: {w}" for w in warnings)]:
        say(text, sys.stderr)
    return config, before, folder, inputs


def _reward_findings(config: TrainConfig, inputs: Inputs, args: argparse.Namespace) -> list[str]:
    """Return warnings about the rewards: functions score variants of the answers.

    An environment is opened and reset. Raises ValueError if it fails.
    """
    if config.environment.enabled:
        from reprise.rl.environments.opened import check_environment

        check_environment(config.environment, config.task, inputs.tokenizer, inputs.task[0])
        return []
    return check_rewards(
        config.reward,
        inputs.task,
        lambda text, task: inputs.read(text, config.sampling.of(task) or config.sampling),
        max_rows=MAX_ROWS if args.dry_run else _ROWS_AT_START,
    )


def _resolve(
    files: Sequence[str], overrides: Sequence[str], *, resume: bool
) -> tuple[TrainConfig, TrainConfig | None]:
    """Return the configuration of the run, and the configuration so far of a resumed run."""
    config = load(TrainConfig, files or [DEFAULT_CONFIG], overrides)
    name = Path((files or [DEFAULT_CONFIG])[-1]).stem
    if resume:
        folder = Path(config.run.directory) if config.run.directory else _newest_run(name)
        saved = folder / CONFIG_FILE
        if not saved.exists():
            raise ConfigError(
                f"--resume: expected a run in {folder}, found no config.gin there; name the run "
                "with --gin.Run.directory=…"
            )
        config = load(TrainConfig, [saved, *files], overrides)
        before = load(TrainConfig, [saved])
        config = config.with_sizes_of(before).on_day(before.task.date)
        return _in_directory(config, folder), before
    if not config.run.directory:
        if config.cluster.kind == "spmd":
            raise ConfigError(
                "Run.directory: expected the folder of the run, on a file system that all of its "
                "processes share, got none: name it with --gin.Run.directory=…"
            )
        config = _in_directory(config, _free_folder(name))
    return config.on_day(run_folder.today()), None


def _refuse_open_sizes_of_several(config: TrainConfig) -> None:
    """Raise ConfigError for "auto" sizes that several processes would determine separately."""
    if config.open_sizes and config.cluster.kind != "local":
        raise ConfigError(
            f"{', '.join(config.open_sizes)}: expected numbers if Cluster.kind is "
            f"{config.cluster.kind!r}, got 'auto': {program('preflight')} --target=… finds them"
        )


def _in_directory(config: TrainConfig, folder: Path) -> TrainConfig:
    return dataclasses.replace(config, run=dataclasses.replace(config.run, directory=str(folder)))


def _free_folder(name: str) -> Path:
    number = 1
    while (folder := Path("runs") / f"{name}-{number}").exists():
        number += 1
    return folder


def _newest_run(name: str) -> Path:
    result = [p for p in Path("runs").glob(f"{name}-*") if (p / CONFIG_FILE).exists()]
    if not result:
        raise ConfigError(
            f"--resume: no run called {name}-N in ./runs; name one with --gin.Run.directory=…"
        )
    return max(result, key=lambda p: (p / CONFIG_FILE).stat().st_mtime)
