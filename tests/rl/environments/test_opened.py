"""An environment is opened and reset before a run: a fault is one sentence with its fix."""

import string
from pathlib import Path

import pytest

from policies.make.characters import save_character_tokenizer
from reprise.models.text import tokenizer as tokenizers
from reprise.rl.data.tasks import Example, TaskConfig
from reprise.rl.environments.config import EnvironmentConfig
from reprise.rl.environments.opened import check_environment

PLUGINS = Path(__file__).with_name("plugins")


def check(tmp_path, name, answer):
    save_character_tokenizer(tmp_path, string.printable)
    config = EnvironmentConfig(factory=f"{PLUGINS}/{name}", deadline_s=5.0)
    example = Example("row#0", "1+1=", answer, {}, "test")
    check_environment(config, TaskConfig(), tokenizers.load(tmp_path), example)


def test_an_environment_that_works_is_accepted(tmp_path):
    check(tmp_path, "games.py:Guess", "5")


@pytest.mark.parametrize(
    ("name", "answer", "message"),
    [
        ("faults.py:Faulty", "raise", "can be reset with the row row#0, got raised: RuntimeError"),
        ("faults.py:Faulty", "os_exit", "can be reset with the row row#0, got died"),
        ("faults.py:NoReset", "a", r"expected an environment with reset\(…\)"),
        ("threads.py:Environment", "a", "starts the thread 'of the user'"),
    ],
)
def test_a_fault_is_one_sentence(tmp_path, name, answer, message):
    with pytest.raises(ValueError, match=message) as raised:
        check(tmp_path, name, answer)
    assert "\n" not in str(raised.value)
