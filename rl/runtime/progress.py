"""What a run says while it runs: one line a step, what it is at, and how long it will take.

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
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

SILENCE_S = 10.0  # in a pipe: after so long a line says where the run is
RECENT_STEPS = 10  # that the time left is judged by


class Progress(Protocol):
    """Told what happens; shows it. Close it, or use it as a context manager."""

    def step(self, row: Mapping[str, Any]) -> None:
        """A training step is over; `row` is its row of metrics.jsonl."""

    def phase(self, step: int, name: str) -> None:
        """A part of a step begins: `rollout`, `reward`, `update`, `checkpoint` and others."""

    def rollout(self, done: int, total: int, tokens: int) -> None:
        """`done` of `total` responses of this step are finished, with `tokens` generated."""

    def compiling(self, what: str, done: int, total: int) -> None:
        """`done` of the `total` programs of `what` are compiled."""

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
    clock: Callable[[], float] = time.monotonic,
) -> Progress:
    """A live display where `stream` (default: stderr) is a terminal and rich is there.

    Plain lines otherwise: into a pipe or a file, with TERM=dumb, without rich.
    """
    stream = sys.stderr if stream is None else stream
    if stream.isatty() and environ.get("TERM", "").lower() not in ("dumb", "unknown"):
        try:
            import rich  # noqa: F401
        except ImportError:
            return PlainProgress(stream, total_steps, clock)
        return RichProgress(stream, total_steps, clock)
    return PlainProgress(stream, total_steps, clock)


class _Watched:
    """What both displays know: where the run is, and how long it will take."""

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
        self._place = ""  # the step and part of it at hand
        self._compiling_since_s = 0.0

    def step(self, row: Mapping[str, Any]) -> None:
        self._recent_s.append(float(row.get("step_time") or 0.0))
        self._left = ""
        if self._total_steps is not None and (steps := self._total_steps - row["step"]) > 0:
            self._left = time_left(steps * statistics.median(self._recent_s))
        line = format_step(row, self._total_steps)
        self.message(f"{line}  {self._left}" if self._left else line)

    def phase(self, step: int, name: str) -> None:
        self._place = f"{_step_of(step, self._total_steps)}: {name}"

    def message(self, text: str) -> None:
        raise NotImplementedError

    def _compiled(self, what: str, done: int, total: int) -> str:
        """How far a compilation is."""
        if done == 0:
            self._compiling_since_s = self._clock()
            return f"compiling {what}: {total} programs"
        seconds = self._clock() - self._compiling_since_s
        if done == total:
            return f"compiled {what}: {total} programs in {seconds:.0f} s"
        return f"compiling {what}: {done} of {total}, {seconds:.0f} s"

    def close(self) -> None:
        """Nothing to give back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class PlainProgress(_Watched):
    """One flushed line a step, one a message, and where a run is after ten silent seconds."""

    def phase(self, step: int, name: str) -> None:
        super().phase(step, name)
        self._say_if_silent(f"{self._place}  {self._left}".rstrip())

    def rollout(self, done: int, total: int, tokens: int) -> None:
        self._say_if_silent(f"{self._place or 'rollout'}, {_responses(done, total, tokens)}")

    def compiling(self, what: str, done: int, total: int) -> None:
        text = self._compiled(what, done, total)
        if done in (0, total):
            self.message(text)
        else:
            self._say_if_silent(text)

    def message(self, text: str) -> None:
        self._said_s = self._clock()
        say(text, self._stream)

    def _say_if_silent(self, text: str) -> None:
        if self._clock() - self._said_s >= SILENCE_S:
            self.message(text)


class RichProgress(_Watched):
    """The same lines, above a bar that names the part of the step at hand, and the time left."""

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
            # What goes to a file must go on doing so: only terminals are woven in.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._task = self._bars.add_task("", total=None, visible=False, counts="", left="")
        self._bars.start()

    def step(self, row: Mapping[str, Any]) -> None:
        self._bars.update(self._task, visible=False, refresh=True)
        super().step(row)

    def phase(self, step: int, name: str) -> None:
        super().phase(step, name)
        self._show(self._place)

    def rollout(self, done: int, total: int, tokens: int) -> None:
        self._show(self._place or "rollout", _responses(done, total, tokens), done, total)

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
        """The bar: of `done` and `total`, or one that moves; seconds are those of its words."""
        if self._bars.tasks[0].description != description:
            self._bars.reset(self._task, total=total, description=description)
        state: dict[str, Any] = {"completed": done, "total": total, "counts": counts}
        self._bars.update(self._task, visible=True, left=self._left, **state)

    def message(self, text: str) -> None:
        self._console.print(printable(text, self._stream), soft_wrap=True)

    def close(self) -> None:
        self._bars.stop()


def _responses(done: int, total: int, tokens: int) -> str:
    return f"{done:,}/{total:,} responses  {tokens:,} tokens"


def time_left(seconds: float) -> str:
    """So many seconds, as a draft token is said: about 40 s, 9 min, 2 h 10 min left."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"about {max(1, round(seconds))} s left"
    if minutes < 90:
        return f"about {minutes} min left"
    return f"about {minutes // 60} h {minutes % 60:02} min left"


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
    parts = [_step_of(row["step"], total_steps)]
    for name, form in _COLUMNS:
        if name in row:
            value = row[name]
            parts.append(form.format(float("nan") if value is None else value))
    return "  ".join(parts)


def _step_of(step: int, total_steps: int | None) -> str:
    if total_steps is None:
        return f"step {step:>5}"
    return f"step {step:>{len(str(total_steps))}}/{total_steps}"


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
