"""Cached responses of rows: their chains, the given tokens, and where they end."""

import dataclasses

import numpy as np
import pytest

from reprise.rl.records.stats import CachedCounts
from reprise.rl.records.trajectory import Origin, PartialRequest, Request
from reprise.rl.slots.cached_prefixes import CachedPrefixes
from reprise.rl.slots.ending import Endings
from reprise.rl.slots.slot_table import SlotTable
from reprise.spec.config import SamplingConfig
from reprise.spec.drafter import Source, no_drafts
from reprise.spec.reuse.chunk_price import ChunkPrice
from reprise.spec.reuse.prefix_rule import PrefixRule, log, parse_mode
from reprise.spec.reuse.rollout_cache import CachedResponse, Scores
from reprise.spec.round_times import RoundTimes
from reprise.spec.verification.nodes import DRAWN, KEPT, NOT_GIVEN, by_slot, pack

PROMPT, TOKENS, STOP = (1, 2), [5, 6, 7, 8, 9], 9


def request(request_id, tokens=TOKENS, **fields):
    n = len(tokens)
    scores = Scores(np.full(n, -1.0, np.float32), np.full(n, -2.0, np.float32), np.full(n, 3))
    cached = CachedResponse(0, np.asarray(tokens, np.int32), 1.0, scores)
    return Request(request_id, PROMPT, cached=cached, **fields)


def table_of(mode, requests, num_slots=4, *, in_chunks=False, **options):
    """A table of these requests, and its cached responses, of which a mode says what is kept.

    Without a mode only what was begun is reused. In chunks nothing is computed yet.
    """
    endings = Endings(SamplingConfig(max_new_tokens=8), (STOP,))
    rule = mode and PrefixRule(parse_mode(mode), log(parse_mode(mode).lenience), 0, 1)
    options |= {"in_chunks": in_chunks}
    cached = CachedPrefixes(rule, endings, CachedCounts(), num_slots, 10, **options)
    table = SlotTable(num_slots, 11, endings, cached)
    for row, r in enumerate(requests):
        table.enter(row, PartialRequest(r), 0 if in_chunks else None)
    return table, cached


def commit(table, rows, kept=None):
    """Each row's tokens of a fetch; how many of them were given ones."""
    B = table.num_slots
    tokens_BN, count_B = np.zeros((B, 8), np.int32), np.zeros(B, np.int32)
    for b, tokens in rows.items():
        tokens_BN[b, : len(tokens)], count_B[b] = tokens, len(tokens)
    reused_B = np.array([(kept or {}).get(b, 0) for b in range(B)])
    logprobs_BN = np.full((B, 8), -0.5, np.float32)
    return table.commit(tokens_BN, logprobs_BN, count_B, count_B > 1, reused_B)


def chains(table, most=31):
    live = table.live()
    drafts = no_drafts(len(live), 31)
    table.cached.draft(live, np.full(len(live), most), drafts)
    return drafts


def test_chains_begin_behind_the_tokens_kept_so_far():
    table, cached = table_of("coupled", [request(0), Request(1, PROMPT)])
    drafts = chains(table, most=3)
    assert drafts.tokens_AN[0, :3].tolist() == [5, 6, 7] and drafts.count_A.tolist() == [3, 0]
    assert drafts.parents_AN[0, :3].tolist() == [-1, 0, 1]
    assert (drafts.sources_AN[0, :3] == Source.CACHED).all()
    assert (np.diff(drafts.prob_AN[0, :3]) < 0).all()
    commit(table, {0: [5, 6], 1: [5]})
    drafts = chains(table)
    assert drafts.tokens_AN[0, :3].tolist() == [7, 8, 9] and drafts.count_A.tolist() == [3, 0]
    commit(table, {0: [7, 4]})
    assert not cached.goes_on(np.arange(2)).any() and not chains(table).count_A.any()
    assert (cached.counts.kept_tokens, cached.counts.whole, cached.counts.responses) == (3, 0, 1)


def test_a_request_that_leaves_goes_on_where_it_was():
    table, cached = table_of("lenient:1", [request(0), request(1)])
    bounds = cached.min_logprobs_BL[0].copy()
    commit(table, {0: [5, 6], 1: [5, 4]}, {0: 2, 1: 1})
    left = [table.leave(row, 7) for row in (0, 1)]
    assert [p.prefix.reused_tokens for p in left] == [2, 1]
    assert left[0].prefix.policy_versions.tolist() == [3, 3]
    assert left[1].prefix.policy_versions.tolist() == [3, 7]
    assert left[1].prefix.emission_logprobs.tolist() == [-2.0, -0.5]
    other, there = table_of("lenient:1", [])
    other.enter(2, left[0])
    other.enter(3, left[1])
    assert there.goes_on(np.array([2, 3])).tolist() == [True, False]
    np.testing.assert_array_equal(there.min_logprobs_BL[2], bounds)
    assert chains(other).tokens_AN[0, :3].tolist() == [7, 8, 9]
    commit(other, {2: [7, 8, 9]}, {2: 3})
    done = other.retire(2, 8)
    assert (done.origins == Origin.REUSED).all() and done.policy_versions.tolist() == [3] * 5
    assert (there.counts.tokens, there.counts.kept_tokens, there.counts.whole) == (5, 5, 1)


