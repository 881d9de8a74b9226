"""Drafting workers in programs of their own: the same tokens, whatever becomes of these."""

import dataclasses
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import rollouts
from drafting_programs import (
    RUN,
    Started,
    asker,
    commit,
    meet,
    programs,
    save_policy,
    told_of,
    wait_for,
)
from remote_workers import Programs, ThreadChannel, make_team
from tiny_team import (
    CONFIG,
    KEY,
    MODEL,
    PARAMS,
    PROMPTS,
    REQUESTS,
    SAMPLING,
    STOP,
    assert_same_tokens,
    play,
)

from rl.drafting.config import DraftingConfig
from rl.engine.engine import Engine
from rl.remote import drafting_link, drafting_workers
from rl.remote.drafting_messages import (
    CODEC,
    Brought,
    Exchange,
    Look,
    Prepare,
    Prepared,
    Seen,
    blocks_of,
    of_commits,
)
from rl.remote.drafting_service import DraftingProgram
from rl.remote.messages import Failed
from rl.remote.service import Met
from rl.runtime.waits import ProgramLost
from rl.speculation.config import SpeculationConfig
from rl.speculation.draft_model import DraftModel
from rl.speculation.sources import Speculation
from spec.budget.config import MODEL as DRAFT
from spec.reuse.rollout_cache import RolloutCache

SPECULATION = SpeculationConfig(budget="fixed:3", sources=("model",))
KEYS = [f"q{g}" for g in range(len(PROMPTS))]
WAYS = ("free_running", "enumeration")
DRAFTING = DraftingConfig(workers=1, window=2)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(drafting_workers, "BEAT_S", 0.1)
    monkeypatch.setattr(drafting_link, "RETRY_S", 0.02)


@pytest.fixture(scope="module")
def alone():
    done = rollouts.run(Engine(MODEL, CONFIG), PARAMS, REQUESTS, SAMPLING, KEY, STOP)
    return {t.request_id: t for t in done}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("draft"))


class Made:
    """Verifying workers and drafting programs, all in this process; a context manager."""

    def __init__(self, model, *, changed=lambda program: None, verifying=2, **settings):
        settings = {"workers": 1, "window": 2} | settings
        self.config = DraftingConfig(**settings)
        self.said, self.model, self.started = [], model, Started(changed)
        count = verifying + self.config.workers
        self.drafting = programs(model, self.started.connect, self.config, count, self.said)
        self.programs = Programs()
        self.programs.ask_at = self.ask = self.started.ask
        given = {"speculation": SPECULATION, "said": self.said, "apart": self.drafting.apart}
        self.multi, self.team = make_team(self.programs, verifying, **given, **told_of(model))
        self.speculation = Speculation(
            SPECULATION, RolloutCache(), {DRAFT: DraftModel.elsewhere(model)}
        )
        self.speculation.for_others = True

    def __enter__(self):
        self.drafting.__enter__()
        self.team.start()
        self.drafting.wait_started()
        return self

    def __exit__(self, *_):
        self.team.__exit__()
        self.drafting.__exit__()
        self.speculation.__exit__()
        for program in self.started.programs:
            program.close()

    def play(self, **options):
        drafts = self.speculation.drafter_factory(KEYS, PROMPTS)
        return play(self.multi, drafts=drafts, **options)

    def accepts(self, alone):
        """Play until draft tokens are accepted: on a busy machine a rollout may be over before."""
        return any(self.accepted(alone) for _ in range(20))

    def accepted(self, alone, **options):
        """Play, check the tokens, and return how many draft tokens were accepted."""
        assert_same_tokens(self.play(**options), alone)
        return self.multi.stats.accepted_tokens


@pytest.mark.parity
@pytest.mark.parametrize("ahead", WAYS)
def test_tokens_are_those_of_plain_decoding(alone, model, ahead):
    with Made(model, ahead=ahead) as made:
        assert made.accepts(alone)
        (program,) = made.started.programs
        assert program._told().threads.workers[0].steps > 0
    assert made.said == [] and made.team.losses == []


