"""Section `Environment`: values that cannot be are refused with the expected ones."""

import pytest

from reprise.rl.environments.config import MAX_TURNS, EnvironmentConfig, validate
from reprise.sched import episodes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factory": "guess"}, "PATH.py:name, got 'guess'"),
        ({"max_turns": 0}, "max_turns must be 1 to 128"),
        ({"max_turns": 129}, "max_turns must be 1 to 128"),
        ({"max_environment_tokens": -1}, "max_environment_tokens must be 0 to"),
        ({"max_tokens": 0}, "max_tokens must be 1 to"),
        ({"live": 0}, "live must be 1 to"),
        ({"deadline_s": 0}, "deadline_s must be above 0"),
        ({"deadline_s": float("nan")}, "deadline_s must be above 0"),
        ({"memory_limit_mib": 1}, "memory_limit_mib must be 64 to"),
        ({"on_failure": "skipp"}, "got 'skipp'; did you mean 'skip'"),
        ({"history": "any"}, "exact, append"),
    ],
)
def test_values_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        EnvironmentConfig(**changes)


def test_every_turn_has_names_of_noise():
    assert MAX_TURNS == episodes.MAX_TURNS


def test_an_episode_has_room_for_all_turns_unless_it_is_limited():
    config = EnvironmentConfig("a.py:A", max_turns=3, max_environment_tokens=10)
    assert config.episode_tokens(8) == 34
    assert EnvironmentConfig("a.py:A", max_turns=3, max_tokens=20).episode_tokens(8) == 20
    assert EnvironmentConfig().episode_tokens(8) == 8


def test_the_file_of_the_factory_must_exist(tmp_path):
    validate(EnvironmentConfig())
    assert not EnvironmentConfig().enabled
    with pytest.raises(FileNotFoundError, match=r"Environment.factory: there is no file"):
        validate(EnvironmentConfig(factory=f"{tmp_path}/none.py:Env"))
