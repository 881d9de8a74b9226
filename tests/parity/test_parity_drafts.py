"""Any draft tree gives the tokens of no draft, and is accepted where it is right."""

import dataclasses

import pytest
from parity_drafters import (
    Bushy,
    HalfRight,
    Oracle,
    Overrunning,
    RandomTrees,
    TooLong,
    Wrong,
    drafted,
    origins_if_all_accepted,
)
from parity_model import MODEL, ONE_SIZE, SAMPLINGS, TOLERANCE, differences, misscored
from shapes import SPEC

from reprise.rl.engine import rounds
from reprise.rl.engine.engine import Engine
from reprise.rl.records.trajectory import Origin
from reprise.rl.slot_memory.model_runner import ModelRunner

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("name", ["plain", "cool", "greedy"])
@pytest.mark.parametrize("kind", [Oracle, Overrunning, TooLong])
def test_right_chains_are_accepted_whole(golden, rollout, engine, kind, name):
    """Also past the end: an end token or the limit inside an accepted run ends it there."""
    drafter = kind(golden(name))
    got = rollout(name, drafter=drafter)
    assert not differences(golden(name), got)
    for t in got:
        origins = drafted(t)
        assert origins == origins_if_all_accepted(len(origins), SPEC.max_nodes)
    assert sum(len(drafted(t)) for t in got) > engine.stats.tokens / 2
    accepted = sum((t.origins == Origin.ACCEPTED).sum() for t in got)
    assert engine.stats.accepted_tokens == accepted
    assert sorted(drafter.finished_ids) == sorted(t.request_id for t in got)


def test_wrong_chains_are_never_accepted(golden, rollout, engine):
    got = rollout("plain", drafter=Wrong(golden("plain")))
    assert not differences(golden("plain"), got)
    origins = {int(o) for t in got for o in t.origins}
    # plain: rounds in which each request is at the last token that it may have
    plain = any(slots == nodes for slots, nodes, _ in engine.stats.rounds)
    assert origins == {Origin.BONUS} | ({Origin.PLAIN} if plain else set())
    assert engine.stats.accepted_tokens == 0
    assert engine.stats.drafted_nodes > engine.stats.tokens


@pytest.mark.parametrize("name", ["plain", "cool", "blocks_cool"])
def test_the_right_branch_of_a_bush_is_found(golden, rollout, name):
    got = rollout(name, drafter=Bushy(golden(name)))
    assert not differences(golden(name), got)
    for t in got:  # two right levels fit into 7 nodes: 3 tokens a round
        assert drafted(t) == origins_if_all_accepted(len(drafted(t)), 3)


@pytest.mark.parametrize("seed", range(6))
def test_random_trees(golden, rollout, engine, seed):
    name = ("plain", "cool", "top_k")[seed % 3]
    got = rollout(name, drafter=RandomTrees(golden(name), seed))
    assert not differences(golden(name), got)
    assert 0 < engine.stats.accepted_tokens < engine.stats.drafted_nodes


def test_rounds_of_chains_may_be_programs_of_their_own(golden, rollout, monkeypatch):
    """As on accelerators, which copy the keys of each path."""
    monkeypatch.setattr(ModelRunner, "has_chains", lambda self, B, M: M > 2 * B)
    seen = set()
    verify_round = rounds.verify_round

    def noted(*args, **options):
        (_, M), B = args[4].shape, len(args[3].active)
        assert options["num_paths"] in (B, M)
        if M > 2 * B:
            seen.add("chains" if options["num_paths"] == B else "trees")
        return verify_round(*args, **options)

    monkeypatch.setattr(rounds, "verify_round", noted)
    for drafter, expected in ((Oracle, "chains"), (Bushy, "trees")):
        seen.clear()
        assert not differences(golden("cool"), rollout("cool", drafter=drafter(golden("cool"))))
        assert expected in seen and (expected == "trees" or len(seen) == 1)


def test_bushes_of_any_size_across_pages(golden, rollout):
    """24 nodes, no power of two; accepted paths end in other pages than they begin in."""
    engine = Engine(MODEL, dataclasses.replace(ONE_SIZE, max_nodes=24, page_tokens=3))
    got = rollout("cool", drafter=Bushy(golden("cool")), engine=engine)
    assert not differences(golden("cool"), got)
    assert max(nodes / slots for slots, nodes, _ in engine.stats.rounds) == 24


def test_drafts_now_and_then_in_few_slots(golden, rollout, params):
    """Plain, accepted and bonus tokens, each with the log-probability of fresh scoring."""
    for name in ("plain", "cool"):
        got = rollout(name, drafter=HalfRight(golden(name), seed=1))
        assert not differences(golden(name), got)
        worst = misscored(params, got, SAMPLINGS[name])
        assert set(worst) == {Origin.PLAIN, Origin.ACCEPTED, Origin.BONUS}
        assert max(worst.values()) < TOLERANCE
