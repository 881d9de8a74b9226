"""One process of a run, from joining the others to the policy that it exports."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jax.errors import JaxRuntimeError

from rl import memory, run_export, run_folder
from rl.checkpoint.reader import NoWholeCheckpointError, StructureMismatchError
from rl.cluster import join
from rl.cluster.config import ClusterConfig
from rl.cluster.processes import Diverged, Processes, ProcessLost
from rl.config import TrainConfig
from rl.gin.loader import ConfigError, dump
from rl.inputs import Inputs, remarks
from rl.learner.gathering import host_copy
from rl.learner.gradient_accumulation import NonFiniteUpdate
from rl.learner.optimizer import TrainState
from rl.metrics.run_summary import summary_lines
from rl.metrics.writer import DamagedRowError, read_metrics, step_rows
from rl.responses import PeerFailed
from rl.rewards.process import RewardWorkerError
from rl.run_checkpoint import check_can_resume
from rl.runtime import devices, program_cache
from rl.runtime.exit_codes import EXIT_FAILED, EXIT_USAGE
from rl.runtime.parallel_compile import TooManyMappings
from rl.runtime.progress import Progress, progress, say
from rl.runtime.run_files import CHECKPOINTS, DRAFTER_MODEL, METRICS_FILE, POLICY
from rl.runtime.signals import EXPORTING, Limits, Stopped, Watch, leave
from rl.runtime.waits import Hang, ProgramLost
from rl.setup import engine_mesh, run_mesh
from rl.workers.results import WorkerError

Train = Callable[..., TrainState]  # rl.train.train


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a trainer process on Ray meets the others, which number it has, and where Ray is."""

    coordinator: str
    process_id: int
    ray_address: str

    def joining(self, cluster: ClusterConfig) -> ClusterConfig:
        """The settings by which this process joins the others, as one of `spmd` does."""
        return dataclasses.replace(
            cluster,
            kind="spmd",
            address=None,
            coordinator=self.coordinator,
            process_id=self.process_id,
        )


def run(
    config: TrainConfig,
    inputs: Inputs,
    folder: Path,
    before: TrainConfig | None,
    train: Train,
    place: Place | None = None,
) -> int:
    """Join the processes of the run, and train in `folder`; return the exit status.

    `place` is a trainer process's on Ray; the configuration in the run folder does not have it.
    """

    shared = dataclasses.replace(config, cluster=config.cluster.shared)
    try:
        folders = inputs.policy, config.draft_model_folder
        identify = partial(join.identity_of, dump(shared), *folders)
        cluster = config.cluster if place is None else place.joining(config.cluster)
        processes = join.join(cluster, identify)
    except (ValueError, OSError) as error:
        say(f"error: {error}", sys.stderr)
        return EXIT_USAGE
    processes.end = partial(_end_lost, folder, processes)
    with processes:
        try:
            address = shared.cluster.address if place is None else place.ray_address
            status = _run_together(shared, inputs, folder, before, train, processes, address)
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
    train: Train,
    processes: Processes,
    ray_address: str | None,
) -> int:
    """Train in `folder`; SIGTERM and Ctrl-C save the last whole step, then exit 75.

    Where there is none to resume from, with the status that the signal stands for.
    """

    try:
        own = not processes.alone and config.cluster.rollouts == "local"
        engine_mesh(config, inputs.model, run_mesh(config), own=own)
        found = devices.found()
        opened = memory.opened_devices(found)
        tight = memory.estimate(config, inputs.model, opened).check(opened)
        lock = _begin(config, inputs, folder, before, processes)
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
            run_folder.note_launch(folder, standing()[0])
        for text in filter(None, (devices.warning(), unkept, tight)):
            show.message(f"warning: {text}")
        for text in remarks(config, inputs):
            show.message(text)
        # written above as it was set: the next leg of the run has another Ray
        cluster = dataclasses.replace(config.cluster, address=ray_address)
        config = dataclasses.replace(config, cluster=cluster)
        return _train(train, config, inputs, folder, show, watch, processes)


def _begin(
    config: TrainConfig,
    inputs: Inputs,
    folder: Path,
    before: TrainConfig | None,
    processes: Processes,
) -> contextlib.AbstractContextManager[object]:
    """Take the run folder, by the process that writes there; the others see that it is the same.

    Raises as `check_can_resume` and `run_folder.begin`, in all of them.
    """

    lock: contextlib.AbstractContextManager[object] = contextlib.nullcontext()

    def begin() -> bytes:
        nonlocal lock
        try:
            if before is not None:
                check_can_resume(config, inputs, folder / CHECKPOINTS)
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
    train: Train,
    config: TrainConfig,
    inputs: Inputs,
    folder: Path,
    show: Progress,
    watch: Watch,
    processes: Processes,
) -> int:
    """Train and export; says how it ended and returns the exit status."""

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

    params = host_copy(state.params, keep=processes.is_first)
    if not processes.is_first:
        return 0
    try:
        source = folder, config.run.steps
        run_export.write_checkpoint(config, inputs, params, source, folder / POLICY)
        text = f"the policy is in {folder / POLICY}"
        if config.speculation.learns:
            target = folder / DRAFTER_MODEL
            run_export.write_drafter(config, inputs, folder, target, params)
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
