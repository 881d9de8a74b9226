"""Indexes that history workers build draft as those of one program; a lost one costs drafts."""

import dataclasses
import threading
from concurrent.futures import wait

import numpy as np
import pytest
from thread_actors import SETTINGS, ThreadRoom

from reprise.rl.cluster import ray_session
from reprise.rl.gin.loader import load
from reprise.rl.runtime.waits import ProgramLost
from reprise.rl.settings.checks import check_cluster
from reprise.rl.settings.config import TrainConfig
from reprise.rl.speculation import history_workers
from reprise.rl.speculation.config import SpeculationConfig
from reprise.rl.speculation.history_workers import HistoryActor, HistoryWorkers, history_index
from reprise.rl.speculation.sources import Speculation
from reprise.spec.drafter import no_drafts
from reprise.spec.retrieval.history import RULE, build_index
from reprise.spec.retrieval.suffix_forest import Followers
from reprise.spec.reuse.rollout_cache import RolloutCache, of_group

SPECULATION = SpeculationConfig(budget="fixed:3", sources=("history",))
KEYS = tuple(f"q{i}" for i in range(8))
VOCAB = 50


def prompt(i):
    return tuple(range(i % 3, i % 3 + 20))


def group(i, epoch=0):
    """Random responses to prompt i, from few tokens, so that contexts recur."""
    rng = np.random.default_rng((i, epoch))
    tokens = [rng.integers(0, 4, 30).astype(np.int32) for _ in range(3)]
    return of_group(tokens, [float(x) for x in rng.random(3)])


class Made:
    """History workers behind a Speculation; a context manager."""

    def __init__(self, count=2):
        self.said, self.room, self.cache = [], ThreadRoom(), RolloutCache(vocab_size=VOCAB)
        for i, key in enumerate(KEYS):
            self.cache.replace(key, group(i))
        settings = dataclasses.replace(SETTINGS, say=self.said.append)
        self.workers = HistoryWorkers(RULE, self.cache, count, self.room, settings)
        self.speculation = Speculation(
            SPECULATION, self.cache, for_others=True, history_workers=self.workers
        )

    def __enter__(self):
        self.workers.wait_started()
        return self

    def __exit__(self, *_):
        self.workers.close()
        self.speculation.__exit__()

    def drafts(self, keys=KEYS):
        return self.speculation.drafter_factory(keys, [prompt(KEYS.index(key)) for key in keys])

    def index(self, drafts):
        """The index that a rollout worker makes of a step's drafts."""
        return history_index(
            *(drafts.history, prompts_of(drafts.keys), drafts.shards),
            *(RULE, 30.0, self.said.append),
        )

    def keys_of(self, worker):
        return {key for key in KEYS if self.workers.worker_of(key) == worker}


@pytest.fixture(autouse=True)
def store(monkeypatch):
    """References are numbers of a list, in which a lost value is a ProgramLost."""
    values = []
    monkeypatch.setattr(ray_session, "share", lambda x: values.append(x) or len(values) - 1)
    monkeypatch.setattr(ray_session, "fetch", lambda numbers, limit_s: [values[i] for i in numbers])
    return values


def prompts_of(keys):
    return {key: np.array(prompt(KEYS.index(key)), np.int32) for key in keys}


def drafts_of(index, keys):
    """Draft tokens and their probabilities after some contexts, by key and context."""
    found = {}
    for key in keys:
        for seed in range(4):
            text = np.random.default_rng(seed).integers(0, 4, (1, 9)).astype(np.int32)
            forest, tree = index.trees[key]
            followers = Followers.of([tree])
            forest.follow(followers, text, [0], [9], longest=RULE.longest)
            out = no_drafts(1, 6)
            forest.propose(followers, RULE, [6], out)
            n = out.count_A[0]
            tokens, parents = out.tokens_AN[0, :n], out.parents_AN[0, :n]
            found[key, seed] = tokens.tolist(), parents.tolist(), out.prob_AN[0, :n].tolist()
    return found


def wanted(cache, keys):
    return drafts_of(build_index(cache, prompts_of(keys), RULE), keys)


