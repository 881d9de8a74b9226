"""Drafting workers in programs of their own: the same tokens, whatever becomes of these."""

import dataclasses
import threading
from types import SimpleNamespace

import pytest
import rollouts
from drafting_actors import WINDOW, drafting_actors, save_policy
from thread_actors import ThreadRoom
from tiny_team import CONFIG, KEY, MODEL, PARAMS, PROMPTS, REQUESTS, SAMPLING, STOP
from waiting import wait_until

from reprise.rl.drafting import worker
from reprise.rl.drafting import workers as drafting
from reprise.rl.drafting.workers import RemoteDrafts
from reprise.rl.engine.engine import Engine
from reprise.rl.runtime.waits import ProgramLost
from reprise.rl.speculation.config import SpeculationConfig
from reprise.rl.speculation.device_drafters import DraftModel
from reprise.rl.speculation.sources import Speculation
from reprise.spec.budget.config import MODEL as DRAFT
from reprise.spec.decoupled.ahead import Enumerating
from reprise.spec.reuse.rollout_cache import RolloutCache

LIMIT_S = 120.0  # of a wait for a thread
SPECULATION = SpeculationConfig(budget="fixed:3", sources=("model",))
pytestmark = pytest.mark.parity


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(drafting, "BEAT_S", 0.05)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="module")
def engine():
    return Engine(MODEL, CONFIG)


@pytest.fixture(scope="module")
def plain(engine):
    return tokens(rollouts.run(engine, PARAMS, REQUESTS, SAMPLING, KEY, STOP))


def tokens(done):
    return {t.request_id: t.response_ids.tolist() for t in done}


class Verifying:
    """A verifying worker: plays rollouts that drafting workers draft for."""

    def __init__(self, engine, plain, model, actors):
        self.engine, self.plain, self.actors, self.lines = engine, plain, actors, []
        self.drafts = RemoteDrafts(self.lines.append)
        models = {DRAFT: DraftModel.elsewhere(model)}
        self.speculation = Speculation(
            SPECULATION, RolloutCache(), models, apart={DRAFT: self.drafts}
        )

    def play(self, **options):
        """Play, check the tokens, and return how many draft tokens were accepted."""
        self.drafts.use(self.actors.apart(0), None)
        keys = [f"q{g}" for g in range(len(PROMPTS))]
        options |= {"drafts": self.speculation.drafter_factory(keys, PROMPTS)}
        done = rollouts.run(self.engine, PARAMS, REQUESTS, SAMPLING, KEY, STOP, **options)
        assert tokens(done) == self.plain
        return self.engine.stats.accepted_tokens

    def accepts(self):
        """Play until draft tokens are accepted: a rollout may be over before a block comes."""
        wait_until(self.play)


@pytest.mark.parametrize("ahead", ["free_running", "enumeration"])
def test_tokens_are_those_of_plain_decoding(engine, plain, model, ahead):
    lines = []
    with drafting_actors(model, workers=2, verifying=1, ahead=ahead, lines=lines) as actors:
        actors.wait_ready()
        assert actors.draft_s > 0 and len(actors.apart(0).places) == 2
        verifying = Verifying(engine, plain, model, actors)
        verifying.accepts()
        wait_until(lambda: all(actor.call("count_steps").result() for actor in actors.actors))
        assert lines == verifying.lines == []  # their end fails calls that close requests


def test_verifying_workers_share_drafting_workers(model):
    with drafting_actors(model, workers=2, verifying=3) as actors:
        assert actors.apart(0).places == {}, "they compile"
        actors.wait_ready()
        assert [list(actors.apart(k).places) for k in range(3)] == [[0], [1], [0]]
        assert actors.apart(0).planned[-1] == WINDOW


def test_before_a_rollout_drafters_get_no_drafts(engine, plain, model):
    """They serve to compile what they do on the host."""
    verifying = Verifying(engine, plain, model, SimpleNamespace(apart=lambda k: None))
    verifying.drafts.use = lambda apart, times: None
    assert verifying.play() == 0 and verifying.lines == []


@pytest.mark.fault
def test_one_that_ends_costs_drafts_and_another_takes_its_place(engine, plain, model):
    room, lines, killed = ThreadRoom(), [], []

    def kill_first(trajectory):
        if not killed:
            killed.append(room.started[0][0].kill())

    with drafting_actors(model, room=room, lines=lines) as actors:
        actors.wait_ready()
        verifying = Verifying(engine, plain, model, actors)
        verifying.accepts()
        verifying.play(on_finish=kill_first)
        verifying.play()
        wait_until(lambda: actors.apart(0).places.get(0) not in (None, room.started[0][0]))
        verifying.accepts()
    assert "drafting worker 0" in lines[0] and lines[0].endswith("it is started again")


@pytest.mark.fault
def test_one_that_hangs_is_waited_for_by_nobody_and_is_started_again(
    engine, plain, model, monkeypatch
):
    go, is_waiting, step = threading.Event(), threading.Event(), Enumerating.step

    def hang_once(self):
        if hangs and not is_waiting.is_set():
            is_waiting.set()
            go.wait(LIMIT_S)
        return step(self)

    hangs, lines = [], []
    monkeypatch.setattr(Enumerating, "step", hang_once)
    monkeypatch.setattr(worker, "LEAVING_S", 0.01)

    def is_late(actor):
        for call in list(actor._calls):
            if call.args[:1] == ("count_steps",):
                call.until_s = 0.0  # its time is up
        return lines

    with drafting_actors(model, lines=lines) as actors:
        actors.wait_ready()
        verifying = Verifying(engine, plain, model, actors)
        hangs.append(True)
        wait_until(lambda: (verifying.play(), is_waiting.is_set())[1])
        wait_until(lambda: is_late(actors.actors[0]))
        go.set()
        wait_until(lambda: actors.actors[0].num_starts == 2)
        verifying.accepts()
    assert "no answer to count_steps within 300.0 s" in lines[0]


@pytest.mark.fault
def test_a_step_that_fails_is_reported_and_drafts_come_again(engine, plain, model, monkeypatch):
    step, fails = Enumerating.step, []

    def fail_once(self):
        if fails:
            raise RuntimeError(fails.pop())
        return step(self)

    monkeypatch.setattr(Enumerating, "step", fail_once)
    with drafting_actors(model) as actors:
        actors.wait_ready()
        verifying = Verifying(engine, plain, model, actors)
        fails.append("a device is gone")
        wait_until(lambda: (verifying.play(), verifying.lines)[1])
        verifying.accepts()
    assert verifying.lines[0] == (
        "warning: drafting worker 0 failed: RuntimeError: a device is gone; it starts again"
    )


def test_one_that_cannot_draft_ends_the_start(model, tmp_path):
    away = dataclasses.replace(model, directory=str(tmp_path / "nowhere"))
    with drafting_actors(away) as actors, pytest.raises(ProgramLost, match="does not start"):
        actors.wait_ready()
