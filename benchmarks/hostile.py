"""Hostile inputs, all of the corpus: what was written outside, executed, hung or not handled.

A row a class: configurations, folders of policies and of drafters, answers against every reward
function; and run folders (links in every place, foreign files, side files, damaged checkpoints),
whose cases are tests: of those it says how many failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks import environment

BUDGETS = {"configs": 400, "policies": 300, "drafters": 300, "answers": 1500}
MUST = 0  # of each of these
FAULTS = ("outside_writes", "executions", "hangs", "tracebacks", "failed")
RUN_FOLDERS = ("tests/hostile/test_run_folder.py", "tests/fault/test_checkpoint_faults.py")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile", description=__doc__)
    parser.add_argument("--budget", type=float, default=1.0, help="share of the cases to try")
    parser.add_argument("--seed", type=int, default=0, help="of the random cases")
    environment.add_output_flags(parser)
    arguments = parser.parse_args(argv)
    result = environment.record("benchmarks.hostile", ("jax", "transformers", "tokenizers"))
    result["rows"] = rows(arguments.budget, arguments.seed)
    figures = {
        f"{row['class']}: {name}": value
        for row in result["rows"]
        for name, value in row.items()
        if name != "class"
    }
    environment.show(result, arguments, figures)
    return int(any(row.get(name, 0) > MUST for row in result["rows"] for name in FAULTS))


def rows(share: float, seed: int) -> list[dict[str, Any]]:
    """A row a class."""
    from tests.hostile import corpus, watch

    found = []
    with tempfile.TemporaryDirectory() as folder:
        tiny = corpus.make_inputs(Path(folder))
        for kind in corpus.CLASSES:
            start = time.perf_counter()
            budget = max(1, round(share * BUDGETS[kind]))
            counts = watch.count(corpus.cases(kind, tiny, budget, seed))
            for line in counts.seen:
                print(line.encode("ascii", "backslashreplace").decode(), file=sys.stderr)
            seconds = round(time.perf_counter() - start, 1)
            found.append({"class": kind, **counts.row, "seconds": seconds})
    return [*found, _answers(max(1, round(share * BUDGETS["answers"]))), _run_folders()]


def _answers(budget: int) -> dict[str, Any]:
    from tests.hostile import answers

    start = time.perf_counter()
    counts = answers.run(budget)
    return {"class": "answers", **counts, "seconds": round(time.perf_counter() - start, 1)}


def _run_folders() -> dict[str, Any]:
    """What is tested in tests: a case that fails wrote outside, hung, raised or lost something."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *RUN_FOLDERS]
        done = subprocess.run(command, cwd=environment.ROOT, stdout=sys.stderr, check=False)
        if done.returncode not in (0, 1):
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}")
        [suite] = ElementTree.parse(report).getroot().iter("testsuite")
    tried, failures, errors = (int(suite.attrib[n]) for n in ("tests", "failures", "errors"))
    seconds = round(time.perf_counter() - start, 1)
    return {"class": "run folders", "tried": tried, "failed": failures + errors, "seconds": seconds}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
