"""Learned drafters with any weights: tokens of plain decoding, hidden states of whole passes."""

import dataclasses

import jax
import numpy as np
import pytest
from noted_drafts import Noted, NotedGoodput, drafts_at_any_gain, share_of_same
from parity_model import (
    CONFIG,
    HALF_TREES,
    MODEL,
    ONE_SIZE,
    SAMPLINGS,
    STEP_KEY,
    TOLERANCE,
    differences,
    misscored,
)

from reprise.models.config import MeshConfig
from reprise.models.decoder import transformer
from reprise.models.sharding import make_mesh
from reprise.rl.engine.engine import Engine
from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.records.trajectory import Origin
from reprise.rl.speculation.device_drafters import LearnedDrafter
from reprise.spec.budget.budget import FixedBudget, SeeingBudget
from reprise.spec.budget.union import DrafterUnion
from reprise.spec.drafter import Drafter
from reprise.spec.eagle import model as eagle
from reprise.spec.eagle.config import TreeConfig
from reprise.spec.eagle.model import EagleWeights
from reprise.spec.retrieval.suffix_drafter import NgramDrafter

pytestmark = pytest.mark.parity


def learned(design, tree=None, seed=0, draft_vocab_size=0):
    config = eagle.config_for(MODEL, design, draft_vocab_size=draft_vocab_size)
    ids = np.arange(2, 2 + draft_vocab_size, dtype=np.int32) if draft_vocab_size else None
    params = eagle.init(config, jax.random.key(seed))
    return LearnedDrafter(
        EagleWeights(config, params, ids), tree or TreeConfig(max_depth=3, top_k=3)
    )


@pytest.fixture(scope="module")
def keeping():
    """`keeping(design)`: an engine that keeps what drafters of that design need."""
    engines = {
        design: Engine(MODEL, CONFIG, feature_layers=eagle.config_for(MODEL, design).feature_layers)
        for design in ("eagle", "eagle3")
    }
    return engines.__getitem__


class Keeps:
    """A sink that wants every sequence."""

    def __init__(self):
        self.sequences = []

    def wants(self, request_id, num_tokens):
        return True

    def add(self, sequence):
        self.sequences.append(sequence)


hidden = jax.jit(transformer.hidden, static_argnums=0)


def out_of_step(params, sequences, feature_layers):
    """The largest gap between recorded states and those of a pass over the whole sequence."""
    worst = 0.0
    for s in sequences:
        n = len(s.hidden_TW)
        tokens = np.zeros((1, 64), np.int32)
        tokens[0, :n] = s.tokens_T[:n]
        last = np.asarray(hidden(MODEL, params, tokens))[0, :n]
        gap = np.abs(s.hidden_TW[:, -MODEL.d_model :] - last).max()
        assert np.isfinite(gap)
        worst = max(worst, float(gap))
        assert s.hidden_TW.shape[1] == MODEL.d_model * (len(feature_layers) + 1)
    return worst


@pytest.mark.parametrize("design", ["eagle", "eagle3"])
def test_alone(golden, rollout, params, keeping, design):
    engine = keeping(design)
    context = engine.drafter_context(RolloutSpec(params, SAMPLINGS["plain"], STEP_KEY))
    got = rollout("plain", engine=engine, drafter=learned(design).drafter_for(context))
    assert not differences(golden("plain"), got)
    assert engine.stats.accepted_tokens > 0
    assert max(misscored(params, got, SAMPLINGS["plain"]).values()) < TOLERANCE


def test_drafts_on_the_device_are_those_that_the_host_would_see(golden, rollout, params, keeping):
    """With several rounds a fetch, as rows come and go.

    Likeliest drafts on the device: test_parity_drafter_pages.py.
    """
    config = dataclasses.replace(ONE_SIZE, rounds_per_fetch=32)
    engine = Engine(MODEL, config, feature_layers=keeping("eagle").feature_layers)
    context = engine.drafter_context(RolloutSpec(params, SAMPLINGS["plain"], STEP_KEY))
    maker = learned("eagle", TreeConfig(max_depth=3, top_k=2, proposal="shared_noise"))
    trees, fetches = [], []
    for budget in (FixedBudget(), SeeingBudget()):
        noted = Noted(maker.drafter_for(context))
        got = rollout("plain", engine=engine, drafter=noted, budget=budget)
        assert not differences(golden("plain"), got)
        assert sum(t.origins.tolist().count(Origin.ACCEPTED) for t in got) > 0
        trees.append(noted.trees)
        fetches.append(engine.stats.fetches)
    assert trees[1].total() > 100 and share_of_same(*trees) > 0.99
    assert fetches[0] < 0.7 * fetches[1]


def test_rounds_on_the_device_take_the_best_of_all_trees_under_goodput(
    golden, rollout, params, keeping, monkeypatch
):
    """Where a round holds fewer nodes than all trees have."""
    drafts_at_any_gain(monkeypatch)
    engine = keeping("eagle")
    context = engine.drafter_context(RolloutSpec(params, SAMPLINGS["plain"], STEP_KEY))
    noted, budget = Noted(learned("eagle").drafter_for(context)), NotedGoodput(HALF_TREES)
    got = rollout("plain", engine=engine, drafter=noted, budget=budget)
    assert not differences(golden("plain"), got)
    assert budget.num_unseen > 5
    assert len({len(tree) for tree in noted.trees}) > 1


