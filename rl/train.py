"""`python -m rl.train`: train a policy on verifiable tasks.

With no arguments it runs configs/tiny_cpu.gin. A run lives in one folder:
config.gin (resolved, reruns as it is), metrics.jsonl, samples.jsonl, TensorBoard
events, checkpoints, and at the end the policy as a Hugging Face folder, with its drafter where
it learned one. Ctrl-C and SIGTERM save the last whole step and exit with 75.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.params import num_params
from rl.cluster.processes import Processes
from rl.config.command_line import config_parser, parse_command_line
from rl.config.loader import ConfigError, dump, load
from rl.loop import memory_estimate, run_folder
from rl.loop.experiment import Inputs, TrainConfig, open_inputs, remarks
from rl.metrics.run_summary import summary_lines
from rl.metrics.writer import DamagedRowError, check_installed, read_metrics, step_rows
from rl.rewards.check import check_rewards
from rl.runtime import devices, host_memory
from rl.runtime.exit_codes import EXIT_FAILED, EXIT_USAGE
from rl.runtime.progress import Progress, progress, say
from rl.runtime.run_files import CONFIG_FILE, DRAFTER_MODEL, METRICS_FILE, POLICY
from rl.runtime.signals import EXPORTING, Limits, Stopped, Watch, leave

if TYPE_CHECKING:
    from rl.learner.optimizer import TrainState

DEFAULT_CONFIG = "configs/tiny_cpu.gin"


def main(argv: Sequence[str]) -> int:
    """Parse, resolve, check, run; returns the exit code."""
    host_memory.bound_arenas()
    parser = config_parser("rl.train", __doc__)
    parser.add_argument("--dry_run", action="store_true", help="check everything, touch no device")
    parser.add_argument("--resume", action="store_true", help="go on with the run in Run.directory")
    parser.add_argument(
        "--allow_changes",
        action="store_true",
        help="with --resume: go on although task, reward, policy or the like differ",
    )
    args, overrides = parse_command_line(parser, argv, TrainConfig)
    try:
        config, before = _resolve(args.gin_file or [], overrides, resume=args.resume)
        if config.cluster.kind != "spmd":
            devices.refuse_several_processes()
        changes = [] if before is None else run_folder.changes(before, config)
        run_folder.refuse_another_experiment(changes, allow=args.allow_changes)
        folder = run_folder.check(config, resume=args.resume)
        check_installed(config.metrics)
        inputs = open_inputs(config)
        warnings = check_rewards(config.reward, inputs.task)
    except (ConfigError, ValueError, OSError, ImportError) as error:
        say(f"error: {error}", sys.stderr)
        return EXIT_USAGE
    for text in [*(f"changed       {c}" for c in changes), *(f"warning: {w}" for w in warnings)]:
        say(text, sys.stderr)
    if args.dry_run:
        return _print_plan(config, inputs, folder)
    if args.resume and run_folder.is_finished(folder, config):
        say(
            f"{folder} is done, all {config.run.steps} steps: to go on raise Run.steps; "
            f"python -m rl.report {folder}",
            sys.stderr,
        )
        return 0
    return _run(config, inputs, folder, before)


def _resolve(
    files: Sequence[str], overrides: Sequence[str], *, resume: bool
) -> tuple[TrainConfig, TrainConfig | None]:
    """The run's configuration; of a resumed run also the one that it wrote, and starts from."""
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
        return _in_directory(config, folder), load(TrainConfig, [saved])
    if not config.run.directory:
        if config.cluster.kind == "spmd":
            raise ConfigError(
                "Run.directory: expected the folder of the run, on a file system that all of its "
                "processes share, got none: name it with --gin.Run.directory=…"
            )
        config = _in_directory(config, _free_folder(name))
    return config, None


def _in_directory(config: TrainConfig, folder: Path) -> TrainConfig:
    return dataclasses.replace(config, run=dataclasses.replace(config.run, directory=str(folder)))


def _free_folder(name: str) -> Path:
    number = 1
    while (folder := Path("runs") / f"{name}-{number}").exists():
        number += 1
    return folder


def _newest_run(name: str) -> Path:
    found = [p for p in Path("runs").glob(f"{name}-*") if (p / CONFIG_FILE).exists()]
    if not found:
        raise ConfigError(
            f"--resume: no run called {name}-N in ./runs; name one with --gin.Run.directory=…"
        )
    return max(found, key=lambda p: (p / CONFIG_FILE).stat().st_mtime)


