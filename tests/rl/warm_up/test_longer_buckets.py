"""The warm-up in two parts: what the first compiles, when the second comes, what is left then."""

import dataclasses
import itertools

import jax
import pytest
from loop_runs import counted_compilations
from shapes import TINY

from reprise.models import transformer
from reprise.rl.engine.config import EngineConfig
from reprise.rl.engine.engine import Engine
from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.records.trajectory import Request
from reprise.rl.runtime.signals import COMPILING, Watch
from reprise.rl.warm_up import round_times
from reprise.rl.warm_up.compile_buckets import LongerBuckets
from reprise.rl.warm_up.rollout_programs import Pool, Reach
from reprise.spec.config import SamplingConfig
from reprise.spec.sampling import step_key

CONFIG = EngineConfig(
    slots=2, min_slots=2, min_positions=16, rounds_per_fetch=4, max_nodes=2, prefill_rows=1
)
SAMPLING = SamplingConfig(max_new_tokens=24)
REACH = Reach(max_requests=2, max_prompt_tokens=8)


class Parts(Watch):
    """A watch that remembers the parts it was told of."""

    def __init__(self):
        super().__init__()
        self.parts = []

    def at(self, part):
        self.parts.append(part)
        super().at(part)


def run(engine, params, num_tokens):
    """Roll out two responses of that many tokens."""
    prompt = (1, 2, 3, 4, 5, 6, 7, 8)
    spec = RolloutSpec(params, SAMPLING, step_key(0, 0))
    done = engine.run(spec, [Request(i, prompt, 0, i, num_tokens) for i in range(2)])
    return [t.response_ids.tolist() for t in done]


@pytest.mark.parametrize(
    "outgrows",
    [pytest.param(False, marks=pytest.mark.soak), True],  # as in whole runs
)
def test_longer_buckets_are_compiled_once_and_after_that_nothing(tmp_path, outgrows):
    jax.clear_caches()
    ticks = itertools.count()
    engine = Engine(TINY, CONFIG, clock=lambda: float(next(ticks)))
    params = transformer.init(TINY, jax.random.key(0))
    told, watch = [], Parts()
    pool = Pool(engine, params, SAMPLING, REACH)
    longer = LongerBuckets(pool, watch, lambda done, total: told.append((done, total)))
    assert longer.max_positions == 16
    longer.warm_up()
    path = tmp_path / "round_times.json"
    args = engine, params, SAMPLING, REACH
    times = round_times.load_or_measure(path, *args, longer.max_positions)
    assert times(2, 2, 32) == times(2, 2, 16) == 1 / CONFIG.rounds_per_fetch
    assert not told and not path.exists()
    run(engine, params, 4)  # what a rollout itself compiles is shared with all others
    with counted_compilations() as found:
        run(engine, params, 4)
    assert not found and not told
    if outgrows:
        run(engine, params, 24)
        assert told[-1][0] == told[-1][1] > 0 and watch.parts == [COMPILING, "starting"]
    ticks = itertools.count(step=3)
    longer.finish(jax.tree.map(lambda x: x + 0, params), path, times)
    assert longer.done and told.count(told[-1]) == 1
    assert times(2, 2, 32) == 3 / CONFIG.rounds_per_fetch
    assert round_times.read_rounds(path).rows() == times.rows()
    with counted_compilations() as found:
        longer.finish(params, path, times)
        grown = run(engine, params, 24)
    assert not found and grown == run(Engine(TINY, CONFIG), params, 24)


def test_the_first_part_holds_the_longest_prompt_whatever_the_slots():
    params = transformer.init(TINY, jax.random.key(0))
    for max_prompt_tokens, most in ((20, 32), (40, 64)):
        reach = dataclasses.replace(REACH, max_prompt_tokens=max_prompt_tokens)
        pool = Pool(Engine(TINY, CONFIG), params, SAMPLING, reach)
        assert LongerBuckets(pool, Watch()).max_positions == most
