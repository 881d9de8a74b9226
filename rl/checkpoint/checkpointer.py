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
  one background thread writes and hashes them, and its errors surface at the
  next `save`, `wait` or `close`.
- What is restored is bitwise what was saved, on the shardings of the template.
- Nothing is written or deleted through a link (models.folder).
- `rl.checkpoint.reader` reads checkpoints without a Checkpointer, also beside a run that writes.

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
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from models.folder import Folder
from rl.checkpoint import folders, host_state, manifest
from rl.checkpoint.config import CheckpointConfig
from rl.checkpoint.manifest import Content
from rl.checkpoint.reader import FILES_FOLDER, PyTree, Restored, describe, flatten, restore
from rl.runtime import host_memory
from rl.runtime.waits import POLL_S, Hang, Patience, result_of

_BARRIER_TIMEOUT_S = 1200
_log = logging.getLogger(__name__)
# Orbax numbers the saves of a process: a second one that begins while the first is being written
# makes the first wait for ever. So only one checkpointer writes arrays at a time.
_writing = threading.Lock()
_writer: Checkpointer | None = None  # the last one that took the lock
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)


class SaveError(OSError):
    """The disk refused a checkpoint; the message says why and which one is the newest."""


@dataclasses.dataclass(frozen=True, eq=False)
class LinkedFiles:
    """Files of a folder that never change, with their contents: hard-linked, and not read."""

    folder: Folder
    contents: Mapping[str, Content]


