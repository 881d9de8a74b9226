"""Scorers in other programs score as reward workers of this one, though programs are lost."""

import dataclasses
import threading
import time
from pathlib import Path

import pytest
from remote_workers import ThreadChannel

from rl.data.tasks import Example
from rl.remote import scoring
from rl.remote.messages import Failed
from rl.remote.scorers import Scorers
from rl.remote.scoring import CODEC, Give, Meet, Open, Poll, Said, Scored, ScoringProgram
from rl.remote.service import ServiceDeadlines, service_identity
from rl.remote.wire import WireError
from rl.rewards.config import RewardConfig
from rl.rewards.pool import RewardPool
from rl.rewards.process import RewardWorkerError
from rl.rewards.scores import ScoreJob

PLUGINS = Path(__file__).parents[1] / "rewards" / "plugins"
CONFIG = RewardConfig(functions=("exact_match",), workers=1, deadline_s=20.0)
DEADLINES = ServiceDeadlines(answer_s=3.0, start_s=30.0, silence_s=60.0)


def job(i, completion="#### 4", **columns):
    columns = {"n": i, "nested": {"x": [1.5, None, "ä"]}} | columns
    prompt = "2+2?" if i % 2 else ({"role": "user", "content": "2+2?"},)
    return ScoreJob(Example(f"q#{i}", prompt, "4", columns, "jsonl:x.jsonl"), completion, (1, i))


class Channels:
    """Connects scorers; `programs` are those of all starts in order, by number."""

    def __init__(self, change=lambda program: None):
        self.channels, self._change = {}, change

    def __call__(self, number):
        program = ScoringProgram("a run")
        self._change(program)
        channel = ThreadChannel(program.answer)
        channel.program, end = program, channel.end

        def end_all():
            end()
            program.close()

        channel.end = end_all
        self.channels.setdefault(number, []).append(channel)
        return channel


def made(connect, count=2, config=CONFIG, said=None, deadlines=DEADLINES, text="a run"):
    say = (lambda line: None) if said is None else said.append
    return Scorers(config, (), count, connect, text, deadlines, say)


def test_scores_and_failures_are_those_of_a_pool():
    config = dataclasses.replace(
        CONFIG,
        functions=("exact_match", f"{PLUGINS}/faults.py:faulty"),
        weights=(1.0, 0.5),
        deadline_s=3.0,
    )
    words = ["#### 4", "#### 5", "raise", "nan", "none", "os_exit", *(f"{i}!" for i in range(6))]
    jobs = [job(i, word) for i, word in enumerate(words)]
    with RewardPool(config) as pool:
        wanted = [pool.result(f) for f in [pool.submit(j) for j in jobs]]
    with made(Channels(), config=config) as scorers:
        found = [scorers.result(f) for f in [scorers.submit(j) for j in jobs]]
    assert found == wanted
    assert scorers.counters == pool.counters and len(pool.counters) == 3
    assert scorers.metrics() == pool.metrics()


def test_responses_of_a_lost_scorer_are_scored_elsewhere_and_it_starts_again():
    connect, said, hold = Channels(), [], threading.Event()
    with made(connect, said=said) as scorers:
        first = connect.channels[0][0]
        first.stopped = True  # what it is given is not answered
        futures = [scorers.submit(job(i)) for i in range(40)]
        while not scorers.scorers[1].worked:
            hold.wait(0.01)
        first.kill()
        assert [scorers.result(f).total for f in futures] == [1.0] * 40
        until_s = time.monotonic() + 60
        while not (scorers.scorers[0].is_open and len(connect.channels[0]) == 2):
            assert time.monotonic() < until_s
            hold.wait(0.01)
        more = [scorers.submit(job(i)) for i in range(8)]
        assert [scorers.result(f).total for f in more] == [1.0] * 8
        assert scorers.scorers[0].worked, "the fewest waited at the new one too"
    (line,) = said
    assert line.startswith("scorer 0 (") and "scored elsewhere, and it is started again" in line


def test_a_scorer_that_does_not_answer_is_lost_after_its_deadline():
    connect, said = Channels(), []
    quick = dataclasses.replace(DEADLINES, answer_s=0.5)
    with made(connect, said=said, deadlines=quick) as scorers:
        connect.channels[1][0].stopped = True
        futures = [scorers.submit(job(i)) for i in range(4)]
        assert [scorers.result(f).total for f in futures] == [1.0] * 4
    assert any("no answer to Give" in line or "no sign of life" in line for line in said)


