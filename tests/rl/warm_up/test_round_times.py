"""The table of round seconds: what is timed, what is kept, when it is made anew."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest

from models import transformer
from models.config import ModelConfig
from rl.engine.config import EngineConfig
from rl.engine.engine import Engine
from rl.warm_up import round_times
from rl.warm_up.rollout_programs import Reach, round_buckets
from spec.config import SamplingConfig

MODEL = ModelConfig("llama", 20, 16, 1, 2, 1, 8, 16, max_positions=64)
CONFIG = EngineConfig(
    slots=2, min_slots=2, min_positions=16, rounds_per_fetch=4, max_nodes=2,
    prefill_rows=1,
)  # fmt: skip
SAMPLING = SamplingConfig(max_new_tokens=8)
REACH = Reach(max_requests=2, max_prompt_tokens=8)


def ticking(step_s=1.0):
    """A clock that goes on by `step_s` each time it is read."""
    times = itertools.count(0.0, step_s)
    return lambda: next(times)


@pytest.fixture(scope="module")
def params():
    return transformer.init(MODEL, jax.random.key(0))


def test_each_bucket_is_timed_and_a_plain_fetch_is_shared_by_its_rounds(params):
    engine = Engine(MODEL, CONFIG, clock=ticking())
    buckets = list(round_buckets(engine, SAMPLING, REACH))
    assert buckets == [(2, 2, 16), (2, 4, 16)]
    times = round_times.measure(engine, params, SAMPLING, buckets)
    assert times(2, 4, 16) == 1.0 and times(2, 2, 16) == 1.0 / CONFIG.rounds_per_fetch
    assert times(4, 4, 16) is None


def test_the_file_is_used_where_it_fits_and_measured_again_elsewhere(params, tmp_path):
    path = tmp_path / "run" / "round_times.json"

    def load(config=CONFIG, step_s=1.0):
        engine = Engine(MODEL, config, clock=ticking(step_s))
        return round_times.load_or_measure(path, engine, params, SAMPLING, REACH)

    # a fetch of one tick holds four plain rounds
    assert load().rows() == [
        ["packed round", 2, 2, 16, 0.25],
        ["packed round", 2, 4, 16, 1.0],
    ]
    assert load(step_s=5.0)(2, 4, 16) == 1.0  # kept
    assert json.loads(path.read_text())["made_for"]["buckets"] == [[2, 2, 16], [2, 4, 16]]
    other = dataclasses.replace(CONFIG, rounds_per_fetch=2)
    assert load(other, step_s=5.0).rows() == [
        ["packed round", 2, 2, 16, 2.5],
        ["packed round", 2, 4, 16, 5.0],
    ]


@pytest.mark.parametrize("text", ["{", '"x"', '{"made_for": {}}', "\x00"])
def test_a_damaged_file_is_named(params, tmp_path, text):
    path = tmp_path / "round_times.json"
    path.write_text(text)
    engine = Engine(MODEL, CONFIG, clock=ticking())
    if text == '{"made_for": {}}':  # of something else: made anew
        assert round_times.load_or_measure(path, engine, params, SAMPLING, REACH).rows()
        return
    with pytest.raises(ValueError, match=r"round_times\.json is damaged .*: delete it"):
        round_times.load_or_measure(path, engine, params, SAMPLING, REACH)


def test_measuring_leaves_the_engine_as_it_was(params):
    engine = Engine(MODEL, CONFIG)
    buckets = list(round_buckets(engine, SAMPLING, REACH))
    round_times.measure(engine, params, SAMPLING, buckets)
    assert engine.stats.fetches == 0 and not np.any(engine._rows.table.busy_B)
