"""Scorers in actors score as reward workers of this program, though programs are lost."""

import dataclasses
import threading
from pathlib import Path

import pytest
from thread_actors import SETTINGS, ThreadRoom

from reprise.rl.data.tasks import Example
from reprise.rl.rewards.config import RewardConfig
from reprise.rl.rewards.pool import RewardPool
from reprise.rl.rewards.process import RewardWorkerError
from reprise.rl.rewards.scorers import Scorers
from reprise.rl.rewards.scores import ScoreJob

PLUGINS = Path(__file__).parent / "plugins"
CONFIG = RewardConfig(functions=("exact_match",), workers=1, deadline_s=60.0)


def job(i, completion="#### 4", **columns):
    columns = {"n": i, "nested": {"x": [1.5, None, "ä"]}} | columns
    prompt = "2+2?" if i % 2 else ({"role": "user", "content": "2+2?"},)
    return ScoreJob(Example(f"q#{i}", prompt, "4", columns, "jsonl:x.jsonl"), completion, (1, i))


def scorers(room, count=2, config=CONFIG, settings=SETTINGS):
    return Scorers(config, (), count, room, settings)


def test_scores_and_failures_are_those_of_a_pool():
    config = dataclasses.replace(
        CONFIG,
        functions=("exact_match", f"{PLUGINS}/faults.py:faulty"),
        weights=(1.0, 0.5),
    )
    words = ["#### 4", "#### 5", "raise", "nan", "none", "os_exit", *(f"{i}!" for i in range(6))]
    jobs = [job(i, word) for i, word in enumerate(words)]
    with RewardPool(config) as pool:
        wanted = [pool.result(f) for f in [pool.submit(j) for j in jobs]]
        wanted += pool.result(pool.submit_group(jobs[6::2]))
    with scorers(ThreadRoom(), config=config) as there:
        found = [there.result(f) for f in [there.submit(j) for j in jobs]]
        found += there.result(there.submit_group(jobs[6::2]))
        with pytest.raises(TypeError, match=r"q#3: its columns must be JSON values"):
            there.submit(job(3, bad=object()))
    assert found == wanted
    assert there.counters == pool.counters and len(pool.counters) == 3
    assert there.metrics() == pool.metrics()


@pytest.mark.fault
def test_responses_of_a_lost_scorer_are_scored_elsewhere_and_it_starts_again():
    room, said = ThreadRoom(), []
    settings = dataclasses.replace(SETTINGS, say=said.append)
    with scorers(room, settings=settings) as there:
        first = room.started[0][0]
        first.is_stopped = True  # it does not answer
        futures = [there.submit(job(i)) for i in range(40)]
        assert any(call[:2] == ("call", "score") for call in first.calls)
        room.hold[0] = threading.Event()
        first.kill()
        assert [there.result(f).total for f in futures] == [1.0] * 40
        room.hold[0].set()  # the program that takes its place comes late
        there.wait_started()
        more = [there.submit(job(i)) for i in range(8)]
        assert [there.result(f).total for f in more] == [1.0] * 8
        assert any(call[:2] == ("call", "score") for call in room.started[0][1].calls)
    (line,) = said
    assert line.startswith("scorer 0 (") and line.endswith("it is started again")


@pytest.mark.fault
def test_samples_are_not_sent_for_ever_nor_scorers_started_for_ever(monkeypatch):
    def broken(self, body, size):
        raise RewardWorkerError("no memory")

    monkeypatch.setattr(RewardPool, "outcomes", broken)
    with scorers(ThreadRoom(), 1) as there:
        for _ in range(2):
            with pytest.raises(RewardWorkerError, match="3 scorers were lost .* no memory"):
                there.result(there.submit(job(0)))
        assert there.actors[0].fatal_error is not None


def test_closing_fails_what_is_scored(monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(RewardPool, "outcomes", lambda self, body, size: go.wait(60))
    with scorers(ThreadRoom(), 1) as there:
        sent = there.submit(job(0))
    go.set()
    with pytest.raises(RuntimeError, match="closed before this sample was scored"):
        sent.result(60)
    with pytest.raises(RuntimeError, match="closed"):
        there.submit(job(1))


def test_other_files_and_functions_that_do_not_load_are_refused_at_the_start(tmp_path):
    (tmp_path / "mine.py").write_text("import nowhere_at_all\ndef f(**c): return [1.0]\n")
    config = dataclasses.replace(CONFIG, functions=(f"{tmp_path}/mine.py:f",))
    with pytest.raises(RewardWorkerError, match="scorer 0 .* does not start: .*nowhere_at_all"):
        scorers(ThreadRoom(), 1, config).__enter__()

    def other(index, handle):
        true = handle.host.identity
        handle.host.identity = lambda files: (true({})[0] | dict.fromkeys(files, "x"), "far", 12)

    with pytest.raises(RewardWorkerError, match=r"expected the same file of .*/mine.py:f"):
        scorers(ThreadRoom(other), 1, config).__enter__()
