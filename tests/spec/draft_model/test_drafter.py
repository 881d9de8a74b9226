"""A draft model's drafts against whole-sequence passes, whatever happens to its requests."""

import dataclasses

import jax
import numpy as np
import pytest
from dense_cache import dense_cache
from draft_model_reference import (
    BUCKETS,
    CONFIG,
    COOL,
    LONGEST,
    MODEL,
    PARAMS,
    SAMPLINGS,
    Host,
    V,
    complaints,
    history,
    make_drafter,
    slowly,
)

from reprise.models.attention import kv_cache
from reprise.models.config import MeshConfig
from reprise.models.decoder import transformer
from reprise.models.sharding import make_mesh, param_shardings
from reprise.spec.config import SamplingConfig
from reprise.spec.draft_cache import cache as draft_cache
from reprise.spec.draft_cache import drafter as caching_drafter
from reprise.spec.draft_cache import drafting
from reprise.spec.draft_cache.drafting import CHUNK_COLUMNS, END_COLUMNS
from reprise.spec.draft_cache.rows import CachedRows
from reprise.spec.draft_model.drafter import PRIOR_DRAFTS, PRIOR_PROB, ChainDrafting
from reprise.spec.drafter import PADDING, Source


@pytest.mark.parametrize("seed", range(2))
def test_drafts_are_those_of_whole_passes_whatever_was_accepted(seed):
    assert history(make_drafter(buckets=BUCKETS), seed) == []


@pytest.mark.parametrize("name", SAMPLINGS)
def test_drafts_of_shared_noise_are_draws_with_the_requests_own_noise(name):
    drafter = make_drafter(draws=SAMPLINGS[name], proposal="shared_noise")
    assert history(drafter, 1, SAMPLINGS[name], "shared_noise") == []


def test_entries_of_wrong_drafts_are_found_if_they_are_kept(monkeypatch):
    monkeypatch.setattr(CachedRows, "roll_back", lambda *_: None)
    assert history(make_drafter(), 0)


def test_at_temperature_0_probs_are_those_of_temperature_1():
    host, draws = Host(), SamplingConfig(temperature=0.0, top_k=3)
    host.enter(1, [4, 5, 6])
    live, most_A = host.live(), np.array([4], np.int32)
    drafts = make_drafter(draws=draws).propose(live, most_A, 7)
    assert complaints(drafts, live, host, most_A, draws) == []
    assert (drafts.sources_AN == Source.MODEL).all()


def test_shared_noise_at_temperature_0_is_greedy():
    host, draws = Host(), SamplingConfig(temperature=0.0)
    host.enter(1, [4, 5, 6])
    greedy, shared = (
        make_drafter(draws=draws, proposal=proposal).propose(host.live(), np.array([5]), 7)
        for proposal in ("likeliest", "shared_noise")
    )
    assert greedy.tokens_AN.tolist() == shared.tokens_AN.tolist()


# -- what a round computes ---------------------------------------------------------


@pytest.fixture
def computed(monkeypatch):
    """The widths of the chunks that are computed."""
    widths = []

    def counting(given, cache, table_PX, **options):
        widths.append(table_PX.shape[1] - len(CHUNK_COLUMNS))
        return drafting.catch_up(given, cache, table_PX, **options)

    monkeypatch.setattr(draft_cache, "catch_up", counting)
    return widths


def test_accepted_drafts_are_not_recomputed(computed):
    host, drafter = Host(), make_drafter()
    host.enter(1, [1, 2, 3, 4, 5, 6, 7])
    host.enter(2, [3, 1])
    most_A = np.full(2, 5, np.int32)
    drafts = drafter.propose(host.live(), most_A, 7)
    assert computed == [16]  # the first prompt: the second fits into a window
    for accepted in (5, 5, 0, 3, 5):
        for a, r in enumerate(host.rows):
            tokens = drafts.tokens_AN[a].tolist()
            host.texts[r] += [*tokens[:accepted], (tokens[accepted] + 1) % V]
        live = host.live()
        drafts = drafter.propose(live, most_A, 7)
        assert complaints(drafts, live, host, most_A) == []
    assert computed == [16]
    host.texts[1] += [3] * 3  # more than a window holds, as plain rounds bring it
    drafter.propose(host.live(), most_A, 7)
    assert computed == [16, 4]


