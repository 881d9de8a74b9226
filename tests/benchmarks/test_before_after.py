"""The figures of two checkouts' turns."""

import subprocess
import sys

from benchmarks import before_after
from benchmarks.ways import Turns


def test_ratios_are_taken_turn_by_turn_and_responses_compared():
    seconds = {("before", "plain"): [2.0, 1.0, 3.0], ("after", "plain"): [1.0, 2.0, 2.0]}
    responses = {("before", "plain"): [[1, 2], [3]], ("after", "plain"): [[1, 2], [4]]}
    row = before_after.row("plain", Turns(seconds, responses))
    assert row["ratio"] == 1.5 and row["ratios"] == [2.0, 0.5, 1.5]
    assert (row["before_s"], row["after_s"], row["tokens"]) == (2.0, 2.0, 3)
    assert row["differing_responses"] == 1 and row["responses"] == 2


def test_updates_have_ratios_of_seconds():
    row = before_after.update_row({"before": [2.0, 3.0, 8.0], "after": [1.0, 2.0, 2.0]})
    assert row["ratios"] == [2.0, 1.5, 4.0] and row["ratio"] == 2.0
    assert (row["before_s"], row["after_s"]) == (3.0, 2.0)


def test_a_folder_without_a_checkout_is_refused(tmp_path):
    command = [sys.executable, "-m", "benchmarks.before_after", "--before", str(tmp_path)]
    done = subprocess.run(
        command, cwd=before_after.ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1 and "expected --before a folder with a checkout" in done.stderr
