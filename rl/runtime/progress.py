"""The display of a run: a line per step, the current part of the step, and the time left.

Outside a terminal the lines are plain text without control codes.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TextIO

SILENCE_S = 10.0  # without a line, until the position of the run is printed
MAX_CHARACTERS = 4000  # of a message
RECENT_STEPS = 10  # for the estimate of the time left


def progress(
    stream: TextIO | None = None,
    *,
    total_steps: int | None = None,
    process: int = 0,
    environ: Mapping[str, str] = os.environ,
    clock: Callable[[], float] = time.monotonic,
) -> Progress:
    """Return a live display if `stream` (default: stderr) is a terminal, else plain lines.

    In a run of several processes, `process` 0 shows the run, and the others only errors.
    """
    stream = sys.stderr if stream is None else stream
    if process:
        return ErrorsOnly(process, stream)
    is_live = stream.isatty() and environ.get("TERM", "").lower() not in ("dumb", "unknown")
    return (RichProgress if is_live else Progress)(stream, total_steps, clock)


class Progress:
    """A display of lines: steps, messages, and after ten silent seconds the run position."""

    def __init__(
        self,
        stream: TextIO,
        total_steps: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._total_steps = total_steps
        self._clock = clock
        self._last_line_s = self._compiling_since_s = clock()
        self._recent_s: collections.deque[float] = collections.deque(maxlen=RECENT_STEPS)
        self._left = ""  # the time left for the run, updated after each step
        self._part = "rollout"  # the current step and its part

    def step(self, row: Mapping[str, Any]) -> None:
        """Show a finished training step; `row` is the row in metrics.jsonl."""
        self._recent_s.append(float(row.get("step_time") or 0.0))
        self._left = ""
        if self._total_steps is not None and (steps := self._total_steps - row["step"]) > 0:
            self._left = f"  {time_left(steps * statistics.median(self._recent_s))}"
        columns = [*step_columns(row, self._total_steps), self._left.strip()]
        self.message(folded(columns, self._width_chars))

    @property
    def _width_chars(self) -> int:
        """Return the maximum width of a line, unlimited for files."""
        return sys.maxsize

    def part(self, step: int, name: str) -> None:
        """Show that a part of a step starts: `rollout`, `reward`, `update`, `checkpoint`, …"""
        self._part = f"{_step_of(step, self._total_steps)}: {name}"
        self._show(self._part)

    def rollout(self, done: int, total: int, tokens: int) -> None:
        """Show that `done` of `total` responses are finished, with `tokens` tokens."""
        self._show(self._part, f"{done:,}/{total:,} responses  {tokens:,} tokens", done, total)

    def compiling(self, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` programs of `what` are compiled."""
        if done == 0:
            self._compiling_since_s = self._clock()
            self.message(f"compiling {what}: {total} programs")
        if done < total:
            self._show(f"compiling {what}", f"{done} of {total} programs", done, total)
        else:
            seconds = self._clock() - self._compiling_since_s
            self.message(f"compiled {what}: {total} programs in {seconds:.0f} s")

    def message(self, text: str) -> None:
        """Show a line of text once."""
        self._last_line_s = self._clock()
        with contextlib.suppress(OSError):  # a lost terminal or full disk must not stop the run
            say(cut(text), self._stream)

    def close(self) -> None:
        """Close the display."""

    def _show(self, text: str, counts: str = "", done: int = 0, total: int | None = None) -> None:
        """Show the position of the run; `total` is None if the end is not known."""
        if self._clock() - self._last_line_s >= SILENCE_S:
            self.message(f"{text}, {counts}{self._left}" if counts else text + self._left)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class ErrorsOnly(Progress):
    """A display of errors and warnings of a process, in a run that another process shows."""

    def __init__(self, index: int, stream: TextIO) -> None:
        super().__init__(stream)
        self._index = index

    def message(self, text: str) -> None:
        if text.startswith(("error", "warning")):
            say(f"process {self._index}: {text}", self._stream)

    def _show(self, text: str, counts: str = "", done: int = 0, total: int | None = None) -> None:
        pass


