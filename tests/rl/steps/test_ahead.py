"""Steps that are begun ahead of their weights: what is learnt is what `sync` learns, to the bit."""

from __future__ import annotations

import contextlib
import json
import time

import numpy as np
import pytest
from loop_runs import finish, stop_after
from run_settings import DAPO, DRAFTS, LEARNED, SETTINGS, TWO

from reprise.rl.engine.engine import Engine
from reprise.rl.learner import trainer
from reprise.rl.metrics.writer import read_metrics, step_rows
from reprise.rl.records.trajectory import Request
from reprise.rl.sessions.ahead_engine import AheadEngine, Prefetched
from reprise.rl.steps import ahead as run_ahead
from reprise.rl.steps.ahead import agreeing, prefetch_metrics
from reprise.rl.workers.messages import WorkerError
from tests.support.tiny_run import rewarded

pytestmark = pytest.mark.usefixtures("one_device")

AHEAD = ("Sched.mode='ahead'", *TWO)
MODES = {  # plainly: below
    "drafts": (*DRAFTS, "Speculation.sources=('last','history','group','own')"),
    "dynamic sampling": (*DAPO, "Reuse.mode='coupled'"),
    "a drafter that idle workers train": LEARNED,
    "lenient": ("Reuse.mode='lenient:e^0.5'", "Reuse.schedule='clip_fraction:0.2'"),
}


@pytest.fixture(scope="module", params=MODES)
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def settings(mode, tiny):
    return (*SETTINGS, *MODES[mode], rewarded(tiny, "lucky"))


@contextlib.contextmanager
def late_updates(has_begun):
    """Updates wait until `has_begun(engine, step)`, so that time decides nothing."""
    begin, update, planned = AheadEngine.begin, trainer.update, []

    def noted(self):
        begin(self)
        planned.append(self)

    def waiting(*args, **options):
        until_s, step = time.monotonic() + 120, len(planned)
        while planned and planned[-1]._begun_place is not None:
            if has_begun(planned[-1], step):
                break
            assert time.monotonic() < until_s, "nothing is begun"
            time.sleep(0.001)
        return update(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AheadEngine, "begin", noted)
        patch.setattr(trainer, "update", waiting)
        yield


def is_done(engine, step):
    """All requests of the next step have ended."""
    return engine._session._driver._scheduler.num_unfinished == 0


def is_begun(engine, step):
    """In every second step all requests of the next one have ended, else there is a token."""
    return is_done(engine, step) if step % 2 else engine._session.num_tokens(engine._begun_place)


@pytest.fixture(scope="module")
def ahead(tiny, settings, tmp_path_factory):
    with late_updates(is_begun):
        return finish(tiny, tmp_path_factory.mktemp("ahead"), *settings, *AHEAD)


def told(done, name):
    return [json.loads(line)[name] for line in done.samples.splitlines()]


def steps(done):
    """The rows of a run's steps, with what depends on who had time for what."""
    return step_rows(read_metrics(done.folder))


def assert_learnt_alike(one, other):
    for name in ("step", "example_id", "completion", "reward"):
        assert told(one, name) == told(other, name)
    for ours, theirs in zip(one.leaves, other.leaves, strict=True):
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parity
def test_a_step_that_was_begun_is_answered_as_one_that_was_not(
    tiny, settings, mode, ahead, tmp_path
):
    assert_learnt_alike(ahead, finish(tiny, tmp_path, *settings))
    rows = steps(ahead)
    begun = [row["ahead/begun_tokens"] for row in rows]
    kept = [row["ahead/kept_tokens"] for row in rows]
    assert begun[0] == 0 and sum(begun) > 0, "an update leaves time to begin something"
    assert all(0 <= k <= b for k, b in zip(kept, begun, strict=True))
    assert 0 < sum(kept) < sum(begun), "some of it stands, and not all"
    assert all(row["rollout/off_policyness/max"] == 0 for row in rows if mode != "lenient")
    dropped = sum(row["ahead/dropped_requests"] for row in rows)
    assert dropped == 0 or mode == "dynamic sampling"
    if mode == "lenient":
        assert sum(row["spec/verified_prefix_tokens"] for row in rows) > 0


