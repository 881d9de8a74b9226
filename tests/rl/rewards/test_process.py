"""What a worker says is heard by the sample that it was asked about, within limits."""

import os
import signal
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from reprise.rl.data.tasks import Example
from reprise.rl.rewards import pool as pool_module
from reprise.rl.rewards import process
from reprise.rl.rewards.config import RewardConfig
from reprise.rl.rewards.pool import RewardPool
from reprise.rl.rewards.process import RewardWorkerError
from reprise.rl.rewards.scores import Score, ScoreJob, combine

FAULTS = Path(__file__).parent / "plugins" / "faults.py"
EXAMPLE = Example("test#0", "2+2?", "4", {}, "jsonl:test.jsonl")


def config(function, **changes):
    fields = {"functions": (f"{FAULTS}:{function}",), "deadline_s": 60.0, "workers": 1}
    return RewardConfig(**fields | changes)


def scores_of(pool, completions):
    futures = [pool.submit(ScoreJob(EXAMPLE, completion)) for completion in completions]
    return [future.result(timeout=60) for future in futures]


def test_a_scorer_that_forks_and_returns_twice_gives_no_other_sample_its_score():
    completions = ["x" * i for i in range(20)]
    completions[3:3] = ["fork", "fork twice"]
    with RewardPool(config("forks")) as pool:
        scores = scores_of(pool, completions)
        assert not pool.counters
    assert [score.total for score in scores] == [len(c) for c in completions]


@pytest.mark.parametrize(
    "text",
    [
        "junk\n",
        "no end of line",
        '{"outcomes": [[99.0, null, null]]}\n',
        '{"ticket": "1-00", "outcomes": [[99.0, null, null]]}\n',
        '{"fatal": "so it says"}\n',
        "[" * 5000 + "\n",
    ],
)
def test_text_on_the_pipe_costs_the_sample_that_wrote_it(text):
    with RewardPool(config("scribbles")) as pool:
        before, scribble, after = scores_of(pool, ["xx", f"now: {text}", "xxx"])
    assert before.total == 2.0 and after.total == 3.0
    assert scribble.total is None and scribble.failure.startswith("scribbles/protocol")


def test_text_that_comes_later_costs_nobody():
    with RewardPool(config("scribbles")) as pool:
        (late,) = scores_of(pool, ["late: junk\n"])
        assert pool._workers[0]._lines._readable.poll(60_000)  # milliseconds
        scores = scores_of(pool, ["x", "xx"])
        assert not pool.counters
    assert late.failure is None and [score.total for score in scores] == [1.0, 2.0]


@pytest.mark.parametrize("completion", ["x", "more than a pipe holds" * 10_000])
def test_a_worker_that_was_stopped_while_idle_is_found_by_its_silence(monkeypatch, completion):
    monkeypatch.setattr(process, "_MIN_ACCEPT_S", 0.5)
    with RewardPool(config("half"), startup_s=120.0) as pool:
        pool._workers[0]._config = config("half", deadline_s=0.5)  # not of the next one
        os.kill(pool._workers[0]._process.pid, signal.SIGSTOP)
        (score,) = scores_of(pool, [completion])  # in half of a start's time
        assert score.total == 0.5 and not pool.counters


def test_a_worker_that_does_not_start_is_an_error(tmp_path):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\ndef f(**c): return [1.0]\n")
    endless = RewardConfig(functions=(f"{tmp_path}/slow.py:f",), workers=1)
    message = r"could not start with .*slow.py:f: no answer within its time \(it printed nothing"
    with pytest.raises(RewardWorkerError, match=message):
        with RewardPool(endless, startup_s=1.0):
            pass


