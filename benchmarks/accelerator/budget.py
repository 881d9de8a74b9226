"""Rows of a benchmark within a budget of seconds, on disk as they come.

The result file holds the plan: every row in order of worth, with the seconds that it is expected to
take. `run` opens no device. It starts one worker, which pays for its start once and measures row
after row (`work`). Another worker follows if a row needs other flags of XLA, and after a row that
failed, since an accelerator may compute nothing more for that process. A row that does not fit into
the seconds that are left is skipped. A row that hangs until the budget ends is cut.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import environment

Figures = dict[str, Any]
WAITING = "waiting"
RUNNING = "running"
DONE = "done"
SHORTENED = "shortened"  # it may have had further steps, which would not have fitted
FAILED = "failed"
SKIPPED = "skipped"  # it did not fit
CUT = "cut"  # the budget ended while it ran
NOT_RUN = "not run"  # it does not exist on this machine
LAST_LINES = 15  # of a failure that are kept
END_S = 5.0  # of the budget, to end a worker and to write
CHECK_S = 0.05  # between looks at a worker


class NotRun(Exception):
    """The row does not exist on this machine; the text says why."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the plan; rows with `flags` of XLA, which reads them once, need another process."""

    name: str
    expected_s: float
    flags: str = ""


class Record:
    """The result file: the rows and whatever else is known, whole on disk after every change."""

    def __init__(self, path: Path, result: dict[str, Any]) -> None:
        self.path = path
        self.result = result

    @classmethod
    def of(cls, path: Path, rows: Sequence[Row], **known: Any) -> Record:
        entries = [
            {"row": row.name, "status": WAITING, "expected_s": row.expected_s} for row in rows
        ]
        record = cls(path, known | {"rows": entries})
        record.save()
        return record

    @classmethod
    def read(cls, path: Path) -> Record:
        return cls(path, json.loads(path.read_text(encoding="utf-8")))

    def save(self) -> None:
        environment.replace(self.path, self.result)

    def entry(self, name: str) -> dict[str, Any]:
        return next(entry for entry in self.result["rows"] if entry["row"] == name)

    def with_status(self, status: str) -> list[dict[str, Any]]:
        return [entry for entry in self.result["rows"] if entry["status"] == status]

    def set(self, entry: dict[str, Any], **values: Any) -> None:
        entry.update(values)
        self.save()

    def skip(self, left_s: float) -> None:
        """Skip the rows at the front of the plan that do not fit into the seconds that are left."""
        for entry in self.with_status(WAITING):
            if entry["expected_s"] <= left_s:
                return
            self.set(entry, status=SKIPPED, left_s=round(left_s, 1))


class Log:
    """The entry of a running row, which says at any moment in which phase it is."""

    def __init__(self, record: Record, entry: dict[str, Any], ends_at_s: float) -> None:
        self._record = record
        self._entry = entry
        self._ends_at_s = ends_at_s
        self._phase_at_s = self._began_at_s = time.monotonic()
        record.set(entry, status=RUNNING, left_s=round(self.left_s, 1), phase_s={}, figures=[])

    @property
    def left_s(self) -> float:
        """The seconds of the budget that are left."""
        return self._ends_at_s - time.monotonic()

    def note(self, **values: Any) -> None:
        self._record.set(self._entry, **values)

    def phase(self, name: str) -> None:
        """Begin a phase: "compile", "warm up", "measure" or another."""
        self._end_phase()
        self._record.set(self._entry, phase=name)

    def _end_phase(self) -> None:
        now_s = time.monotonic()
        if name := self._entry.get("phase"):
            seconds = self._entry["phase_s"]
            seconds[name] = round(seconds.get(name, 0.0) + now_s - self._phase_at_s, 2)
        self._phase_at_s = now_s

    def add(self, figures: Figures) -> None:
        self._entry["figures"].append(figures)
        self._record.save()

    def end(self, status: str, **values: Any) -> None:
        self._end_phase()
        seconds = round(time.monotonic() - self._began_at_s, 2)
        self._record.set(self._entry, status=status, seconds=seconds, **values)
        print(progress(self._entry), flush=True)


# --- the worker ---------------------------------------------------------------------------


Measures = Mapping[str, Callable[[Log], Iterator[Figures]]]  # by row; step by step


def work(
    rows: Sequence[Row], measures: Measures, record: Record, flags: str, ends_at_s: float
) -> None:
    """Measure the next rows with these flags, until one needs others or fails.

    `ends_at_s` is the end of the budget by `time.monotonic`, which all processes share.
    """
    for row in rows:
        entry = record.entry(row.name)
        record.skip(ends_at_s - time.monotonic())
        if entry["status"] != WAITING:
            continue
        if row.flags != flags:
            return
        if not _measured(measures[row.name], Log(record, entry, ends_at_s)):
            return


