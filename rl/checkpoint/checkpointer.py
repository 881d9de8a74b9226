"""Checkpoints: atomic, asynchronous, verified before use. Orbax writes the arrays.

    step_00000020/arrays/          Orbax: every array of the pytree under its path
    step_00000020/host/            data cursor, seeds, caches; one set a process
    step_00000020/files/           files of the run folder, linked: they never change
    step_00000020/manifest.json    size and SHA-256 of every file, shapes, dtypes

Invariants:
- A checkpoint counts only with a manifest that every file matches; it is filled
  under another name and comes in by one rename. So a kill at any moment leaves
  the one before usable, and damage is found before a value is used.
- `save` returns once the values are off the device (donating them then is safe);
  writing and hashing go on in one background thread, whose errors surface at the
  next `save`, `wait` or `close`.
- What is restored is bitwise what was saved, on the shardings of the template.
- Nothing is written or deleted through a link (models.folder).

The directory must be a file system with atomic renames, shared by all hosts.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from models.folder import Folder
from rl.checkpoint import folders as checkpoint_folders
from rl.checkpoint import host_state as checkpoint_host
from rl.checkpoint import manifest as checkpoint_manifest
from rl.checkpoint.folders import list_steps, step_folder, working_folder
from rl.checkpoint.manifest import Content, Problem
from rl.checkpoint.reader import (
    FILES_FOLDER,
    NoWholeCheckpointError,
    PyTree,
    Restored,
    StructureMismatchError,
    describe,
    flatten,
    latest_whole_step,
    restore,
    verify,
    verify_all,
)
from rl.runtime import host_memory
from rl.runtime.waits import POLL_S, Hang, Patience, result_of

_BARRIER_TIMEOUT_S = 1200
_log = logging.getLogger(__name__)
# Orbax tells saves apart by a counter of the process: a second one that begins while the first
# is being written makes the first wait for ever.
_writing = threading.Lock()
_writer: Checkpointer | None = None  # who had that turn last
# What the disk may refuse, and how the libraries word it.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)

__all__ = [
    "CheckpointConfig",
    "Checkpointer",
    "NoWholeCheckpointError",
    "Problem",
    "Restored",
    "SaveError",
    "StructureMismatchError",
    "latest_whole_step",
    "restore",
    "verify",
    "verify_all",
]


class SaveError(OSError):
    """A disk that does not take a checkpoint: why, and which one stands."""


@dataclasses.dataclass(frozen=True, eq=False)
class LinkedFiles:
    """Files of a folder that never change, and what they hold: kept by a link, and not read."""

    folder: Folder
    contents: Mapping[str, Content]


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written and how many are kept.

    `every_steps` of 0 means only at the end of a run. `asynchronous` false waits
    for the disk at every save.
    """

    every_steps: int = 20
    keep: int = 2
    asynchronous: bool = True

    def __post_init__(self) -> None:
        if self.every_steps < 0:
            raise ValueError(
                f"Checkpoint.every_steps: expected 0 (only at the end) or more, "
                f"got {self.every_steps}"
            )
        if self.keep < 1:
            raise ValueError(
                f"Checkpoint.keep: expected at least 1, got {self.keep}: "
                "the newest checkpoint is never deleted"
            )

    def due(self, step: int) -> bool:
        """Whether a run saves after `step`, its last step aside."""
        return self.every_steps > 0 and step > 0 and step % self.every_steps == 0


