"""Siblings on several workers share tokens through the draft server, or draft without it."""

import threading

import numpy as np
import pytest

from reprise.rl.runtime.waits import ProgramLost
from reprise.rl.workers import group_drafts
from reprise.rl.workers.group_drafts import MAX_ROLLOUTS, GroupDrafts, SharedDrafts
from reprise.spec.retrieval.group import GroupDrafter


def tokens(*ids):
    return np.array(ids, np.int32)


def heard(server, groups):
    """What a server has of these groups: the tokens of each request, by group."""
    pieces, _ = server.fetch({group: {} for group in groups})
    return {(group, request): ids.tolist() for group, request, _, ids in pieces}


def no_remarks(line):
    raise AssertionError(line)


def test_a_worker_whose_tokens_others_fetch_may_not_lag():
    shared, _ = pair(GroupDrafts())
    assert not GroupDrafter(server=shared).can_lag


def pair(service, group_size=0):
    return [SharedDrafts("job", group_size, service.exchange, no_remarks) for _ in range(2)]


def test_what_one_worker_has_said_reaches_another_that_follows_the_group():
    one, two = pair(GroupDrafts())
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
    one, two = pair(GroupDrafts())
    one.update([(7, 0, 0, tokens(4, 5, 6))])
    one.sync()
    two.update([(7, 0, 0, tokens(4, 5, 6, 7))])  # all of it, as a new worker sends it
    two.sync()
    one.sync()
    assert heard(one, (7,)) == {(7, 0): [4, 5, 6, 7]}


def test_a_group_that_is_over_is_forgotten_by_all():
    one, two = pair(GroupDrafts(), group_size=2)
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
    service = GroupDrafts()
    one, other = (SharedDrafts(job, 0, service.exchange, no_remarks) for job in ("a", "b"))
    one.update([(7, 0, 0, tokens(4))])
    one.sync()
    other.update([(7, 1, 0, tokens(5))])
    other.sync()
    assert heard(other, (7,)) == {(7, 1): [5]}


def test_old_rollouts_are_forgotten():
    service = GroupDrafts()
    for rollout in range(MAX_ROLLOUTS + 1):
        service.exchange(str(rollout), 0, [(7, 0, 0, tokens(4))], [], {})
    assert service.exchange("0", 0, [], [], {7: {}}) == ([], [])
    assert len(service.exchange(str(MAX_ROLLOUTS), 0, [], [], {7: {}})[0]) == 1


@pytest.mark.fault
def test_if_the_server_is_lost_a_worker_drafts_from_its_own_and_reports_it(monkeypatch):
    monkeypatch.setattr(group_drafts, "EXCHANGE_S", 0.0)
    lines, reported = [], threading.Event()

    def lost(*news):
        raise ProgramLost("the draft server: killed")

    def report(line):
        lines.append(line)
        reported.set()

    with SharedDrafts("job", 0, lost, report) as server:
        server.update([(7, 0, 0, tokens(4))])
        assert reported.wait(60)
        assert heard(server, (7,)) == {(7, 0): [4]}
    assert lines == ["drafts of other workers are missing from now on: the draft server: killed"]


def test_a_gap_is_refused():
    with pytest.raises(ValueError, match="send what is missing"):
        GroupDrafts().exchange("job", 0, [(7, 0, 3, tokens(1))], [], {})
