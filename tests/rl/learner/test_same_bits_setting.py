"""The devices and sizes whose passes find the same bits, and the sentence for others."""

import dataclasses
import os
import re
from functools import partial

import jax
import pytest

from reprise import models
from reprise.models.config import LoraShape, ModelConfig
from reprise.models.kernels.gpu import hopper
from reprise.models.sharding import rollout_mesh
from reprise.rl.gin.loader import load
from reprise.rl.learner.config import NumericsConfig, why_other_bits, why_other_bits_on_accelerators
from reprise.rl.placement import meshes
from reprise.rl.settings.config import TrainConfig

MODEL = ModelConfig("llama", 50, 64, 1, 4, 2, 16, 96)
OF_GPUS = ModelConfig("llama", 50, 256, 1, 4, 2, 64, 320)
OF_TPUS = ModelConfig("llama", 50, 256, 1, 4, 2, 128, 384)


def test_cpus_find_the_same_bits():
    assert why_other_bits(MODEL, 1) is None and why_other_bits(MODEL, 2) is None
    lora = LoraShape(32, 32.0, ("attention",))
    assert why_other_bits(dataclasses.replace(MODEL, lora=lora), 1) is None


@pytest.mark.parametrize(
    "change, words",
    [
        ({"d_model": 72}, "a d_model that 16 divides, got 72"),
        ({"d_ff": 100}, "a d_ff that 16 divides, got 100"),
        ({"head_dim": 6}, "num_heads · head_dim that 16 divides, got 24"),
        ({"head_dim": 4}, "head size that 8 divides, got 4"),
        ({"lora": LoraShape(6, 32.0, ("mlp",))}, "lora_rank that 16 divides, got 6"),
    ],
)
def test_sizes_that_kernels_of_cpus_do_not_take(change, words):
    assert words in why_other_bits(dataclasses.replace(MODEL, **change), 1)


def test_heads_are_not_split():
    assert "heads that Mesh.tensor=4 divides, got 2" in why_other_bits(MODEL, 4)


@pytest.fixture
def hoppers(monkeypatch):
    """GPUs in use are Hoppers, whose products have one tile."""
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    monkeypatch.setattr(hopper, "is_hopper", lambda: True)
    assert "same_bits=True before the start" in why_on_gpus()
    models.sum_in_order_on_accelerators()


def why_on(platform, tensor_ways=1, dtype="bfloat16", page_tokens=128, **change):
    model = dataclasses.replace(OF_GPUS if platform == "cuda" else OF_TPUS, **change)
    return why_other_bits_on_accelerators(platform, model, tensor_ways, dtype, page_tokens)


why_on_gpus = partial(why_on, "cuda")
why_on_tpus = partial(why_on, "tpu")


def test_hoppers_find_the_same_bits(hoppers):
    assert why_on_gpus() is None and why_on_gpus(page_tokens=64) is None


@pytest.mark.parametrize(
    "change, words",
    [
        ({"tensor_ways": 4}, "heads that Mesh.tensor=4 divides, got 2"),
        ({"page_tokens": 16}, "pages of 64 or 128 positions, got 16"),
        ({"dtype": "float32"}, "expected Trainer.compute_dtype=bfloat16, got float32"),
        ({"head_dim": 80}, "head size of 64 or 128, got 80"),
        ({"d_ff": 352}, "a d_ff that 64 divides, got 352"),
        ({"lora": LoraShape(64, 32.0, ("mlp",))}, "got Policy.lora_rank=64"),
    ],
)
def test_what_hoppers_do_not_take(hoppers, change, words):
    assert words in why_on_gpus(**change)


def test_tpus_find_the_same_bits(hoppers):
    assert why_on_tpus() is None


@pytest.mark.parametrize(
    "change, words",
    [
        ({"page_tokens": 64}, "pages of 128 positions, got 64"),
        ({"head_dim": 64}, "head size that is a multiple of 128, got 64"),
        ({"d_ff": 320}, "a d_ff that 128 divides, got 320"),
        ({"dtype": "float32"}, "expected Trainer.compute_dtype=bfloat16, got float32"),
    ],
)
def test_what_tpus_do_not_take(hoppers, change, words):
    assert words in why_on_tpus(**change)


def test_rounds_that_memories_of_a_tpu_do_not_hold():
    def why(*flags):
        config = load(TrainConfig, ["configs/plain_tiny.gin"], flags)
        return meshes._large_rounds(config, OF_TPUS, None)

    slots = "Engine.slots=4096"
    assert why(slots, "Rollout.max_prompt_tokens=3000") is None
    assert "131,072 pages together" in why(slots, "Rollout.max_prompt_tokens=5000")
    tokens = "Engine.prefill_chunk_tokens=8192", "Rollout.max_prompt_tokens=8192"
    tokens = ("Trainer.compute_dtype='bfloat16'", *tokens)
    assert why(*tokens) is None, "32,768 tokens of two heads"
    too_many = "at most 32,768 tokens of drafts, or of prompts, .* 2 key/value heads, got 65,536"
    assert re.search(too_many, why(*tokens, "Engine.prefill_rows=8"))


def test_a_gpu_with_one_slot_is_refused(hoppers, monkeypatch):
    """XLA rewrites a product of one row to another order than the tile's."""
    monkeypatch.setattr(meshes, "platform_in_use", lambda: "cuda")

    def why(slots, ways, *flags):
        flags += "Trainer.compute_dtype='bfloat16'", f"Engine.min_slots={slots}"
        config = load(TrainConfig, ["configs/plain_tiny.gin"], flags)
        config = dataclasses.replace(config, numerics=NumericsConfig(same_bits=True))
        mesh = None if ways == 1 else rollout_mesh(jax.devices()[:ways], 2, ways, 1)
        monkeypatch.setattr(meshes, "engine_mesh", lambda *_, own: mesh)
        meshes.check_bits(config, OF_GPUS, None)

    why(2, 1)
    why(16, 8)
    for slots, ways in ((1, 1), (4, 8), (8, 8)):
        given = max(slots, ways)
        with pytest.raises(ValueError, match=f"min_slots of at least {2 * ways}.*, got {given}: "):
            why(slots, ways)
    with pytest.raises(ValueError, match="prefill_chunk_tokens of at least 2, .*, got 1: "):
        why(4, 1, "Engine.prefill_rows=1", "Engine.prefill_chunk_tokens=1")


def test_workers_on_ray_have_flags_of_their_own(monkeypatch):
    monkeypatch.setattr(meshes.jax, "default_backend", lambda: "tpu")
    settings = "Cluster.kind='ray'", "Numerics.same_bits=True"
    config = load(TrainConfig, ["configs/plain_tiny.gin"], settings)
    with pytest.raises(ValueError, match="expected Cluster.kind='local' or 'spmd': workers on Ray"):
        meshes.check_bits(config, OF_TPUS, None)


def test_other_gpus(hoppers, monkeypatch):
    monkeypatch.setattr(hopper, "is_hopper", lambda: False)
    assert "compute capability 9" in why_on_gpus()


def test_flags_are_added_once(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_cublas_fallback=true")
    for _ in range(2):
        models.sum_in_order_on_accelerators()
    names = [flag.partition("=")[0] for flag in os.environ["XLA_FLAGS"].split()]
    assert len(names) == len(set(names)) == 4
    assert not models.sums_in_order_on_accelerators()  # the user's flag stays
