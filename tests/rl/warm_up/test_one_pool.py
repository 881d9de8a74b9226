"""A warm-up has one cache of pages at a time: on an accelerator there is no memory for two."""

import dataclasses
from typing import ClassVar

import jax
import pytest
import tiny_team
from shapes import one_size

from reprise.rl.engine.engine import Engine
from reprise.rl.warm_up import compile_buckets, round_times, transfer_times
from reprise.rl.warm_up.rollout_programs import Reach, round_buckets

CONFIG = one_size(dataclasses.replace(tiny_team.CONFIG, min_slots=2, page_tokens=4))
REACH = Reach(max_requests=4, max_prompt_tokens=16, speculative=True, moves=True)


class Counting(Engine):
    """Notes how many arrays of pages there are where a cache is made, by it or by a copy of it."""

    found: ClassVar[list[int]] = []

    def empty_cache(self, num_slots):
        if not self.makes_shapes:
            shape = self.num_pages, self.model.num_kv_heads, CONFIG.page_tokens, self.model.head_dim
            self.found.append(sum(x.shape == shape for x in jax.live_arrays()))
        return super().empty_cache(num_slots)


@pytest.fixture
def engine():
    Counting.found.clear()
    return Counting(tiny_team.MODEL, CONFIG)


def test_programs_are_run_on_one_cache_after_the_other(engine):
    compile_buckets.warm_up(engine, tiny_team.PARAMS, tiny_team.SAMPLING, REACH)
    assert len(engine.found) > 5 and set(engine.found) == {0}


def test_rounds_and_moves_are_timed_on_one_cache_after_the_other(engine, tmp_path):
    given = engine, tiny_team.PARAMS, tiny_team.SAMPLING
    buckets = list(round_buckets(engine, tiny_team.SAMPLING, REACH))
    assert {B for B, _, _ in buckets} == {2, 4}
    assert len(round_times.measure(*given, buckets)[0].rounds) == len(buckets)
    moves = transfer_times.measure(*given, REACH, tmp_path / "moves")
    assert moves.seconds and all(tokens < engine.num_positions for tokens in moves.seconds)
    assert len(engine.found) > 2 and set(engine.found) == {0}
