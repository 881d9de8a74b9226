"""Budgets of seconds, with rows that compute nothing: what is on disk after any end."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import types
from functools import partial

import pytest

from benchmarks import environment
from benchmarks.accelerator import budget
from benchmarks.accelerator.budget import Log, Record, Row

ENDLESS_S = 1e6
# A worker whose rows are the functions of `ROWS`, by name.
SCRIPT = """
import json, os, sys, time
from pathlib import Path
from benchmarks.accelerator import budget

def good(log):
    log.phase("measure")
    yield {"flags": os.environ["XLA_FLAGS"], "process": os.getpid()}

def bad(log):
    yield {"step": 1}
    raise KeyError("planted")

def crashes(log):
    yield {"step": 1}
    print("the device is lost", file=sys.stderr, flush=True)
    os._exit(7)

def hangs(log):
    yield {"step": 1}
    log.phase("compile")
    time.sleep(1000)

def absent(log):
    raise budget.NotRun("it is about another device")
    yield

def steps(log):
    for step in range(1000):
        yield {"step": step}
        time.sleep(0.1)

budget.end_with_parent()
names, path, flags, ends_at_s = sys.argv[1:]
rows = [budget.Row(**row) for row in json.loads(names)]
measures = {row.name: globals()[row.name.split()[0]] for row in rows}
budget.work(rows, measures, budget.Record.read(Path(path)), flags, float(ends_at_s))
"""


def command(path, rows, flags, ends_at_s):
    names = json.dumps([dataclasses.asdict(row) for row in rows])
    return [sys.executable, "-c", SCRIPT, names, str(path), flags, str(ends_at_s)]


def environ():
    return os.environ | {"PYTHONPATH": str(environment.ROOT), "XLA_FLAGS": ""}


def run(tmp_path, *rows, seconds=60.0):
    """Run rows within a budget; return their entries by name, as they are on disk."""
    path = tmp_path / "rows.json"
    record = Record.of(path, rows, size="fake")
    of_rows = partial(command, path, rows)
    ends_at_s = time.monotonic() + seconds
    budget.run(record, rows, of_rows, tmp_path / "log.txt", ends_at_s, environ())
    return {entry["row"]: entry for entry in json.loads(path.read_text())["rows"]}


def test_rows_run_in_their_order_in_one_process_and_others_with_their_flags(tmp_path):
    rows = Row("good 1", 1.0), Row("good 2", 1.0), Row("good 3", 1.0, "--flag"), Row("good 4", 1.0)
    found = run(tmp_path, *rows)
    assert [entry["status"] for entry in found.values()] == ["done"] * 4
    figures = [entry["figures"][0] for entry in found.values()]
    assert ["--flag" in f["flags"] for f in figures] == [False, False, True, False]
    assert figures[0]["process"] == figures[1]["process"] != figures[2]["process"]
    assert found["good 1"]["phase"] == "measure" and found["good 1"]["seconds"] >= 0


def test_a_failing_row_costs_its_own_figures_and_keeps_its_last_lines(tmp_path):
    found = run(tmp_path, Row("bad", 1.0), Row("good", 1.0))
    bad = found["bad"]
    assert (bad["status"], bad["why"]) == ("failed", "KeyError: 'planted'")
    assert bad["figures"] == [{"step": 1}]
    assert bad["last_lines"][-1] == "KeyError: 'planted'" and len(bad["last_lines"]) > 2
    assert found["good"]["status"] == "done"


def test_a_row_that_ends_its_process_costs_its_own_figures(tmp_path):
    found = run(tmp_path, Row("crashes", 1.0), Row("good", 1.0))
    lost = found["crashes"]
    assert (lost["status"], lost["why"]) == ("failed", "the process ended with status 7")
    assert lost["figures"] == [{"step": 1}] and lost["last_lines"] == ["the device is lost"]
    assert found["good"]["status"] == "done"


def test_rows_of_a_worker_that_cannot_start_fail_together(tmp_path):
    rows = [Row("good 1", 1.0), Row("good 2", 1.0)]
    path = tmp_path / "rows.json"
    planted = [sys.executable, "-c", "raise ImportError('planted')"]
    record = budget.run(
        Record.of(path, rows),
        rows,
        lambda flags, ends_at_s: planted,
        tmp_path / "log.txt",
        time.monotonic() + 60,
    )
    entries = record.result["rows"]
    assert [e["status"] for e in entries] == ["failed"] * 2
    assert {e["why"] for e in entries} == {"no start: ImportError: planted"}
    assert (tmp_path / "log.txt").read_text().count("ImportError: planted") == 1


def test_a_row_that_does_not_fit_is_skipped_and_never_begun(tmp_path):
    found = run(tmp_path, Row("good 1", 100.0), Row("good 2", 1.0), Row("hangs", 31.0), seconds=30)
    assert [e["status"] for e in found.values()] == ["skipped", "done", "skipped"]
    skipped = found["good 1"]
    assert skipped["expected_s"] == 100.0 and 20 < skipped["left_s"] <= 25, "five end a worker"
    assert "figures" not in skipped and found["hangs"]["left_s"] < 25


def test_a_row_that_hangs_is_cut_in_time_with_its_phase(tmp_path):
    began_s = time.monotonic()
    found = run(tmp_path, Row("good", 1.0), Row("hangs", 1.0), Row("good 2", 1.0), seconds=12)
    assert time.monotonic() - began_s < 12
    cut = found["hangs"]
    assert (cut["status"], cut["phase"]) == ("cut", "compile")
    assert cut["why"] == "the budget ended in the phase 'compile'"
    assert cut["figures"] == [{"step": 1}] and found["good"]["status"] == "done"
    assert found["good 2"]["status"] == "skipped"


def test_a_row_that_does_not_exist_here_says_why(tmp_path):
    found = run(tmp_path, Row("absent", 1.0), Row("good", 1.0))
    assert found["absent"]["status"] == "not run"
    assert found["absent"]["why"] == "it is about another device"
    assert found["good"]["status"] == "done"


def test_a_row_begins_no_step_that_would_not_fit(tmp_path, monkeypatch):
    rows = [Row("steps", 1.0)]
    record = Record.of(tmp_path / "rows.json", rows)
    now_s = 100.0
    monkeypatch.setattr(budget, "time", types.SimpleNamespace(monotonic=lambda: now_s))

    def steps(log):
        nonlocal now_s
        for step in range(20):
            now_s += 0.25
            yield {"step": step}

    budget.work(rows, {"steps": steps}, record, "", ends_at_s=102.1)
    entry = record.entry("steps")
    assert entry["status"] == "shortened"
    assert len(entry["figures"]) == 8  # a ninth would end at 102.25
    assert now_s == 102.0


@pytest.mark.parametrize("killed", ["supervisor", "worker"])
def test_figures_stay_if_a_process_is_killed_and_no_process_stays(tmp_path, killed):
    path = tmp_path / "rows.json"
    rows = [Row("steps", 1.0)]
    Record.of(path, rows)
    if killed == "worker":
        worker = subprocess.Popen(
            command(path, rows, "", ENDLESS_S),
            cwd=environment.ROOT,
            env=environ(),
            stdin=subprocess.PIPE,
        )
    else:  # a process that starts a worker, as `budget.run` does
        script = f"""
