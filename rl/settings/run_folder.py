"""The folder of a run: checked before anything is written, then locked.

a new folder, or an empty one            a run may start
a run without a step, by its marker      may start over
a run                                    resumes with --resume, with its first settings
anything else                            is refused, and left unchanged
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import re
import shlex
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from reprise import __version__
from reprise.models.folder import Folder, held, read_plain
from reprise.models.hints import program
from reprise.rl.checkpoint import manifest as checkpoint_manifest
from reprise.rl.checkpoint.best import read_record
from reprise.rl.checkpoint.folders import list_steps, step_folder
from reprise.rl.gin.loader import ConfigError, dump
from reprise.rl.metrics.writer import read_metrics
from reprise.rl.runtime import devices
from reprise.rl.runtime.run_files import (
    CHECKPOINTS,
    CONFIG_FILE,
    DRAFTER_MODEL,
    LEGS_FILE,
    MARKER_FILE,
    METRICS_FILE,
    NEWEST_FILE,
    OWN_NAMES,
    POLICY,
    ROUNDS_FILE,
    resolve_path,
)
from reprise.rl.settings.config import TrainConfig
from reprise.rl.warm_up.measured_run import read_rounds

# Settings that define the experiment, without settings of speed and place.
_EXPERIMENT = (
    *("Task", "Reward", "Environment", "Policy", "Algorithm", "Critic", "Distill", "Sampling"),
    "Reuse",
)
_EXPERIMENT_FIELDS = (
    *("Run.seed", "Rollout.prompts_per_step", "Rollout.group_size", "Rollout.max_prompt_tokens"),
    "Sched.mode",
)
_HOW_FIELDS = (
    *("Reward.workers", "Reward.deadline_s", "Reward.memory_limit_mib"),
    *("Environment.live", "Environment.deadline_s", "Environment.memory_limit_mib"),
)
_SHOWN = 4  # names in one message
_MAX_LAUNCHES_BYTES = 2**20  # of the file; a launch takes 400 bytes


@dataclasses.dataclass(frozen=True)
class Change:
    """A field that a resumed run changes."""

    field: str
    before: str
    now: str

    @property
    def of_experiment(self) -> bool:
        section = self.field.partition(".")[0]
        named = section in _EXPERIMENT or self.field in _EXPERIMENT_FIELDS
        return named and self.field not in _HOW_FIELDS

    def __str__(self) -> str:
        return f"{self.field}: {self.before} → {self.now}"


def changes(before: TrainConfig, now: TrainConfig) -> list[Change]:
    """Return the differences between two configurations, except for the folder."""
    old = _lines(before)
    new = _lines(now)
    return [
        Change(field, old.get(field, "not set"), value)
        for field, value in new.items()
        if old.get(field) != value and field != "Run.directory"
    ]


def remarks(found: Sequence[Change], now: TrainConfig) -> list[str]:
    """Return sentences on changes with effects that their fields do not name."""
    schedule = now.optimizer.schedule
    if schedule == "constant" or all(change.field != "Run.steps" for change in found):
        return []
    return [
        f"Optimizer.schedule={schedule!r} now ends at step {now.run.steps}: the learning rate "
        "jumps to its place on the longer or shorter curve"
    ]


def refuse_another_experiment(found: Sequence[Change], *, allow: bool) -> None:
    """Raise ConfigError if a resumed run would be another experiment."""
    other = [change for change in found if change.of_experiment]
    if other and not allow:
        more = f" and {len(other) - _SHOWN} more" if len(other) > _SHOWN else ""
        raise ConfigError(
            "--resume: these settings make it another experiment than the run in the folder: "
            f"{'; '.join(map(str, other[:_SHOWN]))}{more}. Leave them as they were, start a run of "
            "its own in another --gin.Run.directory, or say --allow_changes"
        )


def refuse_other_contents(changed: Sequence[Change], step: int, *, allow: bool) -> None:
    """Raise ConfigError if a resumed run would continue with other files than up to `step`."""
    other = [change.field for change in changed if change.of_experiment]
    if other and not allow:
        more = f" and {len(other) - _SHOWN} more" if len(other) > _SHOWN else ""
        raise ConfigError(
            f"--resume: expected the files that the run had up to step {step}, got other contents "
            f"of {', '.join(other[:_SHOWN])}{more}; fix: bring the files back, start a run of its "
            "own in another --gin.Run.directory, or say --allow_changes"
        )


def check(config: TrainConfig, *, resume: bool) -> Path:
    """Return the run folder if a run may start or resume there; write nothing.

    Raises ConfigError, ValueError or OSError with the obstacle and how to fix it.
    """
    folder = _writable(config.run.directory or "")
    _check_outside(folder, config)
    if not os.path.lexists(folder):
        return folder
    held = Folder(folder)
    try:
        _check_links(held)
        if resume:
            _check_can_go_on(held)
        else:
            _check_can_start(held)
    finally:
        held.close()
    return folder


def is_finished(folder: Path, config: TrainConfig) -> bool:
    """Return whether all steps are done and the exports exist."""
    steps = _whole_steps(folder / CHECKPOINTS)
    left = [POLICY] + [DRAFTER_MODEL] * config.speculation.learns
    return bool(steps) and steps[0] >= config.run.steps and all((folder / n).is_dir() for n in left)


def begin(config: TrainConfig, before: TrainConfig | None) -> BinaryIO:
    """Lock the folder for this process, and write the configuration for a later resume.

    `before` is the configuration of a resumed run so far. Returns the lock, which the caller closes
    at the end. Raises the errors of `check`, and ConfigError if another process has the run.
    """
    folder = Folder(check(config, resume=before is not None), create=True)
    lock = _lock(folder)
    try:
        check(config, resume=before is not None)  # another process may have written before the lock
        text = dump(config)
        if before is not None and changes(before, config):
            _keep_launch(folder, before)
        if not folder.exists(CONFIG_FILE) or folder.read(CONFIG_FILE) != text.encode():
            folder.replace(CONFIG_FILE, text)
    except BaseException:
        lock.close()
        raise
    return lock


def standing(folder: Path) -> tuple[int, str]:
    """Return the last saved step, 0 without one, and a sentence on how to resume."""
    try:
        step = int(read_plain(folder / NEWEST_FILE, 100))
    except (OSError, ValueError):
        return 0, "nothing to save"
    return step, f"step {step} is the last that is saved; go on: {resume_command(folder)}"


def resume_command(folder: Path) -> str:
    return f"{program('train')} --resume --gin.Run.directory={shlex.quote(str(folder))}"


# --- checks -----------------------------------------------------------------------


def _writable(directory: str) -> Path:
    """Return the folder as a path; raise ConfigError if it cannot be created or written to."""
    if "\0" in directory:
        raise ConfigError("Run.directory: expected a path, got one with a NUL character")
    if re.match(r"\w+:/", directory):
        raise ConfigError(
            f"Run.directory: expected a folder of a mounted file system, got {directory!r}: mount "
            "the bucket, or run locally and copy"
        )
    folder = Path(directory).absolute()
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.lstat(folder)  # raises for a name that is too long, or a path without permission
    nearest = next(p for p in (folder, *folder.parents) if os.path.lexists(p))
    if not nearest.is_dir():
        kind = "a link to nothing" if nearest.is_symlink() else "a file"
        raise ConfigError(
            f"Run.directory: expected a folder, got {folder}: {nearest} is {kind}; choose another"
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(
            f"Run.directory: {nearest} cannot be written to (read-only, or another user's): choose "
            "another --gin.Run.directory"
        )
    return folder


def _check_outside(folder: Path, config: TrainConfig) -> None:
    """Refuse inputs that the run would overwrite."""
    inputs = {
        "Policy.directory": config.policy.directory,
        "Drafter.directory": config.drafter.directory,
        "Distill.teacher": config.distill.teacher,
        "DraftModel.directory": config.draft_model.directory,
        **{f"DraftModel.directories[{k}]": d for k, d in enumerate(config.draft_model.directories)},
    }
    for name, value in inputs.items():
        if value and resolve_path(value).resolve().is_relative_to(folder.resolve()):
            raise ConfigError(
                f"{name}={value!r} lies in the run's own folder {folder}, where the run writes: "
                "choose another --gin.Run.directory, or copy it to another place"
            )


def _check_links(folder: Folder) -> None:
    linked = [name for name in OWN_NAMES if folder.kind(name) == stat.S_IFLNK]
    if linked:
        raise ConfigError(
            f"{folder.path / linked[0]} is a link: a run follows none in its folder, which may "
            "come from somebody else; remove it, or put what it points to in its place"
        )


def _check_can_start(folder: Folder) -> None:
    names = folder.names()
    if not names:
        return
    if folder.exists(METRICS_FILE) or _holds_steps(folder):
        raise ConfigError(
            f"{folder.path} holds a run already: go on with it through --resume, or choose another "
            "--gin.Run.directory"
        )
    if MARKER_FILE not in names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise ConfigError(
            f"{folder.path} holds what is no run's ({', '.join(names[:_SHOWN])}{more}): choose a "
            "new or an empty folder with --gin.Run.directory"
        )


def _check_can_go_on(folder: Folder) -> None:
    """Raise an error for damaged files that a resumed run reads, and for lost checkpoints."""
    path = folder.path
    if not any(folder.exists(name) for name in (MARKER_FILE, METRICS_FILE, CHECKPOINTS)):
        raise ConfigError(
            f"--resume: {path} holds a {CONFIG_FILE}, but no run: name the run with "
            "--gin.Run.directory=…"
        )
    from reprise.rl.warm_up.step_seconds import SecondsRecord  # imports the budgets

    read_rounds(path / ROUNDS_FILE)
    SecondsRecord(folder)
    read_record(folder)
    rows = read_metrics(path) if folder.exists(METRICS_FILE) else []
    if not rows or _holds_steps(folder):
        return
    if folder.is_folder(CHECKPOINTS) and not folder.exists(NEWEST_FILE):
        return  # killed before the first checkpoint was whole
    step = folder.read(NEWEST_FILE, 100).decode().strip() if folder.exists(NEWEST_FILE) else "?"
    again = f"{program('train')} --gin_file={shlex.quote(str(path / CONFIG_FILE))}"
    raise ConfigError(
        f"--resume: {path} has metrics of {rows[-1]['step']} steps, and its newest checkpoint (of "
        f"step {step}) is gone from {path / CHECKPOINTS}: bring it back (is its disk mounted?), or "
        f"start again in another folder: {again} --gin.Run.directory=NEW"
    )


def _holds_steps(folder: Folder) -> bool:
    return folder.is_folder(CHECKPOINTS) and bool(list_steps(folder.path / CHECKPOINTS))


def _whole_steps(checkpoints: Path) -> list[int]:
    """Return the steps with files of the sizes in their manifests, newest first."""
    return [
        step
        for step in list_steps(checkpoints)
        if not checkpoint_manifest.verify(step_folder(checkpoints, step), contents=False)
    ]


# --- writes --------------------------------------------------------------------------


def _lock(folder: Folder) -> BinaryIO:
    is_new = not folder.exists(MARKER_FILE)
    lock = folder.lock(MARKER_FILE)
    if lock is None:
        raise ConfigError(
            f"another process is running in {folder.path}: wait for its end, stop it, or choose "
            "another --gin.Run.directory"
        )
    if is_new:
        lock.write(b"The folder of a run of python -m rl.train; locked while it goes on.\n")
    return lock


def _keep_launch(folder: Folder, before: TrainConfig) -> None:
    """Save the configuration that a run had so far, as config.1.gin, config.2.gin, …"""
    rows = read_metrics(folder.path) if folder.exists(METRICS_FILE) else []
    number = 1
    while folder.exists(name := f"config.{number}.gin"):
        number += 1
    steps = f"up to {rows[-1]['step']}" if rows else "none"
    folder.replace(name, f"# Leg {number} of this run; its steps: {steps}\n\n{dump(before)}")


def _lines(config: TrainConfig) -> dict[str, str]:
    pairs = (line.partition(" = ") for line in dump(config).splitlines())
    return {name: value for name, equals, value in pairs if equals and not name.startswith("#")}


# --- launches ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Launch:
    """One start of a run process: after which step, with the date, device and versions.

    `changes` are the settings that differ from the launch before, as text.
    """

    after_step: int
    began: str  # the date, in UTC
    device: str
    versions: dict[str, str]
    changes: list[str] = dataclasses.field(default_factory=list)


def today() -> str:
    """Return the date in UTC, YYYY-MM-DD."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def note_launch(folder: Path, after_step: int, changes: Sequence[Change] = ()) -> None:
    """Add the launch of this process to the run folder. Raises OSError."""
    launch = Launch(
        after_step,
        today(),
        devices.device(),
        {"reprise": __version__} | devices.versions(),
        list(map(str, changes)),
    )
    run = Folder(folder)
    with contextlib.closing(run), run.append(LEGS_FILE) as file:
        file.write(json.dumps(dataclasses.asdict(launch)).encode() + b"\n")


def read_launches(folder: Path) -> list[Launch]:
    """Return the launches of a run folder, which may be untrusted; invalid rows are skipped."""
    with held(folder) as run:
        if not run.is_file(LEGS_FILE) or run.size_bytes(LEGS_FILE) > _MAX_LAUNCHES_BYTES:
            return []
        lines = run.read(LEGS_FILE).splitlines()
    return [launch for launch in map(_launch, lines) if launch is not None]


def _launch(line: bytes) -> Launch | None:
    row: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        row = json.loads(line)
    match row:
        case {"began": str(), "device": str(), "versions": dict(v), "changes": list(c), **rest}:
            fits = rest.keys() == {"after_step"} and type(rest["after_step"]) is int
            if fits and all(isinstance(text, str) for text in (*v.values(), *c)):
                return Launch(**row)
    return None