def test_drafts_by_the_noise_of_their_positions(golden, rollout, params, keeping):
    name = "blocks_cool"
    engine, tree = keeping("eagle"), TreeConfig(max_depth=4, top_k=2, proposal="shared_noise")
    context = engine.drafter_context(RolloutSpec(params, SAMPLINGS[name], STEP_KEY))
    maker = learned("eagle", tree, draft_vocab_size=40)
    got = rollout(name, engine=engine, drafter=maker.drafter_for(context))
    assert not differences(golden(name), got)
    assert engine.stats.accepted_tokens > 0


def test_beside_others_with_weights_swapped_at_every_round(golden, rollout, params, keeping):
    engine, maker = keeping("eagle"), learned("eagle")
    context = engine.drafter_context(RolloutSpec(params, SAMPLINGS["plain"], STEP_KEY))
    union = DrafterUnion([NgramDrafter(), maker.drafter_for(context)], names=["own", "learned"])
    swaps = iter(range(1, 10_000))

    def swap(finished, tokens):
        union.skipped = frozenset([["own"], ["learned"], []][next(swaps) % 3])
        maker.swap(eagle.init(maker.config, jax.random.key(maker.version + 1)))

    got = rollout("plain", engine=engine, drafter=union, budget=FixedBudget(), on_round=swap)
    assert not differences(golden("plain"), got)
    assert maker.version > 10


@pytest.mark.parametrize(
    ("design", "shape"),
    [
        pytest.param("eagle", None, marks=pytest.mark.soak),
        ("eagle3", MeshConfig(data=1, fsdp=2, tensor=2)),
    ],
)
def test_caught_states_are_those_of_a_whole_pass(rollout, params, requests, keeping, design, shape):
    """Over prefilled, copied, plainly decoded and speculated tokens, in small pages."""
    engine, sink = keeping(design), Keeps()
    engine = Engine(
        MODEL,
        dataclasses.replace(ONE_SIZE, page_tokens=4),
        feature_layers=engine.feature_layers,
        mesh=None if shape is None else make_mesh(shape, jax.devices()[:4]),
    )
    params = engine.place(params)
    context = engine.drafter_context(RolloutSpec(params, SAMPLINGS["plain"], STEP_KEY))
    drafter = NowAndThen(learned(design).drafter_for(context))
    some = requests[::2]
    got = rollout("plain", some, engine=engine, drafter=drafter, sink=sink, params=params)
    assert len(sink.sequences) == len(some)
    by_tokens = {tuple(s.tokens_T.tolist()) for s in sink.sequences}
    whole = {(*t.prompt_ids.tolist(), *t.response_ids.tolist()) for t in got}
    assert by_tokens == whole
    assert out_of_step(params, sink.sequences, engine.feature_layers) < TOLERANCE
    # and the check notices states that are out of step
    moved = [
        dataclasses.replace(s, hidden_TW=np.roll(s.hidden_TW, 1, axis=0)) for s in sink.sequences
    ]
    assert out_of_step(params, moved, engine.feature_layers) > 100 * TOLERANCE
    drafted = {nodes > slots for slots, nodes, _ in engine.stats.rounds}
    assert drafted == {False, True}


class NowAndThen(Drafter):
    """Draft tokens in two rounds of three: what plain rounds bring must be absorbed later."""

    def __init__(self, drafter):
        self.drafter, self.calls = drafter, 0

    def propose(self, live, max_nodes_A, max_nodes):
        self.calls += 1
        most = max_nodes_A if self.calls % 3 else np.zeros_like(max_nodes_A)
        return self.drafter.propose(live, most, max_nodes)

    def finished(self, live):
        self.drafter.finished(live)


def test_absorbed_along_the_way_is_as_good_as_all_at_once(golden, rollout, params, keeping):
    """Drafts are those of one that sees the rows for the first time, in small pages."""
    maker, config = learned("eagle"), dataclasses.replace(ONE_SIZE, page_tokens=4)
    engine = Engine(MODEL, config, feature_layers=keeping("eagle").feature_layers)
    context = engine.drafter_context(RolloutSpec(params, SAMPLINGS["plain"], STEP_KEY))
    same = []

    class Compared(Drafter):
        def __init__(self, drafter):
            self.drafter = drafter

        def propose(self, live, max_nodes_A, max_nodes):
            drafts = self.drafter.propose(live, max_nodes_A, max_nodes)
            fresh = maker.drafter_for(context).propose(live, max_nodes_A, max_nodes)
            for got_N, want_N, n in zip(
                drafts.tokens_AN, fresh.tokens_AN, drafts.count_A, strict=True
            ):
                same.append(got_N[:n].tolist() == want_N[:n].tolist())
            return drafts

        def finished(self, live):
            self.drafter.finished(live)

    drafter = NowAndThen(Compared(maker.drafter_for(context)))
    assert not differences(golden("plain"), rollout("plain", engine=engine, drafter=drafter))
    # orders of near-equal draft tokens may turn by rounding
    assert len(same) > 100 and np.mean(same) > 0.99