@pytest.mark.parity
def test_several_programs_draft_each_for_its_own_workers(alone, model):
    with Made(model, workers=2, verifying=1) as made:
        assert len(made.drafting.apart(0).addresses) == 2
        assert made.accepts(alone)
        assert all(p._told().threads.workers[0].steps for p in made.started.programs)
    with Made(model, workers=2, verifying=3) as made:
        first = [made.drafting.apart(i).addresses for i in range(3)]
        assert [len(some) for some in first] == [1, 1, 1]
        assert first[0] == first[2] != first[1]


def killed_after(made, responses):
    """Kill the drafting program after so many responses."""

    def on_finish(trajectory):
        responses.append(trajectory)
        if len(responses) == 3:
            next(iter(made.started.channels.values())).kill()

    return on_finish


@pytest.mark.fault
@pytest.mark.parity
def test_a_program_that_is_lost_costs_drafts_and_another_takes_its_place(alone, model):
    with Made(model) as made:
        made.accepted(alone, on_finish=killed_after(made, []))
        wait_for(lambda: len(made.started.channels) == 2)
        (worker,) = made.drafting.workers
        wait_for(lambda: worker.draft_s and worker.link is not None and worker.address.start == 2)
        wait_for(lambda: made.started.programs[1]._prepared is not None)
        wait_for(lambda: made.started.programs[1]._prepared.done())
        assert made.accepts(alone)
    assert any("go on without its drafts; it is started again" in line for line in made.said)


def hanging(go):
    """Change a program: its answers to exchanges wait until they are let go."""

    def changed(program):
        exchange = program.answers[Exchange]

        def hangs(asked):
            assert go.wait(60)
            return exchange(asked)

        program.answers[Exchange] = hangs

    return changed


@pytest.mark.fault
@pytest.mark.parity
def test_a_program_that_hangs_is_waited_for_by_nobody(alone, model):
    go = threading.Event()
    with Made(model, changed=hanging(go)) as made:
        assert made.accepted(alone) == 0
        go.set()
        assert made.accepts(alone)


@pytest.mark.fault
@pytest.mark.parity
def test_a_slow_program_costs_no_token(alone, model):
    def slow(program):
        exchange = program.answers[Exchange]

        def late(asked):
            time.sleep(0.05)
            return exchange(asked)

        program.answers[Exchange] = late

    with Made(model, changed=slow) as made:
        for _ in range(2):
            made.accepted(alone)
    assert made.said == []


@pytest.mark.fault
@pytest.mark.parity
def test_a_thread_that_raises_is_replaced_and_said(alone, model, monkeypatch):
    with Made(model) as made:
        (program,) = made.started.programs
        (thread,) = program._told().threads.workers
        true = program._told()._maker

        def fails(*given):
            program._told()._maker = true
            raise RuntimeError("a device is gone")

        program._told()._maker = SimpleNamespace(ahead=fails)
        made.accepted(alone)
        assert made.accepts(alone)
        assert thread.generation == 1
        wait_for(lambda: made.said)
    assert (
        "drafting worker 0 failed: RuntimeError: a device is gone; it is replaced" in made.said[0]
    )


def lying(change):
    """Change a program: it answers every exchange with other blocks."""

    def changed(program):
        exchange = program.answers[Exchange]

        def lies(asked):
            told = exchange(asked)
            if len(told.blocks.numbers_BX):
                change(told.blocks)
            return told

        program.answers[Exchange] = lies

    return changed


def of_another(blocks):
    blocks.numbers_BX[:, 0] = 10**6


def of_the_future(blocks):
    blocks.numbers_BX[:, 2] += 1000


def beyond(blocks):
    blocks.tokens_N[:] = MODEL.vocab_size


def without_parents(blocks):
    blocks.parents_N[:] = 5000


def unlikely(blocks):
    blocks.prob_N[:] = np.nan


@pytest.mark.fault
@pytest.mark.parity
@pytest.mark.parametrize("lie", [of_another, of_the_future, beyond, without_parents, unlikely])
def test_answers_that_do_not_fit_are_refused(alone, model, lie):
    with Made(model, changed=lying(lie)) as made:
        for _ in range(5):  # on a busy machine the rollout may be over before a block comes
            assert made.accepted(alone) == 0
            if any(p.program.remarks for (p,) in made.programs.channels.values()):
                break
        wait_for(lambda: any("drafts of drafting-" in line for line in made.said))
    assert any("expected" in line for line in made.said)


