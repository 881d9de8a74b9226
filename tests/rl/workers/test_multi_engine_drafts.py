"""Draft tokens and reuse on several workers: the same tokens as one engine's."""

from __future__ import annotations

import dataclasses

import pytest
import rollouts
from drafts_by_hand import chain, stack
from tiny_team import (
    KEY,
    MODEL,
    PARAMS,
    PROMPTS,
    REQUESTS,
    SAMPLING,
    STOP,
    assert_same_tokens,
    play,
    with_cached,
    workers,
)

from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.records.trajectory import Origin, Request
from reprise.spec.budget.budget import FixedBudget
from reprise.spec.config import SamplingConfig
from reprise.spec.drafter import Drafter
from reprise.spec.retrieval.group import DraftServer, GroupDrafter
from reprise.spec.reuse.prefix_rule import PrefixRule, parse_mode


class Told(Drafter):
    """Draft tokens what a request's tokens are going to be, and every third one wrong."""

    def __init__(self, alone):
        self._alone, self.ended = alone, []

    def propose(self, live, max_nodes_A, max_nodes):
        def draft(a):
            known = int(live.total_tokens_A[a] - live.prompt_tokens_A[a])
            rest = self._alone[int(live.request_ids_A[a])].response_ids[known:].tolist()
            count = int(max_nodes_A[a])
            return chain(
                [(t + (i % 3 == 2)) % MODEL.vocab_size for i, t in enumerate(rest)][:count]
            )

        return stack([draft(a) for a in range(len(live))], max_nodes)

    def finished(self, live):
        self.ended += live.request_ids_A.tolist()

    def left(self, live):
        pass


@pytest.mark.parity
@pytest.mark.parametrize(("count", "chunk"), [(2, 3), (3, 1)])
def test_drafts_change_no_token(engines, alone, count, chunk):
    team = workers(engines, count, chunk=chunk)
    made = []

    def drafts(context):
        made.append(Told(alone))
        return made[-1], FixedBudget()

    assert_same_tokens(play(team, drafts=drafts), alone)
    assert len(made) == count, "each worker has a drafter of its own"
    # once each, on whatever worker
    assert sorted(r for d in made for r in d.ended) == sorted(r.request_id for r in REQUESTS)
    assert team.stats.accepted_tokens > (20 if chunk == 3 else -1)


@pytest.mark.parity
@pytest.mark.parametrize("shared", [True, False])
def test_siblings_on_other_workers_are_drafted_from(engines, shared):
    """Equal requests on two workers: with a server in common a drafter hears of all of them."""
    greedy = SamplingConfig(max_new_tokens=16, temperature=0.0)
    requests = [Request(i, PROMPTS[0], 0, i) for i in range(6)]
    server = DraftServer() if shared else None
    drafters = []

    def drafts(context):
        drafters.append(GroupDrafter(update_tokens=1, server=server))
        return drafters[-1], FixedBudget()

    plain = rollouts.run(engines[0], PARAMS, requests, greedy, KEY, STOP)
    team = workers(engines, 2, chunk=16)  # three each, and none moves
    done = rollouts.run(team, PARAMS, requests, greedy, KEY, STOP, drafts=drafts)
    assert [t.response_ids.tolist() for t in done] == [t.response_ids.tolist() for t in plain]
    assert len(drafters) == 2
    for drafter in drafters:
        drafter.wait()
    heard = [set(d._seen.get(0, {})) for d in drafters]
    assert (set(range(len(requests))) in heard) == shared


@pytest.mark.parity
@pytest.mark.parametrize(("policy", "chunk"), [("group_fifo", 3), ("seer", 1)])
def test_coupled_reuse_changes_no_token(engines, alone, policy, chunk):
    """Of responses that the noise repeats, what is drawn again stands."""
    rule = PrefixRule(parse_mode("coupled"), 0.0, 0, 1)
    team = workers(engines, 2, policy, chunk)
    requests = with_cached(REQUESTS, alone)
    spec = RolloutSpec(PARAMS, SAMPLING, KEY, STOP, policy_version=7, rule=rule)
    done = team.run(spec, requests)
    assert_same_tokens(done, alone)
    found = team.stats.cached
    assert found.responses == len(REQUESTS) and found.kept_tokens > 100


@pytest.mark.parity
def test_full_reuse_keeps_all_and_generates_the_rest(engines, alone):
    rule = PrefixRule(parse_mode("full"), 0.0, 0, 1)
    team = workers(engines, 3, chunk=2)
    cut = [
        dataclasses.replace(r, cached=dataclasses.replace(r.cached, tokens=r.cached.tokens[:4]))
        for r in with_cached(REQUESTS, alone, wrong_at=100)
    ]
    spec = RolloutSpec(PARAMS, SAMPLING, KEY, STOP, policy_version=7, rule=rule)
    done, one = team.run(spec, cut), engines[0].run(spec, cut)
    for t, wanted in zip(done, one, strict=True):
        assert t.response_ids.tolist() == wanted.response_ids.tolist()
        assert t.policy_versions.tolist() == wanted.policy_versions.tolist()
        reused = [(x.origins == Origin.REUSED).tolist() for x in (t, wanted)]
        assert reused[0] == reused[1] and sum(reused[0]) == min(4, t.num_tokens)
