"""The environments of configs/environments, by hand."""

from pathlib import Path

import pytest

from reprise.rl.environments.user_environment import UserEnvironment
from reprise.rl.runtime.user_files import load_user_name

FOLDER = Path(__file__).parents[3] / "configs" / "environments"
ROW = {"prompt": "How many?", "answer": "7"}


def opened(name):
    environment = UserEnvironment(load_user_name(f"{FOLDER / name}"))
    environment.reset(ROW)
    return environment


def reply(answer):
    return [message["content"] for message in answer.get("messages", ())]


def test_a_wrong_number_is_corrected_by_a_sum():
    one = opened("corrections.py:Corrections")
    assert reply(one.step("#### 3")) == ["\n3+4\n"]
    assert reply(one.step("3+4=8\n#### 8")) == ["\n8-1\n"]
    assert one.score()["rewards"] == {"": 0.0}
    assert one.step("#### 7")["done"] and one.score()["rewards"] == {"": 1.0}


@pytest.mark.parametrize("text", ["7", "", "####", "#### -7", "#### 7777", "#### 7 or 8", "#### ⅶ"])
def test_a_turn_without_a_number_is_not_corrected(text):
    one = opened("corrections.py:Corrections")
    answer = one.step(text)
    assert reply(answer) == ["\n?\n"] and not answer["done"]
    assert one.score()["rewards"] == {"": 0.0}


def test_fewer_tries_are_paid_better():
    one = opened("try_again.py:TryAgain")
    assert reply(one.step("#### 8")) == ["\nWrong. Try again.\n"]
    assert one.step("#### 7")["done"]
    assert one.score()["rewards"] == {"": pytest.approx(2 / 3)}
