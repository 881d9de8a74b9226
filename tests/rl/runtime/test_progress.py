"""The progress display: its line, and that only a real terminal sees control codes."""

from __future__ import annotations

import ast
import errno
import io
import os
import re
import sys
import threading
from pathlib import Path

import pytest

from reprise import rl
from reprise.rl.runtime.progress import (
    ErrorsOnly,
    Progress,
    RichProgress,
    folded,
    progress,
    say,
    step_columns,
)

ROW = {
    "step": 7,
    "reward": 0.4125,
    "completions/mean_length": 187.26,
    "entropy": 0.8314,
    "perf/throughput": 15320.4,
    "step_time": 4.207,
    "kl": 0.1,
}
LINE = "step   7/200  reward  0.412  length   187.3  entropy  0.831     15,320 tok/s      4.21 s"


def format_step(row, total_steps=None):
    return folded(step_columns(row, total_steps), 10_000)


def test_a_line_is_folded_between_columns():
    columns = ["step 1/2", "reward  0.5", "", "about 3 s left"]
    assert folded(columns, 80) == "step 1/2  reward  0.5  about 3 s left"
    assert folded(columns, 37) == folded(columns, 80)
    assert folded(columns, 36) == "step 1/2  reward  0.5\n    about 3 s left"
    assert folded(columns, 9) == "step 1/2\n    reward  0.5\n    about 3 s left"


def test_the_line_of_a_step():
    assert format_step(ROW, 200) == LINE
    assert format_step({"step": 7, "reward": None}) == "step     7  reward    nan"
    assert format_step({"step": 7}, 9) == "step 7/9"


def test_the_line_says_where_time_goes_and_what_drafts_brought():
    more = {"time/rollout": 2.5242, "spec/accepted_tokens": 1234.0, "spec/seconds_saved": 0.31}
    more |= {"spec/accept_rate": 0.5}
    lines = [LINE + "  rollout  60%  drafts  1,234 tok  saved  +0.31 s"]
    lines.append(LINE + "  rollout  60%")
    assert [format_step(ROW | more | m, 200) for m in ({}, {"spec/turned_off": 1.0})] == lines
    nothing = {name: value for name, value in more.items() if name != "spec/accept_rate"}
    assert format_step(ROW | nothing, 200) == lines[1]
    # a damaged row, as a report or a resumed run may meet, is shown as far as it goes
    assert "rollout" not in format_step(ROW | {"time/rollout": None}, 200)
    assert "rollout" not in format_step(ROW | {"time/rollout": 1.0, "step_time": None}, 200)


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def drive(shown) -> None:
    with shown:
        shown.message("resumed from [bold]step 6[/bold]\x1b[31m")
        shown.part(7, "rollout")
        shown.rollout(0, 4, 0)
        shown.rollout(4, 4, 900)
        shown.step(ROW)


def test_a_pipe_gets_plain_flushed_lines():
    read_fd, write_fd = os.pipe()
    with os.fdopen(write_fd, "w") as stream:
        drive(progress(stream, total_steps=200))
        text = os.read(read_fd, 65536).decode()  # before the stream is closed
    os.close(read_fd)
    assert text == f"resumed from [bold]step 6[/bold]\\x1b[31m\n{LINE}  about 14 min left\n"


def test_a_pipe_hears_where_a_run_is_once_it_was_silent_for_long():
    stream, clock = io.StringIO(), Clock()
    with progress(stream, total_steps=20, clock=clock) as shown:
        shown.part(3, "rollout")
        clock.now_s += 9
        shown.rollout(1, 8, 100)
        clock.now_s += 2
        shown.rollout(2, 8, 1200)
        shown.rollout(3, 8, 1300)
        clock.now_s += 11
        shown.part(3, "update")
        shown.step({"step": 3, "step_time": 20.0})
        shown.step({"step": 4, "step_time": 40.0})
        clock.now_s += 11
        shown.part(5, "rollout")
        shown.step({"step": 20, "step_time": 40.0})
    assert stream.getvalue().splitlines() == [
        "step  3/20: rollout, 2/8 responses  1,200 tokens",
        "step  3/20: update",
        "step  3/20     20.00 s  about 6 min left",
        "step  4/20     40.00 s  about 8 min left",
        "step  5/20: rollout  about 8 min left",
        "step 20/20     40.00 s",
    ]