class Checkpointer:
    """The one writer of a checkpoint directory. Use it as a context manager.

    Opening tidies up after a killed run, and raises RuntimeError while another
    process writes to the directory. To read only, `restore` and `verify_all` do
    without a Checkpointer, also beside a run that is writing. `committed` is told each step
    that counts, in the background thread.
    """

    def __init__(
        self,
        directory: Path | str | Folder,
        config: CheckpointConfig | None = None,
        patience: Patience | None = None,
        *,
        committed: Callable[[int], None] = lambda step: None,
    ) -> None:
        import orbax.checkpoint as ocp

        if not isinstance(directory, Folder) and re.match(r"\w+:/", str(directory)):
            raise ValueError(
                f"expected a path of a mounted file system, got {str(directory)!r}: mount the "
                "bucket, or save locally and copy"
            )
        self._folder = (
            directory if isinstance(directory, Folder) else Folder(directory, create=True)
        )
        self.directory = self._folder.path
        self.config = config or CheckpointConfig()
        self._committed = committed
        self._patience, self._hangs = patience or Patience(), False
        self._done = 0  # parts of saves so far
        self._saves = 0
        self._pending: concurrent.futures.Future[None] | None = None
        self._lock = None
        if _primary():
            self._lock = _take_lock(self._folder)
            checkpoint_folders.recover(self._folder)
        # OCDBT, Orbax's default, keeps memory at every save: tensorstore leaks its specs.
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
        # What is left to do at the end is OCDBT's, and warns where there is none.
        handler.finalize = lambda directory: None  # type: ignore[method-assign]
        host_memory.bound_file_threads()
        self._orbax = ocp.AsyncCheckpointer(handler)
        logging.getLogger("absl").addFilter(_unless_told)  # once, however often
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def save(
        self,
        step: int,
        arrays: PyTree,
        host: dict[str, Any] | None = None,
        files: LinkedFiles | None = None,
    ) -> None:
        """Saves a pytree of jax arrays, host state (see `checkpoint_host.encode`) and files.

        Waits for the save before it, if that is still being written. `host` is
        copied; both may be changed or donated afterwards, and `files` deleted. A step that
        exists is replaced; later ones are set aside (`checkpoint_folders.publish`).
        Raises TypeError or ValueError for what cannot be saved, SaveError where the disk
        does not take it, Hang where the save before it does not go on, and whatever that one
        met in the background.
        """
        self.wait()
        self._take_turn()
        self._save(step, arrays, host, files)

    def save_if_free(self, step: int, arrays: PyTree, host: dict[str, Any] | None = None) -> bool:
        """As `save`; False, and nothing is done, where another save would have to be waited for."""
        if self._pending is not None and not self._pending.done():
            return False
        if not _writing.acquire(blocking=False):
            return False
        try:
            self.wait()
        except BaseException:
            _writing.release()
            raise
        self._save(step, arrays, host, None)
        return True

    def _save(
        self, step: int, arrays: PyTree, host: dict[str, Any] | None, files: LinkedFiles | None
    ) -> None:
        """It has the turn, which is given back once the arrays are written."""
        global _writer
        _writer = self
        try:
            self._start(step, arrays, host, files)
        except BaseException:
            _writing.release()
            raise
        if not self.config.asynchronous:
            self.wait()

    def _start(
        self, step: int, arrays: PyTree, host: dict[str, Any] | None, files: LinkedFiles | None
    ) -> None:
        import orbax.checkpoint as ocp

        if step < 0:
            raise ValueError(f"expected a step of 0 or more, got {step}")
        flat = flatten(arrays, concrete=True)
        state = checkpoint_host.encode(host or {})
        working = working_folder(self.directory, step)
        self._saves += 1
        known: dict[str, Content] = {}
        with self._told(step):
            if _primary():
                known = self._begin(working.name, files)
        _barrier(f"begin-{self._saves}")
        extra = {
            "step": step,
            "processes": jax.process_count(),
            "arrays": describe(flat),
        }
        # Returns once the values are on the host; Orbax writes them in the background.
        with self._told(step):
            self._orbax.save(working / "arrays", args=ocp.args.PyTreeSave(flat))
        self._pending = self._thread.submit(self._commit, step, state, extra, known, self._saves)

    def _take_turn(self) -> None:
        """Wait until no other directory's arrays are being written by this process."""
        seen, since_s = None, time.monotonic()
        while not _writing.acquire(timeout=POLL_S):
            other = _writer
            now, now_s = None if other is None else other._progress(), time.monotonic()
            if now != seen:
                self._patience.alive()
                seen, since_s = now, now_s
            elif now_s - since_s > self._patience.hang_limit_s:
                where = "another folder" if other is None else other.directory
                raise Hang(
                    f"{self.directory} waits for a save in {where}: no sign of life for "
                    f"{now_s - since_s:.1f} s"
                )

    def wait(self) -> None:
        """Returns once the last save counts; raises what it met in the background."""
        if self._pending is None:
            return
        patience = Patience(0.0) if self._hangs else self._patience
        try:
            result_of(self._pending, f"a save in {self.directory}", patience, self._progress)
        except Hang:
            self._hangs = True  # it was waited for long enough
            raise
        finally:
            if self._pending.done():  # not so when a signal ends the waiting, or it hangs
                self._pending = None

    def _progress(self) -> tuple[int, int]:
        """Changes as long as a save goes on: parts that are done, bytes of the part at hand."""
        return self._done, checkpoint_folders.written_bytes(self.directory)

    def restore(
        self, template: PyTree, step: int | None = None, *, subset: bool = False
    ) -> Restored:
        """As `restore` of this module, after the save in progress."""
        self.wait()
        return restore(self.directory, template, step, subset=subset)

    def latest_whole_step(self) -> int | None:
        """As `latest_whole_step` of this module, after the save in progress."""
        self.wait()
        return latest_whole_step(self.directory)

    def close(self) -> None:
        """Finishes the save in progress and lets go of the directory. Raises as `wait`."""
        try:
            self.wait()
        finally:
            self._thread.shutdown(wait=not self._hangs)
            if not self._hangs:
                self._orbax.close()
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            return self.close()
        try:
            self.close()
        except Exception as also:  # the first error is the one to see
            _log.exception("the last save of %s failed as well", self.directory)
            error.add_note(f"The last save of {self.directory} failed as well: {also}")

    def _begin(self, name: str, files: LinkedFiles | None) -> dict[str, Content]:
        """Make an empty working folder with its linked files; what they hold, by their names."""
        self._folder.check_in_place()  # Orbax writes by path
        if self._folder.exists(name):
            self._folder.remove(name)
        working = self._folder.folder(name)
        if files is None:
            return {}
        inner = working.folder(FILES_FOLDER)
        for file in files.contents:
            inner.link(files.folder, file)
        return {f"{FILES_FOLDER}/{file}": content for file, content in files.contents.items()}

    def _commit(
        self,
        step: int,
        state: checkpoint_host.HostState,
        extra: dict[str, Any],
        known: Mapping[str, Content],
        save: int,
    ) -> None:
        """Background: arrays, host state, manifest, rename, in this order."""
        working = working_folder(self.directory, step)
        try:
            with self._told(step):
                try:
                    self._orbax.wait_until_finished()
                finally:
                    _writing.release()
                self._done += 1
                checkpoint_host.write(working / "host", jax.process_index(), state)
                _barrier(f"written-{save}")
                if _primary():
                    checkpoint_manifest.write_manifest(working, extra, known)
                    self._done += 1
                    checkpoint_folders.publish(self._folder, step)
                    self._committed(step)
                    checkpoint_folders.retire(self._folder, self.config.keep)
                _barrier(f"committed-{save}")
            host_memory.give_back()
        except BaseException as error:
            error.add_note(f"while writing checkpoint {working}")
            if _primary():  # a full disk needs the room; `recover` would delete it anyway
                with contextlib.suppress(OSError):
                    self._folder.remove(working.name)
            raise

    @contextlib.contextmanager
    def _told(self, step: int) -> Iterator[None]:
        """What the disk refuses as a SaveError, in one line; other errors as they are."""
        try:
            yield
        except Exception as error:
            why = _disk_refuses(error)
            if why is None or isinstance(error, SaveError):
                raise
            whole = [
                s
                for s in list_steps(self._folder)
                if not checkpoint_manifest.verify(step_folder(self.directory, s), contents=False)
            ]
            stands = f"the newest whole one is of step {whole[0]}" if whole else "there is none"
            what = "what follows" if step in whole else "the checkpoint of"
            raise SaveError(
                f"{what} step {step} could not be written to {self.directory}: {why}; {stands}"
            ) from error