def _measured(measure: Callable[[Log], Iterator[Figures]], log: Log) -> bool:
    """Measure a row, and return whether the process is as before."""
    before_s = None  # when the figures before came: the first also compile
    gc.collect()  # arrays of the row before may be in circles
    try:
        steps = measure(log)
        for figures in steps:
            log.add(figures)
            now_s = time.monotonic()
            if before_s is not None and now_s - before_s > log.left_s:
                step_s = now_s - before_s
                why = f"a step took {step_s:.1f} s, and {log.left_s:.1f} s are left"
                log.end(SHORTENED, why=why)
                return True
            before_s = now_s
        log.end(DONE)
        return True
    except NotRun as error:
        log.end(NOT_RUN, why=str(error))
        return True
    except Exception as error:
        lines = traceback.format_exc().splitlines()
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        log.end(FAILED, why=why, last_lines=lines[-LAST_LINES:])
        return False


def end_with_parent() -> None:
    """End this process as soon as its input ends, which it does with the process that started it.

    A call that is killed leaves no worker behind.
    """

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# --- the supervisor -----------------------------------------------------------------------


def run(
    record: Record,
    rows: Sequence[Row],
    command: Callable[[str, float], Sequence[str]],
    log_file: Path,
    ends_at_s: float,
    env: Mapping[str, str] = os.environ,
) -> Record:
    """Let workers measure all rows that fit; return the record as they have left it.

    `command` of flags and the end of the budget starts a worker, with its errors in `log_file`.
    """
    flags_of = {row.name: row.flags for row in rows}
    while True:
        record.skip(ends_at_s - END_S - time.monotonic())
        waiting = record.with_status(WAITING)
        if not waiting:
            return record
        flags = flags_of[waiting[0]["row"]]
        settings = dict(env) | {"XLA_FLAGS": f"{env.get('XLA_FLAGS', '')} {flags}".strip()}
        with open(log_file, "ab") as errors:
            log_start = errors.tell()
            process = subprocess.Popen(
                command(flags, ends_at_s - END_S),
                env=settings,
                stdin=subprocess.PIPE,
                stdout=2,  # standard output is for the result
                stderr=errors,
                start_new_session=True,
            )
            is_over = _is_over(process, ends_at_s - END_S / 2)
        record = Record.read(record.path)
        lines = _last_lines(log_file, log_start)
        _conclude(record, flags_of, _End(waiting[0]["row"], process.returncode, lines, is_over))


def _is_over(process: subprocess.Popen[bytes], ends_at_s: float) -> bool:
    """Wait for a worker; return True if the budget ended first, and the worker was killed."""
    try:
        while process.poll() is None:
            if time.monotonic() > ends_at_s:
                return True
            time.sleep(CHECK_S)
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the processes that it has started, too
        process.wait()


def _conclude(record: Record, flags_of: Mapping[str, str], end: _End) -> None:
    """Write what the end of a worker means for its rows, and show it."""
    running = record.with_status(RUNNING)
    waiting = record.with_status(WAITING)
    changed = list(running)
    if end.is_over:
        for entry in running:
            why = f"the budget ended in the phase {entry.get('phase', 'start')!r}"
            record.set(entry, status=CUT, why=why, last_lines=end.lines)
    elif running:
        for entry in running:
            why = f"the process ended with status {end.status}"
            record.set(entry, status=FAILED, why=why, last_lines=end.lines)
    elif waiting and waiting[0]["row"] == end.first:  # no process can start with these flags
        changed = [e for e in waiting if flags_of[e["row"]] == flags_of[end.first]]
        why = (end.lines or [f"status {end.status}"])[-1]
        for entry in changed:
            record.set(entry, status=FAILED, why=f"no start: {why}", last_lines=end.lines)
    for entry in changed:
        print(progress(entry), file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True)
class _End:
    """The end of a worker that was started for the row `first`."""

    first: str
    status: int
    lines: list[str]
    is_over: bool


def _last_lines(path: Path, start: int) -> list[str]:
    with open(path, "rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace").splitlines()[-LAST_LINES:]


def progress(entry: Mapping[str, Any]) -> str:
    """Return a line about a row that has ended."""
    words = [f"{entry['row']}: {entry['status']}"]
    if "seconds" in entry:
        words.append(f"{entry['seconds']:g} s of {entry['expected_s']:g} s expected")
    if "why" in entry:
        words.append(entry["why"])
    return ", ".join(words)
