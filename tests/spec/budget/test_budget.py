"""Budgets by hand: windows, gates, and the size that buys the most tokens per second."""

import dataclasses

import numpy as np
import pytest
from drafts_by_hand import drafts

from reprise.spec.budget.aimd import Aimd, next_windows
from reprise.spec.budget.budget import FixedBudget, best_by_size
from reprise.spec.budget.goodput import Goodput, make_budget
from reprise.spec.drafter import Acceptance, LiveSlots, Source, no_drafts, round_acceptance
from reprise.spec.round_times import RoundTimes


def live(num, first_id=0):
    ids = np.arange(first_id, first_id + num)
    return LiveSlots(ids, ids, ids, ids, ids, ids, np.zeros((num, 2), np.int32))


def chains(lengths, prob, width=15):
    """A chain per request, each draft token as likely as the one before times `probability`."""
    out = no_drafts(len(lengths), width)
    for a, n in enumerate(lengths):
        out.parents_AN[a, :n] = np.arange(-1, n - 1)
        out.prob_AN[a, :n] = prob ** np.arange(1, n + 1)
        out.count_A[a] = n
    return out


def after(drafts, num_nodes, emitted):
    """The outcome of a round of chains, cut to so many nodes each, by the tokens of each."""
    tried_A = np.minimum(drafts.count_A, num_nodes - 1)
    nodes_N = np.arange(drafts.max_nodes)
    accepted_AN = nodes_N < np.asarray(emitted)[:, None] - 1
    return Acceptance(num_nodes > 1, accepted_AN, nodes_N < tried_A[:, None])


SIZES = [2, 4, 8, 16]  # nodes of a slot
FREE = RoundTimes({(b, b * n, 64): 1.0 for b in (1, 4, 32) for n in (1, *SIZES)})
# a node costs half of what a plain round does
DEAR = RoundTimes({(b, b * n, 64): 0.5 + 0.5 * n for b in (1, 4, 32) for n in (1, *SIZES)})


def choose(budget, requests, drafts, slots, sizes=SIZES):
    """The nodes of each slot in the round that the budget chooses; 1: plain decoding."""
    found = budget.choose(requests, drafts, [slots * n for n in sizes], slots, 64)
    if found.taken_A is None:
        assert found.num_nodes == slots
    else:
        assert slots + found.taken_A.sum() <= found.num_nodes
        assert (found.taken_A <= drafts.count_A).all()
    return found.num_nodes / slots


def asked_at(budget, requests, drafts, slots, rounds):
    """The rounds, of so many in a row, in which these drafts are asked for and refused."""
    first_A, asked = requests.total_tokens_A, []
    for r in range(rounds):
        now = dataclasses.replace(requests, total_tokens_A=first_A + r)
        if budget.limits(now, slots).any():
            asked.append(r)
            assert choose(budget, now, drafts, slots) == 1
    return asked


def test_windows_by_hand():
    windows = next_windows(
        np.array([2, 4, 32, 8, 6]), np.array([2, 4, 32, 8, 0]), np.array([2, 3, 32, 0, 0])
    )
    assert windows.tolist() == [4, 2, 32, 2, 6]


def test_off_and_fixed():
    assert make_budget("off", None).limits(live(3), 4).tolist() == [0, 0, 0]
    budget = FixedBudget(5)
    assert budget.limits(live(2), 4).tolist() == [5, 5]
    assert choose(budget, live(2), chains([0, 0], 1.0), 4) == 1
    assert choose(budget, live(2), chains([3, 1], 1.0), 4) == 2  # 4 roots and 4 draft tokens
    assert choose(budget, live(2), chains([4, 1], 1.0), 4) == 4
    assert choose(budget, live(2), chains([15, 1], 1.0), 4, [2, 4]) == 4


