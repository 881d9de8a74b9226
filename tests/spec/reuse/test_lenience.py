"""Schedules of the lenience, by hand."""

import math

import pytest

from spec.reuse import lenience
from spec.reuse.lenience import GAIN, LARGEST_LOG, parse_schedule


def test_constant():
    schedule = parse_schedule("constant")
    assert schedule.at(2.0, 0.7, 9) == 0.7 and schedule.after(0.7, 0.9) == 0.7


def test_linear_in_the_lenience():
    schedule = parse_schedule("linear:3:4")
    got = [math.exp(schedule.at(1.0, 0.0, step)) for step in (1, 2, 3, 5, 99)]
    assert got == pytest.approx([1.0, 1.5, 2.0, 3.0, 3.0])
    assert parse_schedule("linear:0:2").at(1.0, 0.0, 3) == -math.inf
    assert schedule.after(0.7, 0.9) == 0.7


def test_a_clip_fraction_is_steered_to_its_target():
    schedule = parse_schedule("clip_fraction:0.02")
    assert schedule.after(0.5, 0.02) == 0.5
    assert schedule.after(0.5, 0.0) == pytest.approx(0.5 + GAIN)
    assert schedule.after(0.5, 0.04) == pytest.approx(0.5 - GAIN / 2)
    assert schedule.after(LARGEST_LOG, 0.0) == LARGEST_LOG
    assert schedule.at(1.0, 0.3, 7) == 0.3
    log = 1.0
    for _ in range(200):  # a policy that clips in proportion to the lenience
        log = schedule.after(log, 0.01 * math.exp(log))
    assert 0.01 * math.exp(log) == pytest.approx(0.02, rel=0.01)


def test_names():
    assert lenience.log(0) == -math.inf and lenience.log(1.0) == 0
    bad_ones = ("linear", "linear:1", "linear:x:3", "linear:1:0", "linear:inf:3", "linear:-1:3")
    for bad in (*bad_ones, "clip_fraction", "clip_fraction:0", "clip_fraction:1", "cosine"):
        with pytest.raises(ValueError, match="schedule must be one of constant, linear:END:STEPS"):
            parse_schedule(bad)
