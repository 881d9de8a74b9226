"""The engine's own promises: clear errors, shared prefill, buckets, counts, reuse."""

import collections
import dataclasses
import itertools
import re

import numpy as np
import pytest
import rollouts
from drafts_by_hand import NO_DRAFT, Draft, chain, stack
from loop_runs import counted_compilations
from shapes import PLAIN, TINY, make_params

from reprise.rl.engine import rounds
from reprise.rl.engine.engine import Engine
from reprise.rl.engine.rollout_spec import RolloutSpec, draft_with, no_drafts
from reprise.rl.records.trajectory import FinishReason, NonFiniteLogits, PartialRequest, Request
from reprise.rl.slots.config import EngineConfig
from reprise.spec.buckets import bucket
from reprise.spec.budget.bandit import BanditBudget, make_bandit
from reprise.spec.budget.budget import DraftDecision, FixedBudget
from reprise.spec.budget.config import TunerConfig
from reprise.spec.budget.goodput import make_budget
from reprise.spec.budget.union import DrafterUnion
from reprise.spec.config import SamplingConfig
from reprise.spec.drafter import Drafter
from reprise.spec.round_times import RoundTimes
from reprise.spec.verification.sampling import step_key
from tests.support import symbolic_device
from tests.support.symbolic_device import SymbolicEngine

SAMPLING = SamplingConfig(max_new_tokens=8)
KEY = step_key(0, 0)
TIMES = RoundTimes(
    {(B, B * n, S): float(n) for B in (2, 4, 8) for n in (1, 2, 4) for S in (32, 64)}
)


PARAMS = make_params(0)


def group(prompt, first_id, size, **options):
    return [Request(first_id + i, prompt, sample_index=i, **options) for i in range(size)]


def run(engine, requests, params=PARAMS, sampling=SAMPLING, stop=(), **options):
    return rollouts.run(engine, params, requests, sampling, KEY, stop, **options)


@pytest.fixture(scope="module")
def engine():
    return Engine(TINY, PLAIN)


def hashing(**changes):
    """An engine on the device that computes hashes, and compiles nothing."""
    config = dataclasses.replace(PLAIN, **changes)
    return SymbolicEngine(symbolic_device.MODEL, config, dtype=np.float32)


@pytest.fixture
def hashes():
    with symbolic_device.device():
        yield


# -- bad requests ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([Request(3, ())], r"request 3 has an empty prompt"),
        ([Request(3, (1,)), Request(3, (2,))], r"request 3 comes twice"),
        ([Request(-1, (1,))], r"request -1: ids must be in 0"),
        ([Request(2**62, (1,))], r"ids must be in 0"),
        ([Request(3, (1, 20))], r"request 3 has the token 20, outside .* vocabulary of 20"),
        ([Request(3, (-4, 1))], r"request 3 has the token -4"),
        ([Request(3, (1,), max_new_tokens=0)], r"request 3 has max_new_tokens=0"),
        ([Request(3, (1,) * 57)], r"request 3 needs 65 positions \(57 of prompt and 8 new\).*64"),
        ([Request(3, (1,) * 4, max_new_tokens=61)], r"needs 65 positions"),
    ],
)
def test_bad_requests_name_themselves_before_any_device_work(requests, message):
    fresh = Engine(TINY, PLAIN)
    with pytest.raises(ValueError, match=message):
        run(fresh, [Request(1, (1,)), *requests])
    assert fresh._rows.memory.cache is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": 0}, "slots must be at least 1, got 0"),
        ({"rounds_per_fetch": 0}, "rounds_per_fetch"),
        ({"page_tokens": 0}, "page_tokens must be at least 1, got 0"),
        ({"prefill_chunk_tokens": -1}, "prefill_chunk_tokens must be at least 0, got -1"),
    ],
)
def test_bad_settings(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(PLAIN, **change)


class Scripted(Drafter):
    """A drafter that gives what `script(live, most)` says: a draft per live request."""

    def __init__(self, script):
        self.script, self.ended = script, []

    def propose(self, live, max_nodes_A, max_nodes):
        return stack(self.script(live, max_nodes_A.tolist()), max_nodes)

    def finished(self, live):
        left = live.remaining_tokens_A.tolist()
        for a, request_id in enumerate(live.request_ids_A.tolist()):
            self.ended.append((request_id, left[a], tuple(live.response(a).tolist())))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (lambda live, n: [NO_DRAFT], r"Scripted.propose gave 1 drafts for 2 requests"),
        (lambda live, n: [chain([1])] * 3, r"gave 3 drafts for 2 requests"),
        (lambda live, n: [Draft([1, 1], [-1, -1])] * 2, r"is 1 behind parent -1: .* siblings"),
        (lambda live, n: [Draft([1], [3])] * 2, r"is 1 behind parent 3"),
    ],
)
def test_bad_drafts(engine, script, message):
    with pytest.raises(ValueError, match=message):
        run(engine, group((1, 2), 0, 2), drafter=Scripted(script))
    # and the engine stays usable
    assert len(run(engine, group((1, 2), 0, 2))) == 2


