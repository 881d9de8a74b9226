"""What a run writes down: metrics.jsonl, samples.jsonl, TensorBoard, timings.

Invariant: after a kill at any moment, `truncate_to_step` of the step that is
resumed from leaves the files that a run stopped cleanly at that step would
have left, byte for byte, wall-clock metrics apart (`deterministic_view`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import math
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from models.folder import Folder

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
ROW_FILES = (METRICS_FILE, SAMPLES_FILE)
TENSORBOARD_FOLDER = "tensorboard"
WANDB_ID_FILE = "wandb_id"
WANDB_FOLDER = "wandb"

WALL_CLOCK_PREFIXES = ("time/", "perf/")
WALL_CLOCK_NAMES = frozenset(
    {
        "step_time",
        "spec/draft_seconds",
        "spec/verify_seconds",
        "spec/host_share",
        "spec/history_index_seconds",
        "spec/prefix_pass_seconds",
    }
)

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class MetricsConfig:
    """Where metrics go besides metrics.jsonl, and how many samples are kept."""

    tensorboard: bool = True  # TensorBoard events in RUN/tensorboard
    wandb_project: str | None = None  # also log to this Weights & Biases project
    samples_per_step: int = 8  # samples.jsonl lines a step; 0 writes none, -1 all

    def __post_init__(self) -> None:
        if self.samples_per_step < -1:
            raise ValueError(
                f"samples_per_step={self.samples_per_step}: expected a count, or -1 for all"
            )


class DamagedRowError(ValueError):
    """A row that is not the last of its file, and not as a run writes it."""


class MetricsWriter:
    """Appends one row a step to the files of a run folder; a context manager.

    `write` takes numbers: Python, numpy or jax scalars. Rows are strict JSON, so
    a value that is not finite is written as null. `write_samples` takes any JSON
    values. Each row goes out in one write and is flushed: a killed process
    leaves at most one torn line, the last, which opening the folder again or
    `truncate_to_step` removes.

    Raises ValueError for a damaged row that is not the last, TypeError for a
    metric that is not a number, LinkError for a link in place of a file, ModuleNotFoundError
    (with the mend) where tensorboardX or wandb is asked for and missing.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        tensorboard: bool = True,
        wandb_project: str | None = None,
        samples_per_step: int = 8,
    ) -> None:
        self._folder = Folder(directory, create=True)
        self._samples_per_step = samples_per_step
        self._files: dict[str, BinaryIO] = {}
        for name in ROW_FILES:
            _keep_rows(self._folder, name, lambda step: True)
        self._tensorboard: Any = self._open_tensorboard(None) if tensorboard else None
        self._wandb: Any = _open_wandb(self._folder, wandb_project) if wandb_project else None

    def write(self, step: int, metrics: Mapping[str, Any]) -> Row:
        """Writes one row and returns it: {"step": step, name: number or None, ...}."""
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        row: Row = {"step": int(step)} | numbers | {"step": int(step)}
        self._append(METRICS_FILE, row)
        finite = {k: v for k, v in row.items() if k != "step" and v is not None}
        if self._tensorboard is not None:
            for name, value in finite.items():
                self._tensorboard.add_scalar(name, value, row["step"])
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(finite, step=row["step"])
        return row

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Writes `samples_per_step` of a step's samples, evenly spread over their order."""
        for index in spread(len(samples), self._samples_per_step):
            row = {"step": int(step)} | _plain(samples[index]) | {"step": int(step)}
            self._append(SAMPLES_FILE, row)

    def truncate_to_step(self, step: int) -> None:
        """Removes the rows of every step after `step`, as if they had never been written."""
        self._close_files()
        for name in ROW_FILES:
            _keep_rows(self._folder, name, lambda row_step: row_step <= step)
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
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        try:
            written = self._files[name].write(line)
        except OSError as error:
            error.filename = str(self._folder.path / name)
            raise
        if written != len(line):
            raise OSError(f"{self._folder.path / name}: wrote {written} of {len(line)} bytes")

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _open_tensorboard(self, purge_step: int | None) -> Any:
        try:
            from tensorboardX import SummaryWriter
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(_NEEDS_TENSORBOARD) from error
        # purge_step tells TensorBoard to hide what a killed run wrote after its checkpoint.
        # The suffix, because two writers of one second would share, and empty, one file.
        return SummaryWriter(
            str(self._folder.folder(TENSORBOARD_FOLDER).path),
            purge_step=purge_step,
            filename_suffix=f".{uuid.uuid4().hex[:8]}",
        )


def open_metrics(config: MetricsConfig, directory: str | Path) -> MetricsWriter:
    """The writer that a `Metrics` section describes."""
    return MetricsWriter(
        directory,
        tensorboard=config.tensorboard,
        wandb_project=config.wandb_project,
        samples_per_step=config.samples_per_step,
    )


def check_installed(config: MetricsConfig) -> None:
    """Raise ModuleNotFoundError, with the mend, for a package that is asked for and missing."""
    if config.tensorboard and not _is_installed("tensorboardX"):
        raise ModuleNotFoundError(_NEEDS_TENSORBOARD)
    if config.wandb_project and not _is_installed("wandb"):
        raise ModuleNotFoundError(_NEEDS_WANDB.format(config.wandb_project))


