"""What a run measured, read for the simulator."""

import json

import pytest

from rl.config import load
from rl.run_profile import MOVES_FILE, ROUNDS_FILE, read_profile
from rl.simulation import play
from rl.simulation_config import SimulateRun

ROWS = {"made_for": {}, "rows": [[0, 4, 1, 64, 0.5], [0, 4, 1, 128, 1.0], [1, 4, 2, 64, 7.0]]}
MOVES = [[15, 0.25, 0.5]]


def write(folder, rounds=ROWS, moves=MOVES):
    for name, value in ((ROUNDS_FILE, rounds), (MOVES_FILE, moves)):
        if value is not None:
            (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


def test_rounds_without_lookups_and_moves_are_read(tmp_path):
    write(tmp_path)
    found = read_profile(tmp_path)
    assert found.rounds == {(4, 1, 64): 0.5, (4, 1, 128): 1.0}
    assert found.moves == {15: (0.25, 0.5)}


@pytest.mark.parametrize(
    ("rounds", "moves", "message"),
    [
        (None, MOVES, r"round_times\.json, which runs with Speculation\.budget"),
        (ROWS, None, r"move_times\.json, which runs with Sched\.workers"),
        ("{", MOVES, "is damaged"),
        ({"rows": [[0]]}, MOVES, "holds no profile that a run wrote"),
        (ROWS, [], "expected seconds of plain rounds and of moves"),
    ],
)
def test_what_is_no_profile_is_said(tmp_path, rounds, moves, message):
    write(tmp_path, rounds, moves)
    with pytest.raises(ValueError, match=message):
        read_profile(tmp_path)


def test_a_simulation_goes_by_it(tmp_path):
    write(tmp_path)
    settings = (
        *(f"Cluster.profile={str(tmp_path)!r}", "Cluster.workers=2", "Cluster.kv_tokens=400"),
        *("Workload.num_groups=4", "Workload.group_size=2", "Workload.mean_tokens=20"),
        *("Workload.limit_tokens=40", "Workload.prompt_tokens=10", "Simulate.chunk_tokens=16"),
    )
    rows = {row["policy"]: row for row, _ in play(load(SimulateRun, [], settings))}
    assert rows["seer"]["completion_s"] > 40 * 0.25, "rounds take a quarter of a second at least"