@pytest.mark.parity
def test_noise_that_is_renewed_is_the_same_in_every_mode(tiny, tmp_path):
    """An epoch is a step: a step is begun before the rewards that renew its noise are known."""
    settings = (*SETTINGS, rewarded(tiny, "lucky"), "Rollout.prompts_per_step=5", "Run.steps=5")
    coupled, alone = "Reuse.mode='coupled'", "Reuse.mode='repeated_noise'"
    with late_updates(is_done):
        ahead = finish(tiny, tmp_path / "ahead", *settings, coupled, *AHEAD)
    assert_learnt_alike(ahead, finish(tiny, tmp_path / "sync", *settings, coupled))
    assert_learnt_alike(ahead, finish(tiny, tmp_path / "plain", *settings, alone))
    stop_after(tiny, tmp_path / "resumed", 3, *settings, alone, "Checkpoint.every_steps=0")
    assert_learnt_alike(ahead, finish(tiny, tmp_path / "resumed", *settings, alone))
    rows = steps(ahead)
    assert 0 < sum(row["spec/renewed_groups"] for row in rows) < 25
    assert sum(row["ahead/dropped_requests"] for row in rows) > 0
    assert 0 < max(row.get("spec/repeated_fraction", 0.0) for row in rows)


def test_stopped_and_resumed_it_learns_the_same_bits(tiny, settings, ahead, tmp_path):
    stop_after(tiny, tmp_path, 3, *(*settings, *AHEAD, "Checkpoint.every_steps=0"))
    resumed = finish(tiny, tmp_path, *settings, *AHEAD)
    assert "resuming after step 3" in resumed.show.messages
    assert_learnt_alike(resumed, ahead)


def test_wrong_tokens_that_were_begun_change_nothing(tiny, tmp_path, monkeypatch):
    """Every one of them is verified, whoever has drawn it."""
    resumed = Prefetched.resumed

    def wrong(self, requests):
        tokens = {i: tuple(t ^ 1 for t in ids) for i, ids in self.tokens.items()}
        return resumed(Prefetched(self.requests, tokens), requests)

    monkeypatch.setattr(Prefetched, "resumed", wrong)
    settings = (*SETTINGS, rewarded(tiny, "lucky"), "Run.steps=3")
    with late_updates(is_begun):
        done = finish(tiny, tmp_path / "wrong", *settings, *AHEAD)
    monkeypatch.undo()
    assert_learnt_alike(done, finish(tiny, tmp_path / "sync", *settings))


def test_begun_tokens_make_fewer_rounds(tiny, tmp_path, monkeypatch):
    """With weights that do not change everything that was begun stands, if it is verified."""
    monkeypatch.setattr(Engine, "_chunk_price", lambda engine, spec: None)
    settings = (*SETTINGS, rewarded(tiny, "lucky"), "Optimizer.learning_rate=0.0", "Run.steps=3")
    rounds = []
    for name, more in (("sync", ()), ("ahead", AHEAD)):
        with late_updates(is_done):
            done = finish(tiny, tmp_path / name, *settings, *more)
        rounds.append([row["rollout/rounds"] for row in done.rows][1:])
    assert all(row["ahead/kept_fraction"] == 1 for row in steps(done)[1:])
    assert sum(rounds[1]) < sum(rounds[0])


def test_what_dynamic_sampling_asks_itself_is_begun_again(tiny, tmp_path, monkeypatch):
    """The prompts that were begun as the next step's become those of a further pass."""
    planned, plan = [], run_ahead.coming_step

    def noted(system, cursor, step):
        planned.append((step, cursor))
        return plan(system, cursor, step)

    monkeypatch.setattr(run_ahead, "coming_step", noted)
    settings = (*SETTINGS, *DAPO, rewarded(tiny, "lucky"))
    done = finish(tiny, tmp_path, *settings, *AHEAD)
    asked = [row["dynamic_sampling/generated_groups"] for row in done.rows]
    assert len(set(asked)) > 1, "some steps are to ask further prompts"
    cursor = np.cumsum([0, *asked])
    for step in range(2, 7):
        first, *again = [at for s, at in planned if s == step]
        assert first == cursor[step - 2] + 2
        assert again == ([cursor[step - 1]] if asked[step - 2] > 2 else [])


