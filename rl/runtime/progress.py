"""The display of a run: a line per step, the part of the step at work, and the time left.

On anything but a terminal the lines are plain text: no control code ever
reaches a pipe, a file or a dumb terminal.
"""

from __future__ import annotations

import collections
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Self, TextIO

SILENCE_S = 10.0  # in a pipe, after this long without a line, one says where the run is
MOST_CHARACTERS = 4000  # of a message
RECENT_STEPS = 10  # that the time left is estimated from


def progress(
    stream: TextIO | None = None,
    *,
    total_steps: int | None = None,
    process: int = 0,
    environ: Mapping[str, str] = os.environ,
    clock: Callable[[], float] = time.monotonic,
) -> Progress:
    """Return a live display where `stream` (default: stderr) is a terminal and rich is installed.

    Plain lines otherwise: into a pipe or a file, with TERM=dumb, without rich. Of the processes of
    a run the first one shows it.
    """
    stream = sys.stderr if stream is None else stream
    if process:
        return OtherProcess(process, stream)
    if stream.isatty() and environ.get("TERM", "").lower() not in ("dumb", "unknown"):
        try:
            import rich  # noqa: F401
        except ImportError:
            return PlainProgress(stream, total_steps, clock)
        return RichProgress(stream, total_steps, clock)
    return PlainProgress(stream, total_steps, clock)


