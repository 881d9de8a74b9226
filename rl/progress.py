"""What a run says while it runs: one line a step, and a live bar on a terminal.

On anything but a terminal the lines are plain text: no control code ever
reaches a pipe, a file or a dumb terminal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, Self, TextIO


class Progress(Protocol):
    """Told what happens; shows it. Close it, or use it as a context manager."""

    def step(self, row: Mapping[str, Any]) -> None:
        """A training step is over; `row` is its row of metrics.jsonl."""

    def rollout(self, done: int, total: int, tokens: int) -> None:
        """`done` of `total` responses of this step are finished, with `tokens` generated."""

    def message(self, text: str) -> None:
        """Something to be read once."""

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None: ...


def progress(
    stream: TextIO | None = None,
    *,
    total_steps: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Progress:
    """A live display where `stream` (default: stderr) is a terminal and rich is there.

    Plain lines otherwise: into a pipe or a file, with TERM=dumb, without rich.
    """
    stream = sys.stderr if stream is None else stream
    if stream.isatty() and environ.get("TERM", "").lower() not in ("dumb", "unknown"):
        try:
            import rich  # noqa: F401
        except ImportError:
            return PlainProgress(stream, total_steps)
        return RichProgress(stream, total_steps)
    return PlainProgress(stream, total_steps)


class _Closing:
    def close(self) -> None:
        """Nothing to give back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class PlainProgress(_Closing):
    """One flushed line a step, one a message; nothing while a rollout runs."""

    def __init__(self, stream: TextIO, total_steps: int | None = None) -> None:
        self._stream = stream
        self._total_steps = total_steps

    def step(self, row: Mapping[str, Any]) -> None:
        self.message(format_step(row, self._total_steps))

    def rollout(self, done: int, total: int, tokens: int) -> None:
        pass

    def message(self, text: str) -> None:
        say(text, self._stream)


class RichProgress(_Closing):
    """The same lines, above a bar that follows the rollout at hand."""

    def __init__(self, stream: TextIO, total_steps: int | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        self._stream = stream
        self._total_steps = total_steps
        self._console = Console(file=stream, markup=False, highlight=False, emoji=False)
        self._bars = Bars(
            TextColumn("rollout", style="bold", markup=False),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[counts]}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            refresh_per_second=4,
            transient=True,
            # What goes to a file must go on doing so: only terminals are woven in.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._task = self._bars.add_task("rollout", total=None, visible=False, counts="")
        self._in_rollout = False
        self._bars.start()

    def step(self, row: Mapping[str, Any]) -> None:
        self._in_rollout = False
        self._bars.update(self._task, visible=False, refresh=True)
        self.message(format_step(row, self._total_steps))

    def rollout(self, done: int, total: int, tokens: int) -> None:
        if not self._in_rollout:
            self._in_rollout = True
            self._bars.reset(self._task)
        self._bars.update(
            self._task,
            completed=done,
            total=total,
            visible=True,
            counts=f"{done:,}/{total:,} responses  {tokens:,} tokens",
        )

    def message(self, text: str) -> None:
        self._console.print(printable(text, self._stream), soft_wrap=True)

    def close(self) -> None:
        self._bars.stop()


# Metric, and how its value reads: widths keep the columns of successive lines apart.
_COLUMNS = (
    ("reward", "reward {:6.3f}"),
    ("completions/mean_length", "length {:7.1f}"),
    ("entropy", "entropy {:6.3f}"),
    ("perf/throughput", "{:9,.0f} tok/s"),
    ("step_time", "{:8.2f} s"),
)


def format_step(row: Mapping[str, Any], total_steps: int | None = None) -> str:
    """One line of the metrics that a person watches; metrics that are not there are left out."""
    if total_steps is None:
        parts = [f"step {row['step']:>5}"]
    else:
        parts = [f"step {row['step']:>{len(str(total_steps))}}/{total_steps}"]
    for name, form in _COLUMNS:
        if name in row:
            value = row[name]
            parts.append(form.format(float("nan") if value is None else value))
    return "  ".join(parts)


def printable(text: str, stream: TextIO) -> str:
    """`text` with control codes and marks of direction escaped, in letters that `stream` has."""
    clean = "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return clean.encode(encoding, errors="backslashreplace").decode(encoding)


def say(text: object, stream: TextIO | None = None) -> None:
    """Print a line to `stream` (default: stdout), as `printable` has it, at once.

    All that commands print goes through here: names of files, tensors and tasks, and messages
    about them, come from outside.
    """
    stream = sys.stdout if stream is None else stream
    stream.write(printable(str(text), stream) + "\n")  # one write: lines of threads do not mix
    stream.flush()
