"""Trees of drafting workers behind the last commit: EAGLE by told hidden states, and n-grams."""

import dataclasses

import pytest
from parity_model import BASE, MODEL, SAMPLINGS, STEP_KEY, differences
from stepped_links import DeafLink, ReplacedLink, Shuffles, SteppedLink, TroubledLink, wrong_tokens
from test_parity_learned import learned

from rl.drafting.ahead_maker import DraftedRollout, LearnedAhead, OwnAhead
from rl.engine.engine import Engine
from rl.engine.rollout_spec import RolloutSpec
from spec.decoupled.drafter import DecoupledDrafter, OnePlan
from spec.decoupled.messages import DraftPlan
from spec.drafter import Drafter, Source
from spec.eagle.config import TreeConfig

pytestmark = pytest.mark.parity

WINDOW = 2
DEPTH = WINDOW + 1  # with nothing that is being verified
TREE = TreeConfig(max_depth=DEPTH, top_k=2)
FEATURES = learned("eagle").config.feature_layers


@pytest.fixture(scope="module")
def keeping():
    return Engine(MODEL, BASE, feature_layers=FEATURES)


@pytest.fixture(scope="module")
def drafting():
    """The engine of a drafting worker, which keeps no hidden states of its own."""
    made = Engine(MODEL, dataclasses.replace(BASE, min_slots=BASE.slots))
    made.expect(BASE.slots, 64 + 2 * WINDOW)
    return made


class Eagle:
    """A drafting worker with a learned drafter, for one rollout of a verifying one."""

    source = Source.LEARNED

    def __init__(self, verifying, drafting, params, name, tree=TREE):
        self.learned = learned("eagle", tree)
        self.maker, self.drafting = LearnedAhead(self.learned, WINDOW), drafting
        spec = RolloutSpec(params, SAMPLINGS[name], STEP_KEY)
        self.context = verifying.drafter_context(spec)
        self.rollout = DraftedRollout(STEP_KEY, SAMPLINGS[name], self.maker.shared(self.context))

    def ahead(self):
        return self.maker.ahead(self.drafting, self.rollout)

    def decoupled(self, *links, plan=DraftPlan(WINDOW)):  # noqa: B008  an immutable tuple
        states = self.maker.states(self.context)
        return DecoupledDrafter(links, OnePlan(plan), self.rollout.sampling, states)


@pytest.mark.parametrize("plan", [DraftPlan(WINDOW), DraftPlan(WINDOW, decoupled=False)])
@pytest.mark.parametrize("name", ["plain", "greedy", "gumbel_cool"])
def test_eagle(golden, rollout, keeping, drafting, params, name, plan):
    eagle = Eagle(keeping, drafting, params, name)
    link = SteppedLink(eagle.ahead(), source=Source.LEARNED)
    got = rollout(name, engine=keeping, drafter=eagle.decoupled(link, plan=plan))
    assert not differences(golden(name), got)
    stats = keeping.stats
    assert 0 < stats.accepted_by_source[Source.LEARNED] < stats.drafted_by_source[Source.LEARNED]
    assert not link.ahead.texts.requests, "all have left"


class Both(Drafter):
    """Drafts as a coupled drafter; a drafting worker is told, and its trees are compared."""

    def __init__(self, coupled, decoupled, ahead):
        self.coupled, self.decoupled, self.ahead = coupled, decoupled, ahead
        self.trees = self.same = 0
        self.finished = self.left = self._finished

    def propose(self, live, max_nodes_A, max_nodes):
        drafts = self.coupled.propose(live, max_nodes_A, max_nodes)
        self.decoupled.propose(live, max_nodes_A, max_nodes)
        blocks = {block.request_id: block for block in self.ahead.step()}
        for a, request_id in enumerate(live.request_ids_A.tolist()):
            n = int(drafts.count_A[a])
            knows = live.total_tokens_A[a] > 1  # in front of one token there is no state
            if n and knows and request_id in blocks:
                there, got = blocks[request_id], (drafts.tokens_AN, drafts.parents_AN)
                pairs = zip(got, (there.tokens_N, there.parents_N), strict=True)
                self.trees += 1
                self.same += all(x[a, :n].tolist() == y[:n].tolist() for x, y in pairs)
        return drafts

    def _finished(self, live):
        self.coupled.finished(live)
        self.decoupled.finished(live)


