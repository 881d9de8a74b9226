"""A draw of the hostile corpus: nothing written outside, executed, hung or raised as a traceback.

The whole of it is `python -m benchmarks.soak hostile`.
"""

from __future__ import annotations

import contextlib
import random
import runpy
import shutil
import subprocess
import sys
import time

import pytest

from reprise.rl.gin.loader import load
from reprise.rl.settings.config import TrainConfig
from tests.hostile import corpus, file_cases, watch
from tests.hostile.watch import CANARY, Case

BUDGETS = {"configs": 40, "policies": 15, "drafters": 40}
BUDGETS |= {"rows": 40, "parquet": 30, "arrow": 30, "ggufs": 10, "tokenizers": 10}
BUDGETS |= {"checkpoints": 10}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return corpus.make_inputs(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize("kind", BUDGETS)
def test_a_sample_of_the_corpus(kind, tiny):
    counts = watch.count(corpus.cases(kind, tiny, BUDGETS[kind]), inputs=tiny.parent)
    bad = counts.outside_writes + counts.outside_reads + counts.executions + counts.hangs
    bad += counts.tracebacks + counts.over_2_gb
    assert bad + counts.accepted_though_wrong == 0, "\n".join(counts.seen)
    assert counts.tried == BUDGETS[kind]
    assert counts.accepted < counts.tried * (0.5 if kind in corpus.CLASSES else 1)


def test_good_inputs_are_accepted(tiny):
    good = [
        corpus.config_cases.of_text("good", "Run.steps = 5\n", tiny),
        corpus.folder_cases.policy_case("good", lambda folder: None, False, tiny),
        corpus.folder_cases.drafter_case(
            "good", lambda folder: None, False, tiny, tiny.parent / "drafter"
        ),
    ]
    assert watch.count(good).accepted == 3


def test_settings_that_are_not_those_of_the_text_are_detected(tiny):
    config = load(TrainConfig, [tiny])
    corpus.config_cases.compare(config, "Run.steps = 3  # as it is\nRun.steps = %many\n")
    with pytest.raises(watch.Wrong, match="Run.steps is 3, and the text says 4"):
        corpus.config_cases.compare(config, "Run.steps = 5", "Run.steps = 4")


@pytest.mark.parametrize(
    ("key", "value", "wrong"),
    [
        ("rope_theta", 1e6, False),
        ("rope_theta", None, False),
        ("rope_theta", "1e6", True),
        ("rope_parameters", {"rope_tipe": "llama3"}, False),
        ("rope_parameters", {"rope_thetas": 1.0}, True),
    ],
)
def test_a_policy_that_reads_otherwise_must_say_so(tiny, tmp_path, key, value, wrong):
    good, ours = tiny.parent / "policy", tmp_path / "policy"
    shutil.copytree(good, ours)
    corpus.folder_cases.entry("config.json", key, value)(ours)
    expected = pytest.raises(watch.Wrong) if wrong else contextlib.nullcontext()
    with expected:
        corpus.folder_cases.compare(good, ours, lambda folder: folder)


def test_a_run_that_reads_otherwise_is_wrong_unless_it_says_so(tiny, monkeypatch):
    said = ""
    monkeypatch.setattr(file_cases, "effect", lambda command, ours, folder: (str(ours), said))
    run = file_cases.finished_run(tiny.parent, tiny)
    cases = file_cases.checkpoints(random.Random(0), run)
    assert watch.count([next(cases)]).accepted_though_wrong == 1
    said = "warning: a damaged checkpoint is skipped\n"
    assert watch.count([next(cases)]).accepted_though_wrong == 0


def write_outside(folder):
    (folder.parent / "outside").write_text("x")


def read_outside(folder):
    (folder.parent / "outside").read_bytes()


def rename_outside(folder):
    (folder / "a").write_text("x")
    (folder / "a").rename(folder.parent / "a")


def run_what_is_there(folder):
    (folder / "code.py").write_text("x = 1\n")
    runpy.run_path(str(folder / "code.py"))


def import_what_is_there(folder):
    (folder / f"{CANARY}_module.py").write_text("x = 1\n")
    sys.path.insert(0, str(folder))
    try:
        __import__(f"{CANARY}_module")
    finally:
        sys.path.remove(str(folder))


def start_a_process(folder):
    subprocess.run([sys.executable, "-c", ""], check=True)


def unwatched_process_leaves_a_canary(folder):
    spy = watch._spy
    spy.folder, before = None, spy.folder
    (folder.parent / CANARY).write_text("x")
    spy.folder = before


def hang(folder):
    time.sleep(60)


def lookup(folder):
    raise KeyError("x")


@pytest.mark.parametrize(
    ("fault", "counted"),
    [
        (write_outside, "outside_writes"),
        (read_outside, "outside_reads"),
        (rename_outside, "outside_writes"),
        (run_what_is_there, "executions"),
        (import_what_is_there, "executions"),
        (start_a_process, "executions"),
        (unwatched_process_leaves_a_canary, "executions"),
        (hang, "hangs"),
        (lookup, "tracebacks"),
        (lambda folder: None, "accepted_though_wrong"),
    ],
)
def test_forbidden_effects_are_detected(fault, counted):
    limit_s = 1.0 if fault is hang else watch.LIMIT_S
    counts = watch.count([Case("planted", fault, refused=True)], limit_s)
    assert getattr(counts, counted) > 0 and counts.seen