class RichProgress(Progress):
    """A live display: lines above a bar that shows the part of the step and the time left."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        self._console = Console(file=self._stream, markup=False, highlight=False, emoji=False)
        self._bars = Bars(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[counts]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            console=self._console,
            refresh_per_second=4,
            transient=True,
            # Redirect only terminals, since output to a file must still reach the file.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._task = self._bars.add_task("", total=None, visible=False, counts="", left="")
        self._bars.start()

    def step(self, row: Mapping[str, Any]) -> None:
        self._bars.update(self._task, visible=False, refresh=True)
        super().step(row)

    def compiling(self, what: str, done: int, total: int) -> None:
        if done == total:
            self._bars.update(self._task, visible=False, refresh=True)
        super().compiling(what, done, total)

    @property
    def _width_chars(self) -> int:
        return self._console.width

    def message(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._console.print(printable(cut(text), self._stream), soft_wrap=True)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._bars.stop()

    def _show(self, text: str, counts: str = "", done: int = 0, total: int | None = None) -> None:
        if self._bars.tasks[0].description != text:  # restart the clock of the bar
            self._bars.reset(self._task, total=total, description=text)
        state: dict[str, Any] = {"completed": done, "total": total, "counts": counts}
        self._bars.update(self._task, visible=True, left=self._left.strip(), **state)


def time_left(seconds: float) -> str:
    """Return rounded seconds as text: about 40 s, 9 min, 2 h 10 min left."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"about {max(1, round(seconds))} s left"
    if minutes < 90:
        return f"about {minutes} min left"
    return f"about {minutes // 60} h {minutes % 60:02} min left"


_ROLLOUT_SHARE = "share of the rollout in the step's seconds"  # computed here from two metrics
# Metrics and formats; fixed widths align the columns of successive lines.
_COLUMNS = (
    ("reward", "reward {:6.3f}"),
    ("completions/mean_length", "length {:7.1f}"),
    ("entropy", "entropy {:6.3f}"),
    ("perf/throughput", "{:9,.0f} tok/s"),
    ("step_time", "{:8.2f} s"),
    (_ROLLOUT_SHARE, "rollout {:4.0%}"),
    ("spec/accepted_tokens", "drafts {:6,.0f} tok"),
    ("spec/seconds_saved", "saved {:+6.2f} s"),
)
_DRAFT_COLUMNS = ("spec/accepted_tokens", "spec/seconds_saved")  # only of steps with drafts


def step_columns(row: Mapping[str, Any], total_steps: int | None = None) -> list[str]:
    """Return the columns of the line for a step, with the watched metrics that `row` has."""
    parts = [_step_of(row["step"], total_steps)]
    if (step_s := row.get("step_time")) and (rollout_s := row.get("time/rollout")) is not None:
        row = {**row, _ROLLOUT_SHARE: rollout_s / step_s}
    has_drafts = "spec/accept_rate" in row and not row.get("spec/turned_off")
    for name, form in _COLUMNS:
        if name in row and (has_drafts or name not in _DRAFT_COLUMNS):
            value = row[name]
            parts.append(form.format(float("nan") if value is None else value))
    return parts


def folded(columns: Sequence[str], width_chars: int) -> str:
    """Join columns by two spaces; a column beyond the width starts an indented line."""
    text = columns[0]
    used = len(columns[0])
    for column in filter(None, columns[1:]):
        is_over = used + 2 + len(column) > width_chars
        text += ("\n    " if is_over else "  ") + column
        used = len(column) + (4 if is_over else used + 2)
    return text


def _step_of(step: int, total_steps: int | None) -> str:
    if total_steps is None:
        return f"step {step:>5}"
    return f"step {step:>{len(str(total_steps))}}/{total_steps}"


def cut(text: str) -> str:
    """Truncate a message, since it may quote untrusted text of any length."""
    more = len(text) - MAX_CHARACTERS
    return text if more <= 0 else f"{text[:MAX_CHARACTERS]} ... and {more:,} more characters"


def printable(text: str, stream: TextIO) -> str:
    """Escape control codes, direction marks, and letters that `stream` cannot encode."""
    clean = "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return clean.encode(encoding, errors="backslashreplace").decode(encoding)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, with the first column aligned left and the others right."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    return ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in rows]


def say(text: object, stream: TextIO | None = None) -> None:
    """Print a line, made `printable`, to `stream` (default: stdout), as all commands do."""
    stream = sys.stdout if stream is None else stream
    try:
        stream.write(printable(str(text), stream) + "\n")  # one write, so lines do not mix
        stream.flush()
    except OSError as error:
        # ignore a closed pipe, a lost terminal, and a warning without room on the disk
        if error.errno not in (errno.EPIPE, errno.EIO) and stream is not sys.stderr:
            raise
