"""Indexes that history workers build draft as those of one program; a lost one costs no token."""

import dataclasses
import threading
import time

import numpy as np
import pytest
import rollouts
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

from rl.config.loader import load
from rl.engine.engine import Engine
from rl.engine.rollout_spec import RolloutSpec
from rl.loop.config_checks import check_cluster
from rl.loop.experiment import TrainConfig
from rl.remote import history_service, history_workers
from rl.remote.history_fetch import history_index
from rl.remote.history_service import (
    CODEC,
    Build,
    Feed,
    Fetch,
    HistoryProgram,
    Lacks,
    Meet,
    Prepare,
    PromptTail,
    Trees,
)
from rl.remote.history_workers import HistoryWorkers
from rl.remote.jobs import drafting_of
from rl.remote.messages import CODEC as WORKERS_CODEC
from rl.remote.messages import Done, Failed
from rl.remote.service import ServiceDeadlines, service_identity
from rl.runtime.waits import ProgramLost
from rl.speculation.config import SpeculationConfig
from rl.speculation.sources import Speculation
from spec.drafter import no_drafts
from spec.retrieval.history import RULE, build_index
from spec.retrieval.suffix_forest import Followers
from spec.reuse.rollout_cache import CachedGroup, CachedResponse, RolloutCache, encode, of_group
from spec.sampling import step_key

DEADLINES = ServiceDeadlines(answer_s=5.0, start_s=30.0, silence_s=60.0)
SPECULATION = SpeculationConfig(budget="fixed:3", sources=("history",))
KEYS = tuple(f"q{i}" for i in range(8))
VOCAB = 50


@pytest.fixture(autouse=True)
def quick_beats(monkeypatch):
    monkeypatch.setattr(history_workers, "BEAT_S", 0.1)


def prompt(i):
    return tuple(range(i % 3, i % 3 + 20))


def group(i, epoch=0):
    """Random responses to prompt i, from few tokens, so that contexts recur."""
    rng = np.random.default_rng((i, epoch))
    tokens = [rng.integers(0, 4, 30).astype(np.int32) for _ in range(3)]
    return of_group(tokens, [float(x) for x in rng.random(3)])


def make_cache(keys=KEYS, epoch=0):
    cache = RolloutCache(vocab_size=VOCAB)
    for key in keys:
        cache.replace(key, group(KEYS.index(key), epoch))
    return cache


class HistoryPrograms:
    """Starts history workers, and asks them by address; `heard` has the messages to each address.

    `changed` gets each program that starts.
    """

    def __init__(self, changed=lambda program: None):
        self.channels, self.heard, self._changed = {}, {}, changed

    def connect(self, number, name):
        program = HistoryProgram("a run")
        self._changed(program)
        heard = self.heard[name] = []
        channel = ThreadChannel(program.answer, lambda data: heard.append(CODEC.decode(data)))
        channel.program = program
        self.channels[name] = channel
        return channel

    def ask(self, address, message):
        if address not in self.channels or self.channels[address].killed:
            raise ProgramLost("it is not there")
        return self.channels[address].program.answer(message)

    def fed(self, address):
        """The keys of all groups that were sent there, in order."""
        messages = self.heard[address]
        return [key for m in messages if isinstance(m, Feed) for key in m.blobs]


class Made:
    """History workers behind a Speculation; a context manager."""

    def __init__(self, count=2, cache=None, programs=None, deadlines=DEADLINES):
        self.said, self.remarks = [], []
        self.programs = programs or HistoryPrograms()
        self.cache = make_cache() if cache is None else cache
        self.workers = HistoryWorkers(
            *("history", self.cache, count, self.programs.connect, "a run"),
            *(deadlines, self.said.append),
        )
        self.speculation = Speculation(SPECULATION, self.cache)
        self.speculation.for_others, self.speculation.index_builder = True, self.workers

    def __enter__(self):
        self.workers.start()
        return self

    def __exit__(self, *_):
        self.workers.close()
        self.speculation.__exit__()

    def drafting(self, keys=KEYS):
        """What rollout workers are told, as they read it."""
        prompts = [prompt(KEYS.index(key)) for key in keys]
        drafts = self.speculation.drafter_factory(keys, prompts)
        spec = RolloutSpec(None, SAMPLING, step_key(0, 0), (), drafts=drafts)
        told = drafting_of(spec)
        part = WORKERS_CODEC._of(type(told))
        arrays = []
        return part[1](part[0](told, arrays), arrays, "told")

    def prepare(self, keys):
        self.speculation.prepare({key: prompt(KEYS.index(key)) for key in keys})

    def index(self, told):
        """The index that a rollout worker makes of what it was told."""
        return history_index(told, RULE, VOCAB, self.programs.ask, self.remarks.append)

    def worker_of(self, key):
        return self.workers._of(key)

    def keys_of(self, worker):
        return {key for key in KEYS if self.worker_of(key) is worker}


