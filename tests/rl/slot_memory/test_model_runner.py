"""What a replica puts on the devices of a mesh: nothing whole on one of them, nothing twice."""

import dataclasses
import os
import threading

import jax
import numpy as np
import pytest
from shapes import PLAIN

from reprise.models.attention import kv_cache
from reprise.models.config import MeshConfig, ModelConfig
from reprise.models.decoder import transformer
from reprise.models.sharding import fitting_sharding, make_mesh
from reprise.rl.engine.engine import Engine
from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.records.trajectory import Request
from reprise.rl.slot_memory import cache_ops
from reprise.rl.slot_memory.model_runner import ModelRunner
from reprise.rl.slots.config import EngineConfig
from reprise.rl.speculation.device_drafters import LearnedDrafter
from reprise.rl.warm_up.rollout_programs import Pool, Reach
from reprise.spec.config import SamplingConfig
from reprise.spec.eagle import model as eagle
from reprise.spec.eagle.config import TreeConfig
from reprise.spec.eagle.model import EagleWeights
from reprise.spec.verification.sampling import step_key
from reprise.spec.verification.verify import decode_beside_chunks, decode_rounds, settle

MODEL = ModelConfig("qwen3", 32, 16, 1, 8, 8, 4, 16, qk_norm=True, max_positions=64)


@pytest.fixture(scope="module")
def engine():
    config = eagle.config_for(MODEL, "eagle")
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=4), jax.devices()[:8])
    options = {"mesh": mesh, "feature_layers": config.feature_layers}
    engine = Engine(MODEL, PLAIN, **options)
    engine.expect(8, 32)
    return engine


@pytest.fixture(scope="module")
def params(engine):
    return engine.place(transformer.init(MODEL, jax.random.key(0)))


def misplaced(engine, tree):
    """Shapes of pages that do not lie as the table says, each shard on its device alone."""

    def as_said(x, kind):
        wanted = fitting_sharding(engine.mesh, x.shape, kind.axes)
        shard = wanted.shard_shape(x.shape)
        return x.sharding.is_equivalent_to(wanted, x.ndim) and all(
            s.data.shape == shard for s in x.addressable_shards
        )

    caches = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kv_cache.KVCache))
    judged = [kv_cache.map_arrays(lambda x, kind: (as_said(x, kind), x.shape), c) for c in caches]
    found = [x for c in judged for x in (*c.keys, *c.values, *c.features)]
    assert found
    return [shape for right, shape in found if not right]


@pytest.fixture
def made(monkeypatch):
    """All caches as they are made, before anybody moves them."""
    caches, init = [], kv_cache.init

    def spy(*args, **options):
        caches.append(init(*args, **options))
        return caches[-1]

    monkeypatch.setattr(kv_cache, "init", spy)
    return caches


def test_caches_are_made_in_shards(engine, made):
    with engine.mesh_context():
        cache = engine.empty_cache(8)
        arrays = cache.keys + cache.values + cache.features
        split = {x.sharding.shard_shape(x.shape) != x.shape for x in arrays}
    assert len(cache.features) == 1
    assert split == {True}  # the table splits them on all of these meshes
    assert made and not misplaced(engine, (cache, made))


def test_a_learned_drafters_cache_is_made_in_shards(engine, params, made):
    config = eagle.config_for(MODEL, "eagle")
    maker = LearnedDrafter(
        EagleWeights(config, eagle.init(config, jax.random.key(0)), None), TreeConfig()
    )
    spec = RolloutSpec(params, SamplingConfig(), step_key(0, 0))
    drafter = maker.drafter_for(engine.drafter_context(spec))
    with engine.mesh_context():
        drafter._held.empty(8)
    assert made and not misplaced(engine, made)