def test_a_start_that_hangs_outside_the_worker_is_an_error(monkeypatch):
    let_go = threading.Event()
    monkeypatch.setattr(process.WorkerProcess, "__init__", lambda *_: let_go.wait(30))
    monkeypatch.setattr(pool_module, "MARGIN_S", 0.2)
    with pytest.raises(RewardWorkerError, match="did not start within 0 s"):
        with RewardPool(config("half"), startup_s=0.1):
            pass
    let_go.set()


class Odd(Exception):
    """Of a kind that nobody expects."""


@pytest.mark.parametrize("method", ["__init__", "wait_ready", "dispose"])
def test_later_samples_get_the_error_of_a_failed_replacement(monkeypatch, method):
    def fails(self, *arguments):
        raise Odd("no")

    with RewardPool(config("faulty")) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(process.WorkerProcess, method, fails)
            died = pool.submit(ScoreJob(EXAMPLE, "os_exit"))
            later = [pool.submit(ScoreJob(EXAMPLE, "x")) for _ in range(3)]
            assert died.result(timeout=60).failure.startswith("faulty/died")
            for future in later:
                with pytest.raises(RewardWorkerError, match="could not be .*no"):
                    future.result(timeout=60)


def test_an_error_while_asking_fails_one_sample_and_the_thread_continues(monkeypatch):
    with RewardPool(config("half")) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(process.WorkerProcess, "score", lambda self, job, size: [][1])
            with pytest.raises(IndexError):
                pool.submit(ScoreJob(EXAMPLE, "x")).result(timeout=60)
        assert scores_of(pool, ["x"])[0].total == 0.5


def test_waiting_for_a_score_can_be_interrupted_and_times_out(monkeypatch):
    class Asked(Exception):
        pass

    def stop():
        raise Asked

    with RewardPool(config("faulty")) as pool:
        hung = pool.submit(ScoreJob(EXAMPLE, "hang"))
        with pytest.raises(Asked):
            pool.result(hung, stop)
        monkeypatch.setattr(pool, "_timeout_s", 0.3)
        with pytest.raises(RewardWorkerError, match="has answered for"):
            pool.result(Future())


def test_sums_that_training_does_not_hold_cost_their_sample():
    two = RewardConfig(functions=("exact_match", "math_verify"), weights=(1.0, 1e8))
    good = combine(two, [[1.0, None, None], [1e3, None, None]])
    assert good == Score({"exact_match": 1.0, "math_verify": 1e3}, 1e11 + 1.0)
    zero = RewardConfig(functions=two.functions, weights=two.weights, on_failure="zero")
    for values in ([0.0, 2e4], [-1e12, -1e3], [3e38, 3e300]):
        outcomes = [[value, None, None] for value in values]
        score = combine(two, outcomes)
        assert score.total is None and score.failure.startswith("sum/not_finite")
        assert combine(zero, outcomes).total == 0.0


def test_huge_rewards_are_counted_as_failures():
    heavy = config("huge", weights=(10.0,))
    with RewardPool(heavy) as pool:
        sums, value, good = scores_of(pool, ["1e12", "2e12", "1.5"])
        assert dict(pool.counters) == {("sum", "not_finite"): 1, ("huge", "not_finite"): 1}
        assert pool.metrics()["rewards/sum/failures"] == 1.0
    assert sums.total is None is value.total and good.total == 15.0


@pytest.mark.parametrize(
    ("printed", "wanted"),
    [
        (b"", b""),
        (b"short\n", b"short\n"),
        (b"a" * 100_000, b"a" * 10 + b"\n... (the rest of this sample's output is left out)\n"),
    ],
)
def test_output_is_copied_up_to_a_bound(capfdbinary, monkeypatch, printed, wanted):
    monkeypatch.setattr(process, "MAX_OUTPUT_BYTES", 10)
    reader, writer = os.pipe()
    output = process.Output(open(reader, "rb"))
    with open(writer, "wb") as file:
        file.write(printed)
    output.wait()
    assert capfdbinary.readouterr().err == wanted
    assert output.whereabouts.startswith("its own" if printed else "it printed nothing")
