"""Runs whose disk fills up at any write, and which are resumed once there is room.

Resumed, a run must end as the one that always had room: the same rows, samples, evaluations, state
and kept checkpoints.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from benchmarks import environment
from benchmarks.soak import writes
from reprise.rl.metrics.writer import MetricsWriter
from tests.support import tiny_run

SETTINGS = writes.SETTINGS + "Checkpoint.asynchronous = {asynchronous}\n"
NEEDS_ROOM = ("os.link", "os.mkdir")


class FullDisk:
    """From write number `at` on, writes of this process to `run` fail; Python's hooks stay.

    Renames, deletions and truncations succeed, as on a full disk. A row is written in part.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._is_on = False
        self._mutex = threading.RLock()
        self.count = 0
        self.at = sys.maxsize
        sys.addaudithook(self._hook)

    @contextlib.contextmanager
    def filling(self, run: Path, at: int) -> Iterator[None]:
        fsync, append = os.fsync, MetricsWriter._append

        def synced(file: Any) -> None:
            self._take()
            fsync(file)

        def appended(writer: MetricsWriter, name: str, row: Any) -> None:
            try:
                self._take()
            except OSError as error:
                with (run / name).open("ab") as file:  # not for the audit hook: it is absolute
                    file.write(b'{"step": 1, "cut')
                error.filename = str(run / name)
                raise
            append(writer, name, row)

        self._run = run
        self.count = 0
        self.at = at
        self._is_on = True
        os.fsync, MetricsWriter._append = synced, appended  # type: ignore[method-assign]
        try:
            yield
        finally:
            self._is_on = False
            os.fsync, MetricsWriter._append = fsync, append  # type: ignore[method-assign]

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_on:
            return
        if event == "open":
            path, _, flags = arguments
            is_ours = isinstance(path, str) and not path.startswith("/")
            if is_ours and isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR):
                self._take()
        elif event in NEEDS_ROOM and not str(arguments[0]).startswith("/"):
            self._take()

    def _take(self) -> None:
        with self._mutex:
            self.count += 1
            if self.count > self.at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full(folder: Path, count: int = 100) -> dict[str, Any]:
    """Fill the disk at `count` writes of runs of both kinds; resume and compare each."""
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    disk = FullDisk(folder)
    rows = []
    for asynchronous in (True, False):
        inner = folder / f"{asynchronous}"
        inner.mkdir()
        rows.append(_of_kind(inner, disk, asynchronous, -(-count // 2)))
    sums = {name: sum(row[name] for row in rows) for name in rows[0] if name != "asynchronous"}
    return sums | {"rows": rows}


def _of_kind(folder: Path, disk: FullDisk, asynchronous: bool, count: int) -> dict[str, Any]:
    config, reference = tiny_run.make_inputs(folder), folder / "reference"
    settings = SETTINGS.format(task=folder / "task.jsonl", asynchronous=asynchronous)
    config.write_text(config.read_text() + settings)
    reference.mkdir()
    with disk.filling(reference, sys.maxsize):
        tiny_run.train(config, reference)
    expected, total = writes._content(reference), disk.count
    found = {"writes": total, "states": 0, "failures": 0, "runs_that_ended_with_a_sentence": 0}
    found |= dict.fromkeys((f"{name}_that_differ" for name in expected), 0)
    for at in sorted({i * total // count for i in range(count)}):
        run = folder / f"run_{at}"
        run.mkdir()
        found["states"] += 1
        try:
            found["runs_that_ended_with_a_sentence"] += _filled(config, run, disk, at)
            writes.resume(config, run)
            content = writes._content(run)
        except Exception as error:  # each of them is a failure
            found["failures"] += 1
            environment.progress(f"write {at}: {type(error).__name__}: {error}"[:300])
            continue
        for name, value in expected.items():
            if content[name] != value:
                found[f"{name}_that_differ"] += 1
                environment.progress(f"write {at}: {name} differs")
        shutil.rmtree(run)
    return {"asynchronous": asynchronous} | found


def _filled(config: Path, run: Path, disk: FullDisk, at: int) -> bool:
    """Train until the disk is full; return whether the error is one of a full disk."""
    with disk.filling(run, at):
        try:
            tiny_run.train(config, run)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None:
                if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
                    return True
                cause = cause.__cause__ or cause.__context__
            raise
    return False
