"""Programs of rollouts are lowered on shapes alone, and are those that calls find later."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import numpy as np
import pytest
from shapes import ODD

from reprise.models.config import MeshConfig
from reprise.models.decoder import transformer
from reprise.models.sharding import make_mesh
from reprise.rl.engine.engine import Engine
from reprise.rl.slot_memory import cache_ops
from reprise.rl.slots.config import EngineConfig
from reprise.rl.speculation.config import DraftModelConfig
from reprise.rl.speculation.device_drafters import DraftModel, LearnedDrafter, PerRunner
from reprise.rl.warm_up.compile_buckets import lowered
from reprise.rl.warm_up.rollout_programs import WHOLE_MODEL, Pool, Reach
from reprise.spec.budget.budget import equal_trees
from reprise.spec.config import SamplingConfig
from reprise.spec.draft_cache.drafting import catch_up, draft
from reprise.spec.eagle import model as eagle
from reprise.spec.eagle.config import TreeConfig
from reprise.spec.eagle.model import EagleWeights

CONFIG = EngineConfig(
    slots=4, min_slots=2, page_tokens=16, rounds_per_fetch=4, max_nodes=4, prefill_rows=2
)
SAMPLING = SamplingConfig(max_new_tokens=24)
PLACES = ("the default device", "another device", "a mesh")


def engine_at(name):
    where = {}
    if name == "another device":
        where = {"device": jax.devices()[1]}
    if name == "a mesh":
        where = {"mesh": make_mesh(MeshConfig(data=1, fsdp=2, tensor=2), jax.devices()[:4])}
    return Engine(ODD, CONFIG, feature_layers=eagle.config_for(ODD).feature_layers, **where)


def make_pool(engine, ids_U, made):
    """What rollouts with all drafters need; `made` calls what makes weights."""
    config = eagle.config_for(ODD, draft_vocab_size=0 if ids_U is None else len(ids_U))
    weights = made(eagle.init, config, jax.random.key(0))
    params = made(transformer.init, ODD, jax.random.key(0))
    learned = LearnedDrafter(EagleWeights(config, weights, ids_U), TreeConfig())
    drafters = {"eagle": learned, "model": DraftModel(ODD, params, DraftModelConfig("", 2))}
    alone = {name: lambda B: [equal_trees(3, [8], B)] for name in drafters}
    reach = Reach(4, 8, True, True, True, drafters=drafters, alone=alone)
    return Pool(engine, engine.place(params), SAMPLING, reach)


def shapes_of(make, config, key):
    return jax.eval_shape(partial(make, config), key)


@pytest.mark.parametrize(
    "where", [PLACES[0], pytest.param(PLACES[1], marks=pytest.mark.soak), PLACES[2]]
)
def test_programs_of_shapes_are_those_of_arrays(where):
    engine, bare_engine = engine_at(where), engine_at(where)
    # on a mesh it is up to XLA where rows of a head go
    ids_U = None if where == "a mesh" else np.arange(0, 32, 2).astype(np.int32)
    programs = make_pool(engine, ids_U, lambda make, *args: make(*args)).programs()
    with bare_engine.shapes_only():
        without_arrays = make_pool(bare_engine, ids_U, shapes_of).programs()
    assert len(programs) == len(without_arrays) > 40
    judged = set()
    with engine.mesh_context():
        for program, bare in zip(programs, without_arrays, strict=True):
            with bare_engine.shapes_only():
                arguments = jax.tree.leaves(bare.arguments())
            assert not [x for x in arguments if isinstance(x, jax.Array)]
            assert program.step is bare.step
            if program.step in judged:
                continue
            judged.add(program.step)
            args, options = program.arguments()
            of_call = program.step.lower(*args, **options).as_text()
            assert lowered(engine, program).as_text() == of_call
            assert lowered(bare_engine, bare).as_text() == of_call
    of_pages = {cache_ops.copy_pages, cache_ops.insert_pages, cache_ops.states_of_pages}
    assert judged >= {*WHOLE_MODEL, *of_pages, cache_ops.make_slots, catch_up, draft}


def test_shapes_are_made_in_one_thread_only():
    engine = engine_at("a mesh")
    with engine.shapes_only(), ThreadPoolExecutor(1) as other:
        here, there = engine.put(np.ones(3)), other.submit(engine.put, np.ones(3)).result()
    assert isinstance(here, jax.ShapeDtypeStruct) and isinstance(there, jax.Array)
    assert here.sharding == there.sharding


def test_weights_of_drafters_are_not_kept_as_shapes():
    engine, held = engine_at("the default device"), PerRunner()
    with engine.shapes_only():
        assert held.get(engine, lambda: engine.put(np.ones(3))) == engine.put(np.ones(3))
    assert isinstance(held.get(engine, lambda: engine.put(np.ones(3))), jax.Array)
