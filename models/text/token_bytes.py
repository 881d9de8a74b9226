"""The UTF-8 text of every token, to search for stop strings."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class TokenBytes:
    """UTF-8 by token: token i is `bytes_N[starts[i] : starts[i + 1]]`; uint8 [N], int64 [V + 1].

    Special tokens are written out. If a tokenizer strips the space before the first token of a
    text, the token keeps the space here. A text occurs in a response if its UTF-8 does.
    """

    bytes_N: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def of(self, token: int) -> bytes:
        return self.bytes_N[self.starts[token] : self.starts[token + 1]].tobytes()

    @functools.cached_property
    def _texts(self) -> set[bytes]:
        return {self.of(i) for i in range(len(self))}

    def min_tokens(self, text: str) -> int | None:
        """Return the minimum number of tokens that contain `text` when joined, None if none can."""
        goal = text.encode()
        if any(goal in token for token in self._texts):
            return 1
        n = len(goal)  # the first token may start before the text, and the last stop after it
        heads = {token[:k] for token in self._texts for k in range(1, min(n, len(token)) + 1)}
        tails = {token[-k:] for token in self._texts for k in range(1, min(n, len(token)) + 1)}
        fewest = [0, *(1 if goal[:j] in tails else n + 1 for j in range(1, n + 1))]
        for i in range(n):
            for j in range(i + 1, n + 1):
                if goal[i:j] in (heads if j == n else self._texts):
                    fewest[j] = min(fewest[j], fewest[i] + 1)
        return fewest[n] if fewest[n] <= n else None


def bytes_of_tokens(rules: Any, vocab_size: int) -> TokenBytes:
    """Return the bytes of every token of a `tokenizers` tokenizer."""
    ids = list(range(vocab_size))
    anchor = _anchor(rules, ids)
    # decode after another token: at the start of a text some tokenizers drop a space
    texts = rules.decode_batch([[*anchor, i] for i in ids], skip_special_tokens=False)
    before = rules.decode(anchor, skip_special_tokens=False)
    raw = [rules.id_to_token(i) for i in ids]
    pieces = [_bytes(t, before, r) for t, r in zip(texts, raw, strict=True)]
    starts = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
    return TokenBytes(np.frombuffer(b"".join(pieces), np.uint8), starts)


def _anchor(rules: Any, ids: Sequence[int]) -> list[int]:
    """Return a list with one token of whole characters, or []."""
    added = rules.get_added_tokens_decoder()
    for i in ids:
        text = "" if i in added else rules.decode([i], skip_special_tokens=False)
        if text.strip() and text.isascii():
            return [i]
    return []


def _bytes(text: str, before: str, raw: str | None) -> bytes:
    text = text.removeprefix(before)
    if "\ufffd" not in text or raw is None:
        return text.encode()
    # part of a character: <0xE2>, or one letter per byte
    if byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", raw):
        return bytes([int(byte[1], 16)])
    letters = _bytes_of_letters()
    if all(letter in letters for letter in raw):
        return bytes(letters[letter] for letter in raw)
    return text.encode()


@functools.cache
def _bytes_of_letters() -> dict[str, int]:
    """Return the byte for each letter of GPT-2: itself if printable, else from 256 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): b for i, b in enumerate(others)}