def drafts_of(index, keys):
    """Draft tokens and their probabilities after some contexts, by key and context."""
    found = {}
    for key in keys:
        for seed in range(4):
            text = np.random.default_rng(seed).integers(0, 4, (1, 9)).astype(np.int32)
            followers = Followers.of([index.trees[key]])
            index.forest.follow(followers, text, [0], [9], longest=RULE.longest)
            out = no_drafts(1, 6)
            index.forest.propose(followers, RULE, [6], out)
            n = out.count_A[0]
            tokens, parents = out.tokens_AN[0, :n], out.parents_AN[0, :n]
            probs = out.prob_AN[0, :n]
            found[key, seed] = tokens.tolist(), parents.tolist(), probs.tolist()
    return found


def wanted(cache, keys):
    prompts = {key: np.array(prompt(KEYS.index(key)), np.int32) for key in keys}
    return drafts_of(build_index(cache, prompts, RULE), keys)


def wait_for(condition):
    until_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_drafts_are_those_of_the_index_of_one_program():
    with Made() as made:
        told = made.drafting()
        assert len(told.indexed.addresses) == 2 and not told.history
        index = made.index(told)
        assert index.trees.keys() == set(KEYS)
        found = drafts_of(index, KEYS)
        assert found == wanted(made.cache, KEYS)
        assert sum(len(tokens) for tokens, *_ in found.values()) > len(found)
        in_one = build_index(made.cache, {k: np.array(prompt(i)) for i, k in enumerate(KEYS)}, RULE)
        tokens = made.speculation.history_metrics()["spec/history_index_tokens"]
        assert tokens == in_one.num_tokens
    assert made.said == made.remarks == []


def test_groups_are_sent_as_they_are_made_and_once():
    """In each epoch a group goes to its worker before the step that drafts from it."""
    with Made(count=1, cache=RolloutCache(vocab_size=VOCAB)) as made:
        halves = KEYS[:4], KEYS[4:]
        told = made.drafting(halves[0])
        assert told.indexed is None and not told.history  # nothing is known
        (address,) = made.programs.channels
        for epoch in range(2):
            for now, coming in (halves, halves[::-1]):
                for key in now:
                    made.cache.replace(key, group(KEYS.index(key), epoch))
                made.prepare(coming)
                told = made.drafting(coming)
                if epoch or now == halves[1]:
                    found = drafts_of(made.index(told), coming)
                    assert found == wanted(made.cache, coming)
        assert made.programs.fed(address) == [*KEYS, *KEYS]
        program = made.programs.channels[address].program
        assert program.num_bytes == sum(len(made.cache.blob(key)) for key in halves[1])
        lacks = [m for m in made.programs.heard[address] if isinstance(m, Prepare)]
        assert [len(m.prompts) for m in lacks] == [4] * 5


def test_groups_of_a_shard_that_was_lost_before_the_rollout_go_with_it():
    with Made() as made:
        made.prepare(KEYS)
        made.speculation.settle()
        lost, there = made.workers.workers
        made.programs.channels[lost.address].kill()
        told = made.drafting() if not lost.is_there else None
        if told is None:  # the link has not heard of it yet
            wait_for(lambda: not lost.is_there)
            told = made.drafting()
        assert told.indexed.addresses == (there.address,)
        assert told.history.keys() == made.keys_of(lost) != set()
        assert drafts_of(made.index(told), KEYS) == wanted(made.cache, KEYS)
    assert made.remarks == [] and "started again" in made.said[0]


