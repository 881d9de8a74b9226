"""The table of round seconds: what is timed, what is kept, when it is made anew."""

import dataclasses
import itertools
import json
import time

import jax
import numpy as np
import pytest
from loop_runs import counted_compilations
from shapes import TINY

from reprise.models.decoder import transformer
from reprise.rl.engine.engine import Engine
from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.records.trajectory import Request
from reprise.rl.slots.config import EngineConfig
from reprise.rl.speculation.config import SpeculationConfig
from reprise.rl.speculation.sources import Speculation
from reprise.rl.warm_up import compile_buckets, round_times, timed_fetches
from reprise.rl.warm_up.rollout_programs import Reach, round_buckets
from reprise.spec.budget.budget import plain
from reprise.spec.budget.goodput import Goodput
from reprise.spec.config import SamplingConfig
from reprise.spec.reuse.prefix_rule import PrefixRule, parse_mode
from reprise.spec.reuse.rollout_cache import CachedResponse
from reprise.spec.verification.sampling import step_key

CONFIG = EngineConfig(
    slots=2, min_slots=2, page_tokens=16, rounds_per_fetch=4, max_nodes=2, prefill_rows=1
)  # fmt: skip
SAMPLING = SamplingConfig(max_new_tokens=8)
REACH = Reach(max_requests=2, max_prompt_tokens=8)


def ticking(step_s=1.0):
    """A clock that goes on by `step_s` each time it is read."""
    times = itertools.count(0.0, step_s)
    return lambda: next(times)


@pytest.fixture(scope="module")
def params():
    return transformer.init(TINY, jax.random.key(0))


def test_each_bucket_is_timed_and_a_plain_fetch_is_shared_by_its_rounds(params):
    engine = Engine(TINY, CONFIG, clock=ticking())
    buckets = list(round_buckets(engine, SAMPLING, REACH))
    assert buckets == [(2, 2, 16), (2, 4, 16)]
    times, _ = round_times.measure(engine, params, SAMPLING, buckets)
    assert times(2, 4, 16) == 1.0 and times(2, 2, 16) == 1.0 / CONFIG.rounds_per_fetch
    assert times(4, 4, 16) is None


class Falling(Engine):
    """An engine whose rounds take less time the more nodes they have."""

    now_s, took_s = [0.0], {2: 8.0, 4: 1.0}

    def verify_options(self, draw, num_slots, num_nodes):
        self.now_s[0] += self.took_s[num_nodes]
        return super().verify_options(draw, num_slots, num_nodes)

    def decode_options(self, draw):
        self.now_s[0] += self.took_s[2]
        return super().decode_options(draw)


def test_the_table_never_falls_with_more_nodes(params):
    engine = Falling(TINY, CONFIG, clock=lambda: Falling.now_s[0])
    times, _ = round_times.measure(engine, params, SAMPLING, [(2, 2, 16), (2, 4, 16)])
    assert times(2, 2, 16) == times(2, 4, 16) == 1.5  # of 8 / 4 rounds and 1


def test_the_other_workers_decode_while_one_is_timed(params, tmp_path):
    """Each of them has begun before the last round is timed, and none goes on after."""

    calls = [0, 0]

    class Decodes(Engine):
        def decode_options(self, draw):
            calls[self.number] += 1
            return super().decode_options(draw)

    class Waits(Engine):
        def verify_options(self, *given):
            while not all(calls):
                time.sleep(0.001)
            return super().verify_options(*given)

    others = [Decodes(TINY, CONFIG, number=i) for i in range(2)]
    path = tmp_path / "round_times.json"
    given = Waits(TINY, CONFIG), params, SAMPLING, REACH
    round_times.load_or_measure(path, *given, beside=others)
    after = list(calls)
    assert json.loads(path.read_text())["made_for"]["workers"] == 3
    time.sleep(0.05)
    assert calls == after


def test_the_file_is_used_where_it_fits_and_measured_again_elsewhere(params, tmp_path):
    path = tmp_path / "run" / "round_times.json"

    def load(config=CONFIG, step_s=1.0):
        engine = Engine(TINY, config, clock=ticking(step_s))
        return round_times.load_or_measure(path, engine, params, SAMPLING, REACH)

    # a fetch of one tick holds four plain rounds
    names = "packed round", "packed round of short rows"
    assert load().rows() == [
        [name, 2, *rest] for name in names for rest in ([2, 16, 0.25], [4, 16, 1.0])
    ]
    assert load(step_s=5.0)(2, 4, 16) == 1.0  # kept
    assert json.loads(path.read_text())["made_for"]["buckets"] == [[2, 2, 16], [2, 4, 16]]
    other = dataclasses.replace(CONFIG, rounds_per_fetch=2)
    assert load(other, step_s=5.0).rows() == [
        [name, 2, *rest] for name in names for rest in ([2, 16, 2.5], [4, 16, 5.0])
    ]