@pytest.mark.fault
def test_a_worker_that_raises_ahead_of_its_step_ends_the_run(tiny, tmp_path, monkeypatch):
    """Also while an update runs; the last whole step is saved."""
    engine_round, failed = Engine._round, []

    def failing(self, *args):
        if (self._table.request_ids_B[self._table.busy_B] > 2**40).any():
            failed.append(self)
            raise RuntimeError("a device is gone")
        engine_round(self, *args)

    monkeypatch.setattr(Engine, "_round", failing)
    settings = (*SETTINGS, rewarded(tiny, "lucky"), "Run.steps=3")
    with (
        late_updates(lambda *_: failed),
        pytest.raises(WorkerError, match="a device is gone"),
    ):
        finish(tiny, tmp_path / "ahead", *settings, *AHEAD)
    monkeypatch.undo()
    resumed = finish(tiny, tmp_path / "ahead", *settings, *AHEAD)
    assert_learnt_alike(resumed, finish(tiny, tmp_path / "sync", *settings))


@pytest.mark.fault
def test_a_worker_that_is_replaced_costs_no_token(tiny, tmp_path, monkeypatch):
    engine_round, failed = Engine._round, []

    def failing(self, *args):
        ahead = (self._table.request_ids_B[self._table.busy_B] > 2**40).any()
        if len(failed) < 2 and ahead:
            failed.append(self.number)
            raise RuntimeError("a device is gone")
        engine_round(self, *args)

    monkeypatch.setattr(Engine, "_round", failing)
    settings = (*SETTINGS, rewarded(tiny, "lucky"), "Run.steps=3")
    restart = "Sched.on_error='restart'"
    with late_updates(lambda *_: len(failed) == 2):
        done = finish(tiny, tmp_path / "ahead", *settings, *AHEAD, restart)
    monkeypatch.undo()
    assert len(failed) == 2
    assert_learnt_alike(done, finish(tiny, tmp_path / "sync", *settings))


def test_what_stands_is_counted_up_to_the_first_difference():
    assert agreeing(np.array([1, 2, 3]), np.array([1, 2, 4, 3])) == 2
    assert agreeing(np.array([1, 2, 3]), np.array([1, 2])) == 2
    assert agreeing(np.array([1]), np.array([1, 2])) == 1

    class Drawn:
        def __init__(self, request_id, tokens):
            self.request_id, self.response_ids = request_id, np.array(tokens)

    requests = [Request(i, (1,)) for i in range(3)]
    begun = Prefetched(requests, {0: (5, 6), 1: (5, 7, 8), 2: (1,)})
    got = prefetch_metrics(begun, [Drawn(0, [5, 6, 9]), Drawn(1, [5, 6]), Drawn(7, [1])], dropped=4)
    assert got == {
        "ahead/begun_requests": 2.0,
        "ahead/begun_tokens": 5.0,
        "ahead/begun_fraction": 5 / 6,
        "ahead/kept_tokens": 3.0,
        "ahead/kept_fraction": 0.6,
        "ahead/kept_whole": 1.0,
        "ahead/dropped_requests": 5.0,
    }


def test_begun_tokens_go_to_the_request_with_that_prompt():
    asked = [Request(0, (1,)), Request(1, (2,)), Request(2, (3,))]
    begun = Prefetched([Request(0, (1,)), Request(1, (9,)), Request(2, (3,))], {0: (5,), 1: (6,)})
    assert [r.begun for r in begun.resumed(asked)] == [(5,), (), ()]
