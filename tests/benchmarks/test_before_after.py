"""The figures of two checkouts' turns."""

import subprocess
import sys

from benchmarks import before_after


def test_ratios_are_taken_turn_by_turn_and_responses_compared_with_the_plain_ones():
    turns = [(2.0, 1.0), (1.0, 2.0), (3.0, 2.0)]
    wanted = [[1, 2], [3]]
    row = before_after.row("plain", turns, wanted, [wanted, [[1, 2], [4]]])
    assert row["ratio"] == 1.5 and row["ratios"] == [2.0, 0.5, 1.5]
    assert (row["before_tokens_per_s"], row["after_tokens_per_s"]) == (1.5, 1.5)
    assert row["differing_responses"] == [0, 1]


def test_a_folder_without_a_checkout_is_refused(tmp_path):
    command = [sys.executable, "-m", "benchmarks.before_after", "--before", str(tmp_path)]
    done = subprocess.run(
        command, cwd=before_after.ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "expected --before a folder with a checkout" in done.stderr


def test_reuse_and_workers_take_turns_too():
    assert {"lenient", "coupled", "ahead", "workers"} <= set(before_after.WAYS)
    assert before_after.LIKE["coupled"] == before_after.LIKE["ahead"] == "plain_gumbel"
