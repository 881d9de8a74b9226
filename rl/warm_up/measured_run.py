"""The files `round_times.json` and `move_times.json` of a run folder, for engines and simulator.

Nothing here touches a device.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reprise.models.folder import held, replace_file
from reprise.rl.runtime.run_files import MOVES_FILE, ROUNDS_FILE
from reprise.sched.simulator.measured_costs import MeasuredCosts
from reprise.spec.round_times import RoundTimes

if TYPE_CHECKING:
    from reprise.rl.cluster.processes import Processes


def rounds_of_first(times: RoundTimes | None, processes: Processes) -> RoundTimes | None:
    """Return the table of process 0 in all processes of a mesh; None if process 0 has no table."""
    own = json.dumps(None if times is None else times.rows()).encode
    rows = json.loads(processes.from_first("seconds of rounds", own))
    return None if rows is None else RoundTimes.from_rows(rows)


def moves_of_first(times: MoveTimes, processes: Processes) -> MoveTimes:
    """Return the times of process 0 in all processes."""
    own = json.dumps(_rows(times)).encode
    return _moves(json.loads(processes.from_first("seconds of moves", own)))


@dataclasses.dataclass(frozen=True)
class MoveTimes:
    """Seconds of (a copy, a pass) by the maximum number of tokens that they apply to."""

    seconds: Mapping[int, tuple[float, float]]

    def prefers_copy(self, tokens: int) -> bool:
        """Return whether copying `tokens` tokens from the host is faster than recomputing them."""
        size = min((n for n in self.seconds if n >= tokens), default=max(self.seconds))
        copy_s, pass_s = self.seconds[size]
        return copy_s < pass_s


def write_rounds(path: Path, times: RoundTimes, made_for: Mapping[str, Any]) -> None:
    """Write `times` and the settings of their measurement, for `read_rounds`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"made_for": dict(made_for), "rows": times.rows()}
    replace_file(path, json.dumps(content, indent=1) + "\n")


def read_rounds(path: Path, made_for: Mapping[str, Any] | None = None) -> RoundTimes | None:
    """Return the table if the file exists and fits, or None. Raises ValueError if it is damaged."""
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
    """Return the times if the file exists, or None. Raises ValueError for a damaged file."""
    rows = _read(path)
    if rows is None:
        return None
    try:
        return _moves(rows)
    except (TypeError, ValueError) as error:
        raise _damaged(path, error) from error


def _read(path: Path) -> Any:
    """Return the JSON at `path`; None if there is no such file."""
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
    """Return rounds and moves of a worker. Raises ValueError for missing or damaged files."""

    def expected(name: str, setting: str) -> ValueError:
        path = folder / name
        return ValueError(f"expected {path}, which runs with {setting} write, found none")

    if (rounds := read_rounds(folder / ROUNDS_FILE)) is None:
        raise expected(ROUNDS_FILE, 'Speculation.budget = "goodput"')
    if (moves := read_moves(folder / MOVES_FILE)) is None:
        raise expected(MOVES_FILE, "Sched.workers above one")
    try:
        return MeasuredCosts(rounds.rounds, moves.seconds)
    except ValueError as error:
        raise ValueError(f"{folder} holds no profile that a run wrote ({error})") from error