class Greedy(FixedBudget):
    """A budget that takes all of a request's draft tokens in a round that has room for the sum."""

    def choose(self, live, drafts, sizes, num_slots, num_positions):
        return DraftDecision(sizes[0], drafts.count_A)


@pytest.mark.usefixtures("hashes")
def test_a_budget_that_takes_too_wide_a_tree():
    """In a round of two nodes a slot a tree has four: of a wider one the rest would be unseen."""
    engine = hashing(max_nodes=8)
    script = Scripted(lambda live, n: [chain([1, 2, 3, 4])] + [NO_DRAFT] * (len(live) - 1))
    with pytest.raises(ValueError, match=r"took 4 draft tokens, 4 of one request: .* and 3 of one"):
        run(engine, group((1, 2), 0, 4), drafter=script, budget=Greedy())


def test_no_requests(engine):
    assert run(engine, []) == []
    assert engine.stats.tokens == engine.stats.fetches == 0


# -- logits that are not finite ------------------------------------------------------


def foreseen(live, most):
    """The tokens that the device of hashes will draw, of every request."""
    drafts = []
    for a, request_id in enumerate(live.request_ids_A.tolist()):
        num_prompt, num_tokens = int(live.prompt_tokens_A[a]), int(live.total_tokens_A[a])
        prompt = tuple(live.tokens_BL[live.rows_A[a], :num_prompt].tolist())
        tokens, _ = symbolic_device.response(Request(request_id, prompt, max_new_tokens=12))
        drafts.append(chain(tokens[num_tokens - num_prompt :][: most[a]]))
    return drafts


@pytest.mark.usefixtures("hashes")
@pytest.mark.parametrize(("rounds_per_fetch", "drafts"), [(1, False), (4, False), (1, True)])
def test_logits_that_are_not_finite_end_their_response_alone(monkeypatch, rounds_per_fetch, drafts):
    """At every place of a response; the others, and later ones in its row, are as without it."""
    engine = hashing(rounds_per_fetch=rounds_per_fetch, max_nodes=4, page_tokens=4)
    requests = [Request(i, (1, 2 + i % 3), max_new_tokens=12) for i in range(9)]
    ends = {1: 0, 2: 3, 5: 11, 8: 7}  # responses, and the tokens before
    logprob, bad = symbolic_device.logprob, set()
    for i, num_tokens in ends.items():
        tokens, _ = symbolic_device.response(requests[i])
        context = 0
        for token in (*requests[i].prompt_ids, *tokens[:num_tokens]):
            context = symbolic_device.extended(context, token)
        bad.add((context, tokens[num_tokens]))
    monkeypatch.setattr(
        symbolic_device,
        "logprob",
        lambda context, token: np.float32(
            np.nan if (context, int(token)) in bad else logprob(context, token)
        ),
    )
    drafting = draft_with(Scripted(foreseen)) if drafts else no_drafts
    spec = RolloutSpec(PARAMS, SAMPLING, KEY, drafts=drafting)
    done = {}
    with engine.rollout(spec, max_requests=4, max_tokens=16):
        engine.add([PartialRequest(r) for r in requests])
        while engine.has_work:
            done |= {t.request_id: t for t in engine.step()}
    for i, request in enumerate(requests):
        tokens, logprobs = symbolic_device.response(request)
        n = ends.get(i, 11) + 1
        assert done[i].response_ids.tolist() == tokens[:n]
        np.testing.assert_array_equal(done[i].logprobs[: n - 1], logprobs[: n - 1])
        ended = FinishReason.NOT_FINITE if i in ends else FinishReason.LENGTH
        assert done[i].finish_reason is ended and np.isnan(done[i].logprobs[-1]) == (i in ends)
    assert not drafts or engine.stats.fetches < 20, "several tokens a round"
    with pytest.raises(NonFiniteLogits, match=r"request 1 .group 0, sample 0.*after 0 tokens"):
        run(engine, requests)


