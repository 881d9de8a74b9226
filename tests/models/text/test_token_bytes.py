"""The bytes of a text's tokens are the text's; the fewest tokens that hold a text."""

import numpy as np
import pytest
from token_rules import byte_level, metaspace

from policies.make.characters import save_character_tokenizer
from reprise.models.text import token_bytes, tokenizer


def characters_backend(tmp_path):
    save_character_tokenizer(tmp_path, "abé \n")
    return tokenizer.load(tmp_path).rules


@pytest.mark.parametrize("kind", ["byte_level", "metaspace", "characters"])
def test_the_bytes_of_a_text_s_tokens_are_the_text_s(kind, tmp_path):
    backend = {"byte_level": byte_level, "metaspace": metaspace}.get(
        kind, lambda: characters_backend(tmp_path)
    )()
    words = token_bytes.bytes_of_tokens(backend, len(backend.get_vocab()))
    text = "b a ab é" if kind == "characters" else "b a ab é 😀"
    ids = backend.encode(text, add_special_tokens=False).ids
    assert any(words.of(i) == b"\xf0\x9f" or words.of(i) == b"\xf0" for i in ids) == (
        kind != "characters"
    )
    # a space before the first word that a decoder strips is there
    assert b"".join(words.of(i) for i in ids).decode().lstrip() == text


def test_special_tokens_are_written_out():
    backend = byte_level()
    words = token_bytes.bytes_of_tokens(backend, len(backend.get_vocab()))
    assert words.of(backend.token_to_id("<end>")) == b"<end>"


@pytest.mark.parametrize(
    ("text", "fewest"),
    [
        ("ab", 1),
        ("b", 1),  # inside a token
        ("abab", 2),
        ("babb", 3),  # the end of one token, a whole one, the start of another
        ("é", 2),
        ("éab", 3),
        ("x", None),
        ("abx", None),
    ],
)
def test_the_fewest_tokens_that_hold_a_text(text, fewest):
    pieces = [b"ab", b"bbb", "é".encode()[:1], "é".encode()[1:], b"", b"c"]
    starts = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
    words = token_bytes.TokenBytes(np.frombuffer(b"".join(pieces), np.uint8), starts)
    assert words.min_tokens(text) == fewest
