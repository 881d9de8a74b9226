"""A round on a mesh of its own moves activations, and neither weights nor logits."""

import dataclasses
import math
import re

import jax
import numpy as np
import pytest
from shapes import PLAIN, one_size

from reprise.models.attention import cached_attention, kv_cache
from reprise.models.config import MeshConfig, ModelConfig
from reprise.models.decoder import layers, transformer
from reprise.models.sharding import make_mesh, param_shardings
from reprise.rl.engine.engine import Engine
from reprise.rl.slots.config import EngineConfig
from reprise.rl.warm_up.rollout_programs import Pool, Reach
from reprise.spec.config import SamplingConfig

pytestmark = pytest.mark.skipif(jax.device_count() != 8, reason="needs 8 (virtual) devices")

# Of 24 tokens at most all activations, and the rows of chunks, are smaller than its weights; the
# logits of one token, whole, are not. Its 135 blocks of tokens do not divide, as real ones do not.
MODEL = ModelConfig("qwen3", 34_560, 128, 1, 16, 8, 128, 2048, qk_norm=True, max_positions=64)
MODEL = dataclasses.replace(MODEL, unused_ids=((34_000, 34_560),))  # rows of padding
CONFIG = one_size(dataclasses.replace(PLAIN, prefill_chunk_tokens=4))
ROUNDS = {"decode_rounds", "decode_beside_chunks", "verify_round", "settle"}
COLLECTIVE = re.compile(
    r" = (\(.*?\)|\S+) "
    r"(?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def largest(monkeypatch, names, **sizes):
    """Return the largest result on a device of the collectives of these rounds, and the smaller of
    a device's part of the smallest matrix of a layer and the logits of one token.
    """
    # the programs of all backends: kernels of CPUs gather the inputs of products
    for module in (layers, cached_attention, kv_cache):
        monkeypatch.setattr(module, "is_in_order", lambda *_, **__: False)
    monkeypatch.setattr(layers, "FEW_ROWS", 0)
    mesh = make_mesh(MeshConfig(**sizes), jax.devices())
    engine, found = Engine(MODEL, CONFIG, mesh=mesh), dict.fromkeys(names, 0)
    specs = transformer.param_specs(MODEL)
    params = jax.tree.map(
        lambda spec, at: jax.ShapeDtypeStruct(spec.shape, np.float32, sharding=at),
        *(specs, param_shardings(mesh, specs)),
    )
    pool = Pool(engine, params, SamplingConfig(max_new_tokens=20), Reach(4, 4, speculative=True))
    seen = set()
    with engine.mesh_context(), engine.shapes_only():
        for program in pool.programs():
            if (name := program.step.__name__) in names:
                seen.add(name)
                args, options = program.arguments()
                text = program.step.lower(*args, **options).compile().as_text()
                for results in COLLECTIVE.findall(text):
                    for shape in re.findall(r"[a-z]+\d*\[([\d,]*)\]", results):
                        elements = math.prod(int(n) for n in shape.split(",") if n)
                        found[name] = max(found.get(name, 0), elements)
    assert seen == names
    weight = MODEL.d_model * MODEL.num_kv_heads * MODEL.head_dim // mesh.shape["tensor"]
    return found, min(weight, MODEL.vocab_size)


@pytest.mark.parametrize(
    "sizes",
    [pytest.param({"data": 1, "tensor": 8}, marks=pytest.mark.soak), {"data": 2, "tensor": 4}],
)
def test_no_round_gathers_weights_or_logits(monkeypatch, sizes):
    found, too_large = largest(monkeypatch, ROUNDS, **sizes)
    assert max(found.values()) < too_large
    assert found["settle"] == 0 < found["decode_rounds"], "sums over `tensor` are collectives"


def test_on_the_trainers_mesh_a_round_would_gather_weights(monkeypatch):
    found, too_large = largest(monkeypatch, {"decode_rounds"}, data=1, fsdp=2, tensor=4)
    assert found["decode_rounds"] >= too_large


@pytest.mark.parametrize(("data", "asked", "rounded"), [(8, 5, 8), (4, 8, 8), (3, 4, 6), (1, 3, 3)])
def test_slots_and_chunks_of_prompts_are_split_over_all_copies(data, asked, rounded):
    """Five slots on eight devices would be whole on each of them."""
    config = EngineConfig(slots=asked, min_slots=asked, prefill_rows=asked, page_tokens=16)
    mesh = make_mesh(MeshConfig(data=data), jax.devices()[:data])
    engine = Engine(MODEL, config, mesh=mesh)
    made = engine.config
    assert (made.slots, made.min_slots, made.prefill_rows) == (rounded,) * 3
    assert all(m % data == 0 for m in made.node_sizes(made.slot_bucket(1)))
    engine.expect(made.slot_bucket(1), 32)
    keys = engine.empty_cache(made.slot_bucket(1)).keys[0]
    pages = max(3, 2 * rounded // data)  # two for each slot, and one to copy a page of a prompt
    assert keys.sharding.shard_shape(keys.shape)[0] == pages