class Unheard(SteppedLink):
    """Brings no block."""

    def take(self):
        return []


@pytest.mark.parametrize("shifted", [False, True])
def test_trees_are_those_that_the_verifying_worker_would_draft(
    golden, rollout, keeping, drafting, params, monkeypatch, shifted
):
    """With the states where they belong; one position off, which is planted, they are others."""
    eagle = Eagle(keeping, drafting, params, "plain")
    if shifted:
        from spec.decoupled.states import StateRows

        put = StateRows.put

        def off(self, read):
            put(self, [(row, x._replace(first=x.first + 1)) for row, x in read])

        monkeypatch.setattr(StateRows, "put", off)
    ahead = eagle.ahead()
    link = Unheard(ahead, source=Source.LEARNED)
    both = Both(eagle.learned.drafter_for(eagle.context), eagle.decoupled(link), ahead)
    got = rollout("plain", engine=keeping, drafter=both)
    assert not differences(golden("plain"), got)
    assert both.trees > 100
    if shifted:
        assert both.same < 0.9 * both.trees
    else:
        assert both.same == both.trees


TROUBLES = {
    "late": lambda make: SteppedLink(make(), delay=1, source=Source.LEARNED),
    "wrong": lambda make: TroubledLink(make(), wrong_tokens, source=Source.LEARNED),
    "shuffled": lambda make: TroubledLink(make(), Shuffles(), source=Source.LEARNED),
    "deaf": lambda make: DeafLink(make(), source=Source.LEARNED),
    "replaced": lambda make: ReplacedLink(make, rounds=4, keeps=True, source=Source.LEARNED),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_eagle_in_trouble(golden, rollout, keeping, drafting, params, trouble):
    eagle = Eagle(keeping, drafting, params, "plain")
    link = TROUBLES[trouble](eagle.ahead)
    got = rollout("plain", engine=keeping, drafter=eagle.decoupled(link))
    assert not differences(golden("plain"), got)
    if trouble == "replaced":
        again = [c for commits, _ in link.told for c in commits if not c.first and c.round > 1]
        assert again and all(sum(s.size for s in c.states) == c.total_tokens - 1 for c in again)


def test_weights_are_the_newest(golden, rollout, keeping, drafting, params):
    import jax

    from spec.eagle import model as eagle_model

    eagle = Eagle(keeping, drafting, params, "plain")
    drafter = eagle.learned

    def swap(finished, tokens):
        drafter.swap(eagle_model.init(drafter.config, jax.random.key(drafter.version + 1)))

    link = SteppedLink(eagle.ahead(), source=Source.LEARNED)
    got = rollout("plain", engine=keeping, drafter=eagle.decoupled(link), on_round=swap)
    assert not differences(golden("plain"), got)
    assert drafter.version > 10 and keeping.stats.drafted_by_source[Source.LEARNED] > 0


@pytest.mark.parametrize("delay", [0, 2])
def test_ngrams(golden, rollout, engine, drafting, delay):
    ahead = OwnAhead().ahead(drafting, DraftedRollout(STEP_KEY, SAMPLINGS["cool"]))
    link = SteppedLink(ahead, delay=delay, source=Source.OWN)
    drafter = DecoupledDrafter([link], OnePlan(DraftPlan(4)), SAMPLINGS["cool"])
    assert not differences(golden("cool"), rollout("cool", drafter=drafter))
    assert engine.stats.drafted_by_source[Source.OWN] > 0
    assert not ahead.texts.requests
