"""A kill at every write: the run folder is copied before each one, and every copy is resumed.

A copy is what `kill -9` leaves at that point. Resumed, it must end as the run that was not stopped:
the same rows, samples, evaluations, best step, state and kept checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from benchmarks import environment
from benchmarks.soak.runs import final_state
from reprise.rl.gin.loader import load
from reprise.rl.metrics.writer import MetricsWriter, deterministic_view, read_metrics, read_samples
from reprise.rl.runtime.run_files import (
    CHECKPOINTS,
    EVAL_SAMPLES_FILE,
    EVALUATION_FILE,
    MARKER_FILE,
)
from reprise.rl.settings import run_folder
from reprise.rl.settings.config import TrainConfig
from tests.support import tiny_run

ARRAYS_EVERY = 12  # a checkpoint has a hundred files of arrays: one in twelve counts
SETTINGS = """
Run.steps = 4
Checkpoint.every_steps = 2
Checkpoint.keep = 1
Eval.num_prompts = 3
Eval.every_steps = 1
Eval.sets = ("e=jsonl:{task}",)
Metrics.tensorboard = False
"""
KINDS = {
    "asynchronous": "",
    "synchronous": "Checkpoint.asynchronous = False\n",
    "spilled": 'Reuse.mode = "coupled"\nRollout.cache_bytes = 1\n',
}
CHANGES = ("os.rename", "os.link", "os.remove", "os.rmdir", "os.mkdir", "os.truncate")


class Copies:
    """Copies `run` before the file system changes, while it is `taking`; Python's hooks stay."""

    def __init__(self, run: Path, into: Path) -> None:
        self._run, self._into = run, into
        self.names: list[str] = []  # of the writes, in order
        self._is_on, self._arrays, self._lock = False, 0, threading.RLock()
        sys.addaudithook(self._hook)

    @contextlib.contextmanager
    def taking(self) -> Iterator[None]:
        fsync, append = os.fsync, MetricsWriter._append

        def synced(file: Any) -> None:
            handle = file if isinstance(file, int) else file.fileno()
            self._take(f"fsync {os.readlink(f'/proc/self/fd/{handle}')}")
            fsync(file)

        def appended(writer: MetricsWriter, name: str, row: Any) -> None:
            self._take(f"append {name}")
            append(writer, name, row)

        os.fsync, MetricsWriter._append = synced, appended  # type: ignore[method-assign]
        self._is_on = True
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
            if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR):
                self._take(f"open {path}")
        elif event in CHANGES:
            self._take(f"{event} {arguments[0]}")

    def _take(self, name: str) -> None:
        with self._lock:
            if not self._is_on:
                return
            if "arrays" in name or ".params" in name or ".opt_state" in name:
                self._arrays += 1
                if self._arrays % ARRAYS_EVERY:
                    return
            self._is_on = False  # this copy is no write of the run
            copy = self._into / f"{len(self.names):05}"
            try:
                shutil.copytree(self._run, copy, symlinks=True)
                self.names.append(name)
            except (shutil.Error, FileNotFoundError):  # another thread has deleted a file
                shutil.rmtree(copy, ignore_errors=True)
            finally:
                self._is_on = True


def writes(folder: Path, count: int = 300) -> dict[str, Any]:
    """Copy runs of each kind before every write, resume `count` copies in all, and compare."""
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    rows = []
    for kind, settings in KINDS.items():
        row = _resumed(folder / kind, settings, -(-count // len(KINDS)))
        rows.append({"kind": kind} | row)
        environment.progress(json.dumps(rows[-1]))
    sums = {name: sum(row[name] for row in rows) for name in rows[0] if name != "kind"}
    return sums | {"rows": rows}


def _resumed(folder: Path, settings: str, count: int) -> dict[str, int]:
    folder.mkdir()
    config, run, copies = tiny_run.make_inputs(folder), folder / "run", folder / "copies"
    config.write_text(config.read_text() + SETTINGS.format(task=folder / "task.jsonl") + settings)
    run.mkdir()
    copies.mkdir()
    taken = Copies(run, copies)
    with taken.taking():
        tiny_run.train(config, run)
    expected, total = _content(run), len(taken.names)
    chosen = sorted({i * total // count for i in range(count)})
    differing = dict.fromkeys((f"{name}_that_differ" for name in expected), 0)
    failures = 0
    for done, index in enumerate(chosen):
        if not done % 10:
            environment.progress(f"{done} of {len(chosen)} copies of {total} resumed")
        copy = copies / f"{index:05}"
        try:
            resume(config, copy)
            content = _content(copy)
        except Exception as error:  # each of them is a failure
            failures += 1
            environment.progress(f"{taken.names[index]}: {type(error).__name__}: {error}"[:300])
            continue
        for name, value in expected.items():
            if content[name] != value:
                differing[f"{name}_that_differ"] += 1
                environment.progress(f"{index} {taken.names[index]}: {name} differs")
        shutil.rmtree(copy)
    return {"writes": total, "states": len(chosen), "failures": failures} | differing


def resume(config: Path, run: Path) -> None:
    """Resume as `rl.train --resume` does, whose check comes first; a run without rows starts."""
    resolved = load(TrainConfig, [config], [f"Run.directory={str(run)!r}"])
    (run / MARKER_FILE).touch()
    run_folder.check(resolved, resume=True)
    tiny_run.train(config, run)


def _content(run: Path) -> dict[str, Any]:
    kept = sorted(path.name for path in (run / CHECKPOINTS).iterdir() if path.name != ".lock")
    return {
        "states": final_state(run),
        "rows": [deterministic_view(row) for row in read_metrics(run)],
        "samples": read_samples(run),
        "evaluation_samples": read_samples(run, EVAL_SAMPLES_FILE),
        "best_steps": json.loads((run / EVALUATION_FILE).read_text()),
        "kept_checkpoints": kept,
    }