def test_one_that_comes_back_has_its_tokens_still(computed):
    host, drafter, most_A = Host(), make_drafter(), np.array([3], np.int32)
    prompt = list(range(11))
    host.enter(5, prompt)
    drafter.propose(host.live(), most_A, 7)
    drafter.finished(host.live())
    text = host.leave(5)
    host.enter(6, [1])
    host.enter(5, prompt, [*text[11:], 3])
    live = host.live()
    most_A = np.array([3, 3], np.int32)
    drafts = drafter.propose(live, most_A, 7)
    assert computed == [16] and complaints(drafts, live, host, most_A) == []


def test_without_room_for_drafts_the_model_does_not_run(monkeypatch):
    monkeypatch.setattr(caching_drafter, "draft", None)
    host = Host()
    host.enter(1, [2, 3])
    drafts = make_drafter().propose(host.live(), np.array([0]), 7)
    assert drafts.count_A.tolist() == [0]


# -- probabilities -----------------------------------------------------------------------


def test_chains_end_where_their_prob_is_small():
    host = Host()
    host.enter(1, [4, 5, 6])
    host.enter(2, [9, 9])
    live, most_A = host.live(), np.full(2, 5, np.int32)
    whole = make_drafter().propose(live, most_A, 7).prob_AN
    bound = float(np.sort(whole[:, :5].ravel())[5]) * 1.0001
    cut = make_drafter(dataclasses.replace(CONFIG, min_prob=bound)).propose(live, most_A, 7)
    assert cut.count_A.tolist() == (whole[:, :5] >= bound).sum(axis=1).tolist()
    assert 0 < cut.count_A.sum() == 4
    assert (cut.prob_AN[cut.tokens_AN != PADDING] >= bound).all()


def test_shared_noise_probs_are_mean_acceptances_by_depth():
    host, drafter, most_A = Host(), make_drafter(proposal="shared_noise"), np.array([3], np.int32)
    host.enter(1, [4, 5, 6])
    prior, seen = PRIOR_PROB, np.zeros((3, 2))
    for accepted in (1, 3, 0, 2):
        drafts = drafter.propose(host.live(), most_A, 7)
        rate = (seen[:, 0] + PRIOR_DRAFTS * prior) / (seen[:, 1] + PRIOR_DRAFTS)
        assert drafts.prob_AN[0, :3] == pytest.approx(np.cumprod(rate))
        tokens = drafts.tokens_AN[0].tolist()
        host.texts[1] += [*tokens[:accepted], (tokens[accepted] + 1) % V]
        for depth in range(3):
            seen[depth] += [depth < accepted, depth <= accepted]
    drafter.finished(host.live())  # the last chain counts too
    rate = (seen[:, 0] + PRIOR_DRAFTS * prior) / (seen[:, 1] + PRIOR_DRAFTS)
    assert drafter._mean_prob()[:3] == pytest.approx(np.cumprod(rate))


def test_shared_noise_chains_are_as_long_as_they_are_accepted():
    config = dataclasses.replace(CONFIG, min_prob=0.5)
    host, drafter = Host(), make_drafter(config, proposal="shared_noise")
    host.enter(1, [4])
    lengths = []
    for _ in range(12):
        drafts = drafter.propose(host.live(), np.array([5]), 7)
        lengths.append(int(drafts.count_A[0]))
        host.texts[1] += [(int(drafts.tokens_AN[0, 0]) + 1) % V]
    assert lengths[0] == 1 and set(lengths) == {1}  # 0.7² is less; one token is always drafted
    host.enter(2, [5])
    config = dataclasses.replace(CONFIG, min_prob=0.3)
    drafter = make_drafter(config, proposal="shared_noise")
    for _ in range(8):
        drafts = drafter.propose(host.live([2]), np.array([5]), 7)
        lengths.append(int(drafts.count_A[0]))
        host.texts[2] += drafts.tokens_AN[0, : drafts.count_A[0]].tolist()
    assert lengths[-1] > lengths[12] == 3


# -- devices and buckets -------------------------------------------------------------


