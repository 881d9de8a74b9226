"""Siblings on several workers hear of each other through the draft server, and draft alone else."""

import time

import numpy as np
import pytest

from rl.remote.drafts import DraftService, SharedDrafts
from rl.remote.messages import CODEC, Failed, Ping
from rl.runtime.waits import ProgramLost


def tokens(*ids):
    return np.array(ids, np.int32)


def heard(server, groups):
    """What a server has of these groups: the tokens of each request, by group."""
    pieces, _ = server.fetch({group: {} for group in groups})
    return {(group, request): ids.tolist() for group, request, _, ids in pieces}


def no_remarks(line):
    raise AssertionError(line)


def pair(service, group_size=0):
    return [SharedDrafts("job", group_size, service.answer, no_remarks) for _ in range(2)]


def test_what_one_worker_has_said_reaches_another_that_follows_the_group():
    one, two = pair(DraftService())
    one.update([(7, 0, 0, tokens(4, 5, 6)), (8, 1, 0, tokens(9))])
    two.update([(7, 2, 0, tokens(4, 4))])
    one.sync()
    two.sync()
    assert heard(two, (7, 8)) == {(7, 0): [4, 5, 6], (7, 2): [4, 4]}  # it has nothing in group 8
    one.update([(7, 0, 3, tokens(1))])
    one.sync()
    two.sync()
    assert heard(one, (7,)) == heard(two, (7,)) == {(7, 0): [4, 5, 6, 1], (7, 2): [4, 4]}


def test_a_request_that_moves_goes_on_where_it_was_and_is_said_once():
    one, two = pair(DraftService())
    one.update([(7, 0, 0, tokens(4, 5, 6))])
    one.sync()
    two.update([(7, 0, 0, tokens(4, 5, 6, 7))])  # all of it, as a new worker sends it
    two.sync()
    one.sync()
    assert heard(one, (7,)) == {(7, 0): [4, 5, 6, 7]}


def test_a_group_that_is_over_is_forgotten_by_all():
    one, two = pair(DraftService(), group_size=2)
    one.update([(7, 0, 0, tokens(4))])
    two.update([(7, 1, 0, tokens(5))])
    one.end([7], [0])
    two.end([7], [1])
    one.sync()
    two.sync()
    one.sync()
    assert heard(one, (7,)) == heard(two, (7,)) == {}
    assert one.seen() == two.seen() == {}


def test_rollouts_do_not_hear_of_one_another():
    service = DraftService()
    one, other = (SharedDrafts(job, 0, service.answer, no_remarks) for job in ("a", "b"))
    one.update([(7, 0, 0, tokens(4))])
    one.sync()
    other.update([(7, 1, 0, tokens(5))])
    other.sync()
    assert heard(other, (7,)) == {(7, 1): [5]}


@pytest.mark.fault
def test_where_the_server_is_lost_a_worker_drafts_from_what_it_knows_and_says_so():
    said = []

    def lost(message):
        raise ProgramLost("the draft server: killed")

    with SharedDrafts("job", 0, lost, said.append) as server:
        server.update([(7, 0, 0, tokens(4))])
        until_s = time.monotonic() + 10
        while not said:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        assert heard(server, (7,)) == {(7, 0): [4]}
    assert "not heard any more: the draft server: killed" in said[0]


@pytest.mark.parametrize("message", [b"", CODEC.encode(Ping())])
def test_the_server_answers_nonsense_with_a_sentence(message):
    answer = CODEC.decode(DraftService().answer(message))
    assert isinstance(answer, Failed) and "expected" in answer.message


def test_a_gap_in_what_is_said_is_refused():
    one, _ = pair(DraftService())
    one._new.append((7, 0, 3, tokens(1)))
    with pytest.raises(ProgramLost, match="send what is missing"):
        one.sync()
