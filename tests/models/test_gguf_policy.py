"""Policies in GGUF files: the weights that were written, Hugging Face's logits, refusals."""

import dataclasses
from pathlib import Path

import gguf_by_hand as by_hand
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf_by_hand import KINDS

from models import hf, transformer
from models.config import ModelConfig

GOLDEN = Path(__file__).parents[1] / "golden"
LOGITS = jax.jit(transformer.logits, static_argnums=0)
SHAPE = {
    "vocab_size": 48,
    "d_model": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "d_ff": 96,
    "rope_theta": 100_000.0,
    "norm_eps": 1e-5,
    "max_positions": 256,
}
LLAMA = ModelConfig("llama", **SHAPE, tied_embeddings=True)
QWEN2 = ModelConfig("qwen2", **SHAPE, qkv_bias=True)
QWEN3 = ModelConfig("qwen3", **SHAPE | {"head_dim": 32}, qk_norm=True, tied_embeddings=True)
EVERY_KIND = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, strict=True, err_msg=name)


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("config", [LLAMA, QWEN2, QWEN3], ids=lambda c: c.architecture)
def test_weights_come_back_as_they_were_stored(config, kind, tmp_path):
    path = tmp_path / "a.gguf"
    stored = by_hand.write(path, config, by_hand.random_weights(config), KINDS[kind])
    assert hf.check(path) == config
    again, params = hf.load_pretrained(path)
    assert again == config
    assert_same(by_hand.by_name(config, params), stored)


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.npz")))
def test_a_file_equals_the_folder_it_was_made_of(name, tmp_path):
    """Logits of these folders equal transformers'; one has Llama 3's rotary scaling."""
    config, params = hf.load_pretrained(GOLDEN / name, dtype=jnp.float32)
    by_hand.write(tmp_path / "a.gguf", config, by_hand.by_name(config, params))
    theirs = dataclasses.replace(config, bos_token_id=None, eos_token_ids=(), pad_token_id=None)
    ours, loaded = hf.load_pretrained(tmp_path / "a.gguf")
    assert ours == theirs
    assert_same(by_hand.by_name(config, loaded), by_hand.by_name(config, params))
    with np.load(GOLDEN / f"{name}.npz") as golden, jax.default_matmul_precision("highest"):
        got = LOGITS(ours, loaded, golden["tokens"])
        assert np.abs(np.asarray(got) - golden["logits"]).max() <= 1e-4


def test_a_type_may_be_asked_for(tmp_path):
    by_hand.write(tmp_path / "a.gguf", QWEN2, by_hand.random_weights(QWEN2), KINDS.Q8_0)
    _, params = hf.load_pretrained(tmp_path / "a.gguf", dtype="bfloat16")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}
