"""What a run measured, written by those who measure it and read for the simulator."""

import json

import pytest
import tiny_team

from reprise.rl.engine.engine import Engine
from reprise.rl.gin.loader import load
from reprise.rl.runtime.run_files import MOVES_FILE, ROUNDS_FILE
from reprise.rl.simulation.config import SimulateRun
from reprise.rl.simulation.rollouts import play
from reprise.rl.warm_up import round_times, transfer_times
from reprise.rl.warm_up.measured_run import (
    MoveTimes,
    read_moves,
    read_profile,
    read_rounds,
    write_moves,
    write_rounds,
)
from reprise.rl.warm_up.rollout_programs import Reach
from reprise.spec.round_times import RoundTimes

TIMES = RoundTimes(
    {(4, 4, 64): 0.5, (4, 4, 128): 1.0}, {"eagle": {(4, 3, 64): 0.125, (4, 1, 64): 0.1}}
)
MOVES = MoveTimes({15: (0.25, 0.5)})
SETTINGS = (
    *("SimulatedCluster.workers=2", "SimulatedCluster.kv_tokens=400", "Workload.num_groups=4"),
    *("Workload.group_size=2", "Workload.mean_tokens=20", "Workload.limit_tokens=40"),
    *("Workload.prompt_tokens=10", "Simulate.chunk_tokens=16"),
)


def write(folder, times=TIMES, moves=MOVES):
    if times is not None:
        write_rounds(folder / ROUNDS_FILE, times, {"device": "cpu"})
    if moves is not None:
        write_moves(folder / MOVES_FILE, moves)


def simulated(folder):
    config = load(SimulateRun, [], (f"SimulatedCluster.profile={str(folder)!r}", *SETTINGS))
    return {row["policy"]: row for row, _ in play(config)}


def test_both_files_come_back_as_they_were_written(tmp_path):
    write(tmp_path)
    found = read_rounds(tmp_path / ROUNDS_FILE, {"device": "cpu"})
    assert found.rows() == TIMES.rows() and found.draft("eagle", 4, 2, 64) == pytest.approx(0.1125)
    assert read_rounds(tmp_path / ROUNDS_FILE, {"device": "tpu"}) is None
    assert read_moves(tmp_path / MOVES_FILE) == MOVES


def test_a_profile_holds_the_plain_rounds_and_the_moves(tmp_path):
    write(tmp_path)
    found = read_profile(tmp_path)
    assert found.rounds == {(4, 4, 64): 0.5, (4, 4, 128): 1.0}
    assert found.moves == {15: (0.25, 0.5)}


@pytest.mark.parametrize(
    ("times", "moves", "message"),
    [
        (None, MOVES, r"round_times\.json, which runs with Speculation\.budget"),
        (TIMES, None, r"move_times\.json, which runs with Sched\.workers"),
        (RoundTimes({(4, 8, 64): 1.0}), MOVES, "expected seconds of plain rounds and of moves"),
        (TIMES, MoveTimes({}), "expected seconds of plain rounds and of moves"),
    ],
)
def test_files_without_a_profile_are_named(tmp_path, times, moves, message):
    write(tmp_path, times, moves)
    with pytest.raises(ValueError, match=message):
        read_profile(tmp_path)


@pytest.mark.parametrize("name", [ROUNDS_FILE, MOVES_FILE])
@pytest.mark.parametrize("text", ["{", "[[0]]", '{"rows": [[0]]}', "7", "\x00"])
def test_a_damaged_file_is_named(tmp_path, name, text):
    write(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        read_profile(tmp_path)


def test_a_folder_that_the_real_writers_wrote_can_be_simulated(tmp_path):
    """An engine's own measurements, through the files, to a simulated rollout."""
    now = iter(range(10**6))
    engine = Engine(tiny_team.MODEL, tiny_team.CONFIG, clock=lambda: 0.5 * next(now))
    path = tmp_path / ROUNDS_FILE
    reach = Reach(max_requests=2, max_prompt_tokens=8)
    times = round_times.load_or_measure(path, engine, tiny_team.PARAMS, tiny_team.SAMPLING, reach)
    policy = tiny_team.PARAMS, tiny_team.SAMPLING
    transfer_times.measure(engine, *policy, reach, tmp_path / MOVES_FILE)
    assert json.loads(path.read_text())["rows"] and read_profile(tmp_path).rounds == times.rounds
    rows = simulated(tmp_path)
    least_s = min(t for (slots, nodes, _), t in times.rounds.items() if nodes == slots)
    assert all(row["completion_s"] >= 20 * least_s for row in rows.values())
