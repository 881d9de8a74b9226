"""Policies in GGUF files: the weights that were written, refusals."""

import dataclasses
from pathlib import Path

import gguf_by_hand as by_hand
import jax.numpy as jnp
import numpy as np
import pytest
from gguf_by_hand import KINDS

from reprise.models.config import Llama3RopeScaling, ModelConfig
from reprise.models.formats import hf

GOLDEN = Path(__file__).parents[2] / "golden"
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
    """Logits of these folders equal transformers' (test_hf.py); one has Llama 3's scaling."""
    config, params = hf.load_pretrained(GOLDEN / name, dtype=jnp.float32)
    by_hand.write(tmp_path / "a.gguf", config, by_hand.by_name(config, params))
    theirs = dataclasses.replace(config, bos_token_id=None, eos_token_ids=(), pad_token_id=None)
    ours, loaded = hf.load_pretrained(tmp_path / "a.gguf")
    assert ours == theirs
    assert_same(by_hand.by_name(config, loaded), by_hand.by_name(config, params))


# Metadata without the architecture's name before it, what becomes of it, and what is said.
REFUSED = {
    "a mixture of experts": ({"expert_count": 8}, "llama.expert_count=8 .expected 0."),
    "a sliding window": ({"attention.sliding_window": 4096}, "sliding_window=4096 .expected 0."),
    "an unknown option": (
        {"logit_scale": 0.5},
        "not implemented: llama.logit_scale=0.5 .expected None.",
    ),
    "many options": (
        {f"a\nb{i}": i for i in range(1, 8)},
        r"llama.a\\nb1=1 .expected None.; .*b6=6 .expected None. and 1 more; use",
    ),
    "another scaling": ({"rope.scaling.type": "yarn"}, "scaling.type='yarn' .expected 'none'."),
    "other values": ({"attention.value_length": 8}, "value_length as the size of a head, 16, got"),
    "no width": ({"embedding_length": None}, "expected llama.embedding_length, got none"),
    "an endless norm": ({"attention.layer_norm_rms_epsilon": float("inf")}, "positive .* got inf"),
    "other heads": (
        {"attention.head_count": 5},
        "num_heads=5 must be a multiple of num_kv_heads=2",
    ),
    "more layers": ({"block_count": 2**30}, "expected num_hidden_layers of at most the 20 tensors"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_implemented_or_does_not_fit_is_refused(case, tmp_path):
    changes, message = REFUSED[case]
    path = tmp_path / "a.gguf"
    metadata = by_hand.plain_vocabulary(LLAMA.vocab_size)
    metadata |= {f"llama.{key}": value for key, value in changes.items()}
    by_hand.write(path, LLAMA, by_hand.random_weights(LLAMA), metadata=metadata)
    with pytest.raises(ValueError, match=message) as caught:
        hf.check(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "misspelt", "error"),
    [
        ("tokenizer.ggml.token_type", "tokenizer.ggml.token_tipe", "expected token_type, got"),
        ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eos_token_ib", "expected eos_token_id"),
        ("tokenizer.ggml.padding_token_id", "tokenizer.ggmm.padding_token_id", "got .*ggmm.pad"),
        ("llama.rope.freq_base", "lLama.rope.freq_base", "got lLama.rope.freq_base: correct its"),
        ("llama.expert_count", "lLama.expert_count", "expected llama.expert_count, got"),
    ],
)
def test_an_entry_with_a_misspelt_name_is_refused(key, misspelt, error, tmp_path):
    path, weights = tmp_path / "a.gguf", by_hand.random_weights(LLAMA)
    words = by_hand.character_vocabulary("0123456789", LLAMA.vocab_size)
    words |= {
        "llama.rope.freq_base": 5e5,
        "llama.expert_count": 0,
        "tokenizer.ggml.cls_token_id": 3,
    }
    by_hand.write(path, LLAMA, weights, metadata=words)
    hf.check(path)
    by_hand.write(path, LLAMA, weights, metadata=words | {key: None, misspelt: words[key]})
    with pytest.raises(ValueError, match=f"a.gguf: .*{error}"):
        hf.check(path)


def test_a_file_without_a_limit_of_its_own_gives_its_rows(tmp_path):
    assert hf.check(written(tmp_path, {"vocab_size": 48})) == LLAMA
    with pytest.raises(ValueError, match="token_embd.weight has shape .48, 64., expected .49, 6"):
        hf.check(written(tmp_path, {"vocab_size": 49}))


def written(folder, changes=None, **given):
    path = folder / "a.gguf"
    metadata = by_hand.plain_vocabulary(LLAMA.vocab_size)
    metadata |= {f"llama.{key}": value for key, value in (changes or {}).items()}
    by_hand.write(path, LLAMA, by_hand.random_weights(LLAMA), metadata=metadata, **given)
    return path


TENSORS = {
    "one missing": ({"blk.1.ffn_up.weight": None}, "missing tensor: blk.1.ffn_up.weight"),
    "one too many": (
        {"blk.0.attn_q.bias": "vector"},
        "surplus: blk.0.attn_q.bias",
    ),
    "another program's name": ({"model.norm.weight": "vector"}, "surplus: model.norm.weight"),
    "whole numbers": ({"output_norm.weight": "numbers"}, "type I32, which the installed gguf pack"),
    "other factors": ({"rope_freqs.weight": "factors"}, "factors of Llama 3 .* got .3.0, 2.0"),
    "factors of another size": ({"rope_freqs.weight": "vector"}, "each of 8 pairs .* shape .64."),
}
VALUES = {
    "vector": (np.ones(64, np.float32), KINDS.F32),
    "numbers": (np.ones(64, np.int32), KINDS.I32),
    "factors": (np.array([3, 2, 1, 1, 1, 1, 1, 4], np.float32), KINDS.F32),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_are_those_of_the_config(case, tmp_path):
    changes, message = TENSORS[case]
    tensors = {name: VALUES.get(value) for name, value in changes.items()}
    path = written(tmp_path, tensors=tensors)
    with pytest.raises(ValueError, match=message):
        hf.check(path)


@pytest.mark.parametrize("scaling", [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192)])
def test_llama3s_scaling_is_found_again(scaling, tmp_path):
    """The heads, base and lengths of Llama 3.1 8B and 3.2 1B; the factors come from their rule."""
    config = dataclasses.replace(
        LLAMA,
        head_dim=64,
        rope_theta=500_000.0,
        rope_scaling=Llama3RopeScaling(*scaling),
        max_positions=131_072,
    )
    by_hand.write(tmp_path / "a.gguf", config, by_hand.random_weights(config))
    assert hf.check(tmp_path / "a.gguf") == config
    # another low factor gives other frequencies, and is refused rather than taken for this one
    other = dataclasses.replace(config.rope_scaling, low_freq_factor=2.0)
    config = dataclasses.replace(config, rope_scaling=other)
    by_hand.write(tmp_path / "b.gguf", config, by_hand.random_weights(config))
    with pytest.raises(ValueError, match="factors of Llama 3 .low 1, high 4., got .1.0"):
        hf.check(tmp_path / "b.gguf")


def test_another_architecture_is_named(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(written(tmp_path).read_bytes().replace(b"llama", b"gemma"))
    with pytest.raises(ValueError, match="as one of .'llama', 'qwen2', 'qwen3'., got 'gemma'"):
        hf.check(path)


def test_a_folder_with_a_gguf_file_in_it_says_to_name_the_file(tmp_path):
    written(tmp_path)
    with pytest.raises(FileNotFoundError, match="or the GGUF file itself, a.gguf"):
        hf.check(tmp_path)
