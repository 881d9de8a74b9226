"""What a worker's program says is an answer to what it was told, in whatever order it comes.

Source and link are made by hand: each message and each report is a step of a test.
"""

import dataclasses
import itertools
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_team import MODEL, REQUESTS

from rl.engine.engine import Engine
from rl.engine.stats import EngineStats
from rl.remote.conversation import Conversation
from rl.remote.drafter_messages import Caught
from rl.remote.records import of_stats
from rl.remote.run_messages import Answered, ChunkEnded, Copied, Dropped, Give, Parked, Report
from rl.runtime.waits import ProgramLost
from rl.trajectory import FinishReason, PartialRequest, Prefix, Trajectory
from sched.request import COPIES

FIRST, SECOND = REQUESTS[:2]
COPY = FIRST.request_id + COPIES


class Source:
    """Brings what a test puts into it, and keeps what it is told."""

    lets_go, longest_tokens, has_requests = False, 64, False

    def __init__(self):
        self.drops, self.asked, self.told = [], [], []

    def dropped(self):
        found, self.drops = self.drops, []
        return found

    def copies(self):
        found, self.asked = self.asked, []
        return found

    def copied(self, number, partial):
        self.told.append(("copied", number, partial))

    def chunk_ended(self, request_id, response_tokens):
        self.told.append(("chunk ended", request_id, response_tokens))
        return 0

    def park(self, leaving):
        self.told += [("left", p.request.request_id) for p in leaving]


class Talk:
    """A conversation, and both of its ends."""

    def __init__(self, states=None):
        self.given, self.source, self.lost = [], Source(), None
        clock = itertools.count(0.0).__next__
        self.engine = SimpleNamespace(
            run_number=1, clock=clock, model=MODEL, stats=EngineStats(), hang_limit_s=1e9,
            later_s=0.0, dtype=Engine(MODEL).dtype, feature_layers=None,
        )  # fmt: skip
        self.finished = []
        given = states, lambda t: self.finished.append(t.request_id), None
        self.talk = Conversation(self.engine, self, self.source, *given)

    def ask(self, message, kind):
        self.given.append(message)

    def lose(self, why, silent=False):
        self.lost = ProgramLost(why)

    def start(self, *requests, drops=(), copies=()):
        """What the source brings at once."""
        self.source.drops += drops
        self.source.asked += copies
        self.talk._give(
            [r if isinstance(r, PartialRequest) else PartialRequest(r) for r in requests]
        )
        return self.given[-1] if self.given else None

    def hear(self, *events, ended=False):
        stats = of_stats(EngineStats()) if ended else None
        return self.talk._hear(Report(1, events, 1, 0, stats))

    def refuses(self, *events, why):
        with pytest.raises(ProgramLost, match=why):
            self.hear(*events)


def answer(request, number=None):
    """A response of two tokens."""
    number = request.request_id if number is None else number
    columns = {
        "logprobs": np.zeros(2, np.float32),
        "emission_logprobs": np.zeros(2, np.float32),
        "policy_versions": np.zeros(2, np.int32),
        "origins": np.zeros(2, np.uint8),
    }
    prompt, ids = np.array(request.prompt_ids, np.int32), np.array([4, 5], np.int32)
    of = number, request.group_id, request.sample_index
    return Answered(Trajectory(*of, prompt, ids, finish_reason=FinishReason.STOP, **columns))


def so_far(count=2):
    columns = [np.zeros(count, t) for t in ("i4", "f4", "f4", "i4", "u1")]
    return Prefix(*columns, 0, None)


def copy_to_start():
    return PartialRequest(dataclasses.replace(FIRST, request_id=COPY))


def test_only_what_is_there_is_dropped_and_drops_alone_are_said():
    talk = Talk()
    talk.start(FIRST, SECOND)
    given = talk.start(drops=[FIRST.request_id, 999])
    assert isinstance(given, Give) and (given.drops, given.starts) == ((FIRST.request_id,), ())
    talk.start()
    assert len(talk.given) == 2, "nothing is said twice"


def test_what_is_said_of_what_was_dropped_changes_nothing():
    talk = Talk()
    talk.start(FIRST, SECOND)
    talk.start(drops=[FIRST.request_id])
    talk.hear(ChunkEnded(FIRST.request_id, 2), Parked(FIRST.request_id, so_far(), None))
    talk.hear(Dropped(FIRST.request_id))
    assert talk.source.told == [] and talk.finished == []
    talk.refuses(answer(FIRST), why="request 0, which it does not have")


def test_an_answer_that_was_too_late_is_not_given_back():
    talk = Talk()
    talk.start(FIRST, SECOND)
    talk.start(drops=[FIRST.request_id])
    talk.hear(answer(FIRST), answer(SECOND), Dropped(FIRST.request_id))
    assert talk.finished == [SECOND.request_id]
    assert talk.hear(ended=True)


def test_a_number_that_is_started_again_is_told_from_the_one_before():
    """Answers to the first count for nothing until its drop is confirmed."""
    talk, again = Talk(), copy_to_start()
    talk.start(again)
    talk.start(again, drops=[COPY])
    talk.start(again, drops=[COPY])
    talk.hear(answer(FIRST, COPY))
    talk.hear(Dropped(COPY), answer(FIRST, COPY))
    assert talk.finished == []
    talk.hear(Dropped(COPY), answer(FIRST, COPY))
    assert talk.finished == [COPY]
    talk.refuses(Dropped(COPY), why="it dropped request .*, which it was not told to")


