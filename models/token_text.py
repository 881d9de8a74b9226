"""The text of each token of a vocabulary, as bytes.

A text in UTF-8 occurs in a response where its bytes do, however they are split into tokens; half a
character at the end of a token is no special case. Where a tokenizer strips the space before the
first token of a text, the token has it here.
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
        """Return the fewest tokens whose text together holds `text`; None where none can."""
        wanted = text.encode()
        words, ends = self._words, self._reversed
        if any(wanted in word for word in words):
            return 1
        known, longest, n = set(words), max(map(len, words), default=0), len(wanted)
        # the first token may begin before the text, the last may end behind it
        fewest = [0, *(1 if _starts(ends, wanted[:i][::-1]) else n + 1 for i in range(1, n + 1))]
        for i in range(n):
            for j in range(i + 1, min(n, i + longest) + 1):
                if wanted[i:j] in known:
                    fewest[j] = min(fewest[j], fewest[i] + 1)
            if _starts(words, wanted[i:]):
                fewest[n] = min(fewest[n], fewest[i] + 1)
        return fewest[n] if fewest[n] <= n else None

    @functools.cached_property
    def _words(self) -> list[bytes]:
        return sorted({self.of(i) for i in range(len(self))} - {b""})

    @functools.cached_property
    def _reversed(self) -> list[bytes]:
        return sorted(word[::-1] for word in self._words)


def _starts(words: Sequence[bytes], prefix: bytes) -> bool:
    """Return whether one of the sorted words starts with `prefix`."""
    at = bisect.bisect_left(words, prefix)
    return at < len(words) and words[at].startswith(prefix)


def token_bytes(backend: Any, vocab_size: int) -> TokenBytes:
    """Return the text of every token of a transformers tokenizer."""
    ids = list(range(vocab_size))
    anchor = _anchor(backend, ids)
    # behind another token: at the beginning of a text some tokenizers leave a space out
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
    """A token of whole characters; empty where there is none."""
    special = set(backend.all_special_ids)
    for i in ids:
        if i not in special and (text := _decoded(backend, [[i]])[0]).strip():
            if text.isascii():
                return [i]
    return []


def _bytes(text: str, before: str, raw: str | None) -> bytes:
    text = text.removeprefix(before)
    if "\ufffd" not in text or raw is None:
        return text.encode()
    # a part of a character: <0xE2>, or a letter for each byte
    if byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", raw):
        return bytes([int(byte[1], 16)])
    if all(letter in _BYTES for letter in raw):
        return bytes(_BYTES[letter] for letter in raw)
    return text.encode()


def _byte_letters() -> dict[str, int]:
    """GPT-2's letter for each byte: itself where it can be printed, else one above 255."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printed]
    letters = [chr(b) for b in printed] + [chr(256 + i) for i in range(len(others))]
    return dict(zip(letters, [*printed, *others], strict=True))


_BYTES = _byte_letters()