def _print_plan(config: TrainConfig, inputs: Inputs, folder: Path) -> int:
    """Print what would run, and in how much memory; returns the exit code."""
    from rl.loop import setup

    model, there = inputs.model, memory_estimate.devices_unopened()
    say(dump(config))
    say(f"# run folder    {folder}")
    say(f"# policy        {inputs.policy}: {model.architecture}, {num_params(model):,} parameters")
    say(f"# examples      {len(inputs.task)}")
    first = inputs.task[0]
    say(f"# first         {str(first.prompt)[-100:]!r}, answer {str(first.answer)[-100:]!r}")
    for asked in inputs.evals.sets:
        say(f"# evaluation    {asked.name}: {len(asked.examples)} questions of {asked.spec}")
    say(f"# per step      {config.rollout.num_requests} responses")
    for field, value in vars(config.algorithm.resolved).items():
        say(f"# algorithm     {field:24s} {value}")
    compiled = setup.num_whole_model(config, model)
    say(f"# programs      {compiled} of rollouts run the whole policy: the rest compile fast")
    needed = memory_estimate.estimate(config, model, there)
    for part, size in [*needed.parts.items(), ("total, of one device", needed.total)]:
        say(f"# memory        {part:38s} {size / 2**20:10.1f} MiB")
    try:
        warning = memory_estimate.verdict(needed, there)
    except ValueError as error:
        say(f"error: {error}", sys.stderr)
        return EXIT_USAGE
    if there.limit_bytes is None:
        say("# memory        nobody says what a device has: compared when it runs")
    for remark in [*filter(None, [warning]), *remarks(config, inputs)]:
        say(f"# note          {remark}")
    say("# ok            all is checked but Mesh: devices are looked at when it runs")
    return 0


def _run(config: TrainConfig, inputs: Inputs, folder: Path, before: TrainConfig | None) -> int:
    """Join the processes of the run, and train in `folder`; returns the exit status."""
    from jax.errors import JaxRuntimeError

    from rl.cluster import join
    from rl.cluster.processes import Diverged, ProcessLost

    shared = dataclasses.replace(config, cluster=config.cluster.shared)
    try:
        identify = partial(join.identity_of, dump(shared), inputs.policy)
        processes = join.join(config.cluster, identify)
    except (ValueError, OSError) as error:
        say(f"error: {error}", sys.stderr)
        return EXIT_USAGE
    processes.end = partial(_end_lost, folder, processes)
    with processes:
        try:
            status = _run_together(shared, inputs, folder, before, processes)
            if status == 0:
                processes.barrier("end of the run")
        except (ProcessLost, Diverged) as error:
            _say_lost(folder, processes, error)
            return EXIT_FAILED
        except JaxRuntimeError as error:
            if (lost := processes.blame()) is None:
                return _failed(processes, error)
            _say_lost(folder, processes, lost)
            return EXIT_FAILED
        except Exception as error:
            return _failed(processes, error)
    if status == 0:
        join.leave()
    return status


def _run_together(
    config: TrainConfig,
    inputs: Inputs,
    folder: Path,
    before: TrainConfig | None,
    processes: Processes,
) -> int:
    """Train in `folder`; SIGTERM and Ctrl-C save the last whole step, then exit 75.

    Where there is none to resume from, with the status that the signal stands for.
    """
    from rl.loop import legs
    from rl.loop.setup import run_mesh
    from rl.runtime import program_cache

    try:
        run_mesh(config)
        found = devices.found()
        there = memory_estimate.devices_of(found)
        needed = memory_estimate.estimate(config, inputs.model, there)
        tight = memory_estimate.verdict(needed, there)
        lock = _begin(config, folder, before, processes)
    except (ValueError, OSError) as error:
        say(f"error: {error}", sys.stderr)
        return EXIT_USAGE
    unkept = program_cache.keep()
    run = config.run
    limits = Limits(run.hang_limit_s, run.compile_limit_s, run.stop_limit_s)
    standing = partial(run_folder.standing, folder)
    with (
        lock,
        progress(total_steps=run.steps, process=processes.index) as show,
        Watch(
            limits,
            standing=standing,
            should_stop=lambda: processes.asked,
            say=show.message,
            close=show.close,
            end=partial(_end_at_once, processes),
        ) as watch,
    ):
        verb = "running" if before is None else "resuming"
        among = "" if processes.alone else f" of {processes.count} processes"
        show.message(f"{verb} in {folder} on {found[0].device_kind} × {len(found)}{among}")
        if processes.is_first:
            legs.note(folder, standing()[0])
        for text in filter(None, (devices.warning(), unkept, tight)):
            show.message(f"warning: {text}")
        for text in remarks(config, inputs):
            show.message(text)
        return _train(config, inputs, folder, show, watch, processes)


