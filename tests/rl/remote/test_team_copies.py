"""Workers in other programs that answer others' last requests again: the same tokens, once each."""

import dataclasses
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import rollouts
from drafting_actors import drafting_actors, save_policy
from remote_faults import Killing, Lying, of_first, other_report, wait_until
from remote_workers import IDENTITY, Programs, make_team
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
)
from tiny_team import play as play_all

from models.kv_cache import KVCache
from rl.cluster.join import DRAFT_MODEL, identity_of
from rl.engine.engine import Engine
from rl.engine.rollout_spec import no_drafts
from rl.remote.drafter_messages import Drafters
from rl.remote.messages import CODEC
from rl.remote.run_messages import Answered, Copied, Dropped, Give, Report
from rl.speculation.config import SpeculationConfig
from rl.speculation.draft_model import DraftModel
from rl.speculation.sources import Speculation
from rl.trajectory import HostKv
from rl.workers.messages import WorkerError
from rl.workers.multi_engine import Helpers
from sched.protocol import Copy, Drop, Finished, WorkerLost
from sched.request import COPIES, copy_of
from spec.budget.config import MODEL as DRAFT
from spec.decoupled.copies import CopiesDrafter
from spec.reuse.rollout_cache import RolloutCache

LIMIT_S = 60.0  # of a wait for another program: rounds take milliseconds
LONG = [r for r in REQUESTS if r.group_id == 0]  # of one worker, under group_fifo
METHODS = ("own", "group")
SPECULATION = SpeculationConfig(budget="fixed:3", sources=("own", "group"))


@pytest.fixture(scope="module")
def alone():
    done = rollouts.run(Engine(MODEL, CONFIG), PARAMS, REQUESTS, SAMPLING, KEY, STOP)
    return {t.request_id: t for t in done}


def helped(programs, count=2, policy="group_fifo", **options):
    options = {"policy": policy, "kv_tokens": 200, "speculation": SPECULATION} | options
    multi, team = make_team(programs, count, **options)
    multi.helpers = Helpers(len(METHODS), 4, lambda held, left: True, dict)
    return multi, team


def actions(multi, kind):
    return [a for d in multi.decisions for a in d.actions if isinstance(a, kind)]


def events(multi, kind):
    return [d.event for d in multi.decisions if isinstance(d.event, kind)]


def winners(multi):
    """Which copy of a request was first, 0 for the request itself; by request."""
    return dict(copy_of(event.request_id) for event in events(multi, Finished))


def make_drafts():
    """What workers are told to draft with: requests, and their copies."""
    keys = [f"q{g}" for g in range(len(PROMPTS))]
    with Speculation(SPECULATION, RolloutCache()) as speculation:
        speculation.for_others, speculation.methods_of_copies = True, METHODS
        return speculation.drafter_factory(keys, PROMPTS, group_size=4)


@pytest.mark.parity
@pytest.mark.parametrize("policy", ["group_fifo", "divided_fifo", "seer"])
@pytest.mark.parametrize("drafts", [no_drafts, make_drafts()], ids=["plain", "drafts"])
def test_tokens_are_those_of_one_engine(alone, policy, drafts):
    multi, team = helped(Programs(), 3, policy, chunk_tokens=5)
    with team:
        team.start()
        for _ in range(2):
            assert_same_tokens(play_all(multi, drafts=drafts), alone)
            assert actions(multi, Copy), "the last request leaves a worker dry"
            assert actions(multi, Drop)
    assert team.losses == []


def shortest(alone):
    """The request of another group that ends first."""
    others = [r for r in REQUESTS if r.group_id != LONG[0].group_id]
    return min(others, key=lambda r: alone[r.request_id].num_tokens)


