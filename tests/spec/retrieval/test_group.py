"""Seer's interface by hand: texts, fetches, groups that end, and draft tokens from siblings."""

import threading
import time

import pytest
from live_by_hand import drafts, ids, live_texts

from reprise.spec.budget.union import DrafterUnion
from reprise.spec.retrieval.group import DraftServer, GroupDrafter
from reprise.spec.retrieval.suffix_drafter import NgramDrafter
from reprise.spec.retrieval.suffix_forest import ProposalRule

CHAIN = ProposalRule(longest=4, shortest=1)


def pieces(*rows):
    """Each row is the group, the request, the number of tokens before, and the tokens."""
    return [(*names, ids(*tokens)) for *names, tokens in rows]


def told(found):
    return [(*name, tokens.tolist()) for *name, tokens in found]


def heard(drafter, *views):
    """Rounds that begin with these: all are in the index."""
    for view in views:
        drafter.committed(view)
    drafter.wait()


def test_a_server_keeps_texts_and_hands_out_what_is_new():
    server = DraftServer()
    server.update(pieces((7, 1, 0, [5, 6]), (7, 2, 0, [5]), (8, 3, 0, [9])))
    found, over = server.fetch({7: {}, 9: {}})
    assert told(found) == [(7, 1, 0, [5, 6]), (7, 2, 0, [5])] and over == []
    server.update(pieces((7, 1, 1, [6, 4]), (7, 1, 0, [5])))  # one is new, the others are known
    found, _ = server.fetch({7: {1: 2, 2: 1}})
    assert told(found) == [(7, 1, 2, [4])]
    assert told(server.fetch({7: {1: 3, 2: 1}, 8: {3: 1}})[0]) == []
    with pytest.raises(ValueError, match="request 1 of group 7 has 3 tokens here.*after 5"):
        server.update(pieces((7, 1, 5, [1])))


def test_a_server_forgets_a_group_once_all_of_its_requests_have_ended():
    server = DraftServer(group_size=2)
    server.update(pieces((7, 1, 0, [5, 6]), (7, 2, 0, [5]), (8, 3, 0, [9])))
    server.end([7, 7, 8], [1, 1, 3])  # told of twice, a request has ended once
    found, over = server.fetch({7: {}, 8: {}})
    assert len(told(found)) == 3 and over == []
    server.end([7], [2])
    found, over = server.fetch({7: {}, 8: {}})
    assert told(found) == [(8, 3, 0, [9])] and over == [7]
    server.update(pieces((7, 2, 8, [4])))  # too late: another worker was slower
    assert told(server.fetch({7: {}})[0]) == []
    assert not any(7 in held for held in (server._texts, server._ended))


def test_a_sibling_behind_is_given_what_the_one_ahead_said():
    drafter = GroupDrafter(CHAIN, update_tokens=1)
    ahead, behind = [50, 51, 1, 2, 3, 4, 9], [50, 51]
    heard(drafter, live_texts(ahead, behind))
    assert drafts(drafter, live_texts(ahead, behind)) == [[], [1, 2, 3, 4]]
    assert drafts(drafter, live_texts(ahead, [50, 51, 1, 2])) == [[], [3, 4, 9]]
    # another group knows nothing of it
    assert drafts(drafter, live_texts([50, 51, 1, 2], groups=[1], first_id=7)) == [[]]


class SlowServer(DraftServer):
    """A server that some updates take a while to reach; `threads` brought them."""

    def __init__(self, waits_s):
        super().__init__()
        self._waits_s, self.threads = iter(waits_s), set()

    def update(self, pieces):
        self.threads.add(threading.current_thread())
        time.sleep(next(self._waits_s, 0.0))
        super().update(pieces)


def test_a_draft_knows_all_rounds_but_the_last_whatever_the_pace_of_the_thread():
    text = [50, 51, *range(1, 9)]
    other = live_texts([50, 51], first_id=3)

    def play(server):
        drafter, found = GroupDrafter(CHAIN, update_tokens=1, server=server), []
        for length in range(3, len(text)):
            if length not in (5, 6):  # plain rounds
                found.append(drafts(drafter, other, most=8)[0])
            drafter.committed(live_texts(text[:length]))
        return found

    slow = SlowServer([0.0, 0.03, 0.0, 0.03, 0.03])
    expected = [text[2 : length - 1] for length in (3, 4, 7, 8, 9)]
    assert play(DraftServer()) == play(slow) == expected
    assert threading.current_thread() not in slow.threads