def test_drafts_are_those_of_the_index_of_one_program():
    with Made() as made:
        drafts = made.drafts()
        assert len(drafts.shards) == 2 and not drafts.history
        index = made.index(drafts)
        assert index.trees.keys() == set(KEYS)
        found = drafts_of(index, KEYS)
        assert found == wanted(made.cache, KEYS)
        assert sum(len(tokens) for tokens, *_ in found.values()) > len(found)
        tokens = made.speculation.history_metrics()["spec/history_index_tokens"]
        assert tokens == build_index(made.cache, prompts_of(KEYS), RULE).num_tokens
        made.cache.replace(KEYS[0], group(0, epoch=1))
        assert drafts_of(made.index(made.drafts(KEYS[:2])), KEYS[:2]) == wanted(
            made.cache, KEYS[:2]
        )
    assert made.said == []


@pytest.mark.fault
def test_groups_of_a_shard_that_was_lost_before_the_rollout_go_with_it():
    with Made() as made:
        made.speculation.prepare(dict(zip(KEYS, map(prompt, range(8)), strict=True)))
        made.speculation.settle()
        made.room.started[0][0].kill()
        with pytest.raises(ProgramLost):
            made.workers.actors[0].call("ready").result(60)
        drafts = made.drafts()
        assert len(drafts.shards) == 1
        assert drafts.history.keys() == made.keys_of(0) != set()
        assert drafts_of(made.index(drafts), KEYS) == wanted(made.cache, KEYS)
        made.workers.wait_started()  # the program that takes its place
        drafts = made.drafts(KEYS[:5])
        assert len(drafts.shards) == 2 and not drafts.history
        assert drafts_of(made.index(drafts), KEYS[:5]) == wanted(made.cache, KEYS[:5])
    assert len(made.said) == 1 and "started again" in made.said[0]


@pytest.mark.fault
def test_a_shard_that_is_lost_in_the_rollout_is_left_out_with_a_line(store):
    with Made() as made:
        drafts = made.drafts()
        store[0] = ProgramLost("its owner has died")
        index = made.index(drafts)
        (left,) = (keys for keys in (made.keys_of(0), made.keys_of(1)) if keys == set(index.trees))
        assert drafts_of(index, left) == wanted(made.cache, left)
    assert made.said == ["it drafts without a part of the history: its owner has died"]


def test_an_index_that_is_late_or_fails_is_not_waited_for(monkeypatch):
    go, true = threading.Event(), HistoryActor.build

    def late(self, *args):
        assert go.wait(60)
        return true(self, *args)

    monkeypatch.setattr(HistoryActor, "build", late)
    with Made(1) as made:
        with monkeypatch.context() as patch:
            patch.setattr(history_workers, "wait", lambda sent, limit_s: wait(sent, 0.0))
            drafts = made.drafts()
        assert not drafts.shards and drafts.history.keys() == set(KEYS)
        assert drafts_of(made.index(drafts), KEYS) == wanted(made.cache, KEYS)
        go.set()
        monkeypatch.setattr(HistoryActor, "build", lambda self, *args: 1 // 0)
        assert made.drafts(KEYS[:2]).history.keys() == set(KEYS[:2])
    assert "no index within 300 s; its prompts' groups go to the rollout" in made.said[0]
    assert "by zero" in made.said[1]


def test_a_damaged_group_is_left_out_and_named():
    with Made(1) as made:
        blob = made.cache.blob(KEYS[0])
        made.cache._put(KEYS[0], blob[:-1] + bytes([blob[-1] ^ 1]))
        drafts = made.drafts(KEYS[:2])
        assert not drafts.history and made.index(drafts).trees.keys() == {KEYS[1]}
        (problem,) = made.cache.new_problems()
        assert KEYS[0] in problem


def test_history_workers_need_what_drafts_from_history():
    ray = ("Cluster.kind='ray'", "Cluster.history_workers=2")
    check_cluster(load(TrainConfig, ["configs/epochs_tiny.gin"], ray))
    for without in ("Speculation.budget='off'", "Speculation.sources=('own',)"):
        with pytest.raises(ValueError, match=r"history_workers=2 .* expected .* in Speculation"):
            check_cluster(load(TrainConfig, ["configs/epochs_tiny.gin"], (*ray, without)))
