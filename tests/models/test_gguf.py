"""`python -m models.gguf`: the folder holds what the file holds."""

import gguf_by_hand as by_hand
import jax
import numpy as np
import pytest

from models import gguf, hf, tokenizer
from models.config import ModelConfig

CONFIG = ModelConfig("llama", 300, 32, 1, 2, 1, 16, 32, tied_embeddings=True, max_positions=64)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.gguf"
    words = by_hand.byte_vocabulary(CONFIG.vocab_size)
    by_hand.write(path, CONFIG, by_hand.random_weights(CONFIG), by_hand.KINDS.Q4_1, words)
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_file_becomes_a_folder(file, dtype, tmp_path, capsys):
    out = tmp_path / "out"
    assert gguf.main([str(file), str(out), "--dtype", dtype]) == 0
    assert f"{out}: llama, 15,840 parameters, {dtype}" in capsys.readouterr().out
    (config, params), (theirs, stored) = hf.load_pretrained(out), hf.load_pretrained(file)
    assert config == theirs and config.eos_token_ids == (2, 0)
    for ours, their in zip(jax.tree.leaves(params), jax.tree.leaves(stored), strict=True):
        assert ours.dtype.name == dtype
        np.testing.assert_array_equal(ours, their.astype(dtype))
    words = tokenizer.load(out)
    assert words.eos_token_ids == tokenizer.load(file).eos_token_ids == (2, 0)
    messages = [{"role": "user", "content": " the 12"}]
    assert words.apply_chat_template(messages) == tokenizer.load(file).apply_chat_template(messages)


def test_another_folders_tokenizer_may_be_taken(file, tmp_path, capsys):
    words = by_hand.byte_vocabulary(CONFIG.vocab_size) | {"tokenizer.ggml.pre": "unheard-of"}
    by_hand.write(file, CONFIG, by_hand.random_weights(CONFIG), metadata=words)
    assert gguf.main([str(file), str(tmp_path / "out")]) == 1
    assert "got 'unheard-of'" in capsys.readouterr().err and not (tmp_path / "out").exists()
    tokenizer.save_character_tokenizer(tmp_path / "words", "abc")
    arguments = [str(file), str(tmp_path / "out"), "--tokenizer", str(tmp_path / "words")]
    assert gguf.main(arguments) == 0
    assert tokenizer.load(tmp_path / "out").encode("abc") == [3, 4, 5]


def test_a_folder_is_no_file(tmp_path, capsys):
    assert gguf.main([str(tmp_path), str(tmp_path / "out")]) == 1
    assert "expected a GGUF file" in capsys.readouterr().err