def test_a_request_that_was_leaving_may_be_dropped():
    """Nobody waits for it any more, and its tokens are nobody's."""
    talk = Talk()
    talk.start(FIRST)
    talk.hear(ChunkEnded(FIRST.request_id, 2))
    assert talk.talk._leaving == {FIRST.request_id}
    given = talk.start(drops=[FIRST.request_id])
    assert given.grants == {} and given.drops == (FIRST.request_id,)
    assert not talk.talk._leaving
    talk.hear(Parked(FIRST.request_id, so_far(), None), Dropped(FIRST.request_id))
    assert talk.source.told == [("chunk ended", FIRST.request_id, 2)]


def test_what_is_wrong_of_a_dropped_request_is_wrong_all_the_same():
    talk = Talk()
    talk.start(FIRST)
    talk.start(drops=[FIRST.request_id])
    talk.refuses(ChunkEnded(FIRST.request_id, 0), why="ended a chunk at 0 tokens")
    bad = answer(FIRST)
    bad.trajectory.response_ids[0] = MODEL.vocab_size
    talk.refuses(bad, why="outside of the vocabulary")


def test_copies_are_asked_for_where_the_request_is_and_given_once():
    talk = Talk()
    talk.start(FIRST)
    given = talk.start(copies=[(FIRST.request_id, COPY), (99, 99 + COPIES)])
    assert given.copies == ((FIRST.request_id, COPY),)
    assert talk.source.told == [("copied", 99 + COPIES, None)], "it is not there"
    talk.hear(answer(FIRST), Copied(COPY, None, None))
    assert talk.source.told[1:] == [("copied", COPY, None)]
    talk.refuses(Copied(COPY, None, None), why="a copy of request 0 that nobody has asked for")


def test_a_run_does_not_end_before_its_copies_are_given():
    talk = Talk()
    talk.start(FIRST)
    talk.start(copies=[(FIRST.request_id, COPY)])
    talk.hear(answer(FIRST))
    with pytest.raises(ProgramLost, match="has ended without 1 copies of requests"):
        talk.hear(ended=True)


def test_what_comes_after_the_last_start_is_not_waited_for():
    """The run there may be over by then: no copy is asked for, and no drop has to be confirmed."""
    talk = Talk()
    talk.start(FIRST, SECOND)
    talk.talk._closed = True
    assert talk.start().closed
    given = talk.start(drops=[FIRST.request_id], copies=[(SECOND.request_id, COPY)])
    assert (given.drops, given.copies, given.closed) == ((FIRST.request_id,), (), True)
    assert talk.source.told == [("copied", COPY, None)]
    talk.hear(answer(FIRST), answer(SECOND))
    assert talk.hear(ended=True) and talk.finished == [SECOND.request_id]


def test_a_program_that_never_hands_over_is_lost():
    talk = Talk()
    talk.start(FIRST)
    talk.start(copies=[(FIRST.request_id, COPY)])
    talk.engine.hang_limit_s = 5.0
    for _ in range(9):
        talk.talk._look_for_promised()
    assert "though it was to hand some over" in str(talk.lost)


class States:
    """What is said of hidden states."""

    waiting = False

    def __init__(self):
        self.heard = []

    def caught(self, event):
        self.heard.append(("states", event.request_id))

    def answered(self, trajectory):
        self.heard.append(("answer", trajectory.request_id))


def test_states_of_what_has_ended_find_their_answer_though_another_was_first():
    """They are of the request's own tokens. A copy's answer has none."""
    states = States()
    talk = Talk(states)
    talk.start(FIRST, copy_to_start())
    talk.start(drops=[FIRST.request_id])
    hidden = np.zeros((4, MODEL.d_model), np.float32)
    tokens = np.array([*FIRST.prompt_ids, 4, 5], np.int32)
    caught = Caught(FIRST.request_id, tokens, len(FIRST.prompt_ids), hidden, 0)
    talk.hear(answer(FIRST), answer(FIRST, COPY), Dropped(FIRST.request_id), caught)
    assert states.heard == [("answer", FIRST.request_id), ("states", FIRST.request_id)]
    assert talk.finished == [COPY]


class Answers:
    """A link whose program answers each Poll with the next report, and says when it is asked."""

    deadline_s, lost = 1e9, None

    def __init__(self, reports, asked):
        self._reports, self._asked = iter(reports), asked

    def submit(self, poll):
        self._asked()
        answer = Future()
        answer.set_result(next(self._reports))
        return answer

    def ask(self, message, kind):
        return kind()

    def expect(self, answer, kind):
        return answer

    def lose(self, why, silent=False):
        raise ProgramLost(why)


def long_run(hang_limit_s):
    """A request that leaves after hours; each Poll is answered 1,000 s after the one before."""
    talk, now_s = Talk(), [0.0]
    events = [(), (), (), (ChunkEnded(FIRST.request_id, 2),)]
    events += [(Parked(FIRST.request_id, so_far(), None),)]
    reports = [Report(1, told, rounds, 0, None) for rounds, told in enumerate(events, 1)]
    reports.append(Report(1, (), 9, 0, of_stats(EngineStats())))

    def asked():
        now_s[0] += 1000.0

    talk.source.wake, talk.source.take = lambda: None, lambda wait: None
    talk.engine.clock, talk.engine.hang_limit_s = lambda: now_s[0], hang_limit_s
    talk.engine.bring_drafter = lambda link: None
    talk.talk._running = {FIRST.request_id: PartialRequest(FIRST)}
    talk.talk._link, talk.talk._told_closed = Answers(reports, asked), True
    talk.talk._closed = True
    talk.talk.run()
    return talk.source.told


def test_what_is_promised_may_take_as_long_as_a_round():
    """However long the run has gone on before without anything that was promised."""
    assert long_run(1500.0)[-1] == ("left", FIRST.request_id)
    with pytest.raises(ProgramLost, match="no request for 1000.0 s, though it was to hand some"):
        long_run(999.0)