@pytest.mark.parametrize("seed", range(20))
def test_the_best_are_those_of_a_sort_of_all(seed):
    """Few different probabilities, so that there are ties; trees and sizes at random."""
    rng = np.random.default_rng(seed)
    num, width, slots = 5, 7, 8
    found = no_drafts(num, width)
    found.count_A[:] = rng.integers(0, width + 1, num)
    found.prob_AN[:] = -np.sort(-rng.choice([0.0, 0.25, 0.5, 1.0], (num, width)), axis=1)
    scale_A = rng.choice([0.5, 1.0, 1.5], num)
    scaled_AN = found.prob_AN * scale_A[:, None]
    sizes = [8, 9, 13, 16, 32, 64]
    taken_SA, accepted_S = best_by_size(found, scale_A, slots, sizes)
    for size, taken_A, accepted in zip(sizes, taken_SA, accepted_S, strict=True):
        widest = -(-2 * size // slots) - 1
        every = []
        for a in range(num):
            before_N = 1 + np.cumsum([0, *scaled_AN[a, :-1]])
            worth_N = (scaled_AN[a] / before_N).astype(np.float32)
            every += [(-worth_N[n], a, n) for n in range(min(found.count_A[a], widest))]
        chosen = sorted(every)[: size - slots]
        assert taken_A.tolist() == [sum(a == b for _, b, _ in chosen) for a in range(num)]
        assert accepted == pytest.approx(sum(scaled_AN[a, n] for _, a, n in chosen))


def test_aimd_follows_each_request():
    budget = Aimd()
    drafts = chains([2, 2], 1.0)
    assert budget.limits(live(2), 4).tolist() == [2, 2]
    budget.observe(live(2), drafts, after(drafts, 4, [3, 2]))
    assert budget.limits(live(2), 4).tolist() == [4, 2]
    budget.observe(live(1), chains([4], 1.0), after(chains([4], 1.0), 8, [5]))
    assert budget.limits(live(3), 4).tolist() == [6, 2, 2]
    budget.observe(
        live(1), chains([0], 1.0), after(chains([0], 1.0), 8, [1])
    )  # nothing drafted, nothing learnt
    budget.observe(live(1), chains([3], 1.0), after(chains([3], 1.0), 1, [1]))  # drafted, not tried
    assert budget.limits(live(1), 4).tolist() == [6]


def test_aimd_compares_acceptance_with_the_longest_path_of_a_tree():
    """Two branches of two draft tokens: no more than two can be right; siblings alone: one."""
    budget = Aimd()
    tree = drafts([(-1, 5, 0.6), (0, 6, 0.5), (-1, 7, 0.3), (2, 8, 0.2)], width=15)
    tokens = np.array([[7, 8, 9]])

    def observe(tree, num_nodes, emitted):
        taken_A = np.minimum(tree.count_A, num_nodes - 1)
        acceptance = round_acceptance(tree, taken_A, tokens, np.array([emitted]))
        budget.observe(live(1), tree, acceptance)
        return budget.limits(live(1), 4).tolist()

    assert observe(tree, 8, 3) == [4] and observe(tree, 8, 3) == [6]
    assert observe(tree, 8, 2) == [2]  # the branch broke off after its first token
    assert observe(tree, 4, 2) == [2]  # cut to three draft tokens the deepest path is of two still
    siblings = drafts([(-1, 5, 0.6), (-1, 7, 0.3)], width=15)
    assert observe(siblings, 4, 2) == [4] and observe(siblings, 4, 1) == [2]


def test_aimd_closes_where_the_table_says_that_drafts_cost_more_than_they_bring():
    budget = Aimd(DEAR)
    drafts = chains([3] * 4, 1.0)
    assert choose(budget, live(4), drafts, 4) == 4  # nothing known yet
    budget.observe(live(4), drafts, after(drafts, 4, [1, 1, 1, 1]))
    looked = asked_at(budget, live(4), drafts, 4, 300)
    assert looked == [0, 32, 96, 224]  # it looks again now and then
    drawn = drafts.prob_AN > 0
    for _ in range(60):  # what plain rounds draw
        budget.observe(live(4), drafts, Acceptance(False, drawn, drawn))
    assert choose(budget, live(4), drafts, 4) == 4
    assert budget.limits(live(4), 4).tolist() == [2] * 4, "windows are of verified drafts"


def test_goodput_weighs_nodes_by_their_price():
    """Rates are (1 + Σ probability) / (0.5 + n / 2): 0.9 → 1.9/1.5, then 3.44/2.5, then less."""
    budget = Goodput(DEAR)
    assert choose(budget, live(1), chains([15], 0.9), 1) == 4
    assert choose(Goodput(DEAR), live(1), chains([15], 0.4), 1) == 1
    # 3 % more are not worth leaving plain decoding for: 1.54 / 1.5
    assert choose(Goodput(DEAR), live(1), chains([15], 0.54), 1, [2]) == 1
    # a round of four slots with two requests pays for four: (2 + Σ of four) / 2 / 1.5 > 1, with
    # drafts of one of them too, as no node is bound to a slot
    assert choose(Goodput(DEAR), live(2), chains([15, 0], 0.9), 4, [2]) == 2
    assert choose(Goodput(DEAR), live(2), chains([1, 0], 0.9), 4, [2]) == 1


def test_goodput_learns_what_drafts_are_worth():
    budget = Goodput(DEAR)
    drafts = chains([3] * 4, 0.95)
    assert choose(budget, live(4), drafts, 4) == 4
    for _ in range(20):
        budget.observe(live(4), drafts, after(drafts, 4, [1, 1, 1, 4]))
    wrong, right = budget.scale(live(4))[[0, 3]]
    assert wrong < 0.2 and right > 0.9
    newcomer = budget.scale(live(1, first_id=99))[0]
    assert 0.2 < newcomer < 0.4  # starts from what all were worth: a quarter
    # all nodes for the one request whose drafts stand, and one that is left over
    assert choose(budget, live(4), drafts, 4) == 2
    assert budget.choose(live(4), drafts, [8], 4, 64).taken_A.tolist() == [1, 0, 0, 3]


def test_goodput_learns_from_drafts_that_were_not_verified():
    budget = Goodput(DEAR)
    drafts = chains([3] * 4, 0.95)
    for _ in range(20):
        budget.observe(live(4), drafts, after(drafts, 4, [1, 1, 1, 1]))
    assert choose(budget, live(4), drafts, 4) == 1
    seen_AN = np.arange(15) < np.array([[3]] * 4)
    for _ in range(60):  # plain decoding draws what was drafted
        budget.observe(live(4), drafts, Acceptance(False, seen_AN, seen_AN))
    assert choose(budget, live(4), drafts, 4) == 4


def test_goodput_asks_less_often_while_plain_decoding_wins():
    budget = Goodput(DEAR)
    dear = live(1), chains([15], 0.1), SIZES, 1, 64
    assert asked_at(budget, *dear[:2], 1, 800) == [0, 16, 48, 112, 240, 496, 752]
    again = [budget.choose(*dear).num_rounds for _ in range(2)]
    assert again == [256, 256], "asked for cached responses meanwhile"
    assert choose(budget, live(1), chains([15], 0.9), 1) == 4
    assert budget.choose(*dear).num_rounds == 16


def test_goodput_asks_for_no_drafts_while_it_waits():
    budget, one = Goodput(DEAR), live(1)
    start = int(one.total_tokens_A[0])
    for passed in (-16, 0):  # the last refusal is for 32 rounds
        then = dataclasses.replace(one, total_tokens_A=one.total_tokens_A + passed)
        budget.choose(then, chains([15], 0.1), SIZES, 1, 64)

    def asked(tokens, slots=1, request_id=int(one.request_ids_A[0])):
        now = dataclasses.replace(
            one, total_tokens_A=np.array([tokens]), request_ids_A=np.array([request_id])
        )
        return bool(budget.limits(now, slots).any())

    assert not asked(start + 31) and asked(start + 32)
    assert asked(start + 1, slots=2)  # another size of batch
    assert asked(start + 1, request_id=99)  # the request that it waits with has ended


def test_refused_drafts_are_wanted_again_for_a_part_of_the_groups_until_they_pay():
    budget, requests = Goodput(DEAR), live(8)  # a group each

    def at(passed):
        return dataclasses.replace(requests, total_tokens_A=requests.total_tokens_A + passed)

    def drafted(wanted_A, prob):
        return chains(np.where(wanted_A, 15, 0), prob)

    assert (budget.limits(at(0), 32) > 0).all()
    assert choose(budget, at(0), chains([15] * 8, 0.1), 32) == 1
    some_A = budget.limits(at(32), 32) > 0
    assert some_A.sum() == 2
    assert choose(budget, at(32), drafted(some_A, 0.1), 32) == 1
    others_A = budget.limits(at(96), 32) > 0
    assert others_A.sum() == 2 and not (others_A & some_A).any()
    found = budget.choose(at(96), drafted(others_A, 0.95), [32 * n for n in SIZES], 32, 64)
    assert (found.taken_A, found.num_rounds) == (None, 1), "the others have no drafts yet"
    assert (budget.limits(at(97), 32) > 0).all()
    assert choose(budget, at(97), chains([15] * 8, 0.95), 32) > 1
    alone = Goodput(DEAR)
    assert choose(alone, live(1), chains([15], 0.1), 32) == 1
    assert (alone.limits(live(1, first_id=3), 32) > 0).all(), "one group is all there is"


def test_a_part_of_the_requests_is_judged_by_its_part_of_the_nodes():
    """All are alike: what pays for all of them pays for a quarter, and what does not, does not."""
    for prob in (0.3, 0.6, 0.9):
        whole, part, requests = Goodput(DEAR), Goodput(DEAR), live(8)
        assert choose(part, requests, chains([15] * 8, 0.1), 32) == 1
        later = dataclasses.replace(requests, total_tokens_A=requests.total_tokens_A + 32)
        wanted_A = part.limits(later, 32) > 0
        found = part.choose(
            later, chains(np.where(wanted_A, 15, 0), prob), [32 * n for n in SIZES], 32, 64
        )
        pays = choose(whole, requests, chains([15] * 8, prob), 32) > 1
        assert (found.num_rounds == 1) == pays, prob


def test_drafts_begin_at_one_speed_and_end_at_a_lower_one():
    """One draft token of probability p and a round of 1.6 plain ones: (1 + p) / 1.6."""
    budget = Goodput(RoundTimes({(1, 1, 64): 1.0, (1, 2, 64): 1.6}))

    def drafts_at(prob):
        return budget.choose(live(1), chains([1], prob), [2], 1, 64).num_nodes == 2

    assert not drafts_at(0.62)  # 1.0125
    assert drafts_at(0.70)  # 1.0625
    assert drafts_at(0.62)
    assert not drafts_at(0.55)  # 0.97
    assert not drafts_at(0.62)


def test_rounds_are_priced_by_the_live_positions_of_their_rows():
    """Short rows make plain rounds cheaper, and rounds with draft tokens hardly."""
    rounds = {(1, 1, 512): 2.0, (1, 4, 512): 3.0}
    short_seconds = {(1, 1, 512): 0.5, (1, 4, 512): 2.9}
    budget = Goodput(RoundTimes(rounds, short_seconds=short_seconds))

    def chosen(tokens):
        now = dataclasses.replace(live(1), total_tokens_A=np.array([tokens]))
        return budget.choose(now, chains([3], 0.8), [4], 1, 512).num_nodes

    assert [chosen(tokens) for tokens in (64, 256, 512)] == [1, 4, 4]


def test_goodput_needs_a_measured_plain_round():
    with pytest.raises(KeyError, match="64 slots and 32 positions: measure"):
        Goodput(FREE).choose(live(1), chains([1], 0.9), SIZES, 64, 32)


def test_names():
    assert isinstance(make_budget("aimd", None), Aimd)
    assert isinstance(make_budget("goodput", FREE), Goodput)
    assert make_budget("fixed:7", None).limits(live(1), 1).tolist() == [7]
    for bad in ("fixed", "fixed:", "fixed:0", "fixed:x", "best"):
        with pytest.raises(ValueError, match="one of off, fixed:K, aimd, goodput"):
            make_budget(bad, None)


def test_windows_do_not_close_rounds_in_which_cached_responses_go_on():
    budget, requests = Aimd(DEAR), live(4)
    found = chains([3] * 4, 0.9, width=3)
    budget.observe(requests, found, after(found, 4, [1] * 4))  # nothing was right
    assert choose(budget, requests, found, 4) == 1
    found.sources_AN[:] = Source.CACHED
    assert choose(budget, requests, found, 4) == 4
    found.prob_AN[:] = 0.3 ** np.arange(1, 4)
    assert choose(budget, requests, found, 4) == 1


def test_what_drafters_were_right_about_says_nothing_of_cached_responses():
    budget, requests = Goodput(DEAR), live(4)
    found = chains([3] * 4, 0.9, width=3)
    for _ in range(20):
        budget.observe(requests, found, after(found, 4, [1] * 4))
    assert choose(budget, requests, found, 4) == 1
    found.sources_AN[:] = Source.CACHED
    assert choose(budget, requests, found, 4) == 4