class HeldUp:
    """Has the first program stay behind the copies of its requests, which are `LONG`.

    With all prompts in it does so many rounds, and then none before it is let go. The other program
    begins after these, and notes what it takes, and what it drafts with.
    """

    def __init__(self, programs, rounds):
        self.began, self.let_go, self.rounds = threading.Event(), threading.Event(), rounds
        self.handed, self.inserted, self.drafters = [], [], []
        self._hold(programs.channels[0][-1].program.engine)
        self._note(programs.channels[1][-1].program)

    def _hold(self, engine):
        copy, play_round = engine.copy, engine._round

        def noted(request_id):
            partial = copy(request_id)
            if partial is not None:
                self.handed.append(partial.kv.num_tokens)
            return partial

        def held(*given):
            if engine._table.live_B.sum() == len(LONG):
                self.rounds -= 1
                if self.rounds < 0:
                    self.began.set()
            if not self.began.is_set() or self.let_go.is_set():
                play_round(*given)
            else:
                self.let_go.wait(0.005)  # it looks whether it is told anything

        engine.copy, engine._round = noted, held

    def _note(self, program):
        engine = program.engine
        insert, rollout, play_round = engine.insert_kv, engine.rollout, engine._round

        def late(*given):
            assert self.began.wait(LIMIT_S)  # what is copied has its prompts
            play_round(*given)

        def noted(cache, entries, *given, **options):
            self.inserted.append(len(entries))
            return insert(cache, entries, *given, **options)

        def opened(spec, **options):
            drafts = spec.drafts

            def made(context):
                drafter, budget = drafts(context)
                self.drafters.append(drafter)
                return drafter, budget

            return rollout(dataclasses.replace(spec, drafts=made), **options)

        engine.insert_kv, engine.rollout, engine._round = noted, opened, late


def play(multi, programs, alone, drafts=no_drafts, rounds=1):
    """Play with the first worker held up, check the tokens, and return what was noted."""
    held, seen = HeldUp(programs, rounds), []
    requests = [*LONG, shortest(alone)]
    given = PARAMS, requests, SAMPLING, KEY, STOP
    options = {"on_finish": lambda t: seen.append(t.request_id), "policy_version": 7}
    try:
        done = rollouts.run(multi, *given, drafts=drafts, **options)
    finally:
        held.let_go.set()
    assert sorted(seen) == sorted(r.request_id for r in requests), "each is given back once"
    for t in done:
        wanted = alone[t.request_id]
        assert t.response_ids.tolist() == wanted.response_ids.tolist()
        assert t.finish_reason == wanted.finish_reason
        assert t.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
    return held


def heard(programs):
    """Notes what all programs are given, and tell."""
    found = SimpleNamespace(given=[], told=[])

    def changed(channel):
        answer = channel._answer

        def noted(message):
            told = answer(message)
            for record, kept in (
                (CODEC.decode(message), found.given),
                (CODEC.decode(told), found.told),
            ):
                if isinstance(record, (Give, Report)):
                    kept.append(record)
            return told

        channel._answer = noted

    programs._changed = changed
    return found


@pytest.mark.parity
@pytest.mark.parametrize("rounds", [0, 1])
@pytest.mark.parametrize("drafts", [no_drafts, make_drafts()], ids=["plain", "drafts"])
def test_a_copy_that_is_first_is_the_answer(alone, drafts, rounds):
    programs = Programs()
    noted = heard(programs)
    multi, team = helped(programs)
    with team:
        team.start()
        held = play(multi, programs, alone, drafts, rounds)
    assert team.losses == []
    assert all(winners(multi)[r.request_id] for r in LONG), "copies have answered"
    # keys and values of prompt and response, as far as they had come, and others took them
    prompt = len(LONG[0].prompt_ids)
    assert held.handed
    assert all((n == prompt - 1) if not rounds else n >= prompt for n in held.handed)
    assert held.inserted
    told = [e for report in noted.told for e in report.events]
    assert sum(isinstance(e, Copied) and e.kv is not None for e in told) == len(held.handed)
    # who was too late has ended without an answer
    dropped = {e.request_id for e in told if isinstance(e, Dropped)}
    assert dropped == {n for given in noted.given for n in given.drops}
    assert dropped == {r.request_id for r in LONG}
    ids = [e.trajectory.request_id for e in told if isinstance(e, Answered)]
    assert len(ids) == len(LONG) + 1 and not dropped.intersection(ids)
    if drafts is not no_drafts:  # the programs draft for copies by the methods of the run
        drafter = held.drafters[-1]
        assert isinstance(drafter, CopiesDrafter)
        kinds = [type(d).__name__ for d in drafter._drafters]
        assert kinds == ["DrafterUnion", "NgramDrafter", "GroupDrafter"]


@pytest.fixture
def drafting(tmp_path):
    """A worker that drafts with a model, and the model's settings."""
    model = save_policy(tmp_path)
    with drafting_actors(model) as actors:
        actors.wait_ready()
        yield SimpleNamespace(model=model, apart=actors.apart)


