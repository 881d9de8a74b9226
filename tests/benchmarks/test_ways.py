"""Ways over plain decoding, from the seconds of scripted children."""

import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import ways
from benchmarks.environment import ROOT
from benchmarks.ways import Checkout, open_checkout, take_turns

PLAINS = {way: ways.LIKE.get(way, "plain") for way in ways.WAYS}
HERE = Checkout("after", ROOT, "ways", ways.WAYS, PLAINS, tuple(ways.POLICIES))


class Scripted:
    """A child whose ways take set seconds, turn by turn, and have set responses."""

    def __init__(self, seconds, responses):
        self.seconds, self.responses = seconds, responses
        self.runs, self.last = dict.fromkeys(seconds, 0), ""

    def ask(self, do, way=""):
        if do == "tokens":
            return {"tokens": self.responses[self.last]}
        self.last, turn = way, self.runs[way]
        self.runs[way] += 1
        return {"seconds": self.seconds[way][turn]}


def turns_of(seconds, responses):
    """Return three turns of the ways that have seconds."""
    child = Scripted(seconds, responses)
    return take_turns({"after": child}, {"after": list(seconds)}, 3)


def test_a_way_is_compared_turn_by_turn_with_the_plain_run_that_has_its_noise():
    seconds = {
        "plain": [2.0, 4.0, 8.0],
        "plain_coupled": [3.0, 3.0, 3.0],
        "history": [1.0, 4.0, 2.0],
        "coupled": [2.0, 3.0, 6.0],
        "lenient": [1.0, 2.0, 4.0],
    }
    own = [[1, 2], [3]]
    responses = {
        **dict.fromkeys(("plain", "plain_coupled", "history"), own),
        "coupled": [[1, 2], [4]],
        "lenient": [[1, 2, 3, 4], [5, 6]],  # twice the tokens in half of the seconds
    }
    found = turns_of(seconds, responses).over_plain(HERE)
    assert found.keys() == {"history", "coupled", "lenient"}
    assert found["history"]["ratios"] == [2.0, 1.0, 4.0] and found["history"]["over_plain"] == 2
    assert found["coupled"]["ratios"] == [1.5, 1.0, 0.5] and found["coupled"]["over_plain"] == 1
    assert found["lenient"]["over_plain"] == 4
    assert found["history"]["differing_responses"] == 0
    assert found["coupled"]["differing_responses"] == 1
    assert "differing_responses" not in found["lenient"], "it has other tokens by design"


@pytest.mark.parametrize(("seconds", "fails"), [(2.0, []), (2.05, ["siblings"])])
def test_a_guarded_way_that_loses_more_than_two_percent_is_named(seconds, fails):
    taken = {"plain": [2.0] * 3, "siblings": [seconds] * 3, "two_workers": [9.0] * 3}
    found = turns_of(taken, {way: [[1]] for way in taken}).over_plain(HERE)
    assert found["two_workers"]["over_plain"] < 0.98, "it has no guard"
    assert ways.lost(found) == fails


def test_tokens_are_kept_up_to_the_first_difference():
    now = [np.array([1, 2, 3, 4]), np.array([5, 6]), np.array([7, 8])]
    older = [np.array([1, 2, 9, 4]), np.array([5, 6, 7]), np.array([7])]
    assert ways.share_kept(now, older) == (2 + 2 + 1) / 8


def test_an_older_checkout_names_its_ways_by_its_own_module(tmp_path):
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "__init__.py").touch()
    module = folder / "before_after.py"
    module.write_text('WAYS = ("plain", "history")\n')
    found = open_checkout("before", tmp_path)
    assert (found.module, found.ways) == ("before_after", ("plain", "history"))
    assert found.policies == (ways.TINY,) and found.plains["history"] == "plain"
    module.write_text(
        'WAYS = ("plain", "lenient", "ahead")\n'
        'LIKE = {"lenient": "lenient", "ahead": "plain_gumbel"}\n'
    )
    found = open_checkout("before", tmp_path)
    assert set(found.ways) == {"plain", "lenient", "ahead", "plain_gumbel"}
    assert (found.plains["lenient"], found.plains["ahead"]) == ("plain", "plain_gumbel")
    assert open_checkout("after", ROOT).ways == ways.WAYS
    module.write_text("raise ValueError('broken')\n")
    with pytest.raises(SystemExit, match="expected a checkout with benchmarks/before_after.py"):
        open_checkout("before", tmp_path)


@pytest.mark.soak
def test_every_way_rolls_out_and_exact_ones_have_the_tokens_of_plain_decoding(tmp_path):
    output = tmp_path / "ways.json"
    sizes = "--slots", "2", "--turns", "1", "--prompts", "1", "--group_size", "2"
    policies = "--policies", ways.TINY, "downloads/none"
    command = [sys.executable, "-m", "benchmarks.ways", *policies, *sizes, "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(output.read_text(encoding="utf-8"))
    (row,) = found["rows"]
    assert row["name"] == "tiny_2" and row["ways"].keys() == {*ways.WAYS} - {*ways.PLAINS}
    assert found["differing_responses"] == 0 and 0 < row["kept"] <= 1
    assert found["reached"] == (not row["lost"])
    assert "downloads/none is left out" in done.stderr
