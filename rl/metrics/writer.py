"""The records of a run: metrics.jsonl, samples.jsonl, TensorBoard, timings.

Invariant: after a kill at any time, `truncate_to_step` for the resumed step leaves the same files,
byte for byte, as a run that stopped cleanly at that step, except for wall-clock metrics
(`deterministic_view`) and workers.jsonl. So samples are written before their row, rows before the
checkpoint (with `sync`, for a power cut), and the samples of an evaluation before its metrics.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from reprise.models.folder import Folder, read_plain
from reprise.rl.runtime.run_files import (
    EVAL_SAMPLES_FILE,
    METRICS_FILE,
    ROW_FILES,
    SAMPLES_FILE,
    TENSORBOARD_FOLDER,
    WANDB_ID_FILE,
    WORKERS_FILE,
)

if TYPE_CHECKING:
    from reprise.rl.metrics.tensorboard import EventFile
    from reprise.rl.metrics.wandb_run import WandbRun
    from reprise.rl.records.worker_record import WorkerStep

WALL_CLOCK_PREFIXES = ("time/", "perf/", "workers/", "weights/", "ahead/", "drafting/", "bandit/")
WALL_CLOCK_NAMES = {
    *("step_time", "eval_s", "rollout/moved", "rollout/tail_s"),
    *("spec/seconds_saved", "spec/disturbed_seconds", "spec/turned_off"),
    *("spec/cached_seconds", "spec/draft_seconds", "spec/verify_seconds", "spec/host_share"),
    "spec/history_index_seconds",
}

EVAL_SECONDS = "eval_s"  # the metric that every evaluation has
SHOWN = 8  # steps listed in one message
Row = dict[str, Any]
MAX_FILE_BYTES = 2**29  # of a file that is read into memory
MAX_LINE_BYTES = 2**26


@dataclasses.dataclass(frozen=True)
class MetricsConfig:
    """Outputs of metrics besides metrics.jsonl, and the number of samples kept."""

    tensorboard: bool = True
    """Write TensorBoard events to RUN/tensorboard."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project."""
    samples_per_step: int = 8
    """Lines of samples.jsonl per step; 0 writes none, -1 all."""

    def __post_init__(self) -> None:
        if self.samples_per_step < -1:
            raise ValueError(
                f"samples_per_step={self.samples_per_step}: expected a count, or -1 for all"
            )


class DamagedRowError(ValueError):
    """A damaged row that is not the last row of its file."""