def _primary() -> bool:
    return jax.process_index() == 0


def _barrier(key: str) -> None:
    """Waits for all processes through the coordinator: safe off the main thread."""
    if jax.process_count() > 1:
        from orbax.checkpoint import multihost

        wait = multihost.get_barrier_sync_fn()
        wait(key=f"reprise-checkpoint-{key}", timeout_ms=_BARRIER_TIMEOUT_S * 1000)


def _unless_told(record: logging.LogRecord) -> bool:
    """Not what Orbax logs with pages of traceback, and a SaveError says in one line."""
    return not (record.exc_info and _disk_refuses(record.exc_info[1]))


def _disk_refuses(error: BaseException | None) -> str | None:
    """Why, where a disk stands behind an error; libraries put it in words of their own."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            return os.strerror(error.errno)
        for number in _DISK_ERRORS:
            if os.strerror(number) in str(error):
                return os.strerror(number)
        error = error.__cause__ or error.__context__
    return None


def _take_lock(folder: Folder) -> Any:
    """Keeps a second writer out. The lock ends with this process, however it ends."""
    try:
        file = folder.lock(".lock")
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        _log.warning("%s cannot be locked (%s): two runs there would collide", folder.path, error)
        return None
    if file is None:
        raise RuntimeError(
            f"expected {folder.path} to have one writer, got a second: another process (not "
            f"{os.getpid()}) is writing checkpoints there; stop it or use another directory"
        )
    return file
