"""Real drafters under every budget and sampling: the tokens of plain decoding."""

import dataclasses

import numpy as np
import pytest
from parity_drafters import Oracle, drafted
from parity_model import MODEL, ONE_SIZE, POSITIONS, SAMPLINGS, TOLERANCE, differences, misscored

from reprise.rl.engine.engine import Engine
from reprise.rl.records.trajectory import Origin
from reprise.spec.budget.goodput import make_budget
from reprise.spec.budget.union import DrafterUnion
from reprise.spec.retrieval.group import GroupDrafter
from reprise.spec.retrieval.history import PAPER_RULE, RULE, HistoryDrafter, build_index
from reprise.spec.retrieval.suffix_drafter import NgramDrafter
from reprise.spec.reuse.rollout_cache import RolloutCache, of_group
from reprise.spec.round_times import RoundTimes

pytestmark = pytest.mark.parity

# a node costs a tenth of a plain round, whatever the batch
TIMES = RoundTimes(
    {(8, 8 * n, s): 0.9 + 0.1 * n for n in (1, 2, 4, 8) for s in POSITIONS}
    | {(1, n, s): 0.9 + 0.1 * n for n in (1, 2, 4, 8) for s in POSITIONS}
)
BUDGETS = ("fixed:1", "fixed:7", "aimd", "goodput")


def almost(response_ids, seed):
    """The response with a token changed, one left out and one doubled: history is never exact."""
    rng = np.random.default_rng(seed)
    tokens = list(response_ids)
    for change in range(3):
        i = int(rng.integers(0, len(tokens)))
        if change == 0:
            tokens[i] = (tokens[i] + 1) % MODEL.vocab_size
        elif change == 1:
            tokens.insert(i, tokens[i])
        elif len(tokens) > 1:
            del tokens[i]
    return np.asarray(tokens, np.int32)


def history(golden, requests, rule):
    store, keys, prompts = RolloutCache(), {}, {}
    for r in requests:
        keys[r.group_id], prompts[f"g{r.group_id}"] = f"g{r.group_id}", np.asarray(r.prompt_ids)
    for group, key in keys.items():
        if group == 5:
            continue  # a prompt without history
        past = [golden[r.request_id].response_ids for r in requests if r.group_id == group]
        rewards = [float(i % 2) for i in range(len(past))]
        store.replace(key, of_group([almost(p, i) for i, p in enumerate(past)], rewards))
    return HistoryDrafter(build_index(store, prompts, rule), keys, rule)


def make(kind, golden, requests):
    parts = {
        "own": NgramDrafter,
        "group": lambda: GroupDrafter(update_tokens=2),
        "history": lambda: history(golden, requests, RULE),
        "histospec": lambda: history(golden, requests, PAPER_RULE),
    }
    if kind == "all":
        return DrafterUnion([parts[k]() for k in ("history", "group", "own")])
    return parts[kind]()


@pytest.mark.parametrize("name", ["plain", "cool", "top_k", "greedy", "blocks_cool"])
@pytest.mark.parametrize("budget", BUDGETS)
def test_all_sources_together(golden, rollout, requests, engine, params, name, budget):
    want = golden(name)
    got = rollout(name, drafter=make("all", want, requests), budget=make_budget(budget, TIMES))
    assert not differences(want, got)
    assert engine.stats.accepted_tokens > 0
    assert max(misscored(params, got, SAMPLINGS[name]).values()) < TOLERANCE


@pytest.mark.parametrize("kind", ["own", "group", "history", "histospec"])
def test_each_source_alone(golden, rollout, requests, engine, kind):
    for name in ("plain", "greedy"):
        want = golden(name)
        got = rollout(name, drafter=make(kind, want, requests), budget=make_budget("fixed:7", None))
        assert not differences(want, got)
    if kind != "group":  # siblings of a random policy have little in common
        assert engine.stats.accepted_tokens > 0


def test_history_is_worth_having(golden, rollout, requests, engine):
    """Three of ten tokens come accepted, and a third of those of rounds with drafts."""
    got = rollout("plain", drafter=make("history", golden("plain"), requests))
    accepted = sum(int((t.origins == Origin.ACCEPTED).sum()) for t in got)
    assert accepted == engine.stats.accepted_tokens > 0.3 * engine.stats.tokens
    assert accepted > 0.35 * sum(map(len, map(drafted, got)))
    assert engine.stats.drafted_nodes >= accepted


def test_one_slot(golden, rollout, requests):
    engine = Engine(MODEL, dataclasses.replace(ONE_SIZE, slots=1, min_slots=1))
    drafts = {"drafter": make("all", golden("cool"), requests)}
    drafts["budget"] = make_budget("goodput", TIMES)
    got = rollout("cool", requests[::3], engine=engine, **drafts)
    assert not differences(golden("cool"), got)


def test_drafts_continue_across_pages(golden, rollout, requests):
    """Rounds without draft tokens bring a last token, no more."""
    engine = Engine(MODEL, dataclasses.replace(ONE_SIZE, page_tokens=4))
    got = rollout("plain", requests, drafter=Oracle(golden("plain")), engine=engine)
    assert not differences(golden("plain"), got)
    records = engine.stats.timeline
    assert max((int(r.emitted_A.max()) for r in records if not r.drafted), default=1) == 1
