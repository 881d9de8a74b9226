"""The text of each token of a vocabulary, as bytes.

A text occurs in a response if its UTF-8 does, however it is split into tokens; half a character at
the end of a token is no special case. If a tokenizer strips the space before the first token of a
text, the token has it here.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class TokenBytes:
    """The UTF-8 of token i is `bytes_N[starts[i] : starts[i + 1]]`; special tokens are written out.

    uint8 [N], and int64 [V + 1].
    """

    bytes_N: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def of(self, token: int) -> bytes:
        return self.bytes_N[self.starts[token] : self.starts[token + 1]].tobytes()

    def fewest_tokens(self, text: str) -> int | None:
        """Return the fewest tokens whose joined text contains `text`; None if none can."""
        wanted = text.encode()
        texts, n = self._texts, len(wanted)
        if any(wanted in token for token in texts):
            return 1
        known, longest = set(texts), max(map(len, texts), default=0)
        # the first token may begin before the text, the last may end after it
        ends = self._reversed_texts
        fewest = [0, *(_has(ends, wanted[:i][::-1], 1, n + 1) for i in range(1, n + 1))]
        for i in range(n):
            for j in range(i + 1, min(n, i + longest) + 1):
                if wanted[i:j] in known:
                    fewest[j] = min(fewest[j], fewest[i] + 1)
            fewest[n] = min(fewest[n], _has(texts, wanted[i:], fewest[i] + 1, n + 1))
        return fewest[n] if fewest[n] <= n else None

    @functools.cached_property
    def _texts(self) -> list[bytes]:
        return sorted({self.of(i) for i in range(len(self))} - {b""})

    @functools.cached_property
    def _reversed_texts(self) -> list[bytes]:
        return sorted(text[::-1] for text in self._texts)


def _has(texts: Sequence[bytes], prefix: bytes, yes: int, no: int) -> int:
    """Return `yes` if one of the sorted texts starts with `prefix`, else `no`."""
    at = bisect.bisect_left(texts, prefix)
    return yes if at < len(texts) and texts[at].startswith(prefix) else no


def token_bytes(backend: Any, vocab_size: int) -> TokenBytes:
    """Return the text of every token of a transformers tokenizer."""
    ids = list(range(vocab_size))
    anchor = _anchor(backend, ids)
    # after another token: at the beginning of a text some tokenizers leave a space out
    texts = _decoded(backend, [[*anchor, i] for i in ids])
    before = _decoded(backend, [anchor])[0]
    raw = backend.convert_ids_to_tokens(ids)
    pieces = [_bytes(t, before, r) for t, r in zip(texts, raw, strict=True)]
    starts = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
    return TokenBytes(np.frombuffer(b"".join(pieces), np.uint8), starts)


def _decoded(backend: Any, sequences: list[list[int]]) -> list[str]:
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return [str(text) for text in backend.batch_decode(sequences, **options)]


def _anchor(backend: Any, ids: Sequence[int]) -> list[int]:
    """Return a token of whole characters, or none."""
    special = set(backend.all_special_ids)
    for i in ids:
        if i not in special and (text := _decoded(backend, [[i]])[0]).strip() and text.isascii():
            return [i]
    return []


def _bytes(text: str, before: str, raw: str | None) -> bytes:
    text = text.removeprefix(before)
    if "\ufffd" not in text or raw is None:
        return text.encode()
    # a part of a character: <0xE2>, or a letter for each byte
    if byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", raw):
        return bytes([int(byte[1], 16)])
    letters = _bytes_of_letters()
    if all(letter in letters for letter in raw):
        return bytes(letters[letter] for letter in raw)
    return text.encode()


@functools.cache
def _bytes_of_letters() -> dict[str, int]:
    """Return the byte of each of GPT-2's letters: itself if printable, else from 256 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): b for i, b in enumerate(others)}
