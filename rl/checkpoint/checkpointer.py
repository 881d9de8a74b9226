"""Checkpoints: atomic, asynchronous, verified before use. Orbax writes the arrays.

    step_00000020/arrays/          Orbax: every array of the pytree under its path
    step_00000020/host/            data cursor, seeds, caches; the same on all processes
    step_00000020/files/           hard links to files of the run folder that never change
    step_00000020/manifest.json    size and SHA-256 of every file, shapes, dtypes

Invariants:
- A checkpoint counts only if it has a manifest that every file matches. It is written under
  another name and renamed once, so a kill at any moment leaves the previous checkpoint usable.
- `save` returns once the values are off the device; one background thread writes and hashes
  them, and its errors surface at the next `save`, `wait` or `close`.
- Restored values are bitwise equal to the saved values, in the shardings of the template.
- With several processes, each writes its shards, and process 0 everything else; each flushes and
  hashes an equal part of the files. After each part of a save, the processes agree, so that the
  save succeeds on all or fails on all.
- Nothing is written or deleted through a link (models.folder).

The directory must be on a file system with atomic renames, shared by all hosts.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax

from reprise.models.folder import Folder, held, replace_file
from reprise.rl.checkpoint import folders, manifest
from reprise.rl.checkpoint.config import CheckpointConfig
from reprise.rl.checkpoint.contents import ArrayWriter, encode_host, write_host
from reprise.rl.checkpoint.manifest import Content
from reprise.rl.checkpoint.reader import (
    ARRAYS,
    FILES_FOLDER,
    PyTree,
    Restored,
    describe,
    flatten,
    restore,
)
from reprise.rl.cluster.processes import ALONE, Processes
from reprise.rl.runtime import disk, host_memory
from reprise.rl.runtime.waits import POLL_S, Deadline, Hang, result_of

_log = logging.getLogger(__name__)
# only one checkpointer of a process writes arrays at a time
_writing = threading.Lock()
_writer: Checkpointer | None = None  # the last checkpointer that took the lock
T = TypeVar("T")
_HASHES = ".hashes-"  # plus the number of a process; a part of the manifest


class SaveError(OSError):
    """The disk refused a checkpoint; the message names the reason and the newest checkpoint."""


@dataclasses.dataclass(frozen=True, eq=False)
class LinkedFiles:
    """Files of a folder that never change, with known contents; hard-linked, and not read."""

    folder: Folder
    contents: Mapping[str, Content]


class Checkpointer:
    """The only writer of a checkpoint directory; a context manager.

    All `processes` call the same methods in the same order, with the same steps and host state.
    Opening cleans up after a killed run, and raises RuntimeError while another process writes to
    the directory. The background thread calls `committed` with each complete step, then deletes
    older steps. Steps that `spared` returns lose only arrays with a path prefix in `light`, and
    linked files. With `keeps_all`, no step is replaced, set aside or deleted.
    """

    def __init__(
        self,
        directory: Path | str | Folder,
        config: CheckpointConfig | None = None,
        deadline: Deadline | None = None,
        *,
        processes: Processes = ALONE,
        committed: Callable[[int], None] = lambda step: None,
        spared: Callable[[], Collection[int]] = tuple,
        light: Sequence[str] = (),
        keeps_all: bool = False,
    ) -> None:
        if isinstance(directory, Folder):
            self._folder = directory
        elif re.match(r"\w+:/", str(directory)):
            raise ValueError(
                f"expected a path of a mounted file system, got {str(directory)!r}: mount the "
                "bucket, or save locally and copy"
            )
        else:
            self._folder = Folder(directory, create=True)
        self.directory = self._folder.path
        self.config = config or CheckpointConfig()
        self._committed = committed
        self._spared = spared
        self._keeps_all = keeps_all
        self._light = [f"{ARRAYS}/{path}" for path in light] + [f"{FILES_FOLDER}/"] * bool(light)
        self._deadline = deadline or Deadline()
        self._hangs = False
        self._parts_done = 0  # of all saves so far
        self._waited = 0  # number of waits for another process
        self._published: int | None = None  # the step of the last published save
        self._pending: concurrent.futures.Future[None] | None = None
        self._lock: Any = None
        self._processes = processes
        self._together("opening", self._open)
        host_memory.bound_file_threads()
        self._orbax = ArrayWriter(by_all=not processes.alone)
        logging.getLogger("absl").addFilter(disk.is_other_record)  # adding it twice changes nothing
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def save(
        self,
        step: int,
        arrays: PyTree,
        host: dict[str, Any] | None = None,
        files: LinkedFiles | None = None,
    ) -> None:
        """Save a pytree of jax arrays, host state (see `encode_host`) and files.

        Waits for the previous save. Afterwards, `arrays` may be donated, `host` changed and `files`
        deleted. Replaces an existing step and sets later steps aside; with `keeps_all`, raises
        FileExistsError for an existing step. Raises TypeError or ValueError for values that cannot
        be saved, SaveError, Hang, and the error of the previous save.
        """
        self.wait()
        self._take_turn()
        self._save(step, arrays, host, files)

    def save_if_free(self, step: int, arrays: PyTree, host: dict[str, Any] | None = None) -> bool:
        """Save if no wait for another save or process is needed; return whether a save started."""
        is_saving = self._pending is not None and not self._pending.done()
        if not self._processes.alone or is_saving or not _writing.acquire(blocking=False):
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
        """Start a save while holding `_writing`, which `_commit` releases."""
        global _writer
        _writer = self
        try:
            if step < 0:
                raise ValueError(f"expected a step of 0 or more, got {step}")
            working = folders.working_folder(self.directory, step)

            def begin() -> tuple[dict[str, jax.Array], Any, Mapping[str, Content]]:
                flat = flatten(arrays, concrete=True)
                if not self._processes.is_first:
                    return flat, None, {}
                if self._keeps_all and folders.has_step(self._folder, step):
                    raise FileExistsError(
                        f"{self.directory} has step {step} already, which is not replaced; "
                        "fix: save to another folder, or delete that one"
                    )
                state = encode_host(host or {})
                with self._disk_errors(step):
                    return flat, state, self._begin(working.name, files)

            flat, state, known = self._together(f"beginning to save step {step}", begin)
            count = self._processes.count
            extra = {"step": step, "processes": count, "arrays": describe(flat)}

            def copy() -> None:
                with self._disk_errors(step):  # in the thread, since an event loop may run here
                    self._thread.submit(self._orbax.save, working / ARRAYS, flat).result()

            self._together(f"copying step {step}", copy)
            flat.clear()  # the caller may donate the arrays
            self._pending = self._thread.submit(self._commit, step, state, extra, known)
        except BaseException:
            _writing.release()
            raise
        if not self.config.asynchronous:
            self.wait()

    def _take_turn(self) -> None:
        """Wait until this process writes no arrays to another directory."""
        seen = None
        since_s = time.monotonic()
        while not _writing.acquire(timeout=POLL_S):
            other = _writer
            now = None if other is None else other._progress()
            now_s = time.monotonic()
            if now != seen:
                self._deadline.heartbeat()
                seen = now
                since_s = now_s
            elif now_s - since_s > self._deadline.hang_limit_s:
                where = "another folder" if other is None else other.directory
                raise Hang(
                    f"{self.directory} waits for a save in {where}: no sign of life for "
                    f"{now_s - since_s:.1f} s"
                )

    def wait(self) -> None:
        """Wait until the last save is complete. Raises the error of the background thread."""
        if self._pending is None:
            return
        deadline = Deadline(0.0) if self._hangs else self._deadline
        try:
            result_of(self._pending, f"a save in {self.directory}", deadline, self._progress)
        except Hang:
            self._hangs = True  # do not wait for this save again
            raise
        finally:
            if self._pending.done():  # not if a signal interrupts the wait, or the save hangs
                self._pending = None

    def _progress(self) -> tuple[int, int]:
        """Return the parts done and the bytes of the present part, which change on progress."""
        return self._parts_done + self._waited, folders.written_bytes(self.directory)

    def _on_wait(self) -> None:
        self._waited += 1
        if threading.current_thread() is threading.main_thread():
            self._deadline.heartbeat()

    def restore(self, template: PyTree, **options: Any) -> Restored:
        """Wait for the save in progress, then `reader.restore` the newest whole checkpoint."""
        self.wait()
        return restore(self.directory, template, processes=self._processes, **options)

    def tidy(self) -> None:
        """Delete the steps that are not kept, after a save or after a kill during a save."""
        if self._keeps_all or not self._processes.is_first:
            return
        if not (steps := folders.list_steps(self._folder)):
            return
        newest = folders.step_folder(self.directory, steps[0])
        if steps[0] == self._published or not manifest.verify(newest, contents=False):
            folders.retire(self._folder, self.config.keep, self._spared(), self._light)

    def close(self) -> None:
        """Finish the save in progress, delete old steps, unlock. Raises the errors of `wait`."""
        try:
            self.wait()
            if self._published is not None and self._folder.is_in_place():
                with self._disk_errors(self._published):
                    self.tidy()
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
        try:
            self.close()
        except Exception as also:
            if error is None:
                raise
            if not isinstance(also, SaveError):
                _log.exception("the last save of %s failed as well", self.directory)
            error.add_note(f"The last save of {self.directory} failed as well: {also}")

    def _open(self) -> None:
        """Lock out other writers and clean up, in process 0 only."""
        if self._processes.is_first:
            self._lock = _take_lock(self._folder)
            folders.recover(self._folder)

    def _together(self, what: str, work: Callable[[], T]) -> T:
        """Do `work` and exchange errors, so that all processes succeed or all raise."""
        if self._processes.alone:
            return work()
        failed = None
        done = None
        try:
            done = work()
        except Exception as error:
            failed = error
        own = "" if failed is None else str(failed) or type(failed).__name__
        # shared with the background thread, which each save waits for
        line = f"{self.directory.name}/"
        errors = self._processes.gather(what, own.encode(), self._on_wait, line)
        if failed is not None:
            raise failed
        for index, text in enumerate(errors):
            if text:
                raise SaveError(f"process {index} failed at {what}: {text.decode()}")
        return done  # type: ignore[return-value]

    def _begin(self, name: str, files: LinkedFiles | None) -> dict[str, Content]:
        """Make a working folder with its linked files; return their contents by name."""
        self._folder.check_in_place()  # Orbax writes by path
        self._folder.remove(name, missing_ok=True)
        working = self._folder.folder(name)
        working.folder(ARRAYS)
        if files is None:
            return {}
        inner = working.folder(FILES_FOLDER)
        for file in files.contents:
            inner.link(files.folder, file)
        return {f"{FILES_FOLDER}/{file}": content for file, content in files.contents.items()}

    def _commit(
        self, step: int, state: Any, extra: dict[str, Any], known: Mapping[str, Content]
    ) -> None:
        """Write arrays, host state and manifest, then rename; in the background thread."""
        working = folders.working_folder(self.directory, step)

        def write() -> None:
            with self._disk_errors(step):
                try:
                    self._orbax.wait_until_finished()
                finally:
                    _writing.release()
                self._parts_done += 1
                if state is not None:
                    write_host(working / "host", state)

        def hash_part() -> None:
            with self._disk_errors(step):
                self._hash_part(working)

        def publish() -> None:
            if not self._processes.is_first:
                return
            with self._disk_errors(step):
                manifest.write_manifest(working, extra, known, self._hashed(working))
                self._parts_done += 1
                folders.publish(self._folder, step, sets_aside=not self._keeps_all)
                self._published = step
                self._committed(step)
                self.tidy()

        try:
            self._together(f"writing step {step}", write)
            if not self._processes.alone:
                self._together(f"hashing step {step}", hash_part)
            self._together(f"publishing step {step}", publish)
            host_memory.give_back()
        except BaseException as error:
            error.add_note(f"while writing checkpoint {working}")
            if self._processes.is_first:  # a full disk needs room; `recover` deletes this anyway
                with contextlib.suppress(OSError):
                    self._folder.remove(working.name)
            raise

    def _hash_part(self, working: Path) -> None:
        """Write the entries of a part of the array files to a file for process 0."""
        index = self._processes.index
        names = manifest.list_files(working / ARRAYS)
        part = names[index :: self._processes.count]
        entries = manifest.durable_entries(working / ARRAYS, part)
        replace_file(working / f"{_HASHES}{index}", json.dumps(entries))

    def _hashed(self, working: Path) -> dict[str, manifest.Entry]:
        """Return the entries from all processes, and delete the files of `_hash_part`."""
        entries: dict[str, manifest.Entry] = {}
        with held(working) as folder:
            for name in folder.names():
                if name.startswith(_HASHES):
                    part = json.loads(folder.read(name))
                    entries |= {f"{ARRAYS}/{file}": entry for file, entry in part.items()}
                    folder.remove(name)
        return entries

    @contextlib.contextmanager
    def _disk_errors(self, step: int) -> Iterator[None]:
        """Raise a SaveError of one line if the disk refuses; other errors pass unchanged."""
        try:
            yield
        except Exception as error:
            why = disk.refuses(error)
            if why is None or isinstance(error, SaveError):
                raise
            whole = [
                s
                for s in folders.list_steps(self._folder)
                if not manifest.verify(folders.step_folder(self.directory, s), contents=False)
            ]
            newest = f"the newest whole one is of step {whole[0]}" if whole else "there is none"
            what = "what follows" if step in whole else "the checkpoint of"
            raise SaveError(
                f"{what} step {step} could not be written to {self.directory}: {why}; {newest}"
            ) from error


def _take_lock(folder: Folder) -> Any:
    """Lock out a second writer. The lock is released when this process exits, for any reason."""
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
