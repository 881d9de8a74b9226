"""Each prompt's responses of its last epoch, with their rewards, kept within a memory cap.

Kept as compressed blobs. Beyond `memory_bytes` the least recently needed prompts go to
files of a folder, one each; a file that is damaged or not ours is named in `problems`
and its prompt has no history (RhymeRL, section 5.3).
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"RPH1"
_HEADER = 12  # magic, CRC-32 of what follows, length of the JSON


class HistoryFileError(ValueError):
    """A blob that is damaged, or not one of ours."""


@dataclasses.dataclass(frozen=True, eq=False)
class Responses:
    """One prompt's responses (int32 arrays) and their rewards."""

    tokens: tuple[np.ndarray, ...]
    rewards: tuple[float, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(t) for t in self.tokens)

    @property
    def best_first(self) -> list[np.ndarray]:
        """The responses by falling reward."""
        pairs = zip(self.rewards, self.tokens, strict=True)
        return [tokens for _, tokens in sorted(pairs, key=lambda pair: -pair[0])]


def encode(key: str, responses: Responses) -> bytes:
    """MAGIC | CRC-32 | size of the JSON | JSON (key, lengths, rewards) | deflated int32 tokens."""
    header = {
        "key": key,
        "lengths": [len(t) for t in responses.tokens],
        "rewards": list(responses.rewards),
    }
    text = json.dumps(header).encode()
    flat = [np.asarray(t, "<i4") for t in responses.tokens]
    tokens = np.concatenate(flat) if flat else np.empty(0, "<i4")
    body = len(text).to_bytes(4, "little") + text + zlib.compress(tokens.tobytes(), 1)
    return MAGIC + zlib.crc32(body).to_bytes(4, "little") + body


def decode(blob: bytes, key: str) -> Responses:
    """What `encode` was given; raises HistoryFileError where it is damaged or another prompt's."""
    if len(blob) < _HEADER or blob[:4] != MAGIC:
        raise HistoryFileError("expected a history blob, got something else")
    body = blob[8:]
    if zlib.crc32(body) != int.from_bytes(blob[4:8], "little"):
        raise HistoryFileError("expected the checksum that it was written with: it is damaged")
    size = int.from_bytes(body[:4], "little")
    header = json.loads(body[4 : 4 + size])
    if header["key"] != key:
        raise HistoryFileError(f"expected the history of {key!r}, got that of {header['key']!r}")
    flat = np.frombuffer(zlib.decompress(body[4 + size :]), "<i4").astype(np.int32)
    ends = np.cumsum([0, *header["lengths"]]).tolist()
    tokens = tuple(flat[i:j] for i, j in itertools.pairwise(ends))
    return Responses(tokens, tuple(header["rewards"]))


class HistoryStore:
    """Responses by prompt key; `replace` after each epoch, `get` before the next.

    Without a `folder` nothing is evicted, whatever the cap.
    """

    def __init__(self, memory_bytes: int = 2**30, folder: Path | None = None) -> None:
        self.memory_bytes, self.folder = memory_bytes, folder
        self.problems: list[str] = []
        self.num_bytes = 0  # of blobs in memory
        self._blobs: collections.OrderedDict[str, bytes] = collections.OrderedDict()
        self._spilled: set[str] = set()

    def __len__(self) -> int:
        return len(self._blobs) + len(self._spilled)

    def replace(self, key: str, responses: Responses) -> None:
        """The prompt's history is now this."""
        self._put(key, encode(key, responses))

    def get(self, key: str) -> Responses | None:
        """The prompt's history; None where it has none that can be read."""
        blob = self._blob(key)
        if blob is None:
            return None
        try:
            return decode(blob, key)
        except HistoryFileError as error:
            self.problems.append(f"history of {key!r} is skipped: {error}")
            self._forget(key)
            return None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: keys from the least recently needed on, and their blobs."""
        keys = [*sorted(self._spilled), *self._blobs]
        pairs = [
            (key, self._read(key) if key in self._spilled else self._blobs[key]) for key in keys
        ]
        kept = [(key, blob) for key, blob in pairs if blob is not None]
        joined = b"".join(blob for _, blob in kept)
        return {
            "keys": [key for key, _ in kept],
            "sizes": [len(blob) for _, blob in kept],
            "blobs": np.frombuffer(joined, np.uint8).copy(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave; whatever was here before is gone."""
        for key in list(self._spilled):
            self._forget(key)
        self._blobs.clear()
        self.num_bytes = 0
        data, start = state["blobs"].tobytes(), 0
        for key, size in zip(state["keys"], state["sizes"], strict=True):
            self._put(key, data[start : start + size])
            start += size

    # -- memory and disk -------------------------------------------------------

    def _put(self, key: str, blob: bytes) -> None:
        self._forget(key)
        self._blobs[key] = blob
        self.num_bytes += len(blob)
        while self.folder is not None and self.num_bytes > self.memory_bytes:
            oldest, old = self._blobs.popitem(last=False)
            self.num_bytes -= len(old)
            self.folder.mkdir(parents=True, exist_ok=True)
            self._path(oldest).write_bytes(old)
            self._spilled.add(oldest)

    def _blob(self, key: str) -> bytes | None:
        """The blob, which is now the most recently needed."""
        if key in self._spilled:
            blob = self._read(key)
            if blob is None:
                self._forget(key)
            else:
                self._put(key, blob)
            return blob
        if key in self._blobs:
            self._blobs.move_to_end(key)
        return self._blobs.get(key)

    def _read(self, key: str) -> bytes | None:
        try:
            return self._path(key).read_bytes()
        except OSError as error:
            self.problems.append(f"history of {key!r} is skipped: {error}")
            return None

    def _forget(self, key: str) -> None:
        if key in self._spilled:
            self._spilled.discard(key)
            self._path(key).unlink(missing_ok=True)
        self.num_bytes -= len(self._blobs.pop(key, b""))

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.history"


def of_group(tokens: Sequence[np.ndarray], rewards: Sequence[float | None]) -> Responses:
    """A group's responses; those that have no reward count 0."""
    return Responses(tuple(tokens), tuple(0.0 if r is None else float(r) for r in rewards))
