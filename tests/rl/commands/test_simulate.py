"""`python -m rl.simulate`: what it refuses and what it writes."""

from __future__ import annotations

import json
import re

import pytest
from small_simulation import SMALL

from reprise.rl.commands import simulate


def arguments(*overrides):
    return [f"--gin.{o}" for o in (*SMALL, *overrides)]


def test_the_command_writes_what_it_prints(tmp_path, capsys):
    where = f"Simulate.directory={str(tmp_path)!r}"
    assert simulate.main([*arguments(where, "Simulate.seeds=(0, 1)"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "results.json").read_text())
    assert printed["simulated"] is True
    assert [row["seed"] for row in printed["rows"]] == [0] * 4 + [1] * 4
    assert (tmp_path / "figure.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("SimulatedCluster.device='H1000'", "expected one of 'H100'"),
        ("SimulatedCluster.model='GPT'", "expected one of 'Qwen"),
        (
            "Simulate.policies=('seer', 'sear')",
            "'oracle' or PATH.py:name, got tuple.*Did you mean seer",
        ),
        ("SimulatedCluster.kv_tokens=100", "a worker holds 100 positions.*fix: more"),
        ("SimulatedCluster.workers=0", "at least one worker"),
        ("Simulate.trace='nowhere'", "expected samples of step 1 in nowhere, got none; fix"),
    ],
)
def test_impossible_simulations_are_refused(override, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert simulate.main(arguments(override)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert re.search(message, error), error


def test_the_picture_says_what_it_is(tmp_path, monkeypatch):
    """Its title, a line where the tail begins, and room for the last line."""
    import matplotlib.figure

    seen = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda self, path: seen.append(self))
    where = f"Simulate.directory={str(tmp_path)!r}"
    assert simulate.main([*arguments(where, "Simulate.seeds=(0, 1)")]) == 0
    (picture,) = seen
    title = picture.get_suptitle()
    assert "Simulated" in title and "roofline" in title and "seed 1" in title
    panels = [axis for axis in picture.axes if len(axis.lines) == 2]
    assert len(panels) == 4
    for axis in panels:
        end_s, tail_s = (line.get_xdata()[0] for line in axis.lines)
        assert 0 < tail_s <= end_s < axis.get_xlim()[1]