class MetricsWriter:
    """A context manager that appends one row per step to the files of a run folder.

    Rows are strict JSON, with null for values that are not finite. Each row is one unbuffered
    write, so a killed process leaves at most one torn last line, which is removed later.

    Raises ValueError for a damaged row that is not the last, TypeError for a metric that is not a
    number, LinkError for a link in place of a file, ModuleNotFoundError if wandb is missing.
    """

    def __init__(self, directory: str | Path, config: MetricsConfig | None = None) -> None:
        config = config or MetricsConfig()
        self._folder = Folder(directory, create=True)
        self._samples_per_step = config.samples_per_step
        self._files: dict[str, BinaryIO] = {}
        for name in ROW_FILES:
            _keep_rows(self._folder, name, lambda step: True)
        self._tensorboard = self._open_tensorboard(None) if config.tensorboard else None
        self._wandb: WandbRun | None = None
        if config.wandb_project:
            from reprise.rl.metrics.wandb_run import WandbRun

            self._wandb = WandbRun(self._folder, config.wandb_project, self._rows())
        else:  # never resume a W&B run without these rows
            self._folder.remove(WANDB_ID_FILE, missing_ok=True)

    def write(self, step: int, metrics: Mapping[str, Any]) -> Row:
        """Write one row and return it: {"step": step, name: number or None, ...}."""
        row = _row(step, metrics)
        self._append(METRICS_FILE, row)
        self._show(row)
        return row

    def amend(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add metrics to the last row if it belongs to `step`, else write a separate row."""
        row = _row(step, metrics)
        self._close_files()
        content = self._folder.read(METRICS_FILE) if self._folder.exists(METRICS_FILE) else b""
        *before, (_, last) = [(b"", Row()), *_rows(self._folder.path / METRICS_FILE, content)]
        if last.get("step") != step:
            self._append(METRICS_FILE, row)
        else:
            rest = b"".join(line for line, _ in before)
            self._folder.replace(METRICS_FILE, rest + _line(last | row))
        self._show(row)

    def _show(self, row: Row) -> None:
        """Send a row to TensorBoard and Weights & Biases."""
        finite = {k: v for k, v in row.items() if k != "step" and v is not None}
        if self._tensorboard is not None:
            self._tensorboard.write(row["step"], finite)
        if self._wandb is not None:
            self._wandb.log(row)

    def write_samples(
        self, step: int, samples: Sequence[Mapping[str, Any]], name: str = SAMPLES_FILE
    ) -> None:
        """Write `samples_per_step` samples of a step, evenly spread over their order."""
        for index in spread(len(samples), self._samples_per_step):
            row = {"step": int(step)} | _plain(samples[index]) | {"step": int(step)}
            self._append(name, row)

    def write_workers(self, row: WorkerStep | None) -> None:
        """Write the worker record of a step; drop the older half if the file gets too large."""
        if row is None:
            return
        from reprise.rl.records.worker_record import MAX_BYTES  # not needed to read rows

        self._append(WORKERS_FILE, dataclasses.asdict(row))
        file = self._files.get(WORKERS_FILE)
        if file is not None and file.tell() > MAX_BYTES:
            self._close_files()
            lines = self._folder.read(WORKERS_FILE).splitlines(keepends=True)
            self._folder.replace(WORKERS_FILE, b"".join(lines[len(lines) // 2 :]))

    def sync(self) -> None:
        """Flush all rows to disk."""
        for file in self._files.values():
            os.fsync(file.fileno())

    def truncate_to_step(self, step: int) -> None:
        """Remove the rows of every step after `step`, as if never written.

        Samples of an evaluation without metrics are removed too, since it will be repeated.
        """
        self._close_files()
        written = self._rows()
        rows = [row for row in written if row["step"] <= step]
        if self._wandb is not None and len(rows) < len(written):
            self._wandb.go_back(rows)  # first, so that a kill here only repeats this
        for name in ROW_FILES:
            _keep_rows(self._folder, name, lambda row_step: row_step <= step)
        evaluated = {row["step"] for row in rows if EVAL_SECONDS in row}
        _keep_rows(self._folder, EVAL_SAMPLES_FILE, evaluated.__contains__)
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = self._open_tensorboard(purge_step=step + 1)

    def close(self) -> None:
        self._close_files()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        if name not in self._files:
            self._files[name] = self._folder.append(name)
        line = _line(row)
        try:
            while line:  # a disk that gets full accepts a part
                line = line[self._files[name].write(line) :]
        except OSError as error:
            error.filename = str(self._folder.path / name)
            raise

    def _rows(self) -> list[Row]:
        return read_metrics(self._folder.path) if self._folder.exists(METRICS_FILE) else []

    def _close_files(self) -> None:
        self.sync()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _open_tensorboard(self, purge_step: int | None) -> EventFile:
        from reprise.rl.metrics.tensorboard import EventFile

        # purge_step hides the rows that a killed run wrote after its checkpoint
        return EventFile(self._folder.folder(TENSORBOARD_FOLDER).path, purge_step)


class RowsOnly(MetricsWriter):
    """A writer without files, for processes of a run while another process writes the files."""

    def __init__(self) -> None:
        self._files = {}
        self._tensorboard = None
        self._wandb = None
        self._samples_per_step = 0

    def amend(self, step: int, metrics: Mapping[str, Any]) -> None:
        _row(step, metrics)

    def truncate_to_step(self, step: int) -> None:
        pass

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        pass


def check_installed(config: MetricsConfig) -> None:
    """Raise ModuleNotFoundError if a configured package is missing."""
    if config.wandb_project:
        from reprise.rl.metrics import wandb_run

        wandb_run.package()


def read_metrics(path: str | Path, on_torn: Callable[[str], None] = lambda text: None) -> list[Row]:
    """Return the rows of a metrics.jsonl file, given by its path or by the run folder.

    A torn last line is left out, and `on_torn` is called with a message.
    """
    path = Path(path)
    path = path / METRICS_FILE if path.is_dir() else path
    return [row for _, row in _rows(path, read_plain(path, MAX_FILE_BYTES), on_torn)]


def step_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of training steps, without an evaluation before the first step."""
    evaluated = ("eval/", EVAL_SECONDS)
    return [r for r in rows if not all(n == "step" or n.startswith(evaluated) for n in r)]


def lost_rows(rows: Sequence[Row], step: int) -> str:
    """Return a message on steps up to `step` without a row; all had a row at the save."""
    lost = sorted(set(range(1, step + 1)) - {row["step"] for row in rows})
    if not lost:
        return ""
    more = f" and {len(lost) - SHOWN} more" if len(lost) > SHOWN else ""
    steps = ", ".join(map(str, lost[:SHOWN])) + more
    return (
        f"has no row of {len(lost)} steps that the checkpoint contains (a power cut, or an edit): "
        f"{steps}; curves lack them, the weights do not"
    )


def read_samples(
    path: str | Path, name: str = SAMPLES_FILE, on_torn: Callable[[str], None] = lambda text: None
) -> list[Row]:
    """Return the rows of a samples.jsonl file like `read_metrics`; [] if the file is missing."""
    path = Path(path)
    path = path / name if path.is_dir() else path
    if not os.path.lexists(path):
        return []
    return [row for _, row in _rows(path, read_plain(path, MAX_FILE_BYTES), on_torn)]


def deterministic_view(row: Mapping[str, Any]) -> Row:
    """Return `row` without the metrics that depend on the clock."""
    return {
        name: value
        for name, value in row.items()
        if name not in WALL_CLOCK_NAMES and not name.startswith(WALL_CLOCK_PREFIXES)
    }


def spread(total: int, wanted: int) -> list[int]:
    """Return `wanted` indices evenly spread over range(total), or all indices for -1."""
    if wanted < 0 or wanted >= total:
        return list(range(total))
    return [index * total // wanted for index in range(wanted)]


class Timings:
    """A timer for the seconds spent in named parts of a step, by the given clock.

    `with timings.section("rollout"): ...` adds to `time/rollout`, also if the body raises.
    `on_start` is called with the name of each part. The seconds of `before`, if given, are added.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        on_start: Callable[[str], None] = lambda name: None,
        before: Timings | None = None,
    ) -> None:
        self._clock = clock
        self._on_start = on_start
        self._seconds: dict[str, float] = {} if before is None else dict(before._seconds)
        self.before_s = self.total_s

    @property
    def total_s(self) -> float:
        return sum(self._seconds.values())

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        self._on_start(name)
        start_s = self._clock()
        try:
            yield
        finally:
            elapsed_s = self._clock() - start_s
            self._seconds[name] = self._seconds.get(name, 0.0) + elapsed_s

    def seconds(self) -> dict[str, float]:
        """Return {"time/NAME": seconds}, in the order of first entry."""
        return {f"time/{name}": elapsed_s for name, elapsed_s in self._seconds.items()}


# --- files ------------------------------------------------------------------------------


def _rows(
    path: Path, content: bytes, on_torn: Callable[[str], None] = lambda text: None
) -> Iterator[tuple[bytes, Row]]:
    """Yield each line of the content with its row; a torn last line is left out."""
    lines = iter(partial(io.BytesIO(content).readline, MAX_LINE_BYTES), b"")
    for number, line in enumerate(lines, start=1):
        try:
            if len(line) == MAX_LINE_BYTES:
                raise ValueError(f"expected less than {MAX_LINE_BYTES:,} bytes")
            row = json.loads(line)
            step = row.get("step") if isinstance(row, dict) else None
            if type(step) is not int or not 0 <= step < 2**53:
                raise ValueError(f"expected an object with an integer step, got {line[:80]!r}")
        except (ValueError, RecursionError) as error:
            if not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
                on_torn(f"{path}:{number}: the last line is torn (a row being written, or a cut)")
                return
            raise DamagedRowError(
                f"{path}:{number}: damaged row ({error}); delete this line to continue"
            ) from error
        yield line, row


def _keep_rows(folder: Folder, name: str, wanted: Callable[[int], bool]) -> None:
    """Rewrite a file atomically with only the rows of wanted steps, as whole lines."""
    if not folder.exists(name):
        return
    content = folder.read(name)
    rows = _rows(folder.path / name, content)
    # A whole last row may lack its newline, and the next row must not be glued to it.
    rest = b"".join(line.removesuffix(b"\n") + b"\n" for line, row in rows if wanted(row["step"]))
    if rest != content:
        folder.replace(name, rest)


def _row(step: int, metrics: Mapping[str, Any]) -> Row:
    numbers = {name: _number(name, value) for name, value in metrics.items()}
    return {"step": int(step)} | numbers | {"step": int(step)}


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def _number(name: str, value: Any) -> int | float | None:
    """Return a Python, numpy or jax scalar as a Python number; None if not finite."""
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"metric {name}: expected one number, got {type(value).__name__} {value!r}")
    return value if math.isfinite(value) else None


def _plain(value: Any) -> Any:
    """Return `value` as strict JSON data: numpy and jax values converted, non-finite as None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
