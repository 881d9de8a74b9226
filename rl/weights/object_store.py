"""Payloads through a store of bytes by key: Ray's, or files in a folder that both ends can open.

A folder in /dev/shm is shared memory.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rl.weights.errors import CarrierError, DamagedWeights
from rl.weights.interface import Payload
from rl.weights.parts import Slice, cut, joined, slices_of
from rl.weights.pieces import empty_aligned

_KEY = re.compile(r"[0-9a-f]{32}")
_POLL_S = 0.01


class Store(Protocol):
    """Keeps bytes. A key is text, unique, and says nothing about the bytes."""

    def put(self, data: bytes) -> str: ...

    def get(self, key: str, timeout_s: float) -> bytes | memoryview:
        """Return the bytes; CarrierError where they are not there in time."""
        ...

    def delete(self, key: str) -> None: ...


class FolderStore:
    """A store in a folder of its own, which must be there. Files appear whole."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ValueError(f"expected a folder for weights, found none at {folder}: make it")
        self._folder = folder

    def put(self, data: bytes) -> str:
        key = secrets.token_hex(16)
        unfinished = self._folder / f"{key}.part"
        with open(unfinished, "xb") as file:
            file.write(data)
        os.replace(unfinished, self._folder / key)
        return key

    def get(self, key: str, timeout_s: float) -> memoryview:
        path, until_s = self._path(key), time.monotonic() + timeout_s
        while True:
            try:
                with open(path, "rb") as file:
                    found_n = empty_aligned(os.fstat(file.fileno()).st_size)
                    if file.readinto(found_n.data) != found_n.size:
                        raise CarrierError(f"expected {found_n.size} bytes under key {key}")
                    return found_n.data
            except FileNotFoundError:
                if time.monotonic() >= until_s:
                    raise CarrierError(
                        f"expected weights under key {key} within {timeout_s:g} s, found none: "
                        "the publisher is gone or has dropped them; ask for another offer"
                    ) from None
            time.sleep(_POLL_S)

    def delete(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        if type(key) is not str or not _KEY.fullmatch(key):
            raise DamagedWeights(f"expected a key of 32 hexadecimal digits, got {key!r:.80}")
        return self._folder / key


class ObjectStoreCarrier:
    """Carries payloads through a store, one object a part, put there once for all subscribers."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def hold(self, payload: Payload, part_bytes: int) -> list[str]:
        keys: list[str] = []
        try:
            for part in cut([b.size for b in payload], part_bytes):
                slices = [found_n.data for found_n in slices_of(payload, part)]
                keys.append(self._store.put(b"".join(slices)))
        except BaseException:
            self.drop(keys)
            raise
        return keys

    def offer(self, held: list[str], lease_s: float) -> Any:
        return {"keys": list(held)}

    def drop(self, held: list[str]) -> None:
        for key in held:
            self._store.delete(key)

    def receive(
        self, where: Any, sizes: Sequence[int], part_bytes: int, deadline_s: float
    ) -> list[np.ndarray]:
        parts = cut(sizes, part_bytes)
        keys = where.get("keys") if type(where) is dict else None
        if type(keys) is not list or len(keys) != len(parts):
            raise DamagedWeights(f"expected the keys of {len(parts)} parts, got {keys!r:.200}")
        return joined(sizes, self._parts(parts, keys, deadline_s))

    def _parts(
        self, parts: list[list[Slice]], keys: list[str], deadline_s: float
    ) -> Iterator[tuple[list[Slice], list[np.ndarray]]]:
        for part, key in zip(parts, keys, strict=True):
            found_n = np.frombuffer(self._store.get(key, deadline_s), np.uint8)
            ends = np.cumsum([s.num_bytes for s in part])
            if len(found_n) != ends[-1]:
                raise DamagedWeights(f"expected a part of {ends[-1]} bytes, got {len(found_n)}")
            yield part, np.split(found_n, ends[:-1])