@pytest.mark.parity
@pytest.mark.parametrize("copies", [True, False])
def test_copies_are_drafted_for_by_a_model_of_their_own_worker(alone, drafting, copies):
    """Others' drafts of the model come from a program; without its weights it says so."""
    speculation = SpeculationConfig(budget="fixed:3", sources=("model",))
    found = identity_of("", Path(__file__), Path(drafting.model.directory))
    told = {"drafters": Drafters(drafting.model, apart=True, copies=copies)}
    told["identity"] = IDENTITY | {DRAFT_MODEL: found[DRAFT_MODEL]}
    programs, models = Programs(), {DRAFT: DraftModel.elsewhere(drafting.model)}
    programs.apart = drafting.apart
    given = {"speculation": speculation, "apart": lambda worker: True}
    multi, team = helped(programs, **given, **told)
    with Speculation(speculation, RolloutCache(), models) as here, team:
        here.for_others, here.methods_of_copies = True, ("model", "own")
        drafts = here.drafter_factory([f"q{g}" for g in range(len(PROMPTS))], PROMPTS)
        team.start()
        if not copies:
            with pytest.raises(
                WorkerError, match="expected a draft model in Hello that drafts for"
            ):
                play_all(multi, drafts=drafts)
            return
        held = play(multi, programs, alone, drafts)
    assert all(winners(multi)[r.request_id] for r in LONG)
    usual, *methods = held.drafters[-1]._drafters
    assert [type(d).__name__ for d in methods] == ["DraftModelDrafter", "NgramDrafter"]
    assert [type(d).__name__ for d in usual._drafters] == ["DecoupledDrafter"]
    assert multi.stats.accepted_tokens > len(LONG), "it is the policy"


# --- losses -----------------------------------------------------------------------------


def begins_copies(given):
    return any(copy_of(s.request.request_id)[1] for s in given.starts)


KILLS = {
    "the original, when copies are asked for": (0, Give, lambda given: bool(given.copies)),
    "the original, when a copy was first": (0, Give, lambda given: bool(given.drops)),
    "a copy, when it begins": (1, Give, begins_copies),
}


@pytest.mark.fault
@pytest.mark.parity
@pytest.mark.parametrize("drafts", [no_drafts, make_drafts()], ids=["plain", "drafts"])
@pytest.mark.parametrize("which", KILLS)
def test_a_lost_program_costs_no_token(alone, which, drafts):
    number, kind, when = KILLS[which]
    killing, said = Killing(kind, 1, when=when), []
    programs = Programs(changed=of_first(number, killing))
    multi, team = helped(programs, said=said, deadline_s=5.0)
    with team:
        team.start()
        play(multi, programs, alone, drafts)
        (victim,) = killing.victims
        assert victim.ended == 1
        assert len(events(multi, WorkerLost)) == 1
        assert actions(multi, Copy)
        wait_until(lambda: said)
    assert "killed" in said[0]


# --- lies -------------------------------------------------------------------------------


def instead(kind, change):
    return other_report(lambda e: change(e) if isinstance(e, kind) else e)


def cut(event):
    """Without the last entry of its keys and values."""
    if event.kv is None:
        return event
    entries = event.kv.entries
    keys, values = (
        tuple(x[..., :-1] for x in entries.keys),
        tuple(x[:, :-1] for x in entries.values),
    )
    return dataclasses.replace(event, kv=HostKv(KVCache(keys, values)))


def longer(event):
    """With a response that goes on and on."""
    if event.prefix is None:
        return event
    columns = ("response_ids", "logprobs", "emission_logprobs", "policy_versions", "origins")
    parts = {n: np.repeat(getattr(event.prefix, n), 99) for n in columns}
    return dataclasses.replace(event, prefix=dataclasses.replace(event.prefix, **parts))


def foreign(event):
    if event.prefix is not None:
        event.prefix.response_ids[-1] = MODEL.vocab_size
    return event


LIES = {
    "it dropped request 999, which it was not told to": instead(Dropped, lambda e: Dropped(999)),
    "it gave a copy of request 9 that nobody has asked for": instead(
        Copied, lambda e: dataclasses.replace(e, number=9 + COPIES)
    ),
    "expected keys and values of": instead(Copied, cut),
    "outside of the vocabulary": instead(Copied, foreign),
    "request 0 came with": instead(Copied, longer),
}


@pytest.mark.fault
@pytest.mark.parity
@pytest.mark.parametrize("why", LIES)
def test_a_program_that_lies_of_copies_is_lost_and_changes_nothing(alone, why):
    programs, said = Programs(changed=of_first(0, Lying(LIES[why]))), []
    multi, team = helped(programs, said=said)
    with team:
        team.start()
        play(multi, programs, alone)
        wait_until(lambda: said)
    assert why in said[0]