def test_after_plain_rounds_a_draft_knows_them_without_the_thread():
    text, server = [50, 51, *range(1, 9)], SlowServer([0.01])
    drafter = GroupDrafter(CHAIN, update_tokens=1, server=server)
    drafter.committed(live_texts(text[:4]))  # the thread is busy with these
    drafter.catch_up(live_texts(text[:8]))
    other = live_texts([50, 51], first_id=3)
    assert drafts(drafter, other, most=8) == [text[2:8]]
    assert threading.current_thread() in server.threads and len(server.threads) == 2


def test_what_the_thread_raises_is_raised_where_drafts_are_asked_for():
    class Broken(DraftServer):
        def fetch(self, seen):
            raise OSError("the server is gone")

    drafter = GroupDrafter(CHAIN, server=Broken())
    drafter.committed(live_texts([50, 51, 1]))
    with pytest.raises(OSError, match="the server is gone"):
        drafts(drafter, live_texts([50, 51, 1]))


def test_a_worker_that_never_drafts_tells_the_others():
    server = DraftServer()
    plain, drafting = (GroupDrafter(CHAIN, update_tokens=1, server=server) for _ in range(2))
    heard(plain, live_texts([50, 51, 1, 2]), live_texts([50, 51, 1, 2, 3, 4]))
    behind = live_texts([50, 51, 1], first_id=3)
    heard(drafting, behind)
    assert drafts(drafting, behind) == [[2, 3, 4]]


def test_a_finished_sibling_goes_on_helping_and_its_end_is_known():
    drafter = GroupDrafter(CHAIN, update_tokens=100)
    one, behind = live_texts([50, 51, 1, 2, 0]), live_texts([50, 51, 1], first_id=3)
    heard(drafter, one)
    assert drafts(drafter, behind) == [[]]
    # of a request that has ended the rest is sent, however short, and soon if it was the last one
    drafter.finished(one)
    assert drafts(drafter, behind) == [[2, 0]]


def test_a_group_is_uprooted_once_its_last_member_has_ended():
    server = DraftServer(group_size=2)
    here, there = (GroupDrafter(CHAIN, update_tokens=1, server=server) for _ in range(2))
    one, two = live_texts([50, 51, 1, 2]), live_texts([50, 51, 1, 3], first_id=1)
    heard(here, one)
    here.left(one)  # and goes on elsewhere
    heard(there, live_texts([50, 51, 1, 2, 5]), two)
    there.finished(two)
    heard(there, live_texts([50, 51, 1, 2, 5]))
    assert drafts(there, live_texts([50, 51, 1, 2])) == [[5]], "one of them has not ended"
    there.finished(live_texts([50, 51, 1, 2, 5]))
    there.wait()  # the server knows
    other = live_texts([8, 9, 7], groups=[1], first_id=9)
    for drafter in (here, there):
        heard(drafter, other)
        assert drafter._seen.keys() == {1} and drafter._forest.num_tokens == 3
    assert server._texts.keys() == {1}


def test_a_request_that_comes_back_is_not_counted_twice():
    drafter = GroupDrafter(CHAIN, update_tokens=1)
    text = live_texts([50, 51, 1, 2, 3])
    heard(drafter, text)
    drafter.left(text)
    heard(drafter, live_texts([50, 51, 1, 2, 3, 4]))
    assert drafter._seen == {0: {0: 6}} and drafter._forest.num_tokens == 6


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


def test_only_a_worker_that_nobody_waits_for_may_lag():
    server = DraftServer()
    one = GroupDrafter(server=server)
    assert one.can_lag and DrafterUnion([one, NgramDrafter()]).can_lag
    other = GroupDrafter(server=server)
    assert not one.can_lag and not other.can_lag
    assert not DrafterUnion([one, NgramDrafter()]).can_lag
