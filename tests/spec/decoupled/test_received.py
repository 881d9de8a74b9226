"""Drafts that follow from blocks: by hand, and on random trees against a plain reading."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_by_hand import live_texts

from reprise.spec.decoupled import drafter as received
from reprise.spec.decoupled.drafter import FIRST_NODES, ReceivedBlocks
from reprise.spec.decoupled.messages import Block
from reprise.spec.drafter import Source


def block(base, *nodes, request=0, round=1):
    """Each node is (parent, token, probability)."""
    parents, tokens, prob = zip(*nodes, strict=True) if nodes else ((), (), ())
    arrays = np.array(tokens, np.int32), np.array(parents, np.int32), np.array(prob, np.float32)
    return Block(request, round, base, *arrays)


def chain(base, *tokens, **fields):
    nodes = [(i - 1, token, 0.5 ** (i + 1)) for i, token in enumerate(tokens)]
    return block(base, *nodes, **fields)


def follow(blocks, live, window=9, most=9, max_nodes=9):
    window_A, most_A = (np.full(len(live), x, np.int64) for x in (window, most))
    return blocks.drafts(live, window_A, most_A, max_nodes)


def nodes(drafts, a=0):
    """The draft of a request as (parent, token, probability)."""
    n = drafts.count_A[a]
    columns = drafts.parents_AN, drafts.tokens_AN, drafts.prob_AN
    return list(zip(*(x[a, :n].tolist() for x in columns), strict=True))


def having(*sent, live):
    blocks = ReceivedBlocks()
    blocks.put(sent, live)
    return blocks


# 5 and 6 behind the base, each with children: 7 and 8 below 5, 7 below 6
TREE = block(2, (-1, 5, 0.5), (-1, 6, 0.25), (0, 7, 0.25), (0, 8, 0.125), (1, 7, 0.0625))


def test_a_chain_as_it_is_and_partly_committed():
    live = live_texts([1, 2], [1, 2, 5, 6], [1, 2, 5, 6, 7])
    sent = [chain(2, 5, 6, 7, request=r) for r in range(3)]
    drafts = follow(having(*sent, live=live), live)
    assert nodes(drafts, 0) == [(-1, 5, 0.5), (0, 6, 0.25), (1, 7, 0.125)]
    assert nodes(drafts, 1) == [(-1, 7, 0.5)], "of a probability behind what was right"
    assert nodes(drafts, 2) == []
    assert (drafts.sources_AN == Source.MODEL).all()
    assert drafts.tokens_AN[1, 1:].tolist() == [-1] * 8, "no more than its draft is written"


def test_a_stale_block_is_given_up_and_counted_once():
    blocks, live = ReceivedBlocks(), live_texts([1, 2, 9])
    blocks.put([TREE], live)
    assert nodes(follow(blocks, live)) == [] and blocks.stale == 1
    assert nodes(follow(blocks, live)) == [] and blocks.stale == 1
    # it is gone: even a text that it would follow from has nothing of it
    assert nodes(follow(blocks, live_texts([1, 2]))) == []
    assert blocks.rounds(live).tolist() == [1], "a block of its round has come"


def test_an_older_round_is_ignored_and_the_same_one_taken():
    live = live_texts([1, 2])
    blocks = having(chain(2, 5, round=3), live=live)
    blocks.put([chain(2, 6, round=2)], live)
    assert nodes(follow(blocks, live)) == [(-1, 5, 0.5)]
    blocks.put([chain(2, 7, round=3)], live)  # chains that go on have the round of their commit
    assert nodes(follow(blocks, live)) == [(-1, 7, 0.5)]
    blocks.put([chain(2, 8, round=4)], live)
    assert nodes(follow(blocks, live)) == [(-1, 8, 0.5)] and blocks.rounds(live).tolist() == [4]


def test_blocks_of_requests_that_are_not_there_change_nothing():
    live = live_texts([1, 2])
    blocks = having(chain(2, 5, request=7), live=live)
    assert nodes(follow(blocks, live)) == [] and blocks.rounds(live).tolist() == [-1]


def test_a_row_that_is_used_again_knows_nothing_of_its_last_request():
    live = live_texts([1, 2], [1, 2])
    blocks = having(chain(2, 5, round=9), chain(2, 6, request=1), live=live)
    blocks.forget([0, 4])
    other = live_texts([1, 2], first_id=8)
    assert nodes(follow(blocks, other)) == [] and blocks.rounds(other).tolist() == [-1]
    blocks.put([chain(2, 4, request=8, round=1)], other)
    assert nodes(follow(blocks, other)) == [(-1, 4, 0.5)]
    assert len(blocks._block_F3) == 2, "the row has been used again"
    assert nodes(follow(blocks, live), 1) == [(-1, 6, 0.5)]


def test_requests_of_which_nothing_has_come(monkeypatch):
    """As Python, which looks at every index."""
    monkeypatch.setattr(received, "_follow", received._follow.py_func)
    live = live_texts(*[[1, 2]] * 9)
    blocks = ReceivedBlocks()
    assert follow(blocks, live).count_A.tolist() == [0] * 9 and blocks.stale == 0
    assert ReceivedBlocks().rounds(live).tolist() == [-1] * 9
    more = live_texts(*[[1, 2]] * 90, first_id=5)
    assert follow(blocks, more).count_A.tolist() == [0] * 90


def test_a_block_larger_than_the_first_room():
    live = live_texts([1, 2], [1, 2])
    size = 2 * FIRST_NODES + 3
    large = block(2, *[(-1, 100 + i, 1.0) for i in range(size)], request=1)
    blocks = having(chain(2, 5, 6), live=live)
    blocks.put([large], live)
    drafts = follow(blocks, live, most=500, max_nodes=size)
    assert [token for _, token, _ in nodes(drafts, 1)] == list(range(100, 100 + size))
    assert nodes(drafts, 0) == [(-1, 5, 0.5), (0, 6, 0.25)], "what was there has stayed"


def test_a_probability_is_one_at_most_and_never_divided_by_nothing():
    live = live_texts([1, 2, 5], [1, 2, 5])
    odd = block(2, (-1, 5, 0.25), (0, 6, 0.5))
    none = block(2, (-1, 5, 0.0), (0, 6, 0.0), request=1)
    drafts = follow(having(odd, none, live=live), live)
    assert nodes(drafts, 0) == [(-1, 6, 1.0)] and nodes(drafts, 1) == [(-1, 6, 0.0)]


# --- against a plain reading ----------------------------------------------------------------


def plainly(sent, text, window, most):
    """({path: probability}, given up) of one request, from paths of tokens only."""
    paths: list[tuple[int, ...]] = []
    for parent, token in zip(sent.parents_N.tolist(), sent.tokens_N.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    behind = tuple(text[sent.base_tokens :])
    if not paths:
        return {}, False
    if sent.base_tokens > len(text) or (behind and behind not in paths):
        return {}, True
    prob = dict(zip(paths, sent.prob_N.tolist(), strict=True))
    above = prob[behind] if behind else 1.0
    found: dict[tuple[int, ...], float] = {}
    for path in paths:
        below = path[len(behind) :]
        if path[: len(behind)] == behind and 0 < len(below) <= window and len(found) < most:
            found[below] = prob[path] / above
    return found, False


@st.composite
def trees(draw):
    """Nodes in order of their probabilities, siblings of different tokens."""
    found, seen = [], set()
    for _ in range(draw(st.integers(0, 12))):
        parent, token = draw(st.integers(-1, len(found) - 1)), draw(st.integers(1, 3))
        if (parent, token) not in seen:
            seen.add((parent, token))
            found.append((parent, token, 0.9 ** (len(found) + 1)))
    return found


TEXT = st.lists(st.integers(1, 3), min_size=2, max_size=6)
REQUEST = st.tuples(trees(), TEXT, st.integers(0, 7), st.integers(0, 5), st.integers(0, 14))


def check(cases, max_nodes):
    live = live_texts(*[text for _, text, *_ in cases])
    sent = [block(base, *tree, request=r) for r, (tree, _, base, _, _) in enumerate(cases)]
    blocks = having(*sent, live=live)
    limits = (np.array([case[i] for case in cases], np.int64) for i in (3, 4))
    drafts = blocks.drafts(live, *limits, max_nodes)
    stale = 0
    for a, (_, text, _, window, most) in enumerate(cases):
        want, lost = plainly(sent[a], text, window, min(most, max_nodes))
        paths, got = [], {}
        for parent, token, prob in nodes(drafts, a):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
            got[paths[-1]] = prob
        assert got == pytest.approx(want, rel=1e-5) and list(got) == list(want)
        assert len(paths) == len(got)
        stale += lost
    assert blocks.stale == stale


@given(st.lists(REQUEST, min_size=1, max_size=4), st.integers(1, 14))
def test_drafts_are_what_is_read_plainly(cases, max_nodes):
    check(cases, max_nodes)


def test_a_planted_fault_is_found(monkeypatch):
    """A base that is one off: what follows is another draft."""
    put = ReceivedBlocks.put

    def wrong(self, sent, live):
        put(self, [x._replace(base_tokens=max(x.base_tokens - 1, 0)) for x in sent], live)

    monkeypatch.setattr(received.ReceivedBlocks, "put", wrong)
    with pytest.raises(AssertionError):
        check([([(-1, 1, 0.9), (0, 2, 0.8)], [3, 3], 2, 5, 5)], 5)
