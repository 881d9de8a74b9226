"""The same requests give the same tokens, however they were batched, ordered or placed."""

import dataclasses
import math
from functools import partial

import jax
import numpy as np
import pytest
from loop_runs import counted_compilations
from parity_drafters import Bushy
from parity_model import (
    CONFIG,
    MODEL,
    ONE_SIZE,
    SAMPLINGS,
    STEP_KEY,
    STOP,
    TOLERANCE,
    differences,
    misscored,
)

from reprise.models.config import MeshConfig
from reprise.models.decoder import transformer
from reprise.models.sharding import make_mesh, param_shardings, rollout_mesh
from reprise.rl.engine.engine import Engine
from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.records.trajectory import FinishReason, Origin
from reprise.rl.weights.gathering import laid_out

pytestmark = pytest.mark.parity

SETTINGS = {
    "one slot": {"slots": 1, "min_slots": 1},
    "few slots, refilled and shrinking": {
        "slots": 6,
        "min_slots": 3,
        "rounds_per_fetch": 3,
        "prefill_rows": 3,
    },
    # prompts longer than a chunk, sizes that are no powers of two
    "more slots than requests, small pages": {
        "slots": 32,
        "min_slots": 32,
        "page_tokens": 5,
        "max_nodes": 1,
        "prefill_chunk_tokens": 12,
        "rounds_per_fetch": 1,
        "prefill_rows": 1,
    },
}


def test_the_requests_cover_what_they_should(golden, requests):
    lengths = {}
    for name in SAMPLINGS:
        answers = golden(name).values()
        if name != "greedy":
            assert {a.finish_reason for a in answers} == {FinishReason.STOP, FinishReason.LENGTH}, (
                name
            )
            assert len({a.response_ids for a in answers}) > 12, name
        lengths[name] = {len(a.response_ids) for a in answers}
    assert 1 in lengths["plain"] and 24 in lengths["plain"]
    # what chains of right drafts need: responses that end inside accepted tokens, by both reasons
    inside = [a for a in golden("plain").values() if len(a.response_ids) % CONFIG.max_nodes]
    assert {a.finish_reason for a in inside} == {FinishReason.STOP, FinishReason.LENGTH}
    assert {len(r.prompt_ids) for r in requests} == {1, 2, 6, 13, 19, 20}
    # peaked enough to vary, neither flat nor certain
    mean = -np.mean([x for a in golden("plain").values() for x in a.logprobs])
    assert 0.7 < mean < 3.0
    assert golden("plain")[7].beyond != golden("gumbel")[7].beyond


@pytest.mark.parametrize("name", SAMPLINGS)
def test_engine_equals_the_naive_reference(golden, rollout, name):
    got = rollout(name)
    assert not differences(golden(name), got)
    assert {int(o) for t in got for o in t.origins} == {Origin.PLAIN}


@pytest.mark.parametrize("setting", SETTINGS)
def test_any_setting(golden, rollout, setting):
    engine = Engine(MODEL, dataclasses.replace(CONFIG, **SETTINGS[setting]))
    for name in ("plain", "cool"):
        assert not differences(golden(name), rollout(name, engine=engine)), name


def test_any_order(golden, rollout, requests):
    shuffled = list(requests)
    np.random.default_rng(0).shuffle(shuffled)
    by_sample = sorted(requests, key=lambda r: r.sample_index)  # siblings far from each other
    for order in (requests[::-1], shuffled, by_sample):
        got = rollout("cool", order)
        assert [t.request_id for t in got] == [r.request_id for r in order]
        assert not differences(golden("cool"), got)


def test_alone_with_a_prompt_of_its_own(golden, rollout, requests):
    for request in requests[::5]:
        assert not differences(golden("plain"), rollout("plain", [request]))


def test_the_group_is_a_label(golden, rollout, requests):
    regrouped = [
        dataclasses.replace(r, group_id=i % 3, sample_index=9) for i, r in enumerate(requests)
    ]
    assert not differences(golden("plain"), rollout("plain", regrouped))


def test_other_prompts_in_the_rows_leave_no_trace(golden, rollout, requests):
    """Rows that are refilled with shorter and longer prompts, and rows that rest."""
    long_first = sorted(requests, key=lambda r: -len(r.prompt_ids))
    short_first = long_first[::-1]
    mixed = [r for pair in zip(long_first[:13], short_first[:13], strict=True) for r in pair]
    for order in (long_first, short_first, mixed):
        assert not differences(golden("top_k"), rollout("top_k", order))


def on_mesh(params, config=ONE_SIZE, **shape):
    """An engine over some devices, and the policy split over them."""
    count = math.prod(shape.values())
    if len(jax.devices()) < count:
        pytest.skip(f"needs {count} devices")
    mesh = make_mesh(MeshConfig(**shape), jax.devices()[:count])
    sharded = jax.device_put(params, param_shardings(mesh, transformer.param_specs(MODEL)))
    return {"engine": Engine(MODEL, config, mesh=mesh), "params": sharded}


def test_replicas_equal_one_device(golden, params, rollout):
    """And whatever step came before, the next one is the same program."""
    replicas = on_mesh(params, data=4)
    want = golden("cool")
    with counted_compilations() as found:
        assert not differences(want, rollout("cool", **replicas))
    assert sum("decode_rounds" in name for name in found) == 1


def on_rollout_mesh(params, config):
    """An engine beside a trainer whose weights are split over four devices."""
    trainer = on_mesh(params, config, data=1, fsdp=2, tensor=2)
    devices = list(trainer["engine"].mesh.devices.flat)
    mesh = rollout_mesh(devices, MODEL.num_kv_heads)
    assert mesh.shape["fsdp"] == 1 < mesh.shape["tensor"]
    weights = laid_out(trainer["params"], transformer.param_specs(MODEL), mesh)
    return {"engine": Engine(MODEL, config, mesh=mesh), "params": weights}


@pytest.mark.parametrize("layout", [pytest.param("trainer", marks=pytest.mark.soak), "rollouts"])
def test_split_weights_equal_one_device(golden, params, requests, rollout, layout):
    trainer = partial(on_mesh, data=1, fsdp=4, tensor=2)
    on_layout = {"trainer": trainer, "rollouts": on_rollout_mesh}
    # rounds with drafts compute prompts too
    split = on_layout[layout](params, dataclasses.replace(CONFIG, max_nodes=4))
    for drafter in (None, Bushy(golden("cool"))):
        got = rollout("cool", requests[::2], drafter=drafter, **split)
        assert not differences(golden("cool"), got)
    assert split["engine"].stats.accepted_tokens > 20


@pytest.mark.parametrize("name", ["plain", "cool", "top_k", "greedy"])
def test_recorded_log_probabilities_equal_fresh_scoring(rollout, params, name):
    worst = misscored(params, rollout(name), SAMPLINGS[name])
    assert set(worst) == {Origin.PLAIN}
    assert worst[Origin.PLAIN] < TOLERANCE


def test_end_tokens_are_those_of_the_call(golden, engine, params, requests):
    """Without any, every response runs to its limit, over what would have ended it."""
    got = engine.run(RolloutSpec(params, SAMPLINGS["plain"], STEP_KEY), requests)
    for t, request in zip(got, requests, strict=True):
        n = request.max_new_tokens or 24
        assert tuple(t.response_ids.tolist()) == golden("plain")[t.request_id].beyond[:n]
        assert t.finish_reason is FinishReason.LENGTH
    assert any(set(t.response_ids.tolist()) & set(STOP) for t in got)