class Checkpointer:
    """The one writer of a checkpoint directory. Use it as a context manager.

    Opening tidies up after a killed run, and raises RuntimeError while another
    process writes to the directory. `committed` is called in the background thread with each
    step whose checkpoint is complete; then older ones are deleted, but never those that `spared`
    returns.
    """

    def __init__(
        self,
        directory: Path | str | Folder,
        config: CheckpointConfig | None = None,
        patience: Patience | None = None,
        *,
        committed: Callable[[int], None] = lambda step: None,
        spared: Callable[[], Collection[int]] = tuple,
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
        self._committed, self._spared = committed, spared
        self._patience, self._hangs = patience or Patience(), False
        self._parts_done = 0  # of all saves so far
        self._saves = 0
        self._published: int | None = None  # the step of the last save that came in
        self._pending: concurrent.futures.Future[None] | None = None
        self._lock = None
        if _primary():
            self._lock = _take_lock(self._folder)
            folders.recover(self._folder)
        # OCDBT, Orbax's default, keeps memory at every save: tensorstore leaks its specs.
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
        # Only OCDBT has something to finalize; without it Orbax warns.
        handler.finalize = lambda directory: None  # type: ignore[method-assign]
        host_memory.bound_file_threads()
        self._orbax = ocp.AsyncCheckpointer(handler)
        logging.getLogger("absl").addFilter(_is_not_disk_error)  # a second time changes nothing
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def save(
        self,
        step: int,
        arrays: PyTree,
        host: dict[str, Any] | None = None,
        files: LinkedFiles | None = None,
    ) -> None:
        """Save a pytree of jax arrays, host state (see `host_state.encode`) and files.

        Waits for the previous save to end. `host` is copied; afterwards both may be changed or
        donated, and `files` deleted. A step that exists is replaced; later ones are set aside
        (`folders.publish`). Raises TypeError or ValueError for what cannot be saved, SaveError
        where the disk refuses it, Hang where the previous save makes no progress, and whatever
        error that one met in the background.
        """
        self.wait()
        self._take_turn()
        self._save(step, arrays, host, files)

    def save_if_free(self, step: int, arrays: PyTree, host: dict[str, Any] | None = None) -> bool:
        """Save unless another save would have to be waited for; return whether it was saved."""
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
        """Begin a save while holding `_writing`, which `_commit` releases."""
        import orbax.checkpoint as ocp

        global _writer
        _writer = self
        try:
            if step < 0:
                raise ValueError(f"expected a step of 0 or more, got {step}")
            flat = flatten(arrays, concrete=True)
            state = host_state.encode(host or {})
            working = folders.working_folder(self.directory, step)
            self._saves += 1
            known: dict[str, Content] = {}
            with self._disk_errors(step):
                if _primary():
                    known = self._begin(working.name, files)
            _barrier(f"begin-{self._saves}")
            extra = {"step": step, "processes": jax.process_count(), "arrays": describe(flat)}
            with self._disk_errors(step):  # returns once the values are on the host
                self._orbax.save(working / "arrays", args=ocp.args.PyTreeSave(flat))
            commit = (step, state, extra, known, self._saves)
            self._pending = self._thread.submit(self._commit, *commit)
        except BaseException:
            _writing.release()
            raise
        if not self.config.asynchronous:
            self.wait()

    def _take_turn(self) -> None:
        """Wait until this process writes the arrays of no other directory."""
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
        """Wait until the last save is complete; raises the error it met in the background."""
        if self._pending is None:
            return
        patience = Patience(0.0) if self._hangs else self._patience
        try:
            result_of(self._pending, f"a save in {self.directory}", patience, self._progress)
        except Hang:
            self._hangs = True  # do not wait for it again
            raise
        finally:
            if self._pending.done():  # it is not where a signal ends the waiting, or it hangs
                self._pending = None

    def _progress(self) -> tuple[int, int]:
        """Return the parts done and the bytes of the present one: they change while it is alive."""
        return self._parts_done, folders.written_bytes(self.directory)

    def restore(self, template: PyTree) -> Restored:
        """Wait for the save in progress, then `reader.restore` the newest whole checkpoint."""
        self.wait()
        return restore(self.directory, template)

    def close(self) -> None:
        """Finish the save in progress, release the directory. Raises as `wait` does, or SaveError.

        What has ceased to be spared since the last save is deleted.
        """
        try:
            self.wait()
            if self._published is not None and self._folder.is_in_place():
                with self._disk_errors(self._published):
                    folders.retire(self._folder, self.config.keep, self._spared())
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
        """Make a working folder with its linked files; return their contents by name."""
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
        state: host_state.HostState,
        extra: dict[str, Any],
        known: Mapping[str, Content],
        save: int,
    ) -> None:
        """Write arrays, host state and manifest, then rename; in the background thread."""
        working = folders.working_folder(self.directory, step)
        try:
            with self._disk_errors(step):
                try:
                    self._orbax.wait_until_finished()
                finally:
                    _writing.release()
                self._parts_done += 1
                host_state.write(working / "host", jax.process_index(), state)
                _barrier(f"written-{save}")
                if _primary():
                    manifest.write_manifest(working, extra, known)
                    self._parts_done += 1
                    folders.publish(self._folder, step)
                    self._published = step
                    self._committed(step)
                    folders.retire(self._folder, self.config.keep, self._spared())
                _barrier(f"committed-{save}")
            host_memory.give_back()
        except BaseException as error:
            error.add_note(f"while writing checkpoint {working}")
            if _primary():  # a full disk needs the room; `recover` would delete it anyway
                with contextlib.suppress(OSError):
                    self._folder.remove(working.name)
            raise

    @contextlib.contextmanager
    def _disk_errors(self, step: int) -> Iterator[None]:
        """Raise a SaveError of one line where the disk refuses; other errors pass as they are."""
        try:
            yield
        except Exception as error:
            why = _disk_refuses(error)
            if why is None or isinstance(error, SaveError):
                raise
            whole = [
                s
                for s in folders.list_steps(self._folder)
                if not manifest.verify(folders.step_folder(self.directory, s), contents=False)
            ]
            stands = f"the newest whole one is of step {whole[0]}" if whole else "there is none"
            what = "what follows" if step in whole else "the checkpoint of"
            raise SaveError(
                f"{what} step {step} could not be written to {self.directory}: {why}; {stands}"
            ) from error


def _primary() -> bool:
    return jax.process_index() == 0


def _barrier(key: str) -> None:
    """Wait for all processes through the coordinator, which is safe off the main thread."""
    if jax.process_count() > 1:
        from orbax.checkpoint import multihost

        wait = multihost.get_barrier_sync_fn()
        wait(key=f"reprise-checkpoint-{key}", timeout_ms=_BARRIER_TIMEOUT_S * 1000)


def _is_not_disk_error(record: logging.LogRecord) -> bool:
    """Drop the pages of traceback that Orbax logs where a SaveError takes one line."""
    return not (record.exc_info and _disk_refuses(record.exc_info[1]))


def _disk_refuses(error: BaseException | None) -> str | None:
    """Return why, where the disk is behind an error; libraries wrap it in words of their own."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            return os.strerror(error.errno)
        for number in _DISK_ERRORS:
            if os.strerror(number) in str(error):
                return os.strerror(number)
        error = error.__cause__ or error.__context__
    return None


def _take_lock(folder: Folder) -> Any:
    """Lock a second writer out. The lock ends with this process, however it ends."""
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
