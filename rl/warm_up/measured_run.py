"""The measurements of a run's engines: two files of its folder, written and read here alone.

    round_times.json   seconds of rounds by bucket, and what they were measured on
    move_times.json    seconds of copies and of passes by tokens

Nothing here touches a device, so that the simulator can read what a run wrote.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.folder import held, replace_file
from rl.runtime.run_files import MOVES_FILE, ROUNDS_FILE
from sched.simulator.measured_costs import MeasuredCosts
from spec.round_times import RoundTimes

if TYPE_CHECKING:
    from rl.cluster.processes import Processes


def rounds_of_first(times: RoundTimes | None, processes: Processes) -> RoundTimes | None:
    """Return process 0's table, or None where it has none: those of one mesh decide by one table.

    Alone, it is the table that is given.
    """
    if processes.alone:
        return times
    own: Any = None if times is None else times.rows()
    rows = json.loads(processes.from_first("seconds of rounds", json.dumps(own).encode))
    return None if rows is None else RoundTimes.from_rows(rows)


def moves_of_first(times: MoveTimes, processes: Processes) -> MoveTimes:
    """Return process 0's times."""
    if processes.alone:
        return times
    own = json.dumps(_rows(times)).encode
    return _moves(json.loads(processes.from_first("seconds of moves", own)))


@dataclasses.dataclass(frozen=True)
class MoveTimes:
    """Seconds of (a copy, a pass) by the most tokens that they are for."""

    seconds: Mapping[int, tuple[float, float]]

    def prefers_copy(self, tokens: int) -> bool:
        """Return True if copying this many tokens from the host is faster than recomputing them."""
        size = min((n for n in self.seconds if n >= tokens), default=max(self.seconds))
        copy_s, pass_s = self.seconds[size]
        return copy_s < pass_s


def write_rounds(path: Path, times: RoundTimes, made_for: Mapping[str, Any]) -> None:
    """Write `times` and what they were measured on, for `read_rounds`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"made_for": dict(made_for), "rows": times.rows()}
    replace_file(path, json.dumps(content, indent=1) + "\n")


def read_rounds(path: Path, made_for: Mapping[str, Any] | None = None) -> RoundTimes | None:
    """Return what `write_rounds` wrote; None if there is none for `made_for`.

    Raises ValueError for a file that is damaged.
    """
    content = _read(path)
    if content is None:
        return None
    try:
        if made_for is not None and content["made_for"] != dict(made_for):
            return None
        return RoundTimes.from_rows(content["rows"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, error) from error


def write_moves(path: Path, times: MoveTimes) -> None:
    """Write `times` for `read_moves`."""
    replace_file(path, json.dumps(_rows(times)) + "\n")


def _rows(times: MoveTimes) -> list[list[float]]:
    return [[n, *both] for n, both in times.seconds.items()]


def _moves(rows: Any) -> MoveTimes:
    return MoveTimes({int(n): (float(copy_s), float(pass_s)) for n, copy_s, pass_s in rows})


def read_moves(path: Path) -> MoveTimes | None:
    """Return what `write_moves` wrote, or None. Raises ValueError for a damaged file."""
    rows = _read(path)
    if rows is None:
        return None
    try:
        return _moves(rows)
    except (TypeError, ValueError) as error:
        raise _damaged(path, error) from error


def _read(path: Path) -> Any:
    """The JSON at `path`; None where there is no such file."""
    if not path.parent.is_dir():
        return None
    with held(path.parent) as folder:
        if not folder.exists(path.name):
            return None
        try:
            return json.loads(folder.read(path.name))
        except (ValueError, RecursionError) as error:
            raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} is damaged ({error}): delete it to measure anew")


def read_profile(folder: Path) -> MeasuredCosts:
    """Return rounds and moves of a run's worker. Raises ValueError for missing or damaged files.

    A budget that goes by measured times has rounds written, several workers have moves written.
    """
    rounds, moves = read_rounds(folder / ROUNDS_FILE), read_moves(folder / MOVES_FILE)
    for path, found, written_with in (
        (folder / ROUNDS_FILE, rounds, 'Speculation.budget = "goodput"'),
        (folder / MOVES_FILE, moves, "Sched.workers above one"),
    ):
        if found is None:
            raise ValueError(f"expected {path}, which runs with {written_with} write, found none")
    assert rounds is not None and moves is not None
    try:
        return MeasuredCosts(rounds.rounds, moves.seconds)
    except ValueError as error:
        raise ValueError(f"{folder} holds no profile that a run wrote ({error})") from error
