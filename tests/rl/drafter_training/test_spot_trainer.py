"""Idle workers train the drafter; whatever comes for them, they stop between two units."""

from __future__ import annotations

import random
import threading
import time
from functools import partial

import numpy as np
import pytest
from tiny_drafter import make_engine, make_trainer
from tiny_team import KEY, PARAMS, REQUESTS, SAMPLING, STOP, assert_same_tokens, workers

from reprise.rl.drafter_training.spot_trainer import SpotTrainer
from reprise.rl.drafter_training.trainer import BufferSink
from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.spec.eagle.config import DataBufferConfig
from reprise.spec.eagle_training.training_data import DataBuffer


def clock():
    clock.now += 1.0
    return clock.now


clock.now = 0.0


@pytest.fixture(scope="module")
def engines():
    return [make_engine() for _ in range(3)]


def make_spot(min_idle_workers=1, **changes):
    return SpotTrainer(make_trainer(**changes), min_idle_workers, clock)


def begun(spot, *worker_ids):
    for worker_id in worker_ids:
        spot.joined(worker_id)
    spot.prepare(PARAMS, 1)
    spot.rollout_began()
    return spot


def test_one_idle_worker_leads_and_the_next_joins(engines):
    spot = begun(make_spot(), 0, 1)
    assert [spot.spare(0, engines[0]) for _ in range(2)] == [True, True]
    assert spot.spare(1, engines[1])  # the third gradient
    assert not spot.spare(1, engines[1])  # the update is the leader's
    assert spot.spare(0, engines[0])
    kinds = [(s.worker_id, s.kind, s.step) for s in spot.take_spans()]
    assert kinds == [(0, "gradient", 0), (0, "gradient", 0), (1, "gradient", 0), (0, "update", 0)]
    assert spot.trainer.step == 1 and spot.take_spans() == []


def test_a_leader_that_has_work_hands_over(engines):
    spot = begun(make_spot(), 0, 1)
    assert spot.spare(0, engines[0]) and spot.spare(1, engines[1])
    spot.busy(0)
    while spot.trainer.step == 0:
        assert spot.spare(1, engines[1])
    assert [s.worker_id for s in spot.take_spans()] == [0, 1, 1, 1]


def test_too_few_idle_workers_do_nothing(engines):
    spot = begun(make_spot(min_idle_workers=2), 0, 1)
    assert not spot.spare(0, engines[0])
    assert spot.spare(1, engines[1]) and spot.spare(0, engines[0])


def test_no_training_before_or_after_a_rollout_or_without_data(engines):
    spot = make_spot()
    spot.joined(0)
    assert not spot.spare(0, engines[0])
    spot.prepare(PARAMS, 1)
    assert not spot.spare(0, engines[0])
    spot.rollout_began()
    assert spot.spare(0, engines[0])
    spot.rollout_ended()
    assert not spot.spare(0, engines[0])
    empty = begun(make_spot(buffer=DataBuffer(DataBufferConfig())), 0)
    assert not empty.spare(0, engines[0])


def rollout(team, spot, requests=REQUESTS, **options):
    buffer = spot.trainer.buffer
    spot.prepare(PARAMS, 1)
    sink = BufferSink(buffer, 1)
    spec = RolloutSpec(PARAMS, SAMPLING, KEY, STOP, policy_version=7, sink=sink)
    return team.run(spec, requests, **options)


def with_spot(engines, count, spot):
    team = workers(engines, count, chunk=3)
    team.spot = spot
    return team


@pytest.mark.parity
def test_rollouts_are_what_they_were_and_catch_what_is_learnt_from(engines):
    alone = {
        t.request_id: t
        for t in workers(engines, 1).run(
            RolloutSpec(PARAMS, SAMPLING, KEY, STOP, policy_version=7), REQUESTS
        )
    }
    spot = make_spot(buffer=DataBuffer(DataBufferConfig()))
    team = with_spot(engines, 3, spot)
    num_rollouts, spans, until_s = 0, [], time.monotonic() + 120
    while num_rollouts < 3 or not spans:  # some worker is idle in one of them
        assert time.monotonic() < until_s
        assert_same_tokens(rollout(team, spot), alone)
        num_rollouts, spans = num_rollouts + 1, spot.take_spans()
    caught = spot.trainer.buffer.sample(10**6, 1, np.random.default_rng(0))
    texts = {(*t.prompt_ids.tolist(), *t.response_ids.tolist()) for t in alone.values()}
    assert len(caught) > len(REQUESTS)
    for sequence in caught:  # some of a full row lack their end
        tokens = tuple(sequence.tokens_T.tolist())
        assert any(text[: len(tokens)] == tokens for text in texts)


@pytest.mark.fault
def test_rollouts_that_end_at_any_moment_lose_nothing(engines, monkeypatch):
    """Each worker finishes at most its current unit; no step and no sequence is lost."""
    spot, rng = make_spot(), random.Random(0)
    trainer, ended, late = spot.trainer, threading.Event(), []
    work, stop = trainer.work, spot.rollout_ended

    def watched(context, *, leads):
        if ended.is_set():
            late.append(leads)
        return work(context, leads=leads)

    def stopped():
        stop()
        ended.set()

    monkeypatch.setattr(trainer, "work", watched)
    monkeypatch.setattr(spot, "rollout_ended", stopped)
    team, held, steps = with_spot(engines, 3, spot), trainer.buffer.num_sequences, []
    until_s = time.monotonic() + 120
    while len(steps) < 20 or steps[-1] < 3:
        assert time.monotonic() < until_s
        ended.clear()
        late.clear()
        rollout(team, spot, rng.sample(REQUESTS, rng.randrange(1, 5)))
        steps.append(trainer.step)
        assert len(late) <= 3  # looked just before the end, and began just after it
    assert steps == sorted(steps)
    assert trainer.buffer.num_sequences >= held
    rows = trainer.take_history()
    assert len(rows) == trainer.step and not any(row["skipped"] for row in rows)
    assert int(trainer.state.step) == trainer.step


def test_nobody_trains_before_requests_are_where_they_run(engines, monkeypatch):
    """A worker that trained when its first request came would hold up the rollout."""
    spot, now, seen = make_spot(), ["after"], []

    def told(method, then, *args):
        method(*args)
        now[0] = then

    moments = {"prepare": "before", "rollout_began": "during", "rollout_ended": "after"}
    for name, then in moments.items():
        monkeypatch.setattr(spot, name, partial(told, getattr(spot, name), then))
    team, work = with_spot(engines, 3, spot), spot.trainer.work
    monkeypatch.setattr(spot.trainer, "work", lambda *a, **o: seen.append(now[0]) or work(*a, **o))
    until_s = time.monotonic() + 120
    while "during" not in seen:
        assert time.monotonic() < until_s
        rollout(team, spot)
    # one that looked just before the end may begin just after it
    assert "before" not in seen


@pytest.mark.fault
def test_a_rollout_that_is_given_up_ends_training_too(engines):
    spot = make_spot()
    team = with_spot(engines, 2, spot)

    def give_up(finished, tokens):
        if finished > 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rollout(team, spot, on_round=give_up)
    until_s = time.monotonic() + 60  # a thread that compiles is left, and ends then
    while any(t.name.startswith("worker-") for t in threading.enumerate()):
        assert time.monotonic() < until_s
        time.sleep(0.01)
    done = rollout(team, spot)
    assert len(done) == len(REQUESTS)