# -- counts ------------------------------------------------------------------------


def test_bucket():
    assert [bucket(n, 4) for n in (0, 1, 4, 5, 8, 9)] == [4, 4, 4, 8, 8, 16]
    assert bucket(9, 4, 12) == 12
    assert bucket(7, 3) == 12


def test_a_prompt_is_computed_once_for_its_group(engine):
    run(engine, group((1, 2, 3, 4, 5), 0, 9) + group((6, 7, 8), 100, 5))
    assert engine.stats.prefilled_tokens == 4 + 2
    run(engine, group((9,), 0, 6))
    assert engine.stats.prefilled_tokens == 0  # a prompt of one token is its own root


def test_fetches_rounds_and_tokens_are_counted(engine):
    got = run(engine, group((1, 2, 3), 0, 4))
    assert [t.num_tokens for t in got] == [8] * 4
    assert engine.stats.tokens == 32
    assert engine.stats.fetches == 2  # 8 rounds, 4 between two fetches
    assert engine.stats.rounds == {(4, 4, 32): 8}
    assert engine.stats.drafted_nodes == engine.stats.accepted_tokens == 0


def test_a_call_begins_where_the_device_gets_its_first_round(monkeypatch, engine):
    """Prompts of three chunks of rows, then plain rounds: calls without a fetch between them."""
    calls, ticks = [], itertools.count()
    monkeypatch.setattr(engine, "clock", lambda: float(next(ticks)))
    for name in ("decode_beside_chunks", "decode_rounds"):
        step = getattr(rounds, name)

        def watched(*args, step=step, **options):
            calls.append(float(next(ticks)))
            return step(*args, **options)

        monkeypatch.setattr(rounds, name, watched)
    run(engine, [Request(i, (1 + i, 2) * 9) for i in range(4)])
    several = 0
    for r in engine.stats.timeline:
        during = [at for at in calls if r.drafted_s < at < r.fetched_s]
        assert during[0] < r.called_s < min(during[1:], default=r.fetched_s)
        several += len(during) > 1
        assert bool(r.prompt_tokens) == (len(during) > 1), "one with plain rounds alone, no chunks"
    assert several, "a call of several rounds, some with chunks"
    in_records = sum(r.prompt_tokens for r in engine.stats.timeline)
    assert 0 < in_records < engine.stats.prefilled_tokens == 4 * 17


def never_drafts(budget):
    """A drafter without a draft token, and the budget that asks it."""
    drafter = Scripted(lambda live, n: [NO_DRAFT] * len(live))
    if budget != "bandit":
        return drafter, make_budget(budget, TIMES)
    union = DrafterUnion([drafter], ["own"])
    tuner = TunerConfig(thresholds=(1,), verify_tokens=(3,))
    return union, BanditBudget(make_bandit(tuner, ["own"], 0, {}, 0), TIMES, union)


@pytest.mark.parametrize("budget", ["fixed:3", "aimd", "goodput", "bandit"])
def test_a_drafter_that_never_drafts_costs_no_fetch_a_round(engine, budget):
    drafter, chosen = never_drafts(budget)
    got = run(engine, group((1, 2, 3), 0, 4), drafter=drafter, budget=chosen)
    assert engine.stats.fetches <= 3  # of 2, 4 and 2 rounds
    assert engine.stats.rounds == {(4, 4, 32): 8}
    drafter = drafter if isinstance(drafter, Scripted) else drafter._drafters[0]
    assert sorted(drafter.ended) == [(t.request_id, 0, tuple(t.response_ids)) for t in got]


def test_drafters_see_the_live_requests(engine):
    seen = []

    def script(live, most):
        left = live.remaining_tokens_A.tolist()
        seen.append(list(zip(live.request_ids_A.tolist(), left, most, strict=True)))
        assert all(len(live.response(a)) + n == 3 + r for a, (r, n, _) in enumerate(seen[-1]))
        return [NO_DRAFT] * len(live)

    requests = [Request(i, (5, 6), 7, i, max_new_tokens=3 + i) for i in range(2)]
    run(engine, requests, drafter=Scripted(script))
    # (request, tokens left, draft tokens allowed); nobody is asked for a last token
    assert seen == [[(0, 3, 2), (1, 4, 3)], [(1, 2, 1)]]


