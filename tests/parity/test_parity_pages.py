"""Pages of any size give the same tokens: alone, drafted, too few for all, on meshes."""

import dataclasses

import jax
import pytest
import tiny_team
from parity_drafters import Bushy
from parity_model import MODEL, ONE_SIZE, SAMPLINGS, STEP_KEY, TOLERANCE, differences, misscored
from test_parity_learned import Keeps, learned, out_of_step
from tiny_team import assert_same_tokens, play

from reprise.models.config import MeshConfig
from reprise.models.sharding import make_mesh
from reprise.rl.engine.engine import Engine
from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.slot_memory import cache_ops
from reprise.sched.request import Kv
from reprise.spec.page_table import PageTable

pytestmark = pytest.mark.parity

PAGED = dataclasses.replace(ONE_SIZE, page_tokens=4)  # 11 pages a request at most
PARTS_AND_HEADS = MeshConfig(data=2, tensor=2)


def paged(**settings):
    options = {name: settings.pop(name) for name in ("mesh", "feature_layers") if name in settings}
    return Engine(MODEL, dataclasses.replace(PAGED, **settings), **options)


@pytest.fixture(scope="module")
def engine_of_pages():
    return paged()


@pytest.fixture(scope="module")
def alone():
    return {t.request_id: t for t in play(Engine(tiny_team.MODEL, tiny_team.CONFIG))}


@pytest.mark.parametrize(("name", "page_tokens"), [("cool", 4), ("gumbel", 4), ("cool", 64)])
def test_pages_give_the_tokens_of_the_reference(
    golden, rollout, params, engine_of_pages, name, page_tokens
):
    """The largest hold a whole request, and several prompts share none of them."""
    engine = engine_of_pages if page_tokens == 4 else paged(page_tokens=page_tokens)
    for drafter in (None, Bushy(golden(name))):
        got = rollout(name, engine=engine, drafter=drafter)
        assert not differences(golden(name), got)
        assert max(misscored(params, got, SAMPLINGS[name]).values()) < TOLERANCE
    assert engine.stats.accepted_tokens > 50


def test_requests_that_pages_lack_for_go_on_with_the_same_tokens(golden, rollout):
    """Some leave in the middle of their response, and of their prompt's computation."""
    engine = paged(pages=20, slots=16, min_slots=16, prefill_rows=1)
    for drafter in (None, Bushy(golden("cool"))):
        assert not differences(golden("cool"), rollout("cool", engine=engine, drafter=drafter))
        assert engine.stats.preemptions > 0


def test_a_part_of_the_devices_too_small_for_a_request_is_named(rollout):
    with pytest.raises(ValueError, match=r"Engine.pages of at least 24, .* 44 tokens .*got 20"):
        rollout(
            "cool", engine=paged(pages=20, mesh=make_mesh(MeshConfig(data=2), jax.devices()[:2]))
        )


def test_pages_on_a_mesh(golden, rollout, params, requests):
    """A group's prompt is shared in one part of it and copied to the other."""
    made = make_mesh(PARTS_AND_HEADS, jax.devices()[:4])
    engine = paged(mesh=made, pages=2 * 20, slots=16, min_slots=16)
    placed = engine.place(params)
    for drafter in (None, Bushy(golden("cool"))):
        got = rollout("cool", requests[:14], engine=engine, params=placed, drafter=drafter)
        assert not differences(golden("cool"), got)
    assert engine.stats.accepted_tokens > 20


@pytest.mark.parametrize("mesh", [None, pytest.param(PARTS_AND_HEADS, marks=pytest.mark.soak)])
def test_hidden_states_in_pages(golden, rollout, params, requests, mesh):
    """A learned drafter reads them, on the device and between rounds; so does a sink."""
    made = None if mesh is None else make_mesh(mesh, jax.devices()[:4])
    maker = learned("eagle")
    engine = paged(feature_layers=maker.config.feature_layers, mesh=made, page_tokens=8)
    placed, sink = engine.place(params), Keeps()
    context = engine.drafter_context(RolloutSpec(placed, SAMPLINGS["plain"], STEP_KEY))
    drafter = maker.drafter_for(context)
    got = rollout("plain", engine=engine, params=placed, drafter=drafter, sink=sink)
    assert not differences(golden("plain"), got)
    assert engine.stats.accepted_tokens > 0
    assert len(sink.sequences) == len(requests)
    assert out_of_step(params, sink.sequences, engine.feature_layers) < TOLERANCE


def test_requests_move_between_pages_of_any_sizes(alone):
    small = dataclasses.replace(tiny_team.CONFIG, page_tokens=4)
    for config in (small, tiny_team.CONFIG):
        engines = [Engine(tiny_team.MODEL, small), Engine(tiny_team.MODEL, config)]
        team = tiny_team.workers(engines, 2, chunk=2)
        assert_same_tokens(play(team), alone)
        assert Kv.POOL in {a.kv for a in tiny_team.starts(team)}


# --- planted faults ------------------------------------------------------------------------


def test_a_last_page_that_is_not_copied_is_found(golden, rollout, monkeypatch):
    share = PageTable.share

    def without_copy(self, source, slot, num_tokens):
        found = share(self, source, slot, num_tokens)
        return found if found is None else []

    monkeypatch.setattr(PageTable, "share", without_copy)
    assert differences(golden("cool"), rollout("cool", engine=paged()))


def test_pages_released_while_others_have_them_are_found(golden, rollout, monkeypatch):
    release = PageTable.release

    def for_all(self, slot, kept_tokens=0):
        kept = self.pages_for(kept_tokens)
        for page in self.pages_BN[slot, kept : self.held_B[slot]].tolist():
            self.users_P[page] = 1
        release(self, slot, kept_tokens)
        self.users_P[:] = [max(0, n) for n in self.users_P]

    monkeypatch.setattr(PageTable, "release", for_all)
    try:
        found = differences(golden("cool"), rollout("cool", engine=paged(pages=30)))
    except AssertionError:
        return  # the table itself notices
    assert found


def test_keys_from_the_host_in_other_pages_are_found(alone, monkeypatch):
    config = dataclasses.replace(tiny_team.CONFIG, page_tokens=4)
    insert = cache_ops.insert_pages

    def elsewhere(cache, new, target_X):
        return insert(cache, jax.tree.map(lambda x: x[::-1], new), target_X)

    monkeypatch.setattr(cache_ops, "insert_pages", elsewhere)
    team = tiny_team.workers([Engine(tiny_team.MODEL, config) for _ in range(2)], 2, chunk=2)
    with pytest.raises(AssertionError):
        assert_same_tokens(play(team), alone)