import subprocess, sys
worker = subprocess.Popen({command(path, rows, "", ENDLESS_S)!r}, stdin=subprocess.PIPE)
print(worker.pid, flush=True)
worker.wait()
"""
        worker = subprocess.Popen(
            [sys.executable, "-c", script],
            cwd=environment.ROOT,
            env=environ(),
            stdout=subprocess.PIPE,
        )
    deadline_s = time.monotonic() + 30
    while len(Record.read(path).result["rows"][0].get("figures", ())) < 3:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    time.sleep(0.5)
    entry = Record.read(path).entry("steps")
    assert entry["status"] == "running" and len(entry["figures"]) >= 3
    time.sleep(0.5)
    assert Record.read(path).entry("steps") == entry, "nobody writes any more"


def test_seconds_are_kept_by_phase(tmp_path, monkeypatch):
    clock = iter([0.0, 0.0, 1.0, 4.0, 5.0, 10.0, 10.0])
    monkeypatch.setattr(budget.time, "monotonic", lambda: next(clock))
    record = Record.of(tmp_path / "rows.json", [Row("x", 1.0)])
    log = Log(record, record.entry("x"), 100.0)  # at 0
    log.phase("compile")  # at 1
    log.phase("measure")  # at 4
    log.phase("compile")  # at 5
    log.end("done")
    entry = Record.read(record.path).entry("x")
    assert entry["phase_s"] == {"compile": 8.0, "measure": 1.0}
    assert (entry["status"], entry["seconds"], entry["left_s"]) == ("done", 10.0, 100.0)