def test_drafters_hear_what_every_round_begins_with_whoever_is_asked(engine):
    heard = collections.defaultdict(list)

    class Hears(Scripted):
        can_lag = False  # as if other workers drafted from it

        def committed(self, live):
            for a, request_id in enumerate(live.request_ids_A.tolist()):
                heard[request_id].append(live.response(a).tolist())

    drafter = Hears(lambda live, n: pytest.fail("nobody is to be asked"))
    got = run(engine, group((1, 2, 3), 0, 2), drafter=drafter, budget=FixedBudget(0))
    for t in got:  # 8 rounds, 4 between two fetches
        assert heard[t.request_id] == [t.response_ids[:n].tolist() for n in (0, 4)]


@pytest.mark.usefixtures("hashes")
def test_the_batch_shrinks_as_requests_end_and_slots_are_refilled():
    engine = hashing(min_slots=2)
    limits = [1, 1, 1, 12, 1, 12]
    requests = [Request(i, (1, 2), max_new_tokens=n) for i, n in enumerate(limits)]
    got = run(engine, requests)
    assert [t.num_tokens for t in got] == limits
    # four enter, three of them end at once; two more make three, one ends; two go on for 11
    assert engine.stats.rounds == {(4, 4, 32): 2, (2, 2, 32): 11}


@pytest.mark.usefixtures("hashes")
def test_rows_that_waiting_siblings_need_survive_the_shrinking():
    engine = hashing(min_slots=2)
    prompts = [(1, 2, 3), (1, 2, 3), (4, 5), (4, 5), (4, 5)]
    requests = [
        Request(i, prompt, max_new_tokens=n)
        for i, (prompt, n) in enumerate(zip(prompts, (12, 1, 1, 1, 12), strict=True))
    ]
    run(engine, requests)  # after a round: one busy, one waiting, and the batch is halved
    assert engine.stats.rounds == {(4, 4, 32): 1, (2, 2, 32): 12}
    assert engine.stats.prefilled_tokens == 2 + 1


@pytest.mark.usefixtures("hashes")
def test_positions_are_those_of_the_longest_request_an_engine_was_told_of():
    """A phase of shorter ones, after the warm-up or a longer phase, finds what is compiled."""
    engine = hashing(page_tokens=16)
    seen = []
    for new_tokens in (60, 38):
        run(engine, group((1, 2), 0, 4, max_new_tokens=new_tokens))
        seen.append({positions for _, _, positions in engine.stats.rounds})
    assert seen == [{64}, {64}]  # 62 positions, and 40: 48 would do alone
    alone = hashing(page_tokens=16)
    run(alone, group((1, 2), 0, 4, max_new_tokens=38))
    assert {positions for _, _, positions in alone.stats.rounds} == {48}


@pytest.mark.usefixtures("hashes")
def test_a_request_that_ends_at_the_edge_of_its_last_page_gets_no_other():
    """Its neighbour goes on for longer than it; only the warmed-up size is used."""
    engine = hashing(max_nodes=1)
    long, short = Request(0, (1,) * 30, max_new_tokens=2), Request(1, (1, 2), max_new_tokens=8)
    got = run(engine, [long, short])
    assert [t.num_tokens for t in got] == [2, 8]
    assert {positions for _, _, positions in engine.stats.rounds} == {32}


def test_prompts_whose_chunks_end_at_every_offset_of_a_bucket(monkeypatch):
    """As if they were given whole; some rows end on the way, and a last window behind its slot."""
    starts, step = set(), rounds.decode_beside_chunks

    def watched(*args, **options):
        starts.update(args[5][:, 1].tolist())
        return step(*args, **options)

    monkeypatch.setattr(rounds, "decode_beside_chunks", watched)
    rng = np.random.default_rng(0)
    requests = [
        Request(n, tuple(rng.integers(0, 20, n).tolist()), max_new_tokens=min(1 + n % 5, 33 - n))
        for n in range(1, 32)
    ]
    found = []
    for tokens in (32, 7):
        starts.clear()
        fresh = Engine(TINY, dataclasses.replace(PLAIN, prefill_chunk_tokens=tokens))
        found.append(run(fresh, requests))
        assert fresh.stats.prefilled_tokens == sum(n - 1 for n in range(1, 32))
    assert starts == {0, 7, 14, 21, 28}  # of 32 positions, behind which nothing is written
    for whole, got in zip(*found, strict=True):
        assert got.response_ids.tolist() == whole.response_ids.tolist()
        np.testing.assert_allclose(got.logprobs, whole.logprobs, atol=1e-5)


# -- phases ------------------------------------------------------------------------