def _begin(
    config: TrainConfig, folder: Path, before: TrainConfig | None, processes: Processes
) -> contextlib.AbstractContextManager[object]:
    """Take the run folder, by the process that writes there; the others see that it is the same.

    Raises as `run_folder.begin`, in all of them.
    """
    lock: contextlib.AbstractContextManager[object] = contextlib.nullcontext()

    def begin() -> bytes:
        nonlocal lock
        try:
            lock = run_folder.begin(config, before)
        except (ValueError, OSError) as error:
            return json.dumps({"error": str(error)}).encode()
        return json.dumps({"error": None, "inode": folder.stat().st_ino}).encode()

    there = json.loads(processes.from_first("run folder", begin))
    if there["error"] is not None:
        raise ConfigError(there["error"])
    here = folder.stat().st_ino if folder.is_dir() else None
    if processes.any("run folder of another file system", here != there["inode"]):
        raise ConfigError(
            f"Run.directory: expected the same folder {folder} in all processes, got another one "
            "in some: it must be on a file system that all of them share"
        )
    return lock


def _train(
    config: TrainConfig,
    inputs: Inputs,
    folder: Path,
    show: Progress,
    watch: Watch,
    processes: Processes,
) -> int:
    """Train and export; says how it ended and returns the exit status."""
    from rl.checkpoint.reader import NoWholeCheckpointError, StructureMismatchError
    from rl.learner.gradient_accumulation import NonFiniteUpdate
    from rl.loop.exchange import PeerFailed
    from rl.loop.train_loop import train
    from rl.rewards.process import RewardWorkerError
    from rl.runtime.parallel_compile import TooManyMappings
    from rl.runtime.waits import Hang, ProgramLost
    from rl.workers.coordinator import WorkerError

    options: dict[str, Any] = {"show": show, "watch": watch, "processes": processes}
    try:
        state = train(config, inputs, folder, **options, clock=time.perf_counter)
    except Stopped:
        step, words = run_folder.standing(folder)
        _say_summary(folder, show)
        show.message(f"stopped and saved; {words}" if step else f"stopped; {words}")
        return watch.exit_status
    except (
        NonFiniteUpdate,
        TooManyMappings,
        RewardWorkerError,
        WorkerError,
        PeerFailed,
        Hang,
        ProgramLost,
        NoWholeCheckpointError,
        StructureMismatchError,
        DamagedRowError,
        OSError,  # a full disk, a link in the folder
    ) as error:
        show.message(f"error: {error}")
        processes.fail(str(error))
        return EXIT_FAILED
    watch.at(EXPORTING)
    return _export(config, inputs, folder, state, show, processes)


def _export(
    config: TrainConfig,
    inputs: Inputs,
    folder: Path,
    state: TrainState,
    show: Progress,
    processes: Processes,
) -> int:
    """Write the trained policy as a Hugging Face folder, and its drafter; returns the status."""
    from rl.loop import drafter_export, policy_export
    from rl.loop.train_loop import policy_params

    params = policy_params(state, keep=processes.is_first)
    if not processes.is_first:
        return 0
    try:
        source = folder, config.run.steps
        policy_export.write_checkpoint(config, inputs, params, source, folder / POLICY)
        text = f"the policy is in {folder / POLICY}"
        if config.speculation.learns:
            target = folder / DRAFTER_MODEL
            drafter_export.export_finished(config, inputs, folder, params, target)
            text += f", its drafter in {target}"
    except OSError as error:
        show.message(f"error: the policy could not be written: {error}")
        processes.fail(f"the policy could not be written: {error}")
        return EXIT_FAILED
    _say_summary(folder, show)
    show.message(f"done; {text}; python -m rl.report {folder}")
    return 0


def _failed(processes: Processes, error: Exception) -> int:
    """Tell the other processes of an error that nobody expected; returns the exit status.

    Jax would wait for them at exit, so that the traceback is printed here. Alone it is raised.
    """
    if processes.alone:
        raise error
    traceback.print_exception(error)
    processes.fail(f"{type(error).__name__}: {error}")
    return EXIT_FAILED


def _say_lost(folder: Path, processes: Processes, error: BaseException | str) -> None:
    _, standing = run_folder.standing(folder)
    say(f"error: process {processes.index} ends: {error}; {standing}", sys.stderr)


def _end_lost(folder: Path, processes: Processes, text: str) -> None:
    """End this process, whose main thread waits for one that is lost."""
    _say_lost(folder, processes, text)
    processes.depart()
    leave(EXIT_FAILED)


def _end_at_once(processes: Processes, status: int) -> None:
    """End this process wherever its main thread is; the others of the run hear of it."""
    processes.fail(f"it ended at once, with status {status}")
    processes.depart()
    leave(status)


def _say_summary(folder: Path, show: Progress) -> None:
    """Say where the run's time went, and what drafts brought; of a resumed one, since its start."""
    rows = read_metrics(folder) if (folder / METRICS_FILE).is_file() else []
    for line in summary_lines(step_rows(rows), [row for row in rows if "eval_s" in row]):
        show.message(line)


if __name__ == "__main__":
    try:
        leave(main(sys.argv[1:]))
    except KeyboardInterrupt:  # before there is anything to stop
        leave(128 + signal.SIGINT)
