"""Seconds of a new user's first commands: what is read from them, and which programs they find."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import first_minutes
from reprise.rl.commands.demo import Machine, Pair, summary


def test_the_demos_own_line_is_read():
    pairs = [Pair(2.0, 1.6, 900, 300, 32, 0), Pair(2.0, 1.0, 900, 300, 32, 1)]
    lines = "\n".join(summary(pairs, Machine(1.0, 1.0)))
    found = first_minutes.MEDIAN.search(lines)
    assert found is not None
    assert found.groups() == ("2", "1.62", "1", "64")


def test_the_second_run_has_the_programs_of_the_first(monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
    seen = []

    def run(variables, folder):
        assert "JAX_COMPILATION_CACHE_DIR" not in variables
        seen.append((variables["XDG_CACHE_HOME"], folder))
        cache = Path(variables["XDG_CACHE_HOME"])
        was_there = cache.exists()
        cache.mkdir(exist_ok=True)
        return {"was_there": was_there}

    assert first_minutes.cold_and_warm(run) == {
        "cold": {"was_there": False},
        "warm": {"was_there": True},
    }
    assert seen[0][0] == seen[1][0] and seen[0][1] != seen[1][1]


@pytest.mark.slow
def test_a_server_that_does_not_start_is_an_error(tmp_path):
    command = [sys.executable, "-m", "benchmarks.first_minutes", "server", "--policy", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "nowhere" in done.stderr