class Progress:
    """Shows what happens in a run. Close it, or use it as a context manager."""

    def __init__(
        self,
        stream: TextIO,
        total_steps: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self._total_steps, self._clock = stream, total_steps, clock
        self._said_s = clock()
        self._recent_s: collections.deque[float] = collections.deque(maxlen=RECENT_STEPS)
        self._left = ""  # of the run, as of the last step
        self._part = ""  # the present step and part of it
        self._compiling_since_s = 0.0

    def step(self, row: Mapping[str, Any]) -> None:
        """Show a finished training step; `row` is its row of metrics.jsonl."""
        self._recent_s.append(float(row.get("step_time") or 0.0))
        self._left = ""
        if self._total_steps is not None and (steps := self._total_steps - row["step"]) > 0:
            self._left = time_left(steps * statistics.median(self._recent_s))
        line = format_step(row, self._total_steps)
        self.message(f"{line}  {self._left}" if self._left else line)

    def part(self, step: int, name: str) -> None:
        """Show that a part of a step begins: `rollout`, `reward`, `update`, `checkpoint`, …"""
        self._part = f"{_step_of(step, self._total_steps)}: {name}"

    def rollout(self, done: int, total: int, tokens: int) -> None:
        """Show that `done` of the step's `total` responses are finished, with `tokens` tokens."""
        raise NotImplementedError

    def compiling(self, what: str, done: int, total: int) -> None:
        """Show that `done` of the `total` programs of `what` are compiled."""
        raise NotImplementedError

    def message(self, text: str) -> None:
        """Show a line of text once."""
        raise NotImplementedError

    def close(self) -> None:
        """End the display."""

    def _compiled(self, what: str, done: int, total: int) -> str:
        if done == 0:
            self._compiling_since_s = self._clock()
            return f"compiling {what}: {total} programs"
        seconds = self._clock() - self._compiling_since_s
        if done == total:
            return f"compiled {what}: {total} programs in {seconds:.0f} s"
        return f"compiling {what}: {done} of {total}, {seconds:.0f} s"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class OtherProcess(Progress):
    """Says what goes wrong in a process of a run that another process shows; nothing else."""

    def __init__(self, index: int, stream: TextIO | None = None) -> None:
        super().__init__(sys.stderr if stream is None else stream)
        self._index = index

    def rollout(self, done: int, total: int, tokens: int) -> None:
        """Nothing to say."""

    def compiling(self, what: str, done: int, total: int) -> None:
        """Nothing to say."""

    def message(self, text: str) -> None:
        if text.startswith(("error", "warning")):
            self._stream.write(f"process {self._index}: {text}\n")
            self._stream.flush()


class PlainProgress(Progress):
    """Prints flushed lines: steps, messages, and where the run is after ten silent seconds."""

    def part(self, step: int, name: str) -> None:
        super().part(step, name)
        self._say_if_silent(f"{self._part}  {self._left}".rstrip())

    def rollout(self, done: int, total: int, tokens: int) -> None:
        self._say_if_silent(f"{self._part or 'rollout'}, {_responses(done, total, tokens)}")

    def compiling(self, what: str, done: int, total: int) -> None:
        text = self._compiled(what, done, total)
        if done in (0, total):
            self.message(text)
        else:
            self._say_if_silent(text)

    def message(self, text: str) -> None:
        self._said_s = self._clock()
        say(cut(text), self._stream)

    def _say_if_silent(self, text: str) -> None:
        if self._clock() - self._said_s >= SILENCE_S:
            self.message(text)


class RichProgress(Progress):
    """Prints lines above a bar that shows the part of the step at work and the time left."""

    def __init__(self, stream: TextIO, *args: Any, **options: Any) -> None:
        super().__init__(stream, *args, **options)
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        self._console = Console(file=stream, markup=False, highlight=False, emoji=False)
        self._bars = Bars(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[counts]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            console=self._console,
            refresh_per_second=4,
            transient=True,
            # Redirect terminals only: what goes to a file must keep going there.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._task = self._bars.add_task("", total=None, visible=False, counts="", left="")
        self._bars.start()

    def step(self, row: Mapping[str, Any]) -> None:
        self._bars.update(self._task, visible=False, refresh=True)
        super().step(row)

    def part(self, step: int, name: str) -> None:
        super().part(step, name)
        self._show(self._part)

    def rollout(self, done: int, total: int, tokens: int) -> None:
        self._show(self._part or "rollout", _responses(done, total, tokens), done, total)

    def compiling(self, what: str, done: int, total: int) -> None:
        text = self._compiled(what, done, total)
        if done < total:
            self._show(f"compiling {what}", f"{done} of {total}", done, total)
        else:
            self._bars.update(self._task, visible=False, refresh=True)
            self.message(text)

    def _show(
        self, description: str, counts: str = "", done: int = 0, total: int | None = None
    ) -> None:
        """Draw the bar, moving where `total` is None; a new description restarts its clock."""
        if self._bars.tasks[0].description != description:
            self._bars.reset(self._task, total=total, description=description)
        state: dict[str, Any] = {"completed": done, "total": total, "counts": counts}
        self._bars.update(self._task, visible=True, left=self._left, **state)

    def message(self, text: str) -> None:
        self._console.print(printable(cut(text), self._stream), soft_wrap=True)

    def close(self) -> None:
        self._bars.stop()


def _responses(done: int, total: int, tokens: int) -> str:
    return f"{done:,}/{total:,} responses  {tokens:,} tokens"


def time_left(seconds: float) -> str:
    """Return seconds as a person would say them: about 40 s, 9 min, 2 h 10 min left."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"about {max(1, round(seconds))} s left"
    if minutes < 90:
        return f"about {minutes} min left"
    return f"about {minutes // 60} h {minutes % 60:02} min left"


_ROLLOUT_SHARE = "share of the rollout in the step's seconds"  # made here, of two metrics
# Metric, and how its value reads: widths keep the columns of successive lines apart.
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


def format_step(row: Mapping[str, Any], total_steps: int | None = None) -> str:
    """Return the line of a step: the metrics that a person watches, as far as `row` has them."""
    parts = [_step_of(row["step"], total_steps)]
    if (step_s := row.get("step_time")) and (rollout_s := row.get("time/rollout")) is not None:
        row = {**row, _ROLLOUT_SHARE: rollout_s / step_s}
    for name, form in _COLUMNS:
        if name in row:
            value = row[name]
            parts.append(form.format(float("nan") if value is None else value))
    return "  ".join(parts)


def _step_of(step: int, total_steps: int | None) -> str:
    if total_steps is None:
        return f"step {step:>5}"
    return f"step {step:>{len(str(total_steps))}}/{total_steps}"


def cut(text: str) -> str:
    """Return a message of bounded length: it may quote what comes from outside."""
    more = len(text) - MOST_CHARACTERS
    return text if more <= 0 else f"{text[:MOST_CHARACTERS]} ... and {more:,} more characters"


def printable(text: str, stream: TextIO) -> str:
    """Escape control codes, marks of direction, and letters that `stream` cannot encode."""
    clean = "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return clean.encode(encoding, errors="backslashreplace").decode(encoding)


def say(text: object, stream: TextIO | None = None) -> None:
    """Print a line, made `printable`, to `stream` (default: stdout) at once.

    Everything that commands print goes through here, since names of files, tensors and tasks
    come from outside.
    """
    stream = sys.stdout if stream is None else stream
    stream.write(printable(str(text), stream) + "\n")  # one write: lines of threads do not mix
    stream.flush()