def test_other_processes_print_their_errors_alone():
    stream = io.StringIO()
    with progress(stream, total_steps=20, process=3) as shown:
        assert type(shown) is ErrorsOnly
        drive(shown)
        shown.compiling("rollouts", 19, 19)
        shown.message("error: a disk is full\x1b")
    assert stream.getvalue() == "process 3: error: a disk is full\\x1b\n"


def test_all_that_commands_print_is_escaped():
    """Whoever prints does it through `say`: names and messages come from outside."""
    prints = [
        f"{path.name}:{node.lineno}"
        for path in sorted(Path(rl.__file__).parent.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
    ]
    assert prints == []


def test_control_codes_and_marks_of_direction_are_escaped():
    stream = io.StringIO()
    say("a\x1b]0;title\x07\x1b[2Jb\u202ec\u2066d\x9b1m\r\n\té", stream)
    assert stream.getvalue() == r"a\x1b]0;title\x07\x1b[2Jb\u202ec\u2066d\x9b1m\r" + "\n\té\n"


@pytest.mark.parametrize("kind", [Progress, RichProgress])
def test_a_message_of_any_length_with_any_markup_is_one_plain_line(kind):
    stream = io.StringIO()
    hostile = "[link=http://x]a[/link]\x1b[31m\u202e:smile: " + "y" * 10**6
    with kind(stream) as shown:
        shown.message(hostile)
    (line,) = [x for x in stream.getvalue().split("\n") if "http" in x]
    assert r"[link=http://x]a[/link]\x1b[31m\u202e:smile: yyy" in line
    assert line.rstrip().endswith("more characters") and len(line) < 5000


def test_letters_that_the_stream_lacks_do_not_stop_a_run():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    with progress(stream) as shown:
        shown.message("é\ud800")
    assert raw.getvalue() == b"\\xe9\\ud800\n"


def test_a_terminal_gets_the_lines_and_a_bar(monkeypatch):
    pty = pytest.importorskip("pty")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    main_fd, terminal_fd = pty.openpty()
    chunks: list[bytes] = []
    reader = threading.Thread(target=_drain, args=(main_fd, chunks))
    reader.start()
    stdout = sys.stdout
    with os.fdopen(terminal_fd, "w") as stream:
        shown = progress(stream, total_steps=200)
        assert isinstance(shown, RichProgress)
        with shown:
            assert sys.stdout is stdout  # it is no terminal here: left alone
            shown.message("resumed from [bold]step 6[/bold]")
            shown.compiling("rollouts", 7, 19)
            shown._bars.refresh()
            shown.part(7, "rollout")
            shown.rollout(2, 4, 450)
            shown._bars.refresh()
            shown.part(7, "update")
            shown._bars.refresh()
            shown.step(ROW)
    reader.join(timeout=60)
    os.close(main_fd)
    text = b"".join(chunks).decode()
    assert "resumed from [bold]step 6[/bold]" in text
    assert "2/4 responses  450 tokens" in text and f"{LINE}  about 14 min left" in text
    assert "compiling rollouts" in text and "7 of 19 programs" in text
    assert "step   7/200: rollout" in text and "step   7/200: update" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is given back
    # The bar is gone after the step's line.
    assert "responses" not in re.split(re.escape(LINE), text)[1]


def _drain(fd: int, chunks: list[bytes]) -> None:
    while True:
        try:
            chunk = os.read(fd, 4096)
        except OSError:  # the other end is closed
            return
        if not chunk:
            return
        chunks.append(chunk)


def test_a_warning_that_has_no_room_ends_nothing(monkeypatch):
    class Full(io.StringIO):
        def flush(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    say("warning: text", sys.stderr)
    with pytest.raises(OSError, match="No space"):
        say("text", Full())
