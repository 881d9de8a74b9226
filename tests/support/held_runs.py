"""Smallest runs that wait, so that they do not end before a test sends them its signal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.support import tiny_run

# The end of the reward file: no sample is scored while the run that `held` names has all its rows.
HELD = """

import time


def _held(score):
    def scored(completions, **columns):
        while _is_held():
            time.sleep(0.02)
        return score(completions, **columns)

    return scored


def _is_held():
    try:
        count, path = open(__file__ + ".hold").read().split()
        return open(path, "rb").read().count(b"\\n") >= int(count)
    except FileNotFoundError:
        return False


digits, lucky = _held(digits), _held(lucky)
"""


def make_held_inputs(folder: Path) -> Path:
    """As `tiny_run.make_inputs`, with a limit of seconds of which no sample comes near."""
    config = tiny_run.make_inputs(folder)
    for path, text in ((folder / "reward.py", HELD), (config, "Reward.deadline_s = 900.0\n")):
        with path.open("a") as file:
            file.write(text)
    return config


@contextlib.contextmanager
def held(config: Path, run: Path, rows: int) -> Iterator[None]:
    """Until the end of the block no sample is scored once a run has so many rows."""
    part, hold = (config.parent / f"reward.py.{name}" for name in ("part", "hold"))
    part.write_text(f"{rows} {run / 'metrics.jsonl'}")
    part.rename(hold)
    try:
        yield
    finally:
        hold.unlink()
