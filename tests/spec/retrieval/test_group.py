"""Seer's interface by hand: logs, fetches, time to live, and draft tokens from siblings."""

import numpy as np
import pytest
from live_by_hand import drafts, ids, live_texts

from spec.retrieval.group import DraftClient, DraftServer, GroupDrafter, Update
from spec.retrieval.ngram import NgramDrafter
from spec.retrieval.suffix_forest import ProposalRule

CHAIN = ProposalRule(longest=4, shortest=1)


def test_a_server_keeps_logs_and_hands_out_what_is_new():
    server = DraftServer()
    server.update(Update(7, 1, 0, ids(5, 6)))
    server.update(Update(7, 2, 0, ids(5)))
    server.update(Update(8, 3, 0, ids(9)))
    first = server.fetch({7: 0, 9: 0})
    assert set(first) == {7} and [u.tokens.tolist() for u in first[7]] == [[5, 6], [5]]
    server.update(Update(7, 1, 1, ids(6, 4)))  # 6 comes twice, and counts once
    server.update(Update(7, 1, 0, ids(5)))  # nothing new
    (new,) = server.fetch({7: 2})[7]
    assert (new.request_id, new.previous_tokens, new.tokens.tolist()) == (1, 2, [4])
    with pytest.raises(ValueError, match="request 1 of group 7 has 3 tokens here.*after 5"):
        server.update(Update(7, 1, 5, ids(1)))
    server.drop(7)
    assert server.fetch({7: 0}) == {}
    server.update(Update(7, 1, 0, ids(2)))  # and may begin anew


def test_a_client_follows_registered_groups_until_their_time_is_over():
    server, client = DraftServer(), DraftClient(CHAIN)
    server.update(Update(0, 9, 0, ids(1, 2, 3, 4, 5)))
    client.register_group(0, ttl_s=10.0, now_s=100.0)
    client.apply(server.fetch(client.seen))
    assert client.seen == {0: 1} and client.expire(109.0) == []
    view = live_texts([8, 1, 2], [8, 1, 2], groups=[0, 1])
    drafts = client.batch_speculate(view, np.array([2, 2]), 4)
    assert drafts.tokens_AN[0, :2].tolist() == [3, 4] and drafts.count_A.tolist() == [2, 0]
    client.register_group(0, ttl_s=10.0, now_s=105.0)  # more time
    assert client.expire(110.0) == [] and client.expire(115.0) == [0]
    assert client.seen == {}
    assert client.batch_speculate(view, np.array([2, 2]), 4).count_A.tolist() == [0, 0]


def test_a_sibling_behind_is_given_what_the_one_ahead_said():
    drafter = GroupDrafter(CHAIN, update_tokens=1)
    ahead, behind = [50, 51, 1, 2, 3, 4, 9], [50, 51]
    assert drafts(drafter, live_texts(ahead, behind)) == [[], [1, 2, 3, 4]]
    assert drafts(drafter, live_texts(ahead, [50, 51, 1, 2])) == [[], [3, 4, 9]]
    # another group knows nothing of it
    assert drafts(drafter, live_texts([50, 51, 1, 2], groups=[1], first_id=7)) == [[]]


def test_a_finished_sibling_goes_on_helping_and_its_end_is_known():
    drafter = GroupDrafter(CHAIN, update_tokens=5)
    one = live_texts([50, 51, 1, 2, 0])
    drafts(drafter, one)
    assert drafts(drafter, live_texts([50, 51, 1], first_id=3)) == [[2, 0]]
    # of a request that has ended the rest is sent, however short
    other = GroupDrafter(CHAIN, update_tokens=100)
    drafts(other, one)
    assert drafts(other, live_texts([50, 51, 1], first_id=3)) == [[]]
    other.finished(one)
    assert drafts(other, live_texts([50, 51, 1], first_id=3)) == [[2, 0]]


def test_the_more_frequent_branch_comes_first():
    drafter = GroupDrafter(CHAIN, update_tokens=1)
    rows = ([50, 51, 1, 7], [50, 51, 1, 8], [50, 51, 1, 8])
    drafts(drafter, live_texts(*rows))
    assert drafts(drafter, live_texts([50, 51, 1], first_id=9))[0][0] == 8


def test_own_text_repeats_itself():
    rule = ProposalRule(longest=4, shortest=2)
    drafter = NgramDrafter(rule)
    assert drafts(drafter, live_texts([1, 2, 3, 4, 1, 2], [5, 6, 7]), most=2) == [[3, 4], []]
    assert drafts(drafter, live_texts([1, 2, 3, 4, 1, 2, 3], [5, 6, 7, 5, 6]), most=2) == [
        [4, 1],
        [7, 5],
    ]
    drafter.finished(live_texts([1, 2, 3, 4, 1, 2, 3]))
    # the id may be another request's in a later phase
    assert drafts(drafter, live_texts([9, 9, 8, 8]), most=2) == [[]]


def test_more_requests_than_followers_at_first():
    drafter = GroupDrafter(CHAIN, update_tokens=1)
    rows = [[50, 51, i, i + 1, i + 2] for i in range(200)]
    drafts(drafter, live_texts(*rows))
    got = drafts(drafter, live_texts(*[row[:3] for row in rows], first_id=1000), most=1)
    assert got == [[i + 1] for i in range(200)]
    drafter.finished(live_texts(*[row[:3] for row in rows], first_id=1000))
    assert drafts(drafter, live_texts([50, 51, 7], first_id=5000), most=1) == [[8]]