def test_pages_stay_in_shards_however_they_are_filled(engine, params):
    reach = Reach(8, 8)
    pool = Pool(engine, params, SamplingConfig(), reach)
    with engine.mesh_context():
        args, options = pool.prompt_arguments(8)
        cache, _, _, _, entries = decode_beside_chunks(*args, **options)
        assert not misplaced(engine, cache)
        # as the step was compiled for them
        empty = engine.empty_entries(engine.config.prefill_rows)
        pairs = zip(jax.tree.leaves(entries), jax.tree.leaves(empty), strict=True)
        assert all(x.sharding.is_equivalent_to(y.sharding, x.ndim) for x, y in pairs)
        cache = cache_ops.write_chunks(cache, entries, args[-1])
        assert not misplaced(engine, cache)
        cache, _ = settle(cache, engine.empty_pending(8))
        assert not misplaced(engine, cache)
        pages = dataclasses.replace(cache, table_BN=None)
        some_X, other_X = (engine.put(np.array([page, -1], np.int32)) for page in (0, 3))
        pages = cache_ops.copy_pages(pages, some_X, other_X)
        assert not misplaced(engine, pages)
        read = cache_ops.read_pages(pages, engine.put(np.zeros(16, np.int32)))
        assert not misplaced(engine, read)
        kv = cache_ops.host_of_pages([jax.device_get(read)], 2)
        new = kv_cache.map_arrays(engine.put_kv, cache_ops.pages_of_host(kv, 0, pages))
        assert not misplaced(engine, new)
        target_X = engine.put(np.array([5] + 15 * [-1], np.int32))
        pages = cache_ops.insert_pages(pages, new, target_X)
        assert not misplaced(engine, pages)
        states_CW = cache_ops.states_of_pages(pages.features[0], engine.put(np.int32([5])))
        wanted = fitting_sharding(engine.mesh, states_CW.shape, (None, "features"))
        assert states_CW.sharding.is_equivalent_to(wanted, 2)
        np.testing.assert_array_equal(states_CW[:2], kv.entries.features[0])


def test_steps_are_lowered_without_a_cache(engine, params):
    """As many as a phase can need would not fit beside one another, nor the largest twice."""
    with engine.mesh_context(), engine.shapes_only():
        long = ModelRunner(MODEL, engine.config, mesh=engine.mesh, feature_layers=())
        long.expect(64, 2**20)
        with long.shapes_only():
            found = engine.empty_cache(8), long.empty_cache(64)
            assert {type(x) for x in jax.tree.leaves(found)} == {jax.ShapeDtypeStruct}
        reach = Reach(8, 8)
        pool = Pool(engine, params, SamplingConfig(), reach)
        args, options = pool.decode_arguments(8)
        cache_steps_lowered = decode_rounds.lower(*args, **options)
    assert cache_steps_lowered.compile()


@pytest.mark.parametrize(
    ("given", "longest_tokens", "chunk_tokens"),
    [(0, 4000, 64), (0, 20, 64), (512, 4000, 512), (512, 200, 256), (96, 4000, 96)],
)
def test_chunks_of_prompts_are_cut_to_the_longest_slot_and_not_by_pages(
    given, longest_tokens, chunk_tokens
):
    runner = ModelRunner(MODEL, EngineConfig(prefill_chunk_tokens=given))
    runner.expect(1, longest_tokens)
    assert runner.no_chunks(4).shape == (4, 2 + chunk_tokens)
    with runner.shapes_only():
        assert runner.empty_entries(4).keys[0].shape[0] == 4 * chunk_tokens


def test_chunks_of_prompts_are_longer_on_accelerators():
    assert EngineConfig().chunk_tokens(4000, is_cpu=False) == 512
    assert EngineConfig().chunk_tokens(4000, is_cpu=True) == 64
    assert EngineConfig(page_tokens=16).chunk_tokens(20, is_cpu=True) == 32


def test_an_engine_without_cuts_takes_no_request_with_one():
    runner = ModelRunner(MODEL, PLAIN, may_cut=False)
    plain, cut = SamplingConfig(max_new_tokens=4), SamplingConfig(max_new_tokens=4, top_p=0.5)
    runner.check([Request(0, (1,), 0, 0)], plain)
    for sampling, own in ((cut, None), (plain, cut)):
        with pytest.raises(AssertionError):
            runner.check([Request(0, (1,), 0, 0, sampling=own)], sampling)
        ModelRunner(MODEL, PLAIN).check([Request(0, (1,), 0, 0, sampling=own)], sampling)


def test_a_cpu_runs_programs_at_once_and_a_mesh_one_after_the_other(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    both = threading.Barrier(2, timeout=60)
    runner = ModelRunner(MODEL, PLAIN)
    assert runner.at_once([lambda: both.wait() >= 0, lambda: both.wait() >= 0]) == [True, True]
    meshed = ModelRunner(MODEL, PLAIN, mesh=make_mesh(MeshConfig(data=2), jax.devices()[:2]))
    found = meshed.at_once([threading.get_ident] * 3)
    assert found == [threading.get_ident()] * 3
