"""What the engines of a run measured, for the simulator: two files of its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sched.measured import Profile

ROUNDS_FILE, MOVES_FILE = "round_times.json", "move_times.json"


def read_profile(folder: Path) -> Profile:
    """Rounds and moves of a run's worker. Raises ValueError where there are none, or damaged ones.

    A budget that goes by measured times has rounds written, several workers have moves written.
    """
    rounds = _read(folder / ROUNDS_FILE, 'Speculation.budget = "goodput"')
    moves = _read(folder / MOVES_FILE, "Sched.workers above one")
    try:
        return Profile(
            {(int(b), int(n), int(s)): t for kind, b, n, s, t in rounds["rows"] if kind == 0},
            {int(tokens): (copy_s, pass_s) for tokens, copy_s, pass_s in moves},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder} holds no profile that a run wrote ({error})") from error


def _read(path: Path, written_with: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"expected {path}, which runs with {written_with} write, found none"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error})") from error