def test_what_was_begun_is_a_chain_up_to_the_first_difference():
    table, cached = table_of(None, [Request(0, PROMPT, begun=(5, 6, 7, 8)), Request(1, PROMPT)])
    assert not cached.given and not cached.ruled(np.arange(2)).any()
    drafts = chains(table, most=3)
    assert drafts.tokens_AN[0, :3].tolist() == [5, 6, 7] and drafts.count_A.tolist() == [3, 0]
    commit(table, {0: [5, 6]})
    assert chains(table).tokens_AN[0, :2].tolist() == [7, 8]
    commit(table, {0: [4]})
    assert not cached.goes_on(np.arange(2)).any()
    assert cached.counts.responses == 0, "those of an earlier epoch alone"
    left = table.leave(0, 3)
    assert left.prefix.reused_tokens == 0 and (left.prefix.policy_versions == 3).all()


def test_a_request_that_moves_goes_on_with_what_was_begun_where_it_agrees():
    r = Request(0, PROMPT, begun=(5, 6, 7, 8))
    for drawn, rest in (([5, 6], [7, 8]), ([5, 4], [])):
        table, cached = table_of(None, [r])
        commit(table, {0: drawn})
        partial = table.leave(0, 0)
        table.enter(1, partial)
        assert cached.goes_on(np.array([1]))[0] == bool(rest)
        if rest:
            assert chains(table).tokens_AN[0, :2].tolist() == rest


@pytest.mark.parametrize(("second", "rest"), [(4, [3, 3]), (8, [])])
def test_behind_what_a_rule_keeps_the_begun_response_goes_on_where_it_agrees(second, rest):
    """The rule keeps one token, and the draw in place of the next is the one that was begun."""
    r = Request(0, PROMPT, cached=request(0).cached, begun=(5, 4, 3, 3))
    table, cached = table_of("full", [r])
    assert cached.ruled(np.array([0]))[0]
    commit(table, {0: [5, second]}, {0: 1})
    assert not cached.ruled(np.array([0]))[0], "the rule has decided"
    drafts = chains(table)
    assert drafts.tokens_AN[0, : drafts.count_A[0]].tolist() == rest
    commit(table, {0: [3]})
    assert table.origins_BL[0, 2:5].tolist() == [Origin.REUSED, Origin.BONUS, Origin.PLAIN]
    assert (cached.counts.responses, cached.counts.kept_tokens) == (1, 1)
    nodes = pack(chains(table), np.zeros(1, np.int32), table.live().rows_A, 4, 4, 8)
    cached.give(nodes, table.emitted_B)
    assert (nodes[3] == NOT_GIVEN).all(), "begun tokens are draft tokens, and never given"


@pytest.mark.parametrize(
    ("begun", "chain_of"),
    [((5, 6), TOKENS), ((5, 4, 4), (5, 4, 4)), ((), TOKENS)],
    ids=["the start of it", "another one", "nothing"],
)
def test_where_noise_repeats_newer_draws_come_before_the_last_epochs(begun, chain_of):
    r = Request(0, PROMPT, cached=request(0).cached, begun=begun)
    table, _ = table_of("coupled", [r])
    drafts = chains(table)
    assert drafts.tokens_AN[0, : drafts.count_A[0]].tolist() == list(chain_of)


def drawn_in_chunks(table, chunks_TX, drawn, kept=()):
    """Commit what was drawn behind the tokens of chunks; return how many of each row stand."""
    B, C = table.num_slots, chunks_TX.shape[1] - 2
    drawn_X = np.asarray(drawn, np.int32)
    kind_X = np.where(np.isin(np.arange(len(drawn_X)), kept), KEPT, DRAWN)
    rows = table.prompt_tokens_B, table.emitted_B, table.limit_B
    kind_X = table.cached.stand(chunks_TX, drawn_X, kind_X, *rows)
    for row, start in chunks_TX[chunks_TX[:, 0] >= 0, :2].tolist():
        table.filled(row, start + C)
    slots_X = np.repeat(chunks_TX[:, 0], C)
    logprobs_X = np.full(len(drawn_X), -0.5, np.float32)
    tokens_BN, logprobs_BN, count_B, reused_B = by_slot(drawn_X, logprobs_X, kind_X, slots_X, B)
    return table.commit(tokens_BN, logprobs_BN, count_B, count_B > 0, reused_B).tolist()