def test_waiting_responses_go_together():
    sizes, connect, entered, go = [], Channels(), threading.Event(), threading.Event()

    def slow(program):
        give = program.answers[Give]

        def noted(asked):
            sizes.append(len(asked.responses))
            entered.set()
            assert go.wait(30)
            return give(asked)

        program.answers[Give] = noted

    connect = Channels(slow)
    with made(connect, 1, deadlines=dataclasses.replace(DEADLINES, answer_s=40.0)) as scorers:
        futures = [scorers.submit(job(0))]
        assert entered.wait(30)
        futures += [scorers.submit(job(i)) for i in range(1, 100)]
        go.set()
        assert [scorers.result(f).total for f in futures] == [1.0] * 100
    assert sizes == [1, 64, 35]


def test_samples_are_not_sent_for_ever_nor_scorers_started_for_ever():
    def broken(program):
        program.answers[Give] = lambda asked: 1 // 0

    said = []
    with made(Channels(broken), 1, said=said) as scorers:
        with pytest.raises(RewardWorkerError, match="3 scorers were lost .* ZeroDivisionError"):
            scorers.result(scorers.submit(job(0)))
        with pytest.raises(RewardWorkerError, match="no scorer is left"):
            scorers.result(scorers.submit(job(2)))
    assert "it is given up: it was lost 3 times" in said[-1]


def test_closing_cancels_what_waits_and_fails_what_is_scored():
    def hangs(program):
        program.answers[Poll] = lambda asked: time.sleep(1.0) or Scored({}, None)

    with made(Channels(hangs), 1) as scorers:
        sent = scorers.submit(job(0))
        while not sent.running():
            time.sleep(0.01)
    with pytest.raises(RuntimeError, match="closed before this sample was scored"):
        sent.result(0)
    with pytest.raises(RuntimeError, match="closed"):
        scorers.submit(job(1))


def test_other_code_and_functions_that_do_not_load_are_refused_at_the_start(tmp_path):
    with pytest.raises(RewardWorkerError, match=r"scorer 0 does not start: .*same configuration"):
        made(Channels(), 1, text="another run").__enter__()
    (tmp_path / "mine.py").write_text("import nowhere_at_all\ndef f(**c): return [1.0]\n")
    config = dataclasses.replace(CONFIG, functions=(f"{tmp_path}/mine.py:f",))
    with pytest.raises(RewardWorkerError, match="nowhere_at_all"):
        made(Channels(), 1, config=config).__enter__()
    program, message = (
        ScoringProgram("a run"),
        CODEC.encode(
            Meet(
                service_identity("a run") | {f"file of {tmp_path}/mine.py:f": "other"}, 9.0, config
            )
        ),
    )
    refused = CODEC.decode(program.answer(message))
    assert isinstance(refused, Failed) and "file of" in refused.message


def test_what_comes_is_checked():
    program = ScoringProgram("a run")
    early = CODEC.decode(program.answer(CODEC.encode(Give(()))))
    assert isinstance(early, Failed) and "expected Open first" in early.message
    assert isinstance(CODEC.decode(program.answer(CODEC.encode(Open(())))), Failed)
    assert isinstance(CODEC.decode(program.answer(b"nonsense")), Failed)
    good = scoring.response_of(1, job(1))
    for i in (1, 2):
        there, here = scoring.job_of(scoring.response_of(i, job(i))), job(i)
        assert dataclasses.asdict(there) == dataclasses.asdict(here)
    assert CODEC.decode(CODEC.encode(Give((good,)))).responses[0].columns == good.columns
    for changes in (
        {"columns": "[1]"},
        {"columns": "{"},
        {"prompt": "3"},
        {"prompt": '[{"a": 1}]'},
    ):
        bad = dataclasses.replace(good, **changes)
        with pytest.raises(WireError):
            CODEC.decode(CODEC.encode(Give((bad,))))
    nothing, lies = (float("nan"), None, None), (1.0, "raised", "x")
    for wrong in (nothing, lies, (None, "unheard of", "x"), (None, "raised", None)):
        with pytest.raises(WireError):
            CODEC.decode(CODEC.encode(Scored({1: (Said(*wrong),)}, None)))


def test_a_scorer_that_answers_what_it_was_not_asked_is_lost():
    def strange(program):
        poll = program.answers[Poll]
        program.answers[Poll] = lambda asked: (
            poll(asked) if program.lied else (setattr(program, "lied", True) or
            Scored({77: (Said(1.0, None, None),)}, None))
        )  # fmt: skip
        program.lied = bool(connect.channels)

    said, connect = [], Channels(strange)
    with made(connect, 1, said=said) as scorers:
        assert scorers.result(scorers.submit(job(0))).total == 1.0
    assert "expected what 1 functions say of the responses that it has" in said[0]


def test_columns_that_are_not_json_are_refused_here():
    with made(Channels(), 1) as scorers:
        with pytest.raises(TypeError, match=r"q#3: its columns must be JSON values"):
            scorers.submit(job(3, bad=object()))