@pytest.fixture
def compiled():
    """A list that grows by one with every compilation."""
    found = []

    def listen(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def warm_up(drafter, *sizes):
    """As the engine's does; how many programs there are."""
    programs = [program for slots in sizes for program in drafter.programs(slots)]
    for step, arguments in programs:
        args, options = arguments()
        jax.block_until_ready(step(*args, **options))
    return len(programs)


def test_nothing_compiles_after_warm_up(compiled):
    """On a device that is not the default."""
    device = jax.local_devices()[1]
    place = {"device": device}
    drafter = make_drafter(buckets=BUCKETS, params=jax.device_put(PARAMS, device), place=place)
    slowly([1], 1, 0, 1, COOL, "greedy")  # the reference compiles for itself
    compiled.clear()
    programs = warm_up(drafter, 4, 8)
    # 2 buckets of rows: a chain and 2 chunks in each
    assert len(compiled) >= programs == 2 * 3
    compiled.clear()
    assert history(drafter, 2, rounds=20) == []
    assert compiled == []
    assert history(drafter, 2, rounds=20, num_rows=4) == []
    assert compiled == []
    cache = drafter._held.arrays
    assert {d for x in jax.tree.leaves(cache) for d in x.devices()} == {device}
    assert (cache.num_slots, cache.num_positions) == (4, LONGEST)


def test_nor_on_a_mesh(compiled):
    mesh = make_mesh(MeshConfig(data=2, tensor=2), jax.local_devices()[:4])
    shardings = param_shardings(mesh, transformer.param_specs(MODEL))
    drafter = make_drafter(
        params=jax.tree.map(jax.device_put, PARAMS, shardings),
        place={"mesh": mesh},
    )
    with jax.set_mesh(mesh):
        slowly([1], 1, 0, 1, COOL, "greedy")
        compiled.clear()
        programs = warm_up(drafter, 8)
        assert len(compiled) >= programs == 3
        compiled.clear()
        assert history(drafter, 2) == []
    assert compiled == []
    assert {len(x.devices()) for x in jax.tree.leaves(drafter._held.arrays)} == {4}


def test_rows_follow_those_of_the_engine():
    drafter, sizes = make_drafter(buckets=BUCKETS), []
    texts = {r: [r, 1, 2] for r in range(6)}
    for num_rows, ids in ((6, range(6)), (4, (5, 2, 4)), (8, (4, 7, 8))):
        host = Host(num_rows)
        for r in ids:
            host.enter(r, texts.setdefault(r, [r, 1, 2]))
        live, most_A = host.live(), np.full(len(host.rows), 4, np.int32)
        drafts = drafter.propose(live, most_A, 7)
        assert complaints(drafts, live, host, most_A) == []
        sizes.append(drafter._held.arrays.num_slots)
    assert sizes == [8, 4, 8]


# -- refusals ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_draft_tokens": 0}, "max_draft_tokens must be at least 1, got 0"),
        ({"min_prob": 1.5}, r"expected min_prob in \[0, 1\]"),
    ],
)
def test_bad_settings_are_named(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(CONFIG, **change)


def test_rows_at_rest_and_chains_that_have_ended_are_written_nowhere():
    B, S, W, most_B = 4, 32, 4, np.array([0, 5, 2, 0])
    total_B = np.array([S, 9, 7, 3])
    rng = np.random.default_rng(0)
    held = kv_cache.map_arrays(
        lambda x, _: rng.normal(size=x.shape).astype(np.float32), dense_cache(MODEL, B, S)
    )
    table_BX = np.zeros((B, W + len(END_COLUMNS)), np.int32)
    for name, values in (("total", total_B), ("max", most_B)):
        table_BX[:, W + END_COLUMNS.index(name)] = values
    constants = PARAMS, np.float32(0), jax.random.key(0), np.zeros(6, np.float32)
    state = (constants, ()), jax.tree.map(jax.numpy.asarray, held), table_BX, np.int32(6)
    after, _ = drafting.draft(*state, drafting=ChainDrafting(MODEL, None), max_tokens=6)
    at_S = np.arange(S)
    for got, old in zip(after.values, held.values, strict=True):
        changed_BS = np.moveaxis(np.asarray(got) != old, 2, 1).reshape(B, S, -1).any(axis=2)
        for b, (total, most) in enumerate(zip(total_B, most_B, strict=True)):
            window = (at_S >= total - W) & (at_S < total + most - 1) & (most > 0)
            np.testing.assert_array_equal(changed_BS[b], window)