def read_metrics(path: str | Path) -> list[Row]:
    """The rows of a metrics.jsonl, or of a run folder's; a torn last line is left out.

    Raises FileNotFoundError where there is none, ValueError for a damaged row.
    """
    path = Path(path)
    return [row for _, row in _rows(path / METRICS_FILE if path.is_dir() else path)]


def read_samples(path: str | Path) -> list[Row]:
    """The rows of a samples.jsonl, or of a run folder's; [] where there is none."""
    path = Path(path)
    path = path / SAMPLES_FILE if path.is_dir() else path
    return [row for _, row in _rows(path)] if path.exists() else []


def deterministic_view(row: Mapping[str, Any]) -> Row:
    """`row` without what the clock decides: `time/*`, `perf/*` and `WALL_CLOCK_NAMES`."""
    return {
        name: value
        for name, value in row.items()
        if name not in WALL_CLOCK_NAMES and not name.startswith(WALL_CLOCK_PREFIXES)
    }


def spread(total: int, wanted: int) -> list[int]:
    """`wanted` indices evenly spread over range(total); -1 wants all of them."""
    if wanted < 0 or wanted >= total:
        return list(range(total))
    return [index * total // wanted for index in range(wanted)]


class Timings:
    """Seconds spent in named parts of a step, by the clock that is handed in.

    `with timings.section("rollout"): ...` adds to `time/rollout`. A part entered
    twice adds up; a part that raises counts too. Parts should not nest: the
    report stacks them. `began` is told the name of each part as it begins.
    """

    def __init__(
        self, clock: Callable[[], float], began: Callable[[str], None] = lambda name: None
    ) -> None:
        self._clock, self._began = clock, began
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        self._began(name)
        start_s = self._clock()
        try:
            yield
        finally:
            elapsed_s = self._clock() - start_s
            self._seconds[name] = self._seconds.get(name, 0.0) + elapsed_s

    def seconds(self) -> dict[str, float]:
        """{"time/NAME": seconds}, in the order of first entry."""
        return {f"time/{name}": elapsed_s for name, elapsed_s in self._seconds.items()}


# --- files ------------------------------------------------------------------------------


def _rows(path: Path) -> Iterator[tuple[bytes, Row]]:
    """(line as it stands, its row) of a file; a torn last line is left out."""
    return _parsed(path, path.read_bytes())


def _parsed(path: Path, content: bytes) -> Iterator[tuple[bytes, Row]]:
    lines = content.splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            step = row.get("step") if isinstance(row, dict) else None
            if type(step) is not int or not 0 <= step < 2**53:
                raise ValueError(f"expected an object with an integer step, got {line[:80]!r}")
        except (ValueError, RecursionError) as error:
            if number == len(lines) and not line.endswith(b"\n"):
                return
            raise DamagedRowError(
                f"{path}:{number}: damaged row ({error}); delete this line to go on"
            ) from error
        yield line, row


def _keep_rows(folder: Folder, name: str, wanted: Callable[[int], bool]) -> None:
    """Rewrites a file of rows to those wanted, whole lines only, in one atomic step."""
    if not folder.exists(name):
        return
    content = folder.read(name)
    rows = _parsed(folder.path / name, content)
    # A whole last row may lack its newline: one more row must not be glued to it.
    kept = b"".join(line.removesuffix(b"\n") + b"\n" for line, row in rows if wanted(row["step"]))
    if kept != content:
        folder.replace(name, kept)


def _number(name: str, value: Any) -> int | float | None:
    """A Python number of a Python, numpy or jax scalar; None for one that is not finite."""
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"metric {name}: expected one number, got {type(value).__name__} {value!r}")
    return value if math.isfinite(value) else None


def _plain(value: Any) -> Any:
    """`value` as strict JSON: numpy and jax values as Python's, non-finite numbers as null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


_NEEDS_TENSORBOARD = (
    "Metrics.tensorboard = True needs tensorboardX: install it (pip install tensorboardX) or set "
    "Metrics.tensorboard = False"
)
_NEEDS_WANDB = (
    "Metrics.wandb_project = {!r} needs wandb: install it (pip install wandb) or set "
    "Metrics.wandb_project = None"
)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # imported already, by hand: a test's
        return module in sys.modules


def _open_wandb(folder: Folder, project: str) -> Any:
    """A Weights & Biases run whose id lives in the run folder, so that resuming continues it."""
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(_NEEDS_WANDB.format(project)) from error
    if not folder.exists(WANDB_ID_FILE):
        folder.replace(WANDB_ID_FILE, uuid.uuid4().hex[:16])
    folder.folder(WANDB_FOLDER)  # wandb writes there by path: it must be no link
    return wandb.init(
        project=project,
        name=folder.path.name,
        dir=str(folder.path),
        id=folder.read(WANDB_ID_FILE).decode().strip(),
        resume="allow",
    )
