"""The devices and sizes whose passes find the same bits, and the sentence for others."""

import dataclasses

import pytest

from models.config import LoraShape, ModelConfig
from rl.learner.config import why_other_bits

MODEL = ModelConfig("llama", 50, 64, 1, 4, 2, 16, 96)


def why(model=MODEL, platform="cpu", tensor_ways=1):
    return why_other_bits(model, platform, tensor_ways)


def test_cpus_find_the_same_bits():
    assert why() is None and why(tensor_ways=2) is None
    lora = LoraShape(32, 32.0, ("attention",))
    assert why(dataclasses.replace(MODEL, lora=lora)) is None


@pytest.mark.parametrize(
    "change, words",
    [
        ({"d_model": 72}, "a d_model that 16 divides, got 72"),
        ({"d_ff": 100}, "a d_ff that 16 divides, got 100"),
        ({"head_dim": 6}, "num_heads · head_dim that 16 divides, got 24"),
        ({"head_dim": 4}, "head size that 8 divides, got 4"),
    ],
)
def test_sizes_that_kernels_do_not_take(change, words):
    assert words in why(dataclasses.replace(MODEL, **change))


def test_other_devices_and_ranks():
    assert "got a gpu" in why(platform="gpu")
    assert "heads that Mesh.tensor=4 divides, got 2" in why(tensor_ways=4)
    odd = LoraShape(6, 32.0, ("mlp",))
    assert "lora_rank that 16 divides, got 6" in why(dataclasses.replace(MODEL, lora=odd))
