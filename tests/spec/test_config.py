"""Settings of sampling: those of tasks, and what is refused."""

import dataclasses
import re

import pytest

from reprise.spec.config import SamplingConfig


def test_a_task_s_settings_replace_those_of_all_and_its_stops_are_added():
    config = SamplingConfig(
        top_p=0.9,
        stop=("\n\n",),
        stop_ids=(4,),
        by_task=(
            'a: temperature=0.5,max_new_tokens = 8, stop=["x, y: z", "\\n\\n"]',
            "reasoning_gym:gcd?size=3: stop_ids=7, top_k=2",
            'b: stop="é\n"',
        ),
    )
    same = dataclasses.replace(config, by_task=())
    assert config.of("a") == dataclasses.replace(
        same, temperature=0.5, max_new_tokens=8, stop=("\n\n", "x, y: z")
    )
    assert config.of("reasoning_gym:gcd?size=3") == dataclasses.replace(
        same, stop_ids=(4, 7), top_k=2
    )
    assert config.of("b") == dataclasses.replace(same, stop=("\n\n", "é\n"))
    assert config.of("c") is None
    assert config.at(0.0).of("a") == dataclasses.replace(config.of("a"), temperature=0.0)
    assert SamplingConfig(by_task=("a: temperature=0.5",)).at(0.0).by_task == ()
    assert config.max_any_new_tokens == 256 and len(config.variants) == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stop": ("",)}, "got an empty one"),
        ({"stop": ("a", "b", "a")}, "stop: expected each once, got 'a' again"),
        ({"stop": ("a" * 101,)}, "at most 100 characters, got 101"),
        ({"stop": tuple(map(str, range(17)))}, "stop: expected at most 16, got 17"),
        ({"stop": ("\ud800",)}, "whole characters"),
        ({"stop": ("a\ufffd",)}, "whole characters"),
        ({"stop_ids": (3, 3)}, "stop_ids: expected each once, got 3"),
        ({"stop_ids": (-1,)}, "0 or more, got -1"),
        ({"stop_ids": tuple(range(65))}, "stop_ids: expected at most 64, got 65"),
        ({"by_task": ("gsm",)}, "expected a task's name, a colon and a space"),
        ({"by_task": ("gsm: ",)}, "expected one of temperature, top_k"),
        ({"by_task": ("gsm: draw=1",)}, "expected one of temperature, top_k"),
        ({"by_task": ("gsm: top_k=1, top_k=2",)}, "each once"),
        ({"by_task": ("gsm: top_k=1 top_p=1",)}, "expected a comma, got ' top_p=1'"),
        ({"by_task": ("gsm: top_k=many",)}, "expected top_k to be JSON"),
        ({"by_task": ("gsm: top_k=1.5",)}, "expected top_k to be int, got '1.5'"),
        ({"by_task": ("gsm: top_k=true",)}, "expected top_k to be int"),
        ({"by_task": ("gsm: stop=[1]",)}, "expected stop to be str or a list of str"),
        ({"by_task": ("gsm: temperature=NaN",)}, "by_task, 'gsm': temperature must be"),
        ({"by_task": ("gsm: max_new_tokens=0",)}, "by_task, 'gsm': max_new_tokens"),
        ({"by_task": ('gsm: stop=""',)}, "by_task, 'gsm': stop: .* an empty one"),
        ({"by_task": ("gsm: top_k=1", "gsm: top_k=2")}, "each task once, got 'gsm' again"),
        ({"by_task": ("gsm: stop=" + "[" * 100_000,)}, "expected stop to be JSON"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, message):
    with pytest.raises(ValueError, match=message if "*" in message else re.escape(message)):
        SamplingConfig(**settings)


def test_settings_of_a_task_that_is_not_there_are_refused():
    config = SamplingConfig(by_task=("gms: top_k=1",))
    with pytest.raises(ValueError, match=r"expected names of tasks \(gsm, math\), got 'gms'; did"):
        config.check_tasks(["gsm", "math"])
    config.check_tasks(["gms"])