def test_a_table_that_an_earlier_run_kept_is_not_measured_again(params, tmp_path):
    kept = tmp_path / "kept"

    def load(run, step_s, config=CONFIG, **drafts):
        engine = Engine(TINY, config, clock=ticking(step_s))
        given = engine, params, SAMPLING, dataclasses.replace(REACH, speculative=True)
        return round_times.load_or_measure(tmp_path / run, *given, shared_folder=kept, **drafts)

    assert load("first", 1.0)(2, 4, 16) == 1.0 and len([*kept.iterdir()]) == 1
    assert load("second", 5.0)(2, 4, 16) == 1.0
    assert (tmp_path / "second").read_text() == (tmp_path / "first").read_text(), "for its resume"
    own = SpeculationConfig(sources=("own",))
    assert load("third", 5.0, speculation=own)(2, 4, 16) == 5.0, "other drafters"


def test_the_table_of_a_busy_machine_is_not_kept(params, tmp_path):
    steps = itertools.cycle([1.0, 1.0, 4.0])  # of times between two looks at the clock
    times = itertools.accumulate(steps)
    engine = Engine(TINY, CONFIG, clock=lambda: next(times))
    given = tmp_path / "run", engine, params, SAMPLING, REACH
    round_times.load_or_measure(*given, shared_folder=tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_a_fetch_has_the_runs_drafters_and_its_budget(params, monkeypatch):
    """Of those that draft on the device none: they are timed apart."""
    made, asked = [], []

    class Noted(Speculation):
        def __init__(self, config, *given, **options):
            made.append((config.sources, config.budget))
            super().__init__(config, *given, **options)

    def choose(self, *given):
        asked.append(given[2])
        return plain(given[3])

    monkeypatch.setattr(timed_fetches, "Speculation", Noted)
    monkeypatch.setattr(Goodput, "choose", choose)
    config = SpeculationConfig(sources=("group", "learned", "history"))
    times, _ = round_times.measure(
        Engine(TINY, CONFIG), params, SAMPLING, [(2, 2, 16), (2, 4, 16)], speculation=config
    )
    assert set(made) == {(("group", "history"), "goodput")}
    assert len(times.rounds) == 2 and len(asked) >= 2 * round_times.TRIES


@pytest.mark.parametrize("text", ["{", '"x"', '{"made_for": {}}', "\x00"])
def test_a_damaged_file_is_named(params, tmp_path, text):
    path = tmp_path / "round_times.json"
    path.write_text(text)
    engine = Engine(TINY, CONFIG, clock=ticking())
    if text == '{"made_for": {}}':  # of something else: made anew
        assert round_times.load_or_measure(path, engine, params, SAMPLING, REACH).rows()
        return
    with pytest.raises(ValueError, match=r"round_times\.json is damaged .*: delete it"):
        round_times.load_or_measure(path, engine, params, SAMPLING, REACH)


def test_measuring_leaves_the_engine_as_it_was(params):
    engine = Engine(TINY, CONFIG)
    buckets = list(round_buckets(engine, SAMPLING, REACH))
    round_times.measure(engine, params, SAMPLING, buckets)
    assert engine.stats.fetches == 0 and not np.any(engine._rows.table.busy_B)


def test_rounds_that_draw_in_chunks_are_compiled_and_timed_where_responses_are_reused(
    params, tmp_path
):
    few = {"slots": 4, "min_slots": 4, "prefill_chunk_tokens": 4, "max_round_nodes": 16}
    config, reach = dataclasses.replace(CONFIG, **few), Reach(4, 8, reuse=True)
    assert config.drawing_chunks(4, 4) == [1, 2, 4] and config.drawing_chunks(3, 4) == [1, 2]
    engine = Engine(TINY, config, clock=ticking())
    compile_buckets.warm_up(engine, params, SAMPLING, reach)
    path = tmp_path / "round_times.json"
    times = round_times.load_or_measure(path, engine, params, SAMPLING, reach)
    assert ["draws in chunks", 4, 16, 16, 1.0] in times.rows()
    assert {row[2] for row in times.rows() if row[0] == "draws in chunks"} == {4, 8, 16}
    assert ["draws in chunks with a round", 4, 4, 16, 1.0] in times.rows()
    assert times.fetch(4) > 0 and engine.stats.fetches == 0 == times.fetch(8)
    assert round_times.read_rounds(path).rows() == times.rows()

    def request(i):
        cached = CachedResponse(i, np.arange(2 + 2 * i, dtype=np.int32), 0.0)
        return Request(i, (1, 2, 3 + i), i, 0, cached=cached)

    rule = PrefixRule(parse_mode("full"), 0.0, 0, 1)
    spec = RolloutSpec(params, SAMPLING, step_key(0, 0), rule=rule)
    first = engine.run(spec, [request(i) for i in range(4)])
    with counted_compilations() as found:
        again = engine.run(spec, [request(i) for i in range(4)])
    assert not found
    in_chunks = [r.cached_in_chunks for r in engine.stats.timeline if r.cached_in_chunks]
    # once all prompts are there, four tokens of a row at a time
    assert in_chunks == [2 + 4 + 4 + 4, 2 + 4]
    pairs = zip(first, again, strict=True)
    assert all(np.array_equal(a.response_ids, b.response_ids) for a, b in pairs)
