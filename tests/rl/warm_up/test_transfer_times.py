"""Copies against passes: what is timed, and what a scheduler makes of it."""

import dataclasses
import itertools

import pytest
import tiny_team
from replay import RecordedTeam
from tiny_team import PARAMS, assert_same_tokens, play, starts

from reprise.rl.engine.engine import Engine
from reprise.rl.slot_memory.page_memory import PageMemory
from reprise.rl.warm_up import transfer_times
from reprise.rl.warm_up.measured_run import read_moves
from reprise.rl.warm_up.rollout_programs import Reach
from reprise.rl.warm_up.transfer_times import MoveTimes, measure
from reprise.rl.workers.config import SchedConfig
from reprise.sched.request import Kv


def test_the_faster_of_copy_and_recomputation_by_bucket():
    times = MoveTimes({7: (2.0, 1.0), 15: (2.0, 3.0)})
    assert [times.prefers_copy(n) for n in (1, 7, 8, 15, 99)] == [False, False, True, True, True]


@pytest.mark.parametrize(("copy_s", "pass_s"), [(1.0, 5.0), (5.0, 1.0)])
def test_medians_of_the_clock(copy_s, pass_s, tmp_path, monkeypatch):
    """The clock stands still but for the two moves; a slow first one counts for nothing."""
    now, first = [0.0], itertools.count()

    def insert(self, entering, run=PageMemory.insert):
        now[0] += copy_s + 100 * (next(first) == 0)
        return run(self, entering)

    def recomputed(pool, cache, num_tokens, run=transfer_times.recomputed):
        now[0] += pass_s
        return run(pool, cache, num_tokens)

    monkeypatch.setattr(transfer_times, "recomputed", recomputed)
    monkeypatch.setattr(PageMemory, "insert", insert)
    config = dataclasses.replace(tiny_team.CONFIG, page_tokens=8)
    engine = Engine(tiny_team.MODEL, config, clock=lambda: now[0])
    reach = Reach(max_requests=4, max_prompt_tokens=16)
    times = measure(engine, PARAMS, tiny_team.SAMPLING, reach, tmp_path / "moves")
    assert times.seconds == dict.fromkeys((3, 15, 31), (copy_s, pass_s))
    assert read_moves(tmp_path / "moves") == times
    assert times.prefers_copy(20) == (copy_s < pass_s)


@pytest.mark.parity
def test_recomputed_requests_resume_with_the_same_tokens():
    engines = [Engine(tiny_team.MODEL, tiny_team.CONFIG) for _ in range(2)]
    alone = {t.request_id: t for t in play(engines[0])}
    config = SchedConfig(policy="divided_fifo", workers=2, chunk_tokens=2, kv_tokens=40)
    copies = {"prefer_pool": lambda tokens: tokens > 8}
    team = RecordedTeam(engines, config, **copies)
    assert_same_tokens(play(team), alone)
    later = [a for a in starts(team) if a.chunk > 1]
    assert {a.kv for a in later} >= {Kv.POOL, Kv.PREFILL}