def test_in_chunks_what_was_begun_goes_on_behind_what_a_rule_keeps():
    r = Request(0, PROMPT, cached=request(0).cached, begun=(5, 4, 3, 3))
    table, cached = table_of("full", [r], 2, in_chunks=True)
    chunks_TX = np.array([[0, 1, 2, 5, 6]], np.int32)
    assert drawn_in_chunks(table, chunks_TX, [5, 4, 7], kept=[0]) == [2, 0]
    assert cached.goes_on(np.array([0]))[0] and table.missing_tokens_B[0] == 2
    assert table.tokens_BL[0, 2:6].tolist() == [5, 4, 3, 3]


PRICE = ChunkPrice(RoundTimes({}), 4)


def test_a_row_that_decodes_instead_joins_and_its_chain_is_only_compared():
    table, cached = table_of("coupled", [request(0), request(1)], 2, in_chunks=True)
    table.filled(0, 1)
    table.filled(1, 1)
    assert table.verifies_B.all() and table.missing_tokens_B.tolist() == [5, 5]
    table.decode_instead(0)
    assert table.live_B.tolist() == [True, False] and table.verifies_B.tolist() == [False, True]
    assert table.known_tokens_B.tolist() == [1, 6]
    assert not cached.goes_on(np.array([0]))[0] and not chains(table).count_A.any()
    commit(table, {0: [5, 6]})
    assert not table.missing_tokens_B[0], "it does not look ahead"
    commit(table, {0: [7, 4]})
    assert (cached.counts.kept_tokens, cached.counts.tokens, cached.counts.whole) == (3, 5, 0)
    assert table.so_far(0, 0).prefix.reused_tokens == 3


def test_a_row_that_decodes_instead_lacks_what_it_lacked_of_its_prompt():
    table, _ = table_of("coupled", [request(0)], 1, in_chunks=True)
    assert table.missing_tokens_B[0] == 6
    table.decode_instead(0)
    assert table.missing_tokens_B[0] == 1 and not table.live_B[0]
    table.filled(0, 1)
    assert table.live_B[0]


def test_where_a_rule_decides_no_row_decodes_instead():
    table, _ = table_of("lenient:1", [request(0)], 1, in_chunks=True)
    with pytest.raises(AssertionError, match="a rule has to decide"):
        table.decode_instead(0)


def test_what_chunks_bring_follows_from_rates_that_the_rollout_corrects():
    early = Request(2, PROMPT, begun=(5, 6, 7))
    often = request(1)
    often = dataclasses.replace(often, cached=dataclasses.replace(often.cached, miss_rate=0.5))
    table, cached = table_of(
        "coupled",
        [request(0), often, early],
        in_chunks=True,
        price=PRICE,
        early_miss_rate=0.2,
    )
    for row in range(3):
        table.decode_instead(row)

    def expected():
        return cached.expected_tokens([0, 1, 2], table.emitted_B, table.limit_B).tolist()

    of_first = 1 + 0.9 + 0.9**2 + 0.9**3  # chunks have four tokens
    assert expected() == pytest.approx([of_first, 1 + 0.5 + 0.25 + 0.125, 1 + 0.8 + 0.64], 1e-4)
    commit(table, {0: [5, 6], 1: [4], 2: [5]})
    # of cached responses 1 of 0.1 + 0.1 + 0.5 expected misses, of early tokens 0 of 0.2
    rates = [0.1 * (1 + 2) / (0.7 + 2), 0.2 * 2 / (0.2 + 2)]
    assert expected() == pytest.approx(
        [1 + (1 - rates[0]) + (1 - rates[0]) ** 2, 0, 1 + 1 - rates[1]], 1e-4
    )


def test_a_row_that_decodes_verifies_the_rest_of_its_chain_again():
    table, cached = table_of("coupled", [request(0), request(1)], 2, in_chunks=True)
    for row in (0, 1):
        table.filled(row, 1)
        table.decode_instead(row)
    commit(table, {0: [5, 6], 1: [5, 6]})
    table.verify_again(0)
    assert table.live_B.tolist() == [False, True] and table.verifies_B.tolist() == [True, False]
    assert table.tokens_BL[0, 2:7].tolist() == TOKENS and table.missing_tokens_B[0] == 3
    chunks_TX = np.array([[0, 3, 6, 7, 8]], np.int32)
    assert drawn_in_chunks(table, chunks_TX, [7, 8, 9]) == [3, 0]
    assert not cached.goes_on(np.array([0]))[0] and table.ended_rows() == [0]