def test_on_finish_is_called_once_for_each_response_as_it_ends(engine):
    told, rounds = [], []
    limits = [8, 1, 5, 3, 2]
    requests = [Request(i, (1, 2), max_new_tokens=n) for i, n in enumerate(limits)]
    got = run(
        engine,
        requests,
        on_finish=told.append,
        on_round=lambda done, tokens: rounds.append((done, tokens, len(told))),
    )
    assert sorted(t.request_id for t in told) == list(range(5))
    assert {id(t) for t in told} == {id(t) for t in got}
    assert told[0].request_id == 1 and told[-1].request_id == 0
    assert all(done == so_far for done, _, so_far in rounds)
    assert rounds[-1][:2] == (5, sum(limits))
    assert len({done for done, _, _ in rounds}) > 2  # not all at the end


def test_finish_reasons_versions_and_identity(engine):
    requests = [Request(i, (i + 1, 2), group_id=i // 2, sample_index=i % 2) for i in range(8)]
    got = run(engine, requests, stop=(4, 5, 6), policy_version=17)
    for request, t in zip(requests, got, strict=True):
        assert (t.request_id, t.group_id, t.sample_index) == (
            request.request_id,
            request.group_id,
            request.sample_index,
        )
        assert t.prompt_ids.tolist() == list(request.prompt_ids)
        assert t.policy_versions.tolist() == [17] * t.num_tokens
        stops = [token in (4, 5, 6) for token in t.response_ids.tolist()]
        assert not any(stops[:-1])
        assert stops[-1] == (t.finish_reason is FinishReason.STOP)
        assert stops[-1] or t.num_tokens == 8
        assert t.logprobs.dtype == np.float32 and (t.logprobs <= 0).all()
    assert {t.finish_reason for t in got} == {FinishReason.STOP, FinishReason.LENGTH}


def responses(trajectories):
    return [(t.response_ids.tolist(), t.logprobs.tolist()) for t in trajectories]


def test_a_used_engine_with_new_weights_equals_a_fresh_one(engine):
    """Nothing of the old policy's cache is left, though the prompts are the same."""
    requests = group((1, 2, 3, 4, 5), 0, 6)
    old = run(engine, requests)
    new = run(engine, requests, make_params(1))
    fresh = run(Engine(TINY, PLAIN), requests, make_params(1))
    assert responses(new) == responses(fresh)
    assert responses(new) != responses(old)
    assert engine.stats.prefilled_tokens == 4


def test_an_error_of_on_round_ends_the_rollout_and_the_engine_stays_usable(engine):
    class Enough(Exception):
        pass

    def stop(done, tokens):
        raise Enough

    want = responses(run(engine, group((1, 2, 3), 0, 6)))
    with pytest.raises(Enough):
        run(engine, group((1, 2, 3), 0, 6), on_round=stop)
    assert responses(run(engine, group((1, 2, 3), 0, 6))) == want


def test_a_second_rollout_compiles_nothing(engine):
    requests = group((1, 2, 3), 0, 6) + group((7, 7), 50, 3)
    run(engine, requests)
    cooler = SamplingConfig(temperature=0.5, top_k=3, top_p=0.8, max_new_tokens=6)
    with counted_compilations() as compiled:
        run(engine, requests, make_params(2), cooler)
    assert not compiled


def test_prompts_come_in_few_fetches_while_drafts_wait_for_them(monkeypatch):
    """Most rows lack their prompt for several rounds; drafts begin right after these."""
    config = EngineConfig(
        **{"slots": 8, "min_slots": 8, "max_nodes": 4, "prefill_rows": 1, "page_tokens": 64},
        **{"prefill_chunk_tokens": 8, "rounds_per_fetch": 16},
    )
    requests = [Request(i, tuple((i + k) % 11 for k in range(20)), i) for i in range(8)]

    def rollout(**drafts):
        """Return the tokens, and how many fetches had rounds that computed prompts."""
        engine = Engine(TINY, config)
        done = rollouts.run(engine, PARAMS, requests, SAMPLING, KEY, **drafts)
        with_prompts = [r for r in engine.stats.timeline if r.prompt_tokens]
        return [t.response_ids.tolist() for t in done], len(with_prompts)

    drafter = Scripted(lambda live, most: [chain([5])] * len(live))
    tokens, few = rollout(drafter=drafter)
    assert tokens == rollout()[0]
    with monkeypatch.context() as patch:  # a fetch for each of these rounds
        patch.setattr(rounds.Rounds, "_drafts_wait", lambda self: False)
        again, many = rollout(drafter=drafter)
    assert again == tokens
    assert few <= many - 8, "the prompts of the first half of the rows are 12 rounds"
