"""The demo draws the same responses twice, and its lines say what a user needs to know."""

from __future__ import annotations

import pytest

from reprise.rl.commands import demo
from reprise.rl.commands.demo import Machine, Pair

FEW = (
    "Engine.slots=4",
    "Engine.min_slots=4",
    "Engine.max_nodes=4",
    "Engine.max_round_nodes=8",
    "Rollout.max_prompt_tokens=32",
    "Sampling.max_new_tokens=24",
    'Speculation.budget="fixed:4"',
    'Speculation.sources=("history", "group", "own")',
)
SLOW = Pair(4.0, 2.0, 1000, 400, 64, 0)
FAST = Pair(2.0, 2.5, 1000, 200, 64, 0)


def test_a_pair_draws_the_same_tokens_twice(capsys):
    pairs, machine = demo.compare(
        demo.SMALL, ["Make 28 of 2, 4, 5.\n", "Make 11 of 2, 4, 13.\n"], 2, settings=FEW
    )
    assert [pair.num_different for pair in pairs] == [0, 0]
    assert all(pair.num_responses == 16 and pair.num_drafted > 0 for pair in pairs)
    assert machine.round_ratio is None  # a fixed budget measures nothing
    assert min(machine.before_s, machine.after_s) > 0
    assert "pair 2: plain" in capsys.readouterr().out


def test_the_summary_has_the_median_and_the_reason():
    lines = demo.summary([SLOW, FAST, SLOW], Machine(10.0, 12.0, 64, 2.04))
    assert lines[0] == "median of 3: 2.00×; 0 of 192 responses differ"
    assert lines[1].startswith("why: 33% of the tokens were accepted draft tokens; a round that")
    assert "verifies 64 tokens for 16 requests takes 2.0 plain rounds" in lines[1]
    assert lines[2].startswith("this machine is busy: the same plain rollout took 10.0 s before")
    assert not any("busy" in line for line in demo.summary([SLOW], Machine(10.0, 11.0)))


def test_the_picture_is_a_png():
    assert demo.draw([SLOW, FAST]).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--pairs", "0"], "--pairs: expected at least 1, got 0"),
        (["--pair", "2"], "unrecognized arguments: --pair 2"),
        (["--questions", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--questions", "EMPTY"], "expected at least one line, got none"),
        (["--questions", "OTHER"], "expected a text as `prompt`"),
    ],
)
def test_wrong_arguments_are_one_sentence(argv, words, capsys, tmp_path):
    files = {"EMPTY": "", "OTHER": '{"question": "1"}\n'}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    argv = [str(tmp_path / word) if word in files else word for word in argv]
    try:
        code = demo.main([*argv, "--output", str(tmp_path)])
    except SystemExit as ended:
        code = ended.code
    assert code == 2 and words in capsys.readouterr().err