def test_a_worker_that_is_started_again_is_fed_what_the_next_step_needs():
    with Made(count=1) as made:
        made.prepare(KEYS[:4])
        made.drafting(KEYS[:4])
        (worker,) = made.workers.workers
        first = worker.address
        made.programs.channels[first].kill()
        wait_for(lambda: worker.address != first and worker.is_there)
        told = made.drafting(KEYS[4:6])
        assert told.indexed.addresses == (worker.address,)
        assert sorted(made.programs.fed(worker.address)) == list(KEYS[4:6])
        assert drafts_of(made.index(told), KEYS[4:6]) == wanted(made.cache, KEYS[4:6])


def test_a_shard_that_is_lost_in_the_rollout_or_lies_is_left_out_with_a_remark():
    with Made() as made:
        told = made.drafting()
        lost, there = made.workers.workers
        made.programs.channels[lost.address].kill()
        index = made.index(told)
        assert index.trees.keys() == made.keys_of(there) != set()
        assert drafts_of(index, made.keys_of(there)) == wanted(made.cache, made.keys_of(there))
        (remark,) = made.remarks
        assert lost.address in remark and "without the history" in remark

        program = made.programs.channels[there.address].program
        fetch, made.remarks[:] = program.answers[Fetch], []

        def lies(asked):
            trees = fetch(asked).part.trees
            trees.states_SX[1, 1] = 10**6  # a link that leads out of the arrays
            return Trees(dataclasses.replace(fetch(asked).part, trees=trees))

        program.answers[Fetch] = lies
        assert not made.index(told).trees
        assert any("expected links within the states" in line for line in made.remarks)


def test_an_index_that_is_late_is_not_waited_for():
    go = threading.Event()

    def slow(program):
        index = program._index

        def late(*given):
            assert go.wait(30)
            index(*given)

        program._index = late

    quick = dataclasses.replace(DEADLINES, answer_s=0.5)
    with Made(count=1, programs=HistoryPrograms(slow), deadlines=quick) as made:
        told = made.drafting()
        assert told.indexed is None and told.history.keys() == set(KEYS)
        assert drafts_of(made.index(told), KEYS) == wanted(made.cache, KEYS)
        go.set()
        assert made.drafting(KEYS[:2]).indexed is not None
    assert len(made.said) == 1 and "no index within" in made.said[0]


def test_a_program_that_does_not_answer_or_cannot_build_is_lost():
    def broken(program):
        program.answers[Build] = lambda asked: 1 // 0

    with Made(count=1, programs=HistoryPrograms(broken)) as made:
        for _ in range(3):
            assert made.drafting().history.keys() == set(KEYS)
            (worker,) = made.workers.workers
            wait_for(lambda worker=worker: worker.is_there or worker.given_up is not None)
        assert made.drafting().history.keys() == set(KEYS)
    assert "ZeroDivisionError" in made.said[0] and "it is given up" in made.said[-1]

    quick = dataclasses.replace(DEADLINES, answer_s=0.5)
    with Made(count=1, deadlines=quick) as made:
        next(iter(made.programs.channels.values())).stopped = True
        assert made.drafting().history.keys() == set(KEYS)
        wait_for(lambda: made.said)
    assert "no answer to" in made.said[0]


def test_a_damaged_group_is_left_out_and_named():
    cache = make_cache(KEYS[:2])
    blob = cache.blob(KEYS[0])
    cache._put(KEYS[0], blob[:-1] + bytes([blob[-1] ^ 1]))
    with Made(count=1, cache=cache) as made:
        told = made.drafting(KEYS[:2])
        assert not told.history and made.index(told).trees.keys() == {KEYS[1]}
        (problem,) = cache.new_problems()
        assert KEYS[0] in problem


def test_other_code_is_refused_at_the_start():
    def other(program):
        program._config = "another run"

    with pytest.raises(ProgramLost, match=r"history worker 0 .*does not start: .*configuration"):
        Made(count=1, programs=HistoryPrograms(other)).__enter__()


