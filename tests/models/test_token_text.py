"""The bytes of tokens, of tokenizers that split characters in several ways."""

import pytest

from models import tokenizer
from policies.make.characters import save_character_tokenizer


def byte_level():
    """A byte-level vocabulary: all bytes, a few pairs, and a special token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ġ", "a"), ("Ã", "©"), ("ð", "Ł")]
    vocabulary = {w: i for i, w in enumerate([*letters, *("".join(m) for m in merges)])}
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


def metaspace():
    """Words with ▁ for a space, which is left out at the beginning, and bytes as <0xC3>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "▁", "a", "b", "▁a", "ab", *(f"<0x{i:02X}>" for i in range(256))]
    vocabulary = {w: i for i, w in enumerate(words)}
    backend = Tokenizer(
        models.BPE(vocabulary, [("▁", "a"), ("a", "b")], byte_fallback=True, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [
            *(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def characters(tmp_path):
    save_character_tokenizer(tmp_path, "abé \n")
    return tokenizer.load(tmp_path).backend


@pytest.mark.parametrize("kind", ["byte_level", "metaspace", "characters"])
def test_the_bytes_of_a_text_s_tokens_are_the_text_s(kind, tmp_path):
    backend = {"byte_level": byte_level, "metaspace": metaspace}.get(
        kind, lambda: characters(tmp_path)
    )()
    words = tokenizer.bytes_of_tokens(backend, len(backend.get_vocab()))
    text = "b a ab é" if kind == "characters" else "b a ab é 😀"
    ids = backend.encode(text, add_special_tokens=False)
    assert any(words.of(i) == b"\xf0\x9f" or words.of(i) == b"\xf0" for i in ids) == (
        kind != "characters"
    )
    # a space before the first word that a decoder strips is there
    assert b"".join(words.of(i) for i in ids).decode().lstrip() == text


def test_special_tokens_are_written_out():
    backend = byte_level()
    words = tokenizer.bytes_of_tokens(backend, len(backend.get_vocab()))
    assert words.of(backend.eos_token_id) == b"<end>"