def prepared(ask, limit_s=60.0):
    until_s = time.monotonic() + limit_s
    while not (found := ask(Prepare(1.0))).done:
        assert time.monotonic() < until_s
    return found


def exchange(commits, closed=(), key=None, wait_s=5.0, link="a"):
    from jax.random import key_data

    key = np.asarray(key_data(KEY)) if key is None else key
    return Exchange(link, key, SAMPLING, of_commits(commits), closed, wait_s)


def test_a_program_checks_what_it_is_asked_and_drafts_once_it_is_prepared(model):
    program = DraftingProgram(RUN)
    ask = asker(program)
    assert "expected Meet first" in ask(exchange([commit(1)])).message
    other = {"identity": meet(model).identity | {"code of Reprise": "0000"}}
    assert "the same code of Reprise" in ask(meet(model, **other)).message
    away = dataclasses.replace(model, directory="/nowhere/to/be/found")
    assert "put the same" in ask(dataclasses.replace(meet(model), model=away)).message
    assert "expected 99 devices" in ask(meet(model, devices=99)).message
    assert isinstance(ask(meet(model)), Met)
    assert "expected Meet once" in ask(meet(model)).message
    assert "once it is prepared" in ask(exchange([commit(1)])).message
    assert isinstance(found := prepared(ask), Prepared) and found.draft_s > 0
    for bad in (
        exchange([commit(1, tokens=(MODEL.vocab_size,))]),
        exchange([commit(1, tokens=range(1, 19), remaining=9)]),
        exchange([commit(1, window=3)]),
        exchange([commit(1)], key=np.zeros(5, np.uint32)),
    ):
        assert isinstance(ask(bad), Failed)
    asked = exchange([commit(r, 2) for r in range(3)])
    brought = ask(asked)
    assert isinstance(brought, Brought)
    blocks = blocks_of(brought.blocks)
    assert {b.request_id for b in blocks} == {0, 1, 2} and {b.base_tokens for b in blocks} == {3}
    began_s = time.monotonic()
    idle = ask(exchange([], closed=(0, 1, 2)))
    assert not idle.more and not len(idle.blocks.numbers_BX) and idle.program == brought.program
    assert time.monotonic() - began_s < 2.0, "nothing is left to draft"
    seen = ask(Look())
    assert isinstance(seen, Seen) and seen.steps > 0 and seen.remarks == ()
    assert isinstance(CODEC.decode(program.answer(b"nonsense")), Failed)
    program.close()


def test_requests_are_shared_among_the_devices_of_a_program(model):
    program = DraftingProgram(RUN)
    ask = asker(program)
    if len(jax.local_devices()) < 2:
        pytest.skip("one device")
    assert isinstance(ask(meet(model, devices=2, rows=4)), Met)
    prepared(ask)
    blocks, left = [], [commit(r, 2) for r in range(0, 12, 2)]
    until_s = time.monotonic() + 30
    while len({b.request_id for b in blocks}) < 6:
        assert time.monotonic() < until_s
        blocks += blocks_of(ask(exchange(left)).blocks)
        left = []
    threads = program._told().threads.workers
    assert [worker.engine.device for worker in threads] == jax.local_devices()[:2]
    assert all(worker.steps for worker in threads)
    again = ask(exchange([commit(0, 2)], link="another"))  # its requests are those of others
    assert again.program == program._name
    program.close()


def test_a_program_that_cannot_serve_ends_the_start(model):
    def other(program):
        program._config = "another run"

    made = programs(model, Started(other).connect, DRAFTING, 2)
    with made, pytest.raises(ProgramLost, match=r"drafting program 0 does not start: .*configura"):
        made.wait_started()


def test_a_channel_that_stops_is_replaced(model):
    said, started = [], Started()
    with programs(model, started.connect, DRAFTING, 2, said) as made:
        made.wait_started()
        made.workers[0].link.deadline_s = 0.3
        (channel,) = started.channels.values()
        assert isinstance(channel, ThreadChannel)
        channel.stopped = True
        wait_for(lambda: len(started.channels) == 2)
        assert "no answer to Look for 0.3 s" in said[0]
    for program in started.programs:
        program.close()
