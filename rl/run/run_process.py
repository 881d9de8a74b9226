"""One process of a run, from joining the other processes to exporting the policy."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from jax.errors import JaxRuntimeError

from reprise.models.formats import peft_files
from reprise.models.formats.hf_files import WeightsError
from reprise.models.hints import program
from reprise.rl.checkpoint.checkpointer import SaveError
from reprise.rl.checkpoint.reader import NoWholeCheckpointError, StructureMismatchError
from reprise.rl.cluster import join
from reprise.rl.cluster.config import ClusterConfig
from reprise.rl.cluster.processes import Diverged, Processes, ProcessLost
from reprise.rl.data.prompts import UnreadableExample
from reprise.rl.exchange.responses import PeerFailed
from reprise.rl.export import adapter_base, exports
from reprise.rl.gin.loader import ConfigError, dump
from reprise.rl.learner.gradient_accumulation import NonFiniteUpdate, NonFiniteWeights
from reprise.rl.learner.optimizer import TrainState
from reprise.rl.metrics.run_summary import summary_lines
from reprise.rl.metrics.writer import DamagedRowError, read_metrics, step_rows
from reprise.rl.placement.meshes import open_mesh
from reprise.rl.preflight import memory
from reprise.rl.records.trajectory import NonFiniteLogits
from reprise.rl.rewards.process import RewardWorkerError
from reprise.rl.run.disk_plan import disk_plan
from reprise.rl.run.loop import train
from reprise.rl.run.run_checkpoint import check_can_resume
from reprise.rl.runtime import devices, disk
from reprise.rl.runtime.exit_codes import EXIT_FAILED, EXIT_USAGE
from reprise.rl.runtime.parallel_compile import TooManyMappings, keep_programs
from reprise.rl.runtime.progress import Progress, progress, say
from reprise.rl.runtime.run_files import ADAPTER, CHECKPOINTS, DRAFTER_MODEL, METRICS_FILE, POLICY
from reprise.rl.runtime.signals import EXPORTING, Limits, Stopped, Watch, leave
from reprise.rl.runtime.waits import Hang, ProgramLost
from reprise.rl.settings import identity, run_folder
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import Inputs, remarks
from reprise.rl.steps.learning_checks import NotLearning
from reprise.rl.weights.gathering import host_copy
from reprise.rl.workers.messages import WorkerError


@dataclasses.dataclass(frozen=True)
class Place:
    """The rendezvous of a trainer process on Ray, its number, and the address of Ray."""

    coordinator: str
    process_id: int
    ray_address: str

    def joining(self, cluster: ClusterConfig) -> ClusterConfig:
        """Return the settings for joining the other processes, as a process of `spmd` does."""
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
    place: Place | None = None,
) -> int:
    """Join the processes of the run, and train in `folder`; return the exit status.

    `before` is the configuration of a resumed run so far; `place` is set in a trainer process on
    Ray.
    """
    status = _join_and_train(config, inputs, folder, before, place)
    if status == 0:
        join.leave()
    elif join.has_joined():
        leave(status)  # jax may abort an interpreter that exits after process 0
    return status


def _join_and_train(
    config: TrainConfig,
    inputs: Inputs,
    folder: Path,
    before: TrainConfig | None,
    place: Place | None,
) -> int:
    shared = dataclasses.replace(config, cluster=config.cluster.shared)
    try:
        identify = partial(join.identity_of, dump(shared), _compared_files(config, inputs))
        cluster = config.cluster if place is None else place.joining(config.cluster)
        processes = join.join(cluster, identify)
    except (ValueError, OSError) as error:
        say(f"error: {error}", sys.stderr)
        return EXIT_USAGE
    one = _RunProcess(shared, inputs, folder, before, processes)
    processes.end = one.end_lost
    with processes:
        try:
            status = one.run(shared.cluster.address if place is None else place.ray_address)
            if status == 0:
                processes.barrier("end of the run")
        except (ProcessLost, Diverged) as error:
            return one.lost(error)
        except JaxRuntimeError as error:
            lost = processes.blame()
            return one.failed(error) if lost is None else one.lost(lost)
        except OSError as error:
            return one.failed_disk(error)
        except Exception as error:
            return one.failed(error)
    return status


def _compared_files(config: TrainConfig, inputs: Inputs) -> dict[str, str]:
    """Return the files, by description, with the same contents in all processes of a run."""
    files = {join.POLICY: str(inputs.policy)} | config.user_files
    if config.draft_model_folder is not None:
        files[join.DRAFT_MODEL] = str(config.draft_model_folder)
    if config.teacher_folder is not None:
        files[join.TEACHER] = str(config.teacher_folder)
    return files


@dataclasses.dataclass(frozen=True, eq=False)
class _RunProcess:
    """One of the `processes` of a run; `before` is the configuration of a resumed run so far."""

    config: TrainConfig
    inputs: Inputs
    folder: Path
    before: TrainConfig | None
    processes: Processes

    def run(self, ray_address: str | None) -> int:
        """Train, with signals handled; return the exit status.

        SIGTERM and Ctrl-C save the last whole step and exit with 75, or with the status of the
        signal if there is no step to resume from.
        """
        config = self.config
        processes = self.processes
        limits = self.config.run
        try:
            own = not processes.alone and config.cluster.rollouts == "local"
            _, rounding = open_mesh(config, self.inputs.model, own=own)
            result = devices.found()
            opened = memory.opened_devices(result)
            tight = memory.estimate(config, self.inputs.model, opened).check(opened)
            lock = self._take_folder()
        except (ValueError, OSError) as error:
            say(f"error: {error}", sys.stderr)
            return EXIT_USAGE
        not_cached = keep_programs()
        last_saved = partial(run_folder.standing, self.folder)
        with (
            lock,
            progress(total_steps=limits.steps, process=processes.index) as show,
            Watch(
                Limits(limits.hang_limit_s, limits.compile_limit_s, limits.stop_limit_s),
                standing=last_saved,
                should_stop=lambda: processes.stop_requested,
                say=show.message,
                close=show.close,
                end=self._end_at_once,
            ) as watch,
        ):
            verb = "running" if self.before is None else "resuming"
            among = "" if processes.alone else f" of {processes.count} processes"
            device = f"{result[0].device_kind} × {len(result)}"
            show.message(f"{verb} in {self.folder} on {device}{among}")
            if processes.is_first:
                run_folder.note_launch(self.folder, last_saved()[0], self._changes())
            room = disk_plan(config, self.inputs, self.folder).warning
            for text in filter(None, (devices.warning(), not_cached, tight, room)):
                show.message(f"warning: {text}")
            for text in filter(None, (*remarks(config, self.inputs), rounding)):
                show.message(text)
            # the run folder keeps the address as set, since a resumed run has another Ray
            cluster = dataclasses.replace(config.cluster, address=ray_address)
            return self._train(dataclasses.replace(config, cluster=cluster), show, watch)

    def _changes(self) -> list[run_folder.Change]:
        """Return the settings and the files that a resumed run changes."""
        if self.before is None:
            return []
        _, then = identity.saved_contents(self.folder / CHECKPOINTS)
        others = identity.changes(then, self.inputs.contents)
        return run_folder.changes(self.before, self.config) + others

    def _take_folder(self) -> contextlib.AbstractContextManager[object]:
        """Lock the run folder in process 0, and check that all processes share the folder.

        Raises, in all processes, the errors of `check_can_resume` and of the lock.
        """
        lock: contextlib.AbstractContextManager[object] = contextlib.nullcontext()

        def begin() -> bytes:
            nonlocal lock
            try:
                if self.before is not None:
                    check_can_resume(self.config, self.inputs, self.folder / CHECKPOINTS)
                lock = run_folder.begin(self.config, self.before)
            except (ValueError, OSError) as error:
                return json.dumps({"error": str(error)}).encode()
            return json.dumps({"error": None, "inode": self.folder.stat().st_ino}).encode()

        first = json.loads(self.processes.from_first("run folder", begin))
        if first["error"] is not None:
            raise ConfigError(first["error"])
        inode = self.folder.stat().st_ino if self.folder.is_dir() else None
        if self.processes.any("run folder of another file system", inode != first["inode"]):
            raise ConfigError(
                f"Run.directory: expected the same folder {self.folder} in all processes, got "
                "another one in some: it must be on a file system that all of them share"
            )
        return lock

    def _train(self, config: TrainConfig, show: Progress, watch: Watch) -> int:
        """Train and export; report the outcome and return the exit status."""
        try:
            options: dict[str, Any] = {"show": show, "watch": watch, "processes": self.processes}
            state = train(config, self.inputs, self.folder, clock=time.perf_counter, **options)
        except Stopped:
            step, text = run_folder.standing(self.folder)
            self._show_summary(show)
            show.message(f"stopped and saved; {text}" if step else f"stopped; {text}")
            return watch.exit_status
        except (NonFiniteWeights, UnreadableExample) as error:
            return self._ended(f"{error}; {run_folder.standing(self.folder)[1]}", show)
        except OSError as error:  # a full disk, a link in the folder
            return self._ended(self._disk_sentence(error), show)
        except (
            NonFiniteUpdate,
            NonFiniteLogits,
            NotLearning,
            TooManyMappings,
            RewardWorkerError,
            WorkerError,
            PeerFailed,
            Hang,
            ProgramLost,
            NoWholeCheckpointError,
            StructureMismatchError,
            DamagedRowError,
            WeightsError,
        ) as error:
            return self._ended(str(error), show)
        watch.at(EXPORTING)
        return self._export(state, show)

    def _export(self, state: TrainState, show: Progress) -> int:
        """Write the trained policy as a Hugging Face folder, and its drafter; return the status."""
        config = self.config
        folder = self.folder
        params = host_copy(state.params, keep=self.processes.is_first)
        if not self.processes.is_first:
            return 0
        try:
            inputs = self.inputs
            text = f"the policy is in {folder / POLICY}"
            if inputs.model.lora is not None:
                base, digest = adapter_base.describe_base(inputs.policy, inputs.contents)
                peft_files.write(folder / ADAPTER, inputs.model, params, base, digest)
                steps = config.run.steps
                then = inputs.contents
                identity.check_policy(steps, then, inputs.policy, is_base=True)
                model, params = peft_files.load_merged(inputs.policy, inputs.model, params)
                inputs = dataclasses.replace(inputs, model=model)
                text += f", its adapter for peft in {folder / ADAPTER}"
            source = folder, config.run.steps
            exports.write_checkpoint(config, inputs, params, source, folder / POLICY)
            if config.speculation.learns:
                target = folder / DRAFTER_MODEL
                drafter = exports.write_drafter(config, inputs, folder, target, params)
                text += f", its drafter in {target}: {drafter.text}"
        except (OSError, ValueError) as error:
            return self._ended(f"the policy could not be written: {error}", show)
        self._show_summary(show)
        show.message(f"done; {text}; {program('report')} {shlex.quote(str(folder))}")
        return 0

    def _show_summary(self, show: Progress) -> None:
        """Show seconds by part and the gain of drafts, since the start of this launch."""
        rows = read_metrics(self.folder) if (self.folder / METRICS_FILE).is_file() else []
        for line in summary_lines(step_rows(rows), [row for row in rows if "eval_s" in row]):
            show.message(line)

    def _disk_sentence(self, error: OSError) -> str:
        """Return an error as text; errors of the disk name the folder and the last saved step."""
        reason = disk.refuses(error)
        if reason is None or isinstance(error, SaveError):
            return str(error)
        what = error if error.filename else f"{self.folder}: {reason}"
        return f"{what}; {run_folder.standing(self.folder)[1]}"

    # -- other exits ----------------------------------------------------------------------

    def _ended(self, text: str, show: Progress) -> int:
        """Report an error that users can cause; the other processes stop as well."""
        show.message(f"error: {text}")
        self.processes.fail(text)
        return EXIT_FAILED

    def failed_disk(self, error: OSError) -> int:
        """Report a disk error before the run has started, or after it has finished."""
        text = self._disk_sentence(error)
        say(f"error: {text}", sys.stderr)
        self.processes.fail(text)
        return EXIT_FAILED

    def failed(self, error: Exception) -> int:
        """Report an unexpected error, since jax waits at exit; raise it in a single process."""
        if self.processes.alone:
            raise error
        traceback.print_exception(error)
        self.processes.fail(f"{type(error).__name__}: {error}")
        return EXIT_FAILED

    def lost(self, error: BaseException | str) -> int:
        """Report the loss of another process."""
        _, last_saved = run_folder.standing(self.folder)
        say(f"error: process {self.processes.index} ends: {error}; {last_saved}", sys.stderr)
        return EXIT_FAILED

    def end_lost(self, text: str) -> None:
        """Exit this process while its main thread waits for a lost process."""
        status = self.lost(text)
        self.processes.depart()
        leave(status)

    def _end_at_once(self, status: int) -> None:
        """Exit this process in any state of its main thread; the other processes exit too."""
        self.processes.fail(f"it ended at once, with status {status}")
        self.processes.depart()
        leave(status)
