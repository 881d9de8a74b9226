"""A draw of the hostile corpus: nothing written outside, executed, hung or raised as a traceback.

The whole of it is `python -m benchmarks.soak hostile`.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
import time

import pytest

from tests.hostile import corpus, watch
from tests.hostile.watch import CANARY, Case

BUDGETS = {"configs": 40, "policies": 15, "drafters": 40}
BUDGETS |= {"rows": 40, "parquet": 30, "arrow": 30, "ggufs": 10, "tokenizers": 10}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return corpus.make_inputs(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize("kind", BUDGETS)
def test_a_sample_of_the_corpus(kind, tiny):
    counts = watch.count(corpus.cases(kind, tiny, BUDGETS[kind]))
    bad = counts.outside_writes + counts.executions + counts.hangs + counts.tracebacks
    bad += counts.over_2_gb
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


def write_outside(folder):
    (folder.parent / "outside").write_text("x")


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