def test_what_comes_is_checked_and_groups_for_later_are_bounded():
    program = HistoryProgram("a run")

    def ask(message):
        return CODEC.decode(program.answer(CODEC.encode(message)))

    tail = np.array([1, 2], np.int32)
    assert "expected Meet first" in ask(Prepare("a", {})).message
    blobs = {key: encode(key, group(i)) for i, key in enumerate(KEYS)}
    room = len(blobs["q0"]) + len(blobs["q1"])
    identity = service_identity("a run")
    good = Meet(identity, 60.0, "history", "", VOCAB, room)
    assert isinstance(ask(dataclasses.replace(good, source="own")), Failed)
    assert isinstance(ask(good), history_service.Met)
    assert ask(Feed({key: blobs[key] for key in ("q0", "q1", "q2")})) == Done()
    assert program.num_bytes == room

    def sums(*keys):
        return {key: PromptTail(tail, int.from_bytes(blobs[key][4:8], "little")) for key in keys}

    assert ask(Prepare("a", sums("q0", "q2", "q3"))) == Lacks(("q2", "q3"))
    assert "expected the groups of q2, q3 first" in ask(Build("a", 0.0)).message
    assert "is not" in ask(Fetch("a")).message and "expected an index" in ask(Fetch("b")).message
    assert ask(Feed({key: blobs[key] for key in ("q2", "q3")})) == Done()  # which are needed
    built = ask(Build("a", 30.0))
    assert built.done and built.num_tokens == 3 * 3 * (30 + 2)
    assert program.num_bytes == len(blobs["q1"])
    assert ask(Fetch("a")).part.keys == ("q0", "q2", "q3")
    assert ask(Prepare("c", {"q1": PromptTail(tail, None)})) == Lacks(())
    assert program.num_bytes == 0, "what the run has no more"
    assert isinstance(ask(Prepare("d", {"q1": PromptTail(-tail, None)})), Failed)
    assert isinstance(CODEC.decode(program.answer(b"nonsense")), Failed)


@pytest.mark.parity
def test_tokens_are_the_same_though_a_history_worker_is_lost():
    done = rollouts.run(Engine(MODEL, CONFIG), PARAMS, REQUESTS, SAMPLING, KEY, STOP)
    alone = {t.request_id: t for t in done}
    cache, keys = RolloutCache(vocab_size=MODEL.vocab_size), [f"q{g}" for g in range(len(PROMPTS))]
    for g, key in enumerate(keys):
        own = [t for t in alone.values() if t.group_id == g]
        responses = tuple(CachedResponse(t.sample_index, t.response_ids, 1.0) for t in own)
        cache.replace(key, CachedGroup(np.asarray(PROMPTS[g], np.int32), responses))
    programs, said = Programs(), []
    with Made(cache=cache) as made:
        programs.ask_at = made.programs.ask
        multi, team = make_team(programs, 2, speculation=SPECULATION, said=said)
        with team:
            team.start()
            accepted = []
            for dies in (False, True):
                drafts = made.speculation.drafter_factory(keys, PROMPTS, group_size=4)
                assert drafts.indexed is not None and not drafts.history
                if dies:
                    made.programs.channels[made.worker_of(keys[0]).address].kill()
                assert_same_tokens(play(multi, drafts=drafts), alone)
                accepted.append(multi.stats.accepted_tokens)
            wait_for(lambda: any("without the history" in line for line in said))
    assert accepted[0] > accepted[1]
    assert accepted[0] > 20


def test_history_workers_need_what_drafts_from_history():
    ray = ("Cluster.kind='ray'", "Cluster.history_workers=2")
    check_cluster(load(TrainConfig, ["configs/epochs_tiny.gin"], ray))
    for without in ("Speculation.budget='off'", "Speculation.sources=('own',)"):
        with pytest.raises(ValueError, match=r"history_workers=2 .* expected .* in Speculation"):
            check_cluster(load(TrainConfig, ["configs/epochs_tiny.gin"], (*ray, without)))
