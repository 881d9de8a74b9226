"""The calculator of `benchmarks.end_to_end`: the same dialogue for our system and for TRL."""

import pytest

from benchmarks.end_to_end import calculator, protocol, tasks
from benchmarks.end_to_end.calculator import Calculator, Tool
from reprise.rl.gin.loader import load
from reprise.rl.settings.config import TrainConfig

TURNS = ["65-5=", "60-5=", "x=", "#### 5"]


@pytest.mark.parametrize(("turns", "reward"), [(TURNS, 1.0), ([*TURNS[:3], "#### 6"], 0.0)])
def test_both_systems_have_the_same_dialogue_and_reward(turns, reward):
    ours = Calculator()
    ours.reset("5", prompt="?")
    theirs = Tool()
    dialogue = []
    for turn in turns:
        message = calculator.parsed(turn)
        dialogue.append(message)
        reply = ours.step(turn)
        calls = message.get("tool_calls", [])
        assert (reply is None) == (not calls), "the same turns end an episode"
        for call in calls:
            arguments = call["function"]["arguments"]
            assert getattr(theirs, call["function"]["name"])(**arguments) + "\n" == reply
    assert ours.get_reward() == reward
    work = tasks.WORK["calculator"]
    [of_trl] = getattr(protocol.reward, work.reward)(calculator.last_turns([dialogue]), ["5"])
    assert of_trl == reward


def test_an_episode_that_ends_with_a_call_has_no_answer():
    assert calculator.last_turns([[calculator.parsed("#### 5\n5-5=")], []]) == ["", ""]


def test_limits_of_episodes_are_the_same():
    config = load(TrainConfig, [tasks.WORK["calculator"].config], [])
    work = tasks.WORK["calculator"]
    assert config.environment.max_tokens == work.max_new_tokens
    source = (protocol.__file__.rpartition("end_to_end")[0]) + "baselines/trl_grpo.py"
    with open(source, encoding="utf-8") as file:
        assert f"MAX_TURNS = {config.environment.max_turns}  " in file.read()
