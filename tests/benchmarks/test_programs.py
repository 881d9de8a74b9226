"""Every program that runs in seconds, at its smallest; its record; and planted faults."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from benchmarks import environment
from benchmarks.soak import inputs
from benchmarks.soak.__main__ import is_wrong
from benchmarks.turns import in_turns
from reprise.spec.page_table import PageTable

RECORD = {
    "benchmark",
    "command",
    "commit",
    "uncommitted_changes",
    "device",
    "instructions",
    "versions",
    "date",
}
BATCH = "--prompt 4 --new_tokens 4 --cache 8"
SMALLEST = {
    "rollout": f"--batch 2 --repeats 1 {BATCH}",
    "rounds": "--slots 2 --positions 160 --repeats 1",
    "compare": f"--batches 2 --repeats 1 --choosing_repeats 1 {BATCH}",
    "simulator.reproduction": "--experiments tlt --seeds 2 --processes 1",
    "exploration": "--prompts 5 --seeds 1",
    "soak": "pages --count 20",
}


def run(monkeypatch, capsys, program, flags):
    monkeypatch.setattr(sys, "argv", [program, *flags.split(), "--json"])
    try:
        runpy.run_module(f"benchmarks.{program}", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert not end.code
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.soak
@pytest.mark.parametrize("program", SMALLEST)
def test_a_program_runs_at_its_smallest(program, monkeypatch, capsys):
    found = run(monkeypatch, capsys, program, SMALLEST[program])
    assert set(found) > RECORD and found["benchmark"] == program
    assert found["command"].startswith(f"python -m benchmarks.{program} ")


def test_the_paths_of_this_machine_are_not_recorded(monkeypatch):
    argv = ["x", "--policy", "/home/me", "--seeds", "3", "--output=/tmp/a", "--json"]
    monkeypatch.setattr(sys, "argv", argv)
    found = environment.record(["numpy"], {"--policy", "--output"})
    assert found["command"].endswith(" --policy POLICY --seeds 3 --output OUTPUT --json")


def test_flags_have_the_types_of_their_defaults(monkeypatch, capsys, tmp_path):
    output = tmp_path / "found.json"
    argv = ["x", "second", "--sizes", "1", "2", "--folder", "a", f"--output={output}"]
    monkeypatch.setattr(sys, "argv", argv)
    flags = {"sizes": (3,), "folder": Path, "rate": 0.5, "name": str, "repeats": 7}
    parts = {
        "first": lambda given: {},
        "second": lambda given: {"found": {n: str(getattr(given, n)) for n in flags}},
    }
    environment.run("", parts, **flags)
    found = json.loads(output.read_text())
    assert found == json.loads(capsys.readouterr().out)
    expected = {"sizes": "[1, 2]", "folder": "a", "rate": "0.5", "name": "None", "repeats": "7"}
    assert found["found"] == expected


def test_kinds_take_turns_and_the_first_two_do_not_count():
    order = []
    kinds = {name: lambda n=name: order.append(n) or float(len(order)) for name in "ab"}
    seconds = in_turns(kinds, 5)
    assert "".join(order) == "abba" * 3 + "ab"
    assert seconds["a"].tolist() == [5, 8, 9, 12, 13]


def test_a_planted_fault_of_pages_is_counted_and_named(monkeypatch, tmp_path):
    share = PageTable.share  # the last page of a prompt is not copied
    monkeypatch.setattr(PageTable, "share", lambda *given: (x := share(*given)) and x[:-1])
    found = inputs.pages(tmp_path, 60)
    assert found["rollouts"] == 60 and found["failures"] > 0 and found["failed"]
    assert is_wrong(found)


@pytest.mark.parametrize(
    "row", [{"policy_equal": False}, {"tokens_that_differ": 1}, {"hangs": 1}, {"traceback": True}]
)
def test_a_soak_fails_if_a_run_with_a_fault_differs(row):
    assert is_wrong(row) and not is_wrong({name: name.endswith("_equal") for name in row})
