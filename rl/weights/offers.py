"""Offers of a publisher to a subscriber: plain data, checked before anything is believed.

An offer is a line with the SHA-256 of what follows, and JSON: the version, every piece with its
checksum, and what leads there. `base` is what the subscriber has now, and `links` are one delta for
each version since; or it is None, and the first link is a full copy. `sizes` are the bytes of each
piece's payload, `where` is how the carrier receives them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl.weights import delta
from rl.weights.errors import DamagedWeights
from rl.weights.pieces import PieceInfo, fingerprint

MOST_BYTES = 256 * 2**20  # of an offer's text
MOST_LINKS = 10_000
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True)
class VersionId:
    """A version and its fingerprint: two runs have versions of the same number."""

    version: int
    fingerprint: str

    @classmethod
    def of_plain(cls, value: Any, what: str) -> VersionId:
        found = _fields(value, ("version", "fingerprint"), what)
        _count(found["version"], f"{what}: version")
        _checksum(found["fingerprint"], f"{what}: fingerprint")
        return cls(**found)


@dataclasses.dataclass(frozen=True)
class Link:
    """One payload: the bytes of each piece, and where they are."""

    sizes: tuple[int, ...]
    where: Any


@dataclasses.dataclass(frozen=True)
class Offer:
    """A version's pieces, and the links that lead to it."""

    to: VersionId
    base: VersionId | None
    pieces: tuple[PieceInfo, ...]
    links: tuple[Link, ...]

    def text(self) -> str:
        body = json.dumps(dataclasses.asdict(self), separators=(",", ":"))
        return f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}"


@dataclasses.dataclass(frozen=True)
class Expected:
    """Shape and dtype of an array, as the subscriber's own policy has it."""

    shape: tuple[int, ...]
    dtype: str


def parse(text: str, expected: Mapping[str, Expected]) -> Offer:
    """Return an offer whose every field is as it must be; DamagedWeights says which is not."""
    if not isinstance(text, str) or len(text) > MOST_BYTES:
        raise DamagedWeights(f"expected the text of an offer of at most {MOST_BYTES:,} characters")
    digest, _, body = text.partition("\n")
    found_digest = hashlib.sha256(body.encode(errors="replace")).hexdigest()
    if digest != found_digest:
        raise DamagedWeights(
            f"expected an offer with the checksum {found_digest}, got {digest[:64]!r}"
        )
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DamagedWeights(f"expected an offer in JSON, got {str(error)[:200]}") from error
    return _offer(value, expected)


def check_cover(pieces: Sequence[PieceInfo], expected: Mapping[str, Expected]) -> None:
    """Check that pieces hold each element of each array exactly once; else DamagedWeights."""
    found: dict[str, list[PieceInfo]] = {name: [] for name in expected}
    for piece in pieces:
        found[piece.name].append(piece)
    for name, wanted in expected.items():
        if not _covers(found[name], wanted.shape):
            raise DamagedWeights(
                f"{name}: expected pieces that make up shape {list(wanted.shape)}, got "
                f"{[(list(p.start), list(p.shape)) for p in found[name][:8]]}"
            )


def _covers(pieces: Sequence[PieceInfo], whole: tuple[int, ...]) -> bool:
    """Pieces are of one shape, on the grid of that shape, and as many as the grid has places."""
    if not pieces or len({p.start for p in pieces}) != len(pieces):
        return False
    shape = pieces[0].shape
    for piece in pieces:
        if piece.shape != shape:
            return False
        if any(s % n if n else s for s, n in zip(piece.start, shape, strict=True)):
            return False
    return len(pieces) * math.prod(shape) == math.prod(whole) and all(
        not w or (n and w % n == 0) for w, n in zip(whole, shape, strict=True)
    )


def _offer(value: Any, expected: Mapping[str, Expected]) -> Offer:
    names = tuple(field.name for field in dataclasses.fields(Offer))
    found = _fields(value, names, "an offer")
    to = VersionId.of_plain(found["to"], "the offer's version")
    base = found["base"]
    base = None if base is None else VersionId.of_plain(base, "the offer's base")
    pieces = tuple(_piece(p, expected) for p in _list(found["pieces"], "pieces"))
    if fingerprint(pieces) != to.fingerprint:
        raise DamagedWeights(
            f"expected the fingerprint {fingerprint(pieces)[:16]}… of these checksums, got "
            f"{to.fingerprint[:16]}…"
        )
    listed = _list(found["links"], "links")
    if len(listed) > MOST_LINKS or (base is None and not listed):
        raise DamagedWeights(
            f"expected at most {MOST_LINKS} payloads, at least that of a full copy where there is "
            f"no base, got {len(listed)}"
        )
    links = tuple(_link(p, pieces, base is None and n == 0) for n, p in enumerate(listed))
    return Offer(to, base, pieces, links)


def _piece(value: Any, expected: Mapping[str, Expected]) -> PieceInfo:
    found = _fields(value, ("name", "start", "shape", "dtype", "sha256"), "a piece")
    name = found["name"]
    if type(name) is not str or name not in expected:
        raise DamagedWeights(
            f"expected weights of this policy ({len(expected)} arrays), got one named "
            f"{str(name)[:200]!r}: trainer and worker have different policies"
        )
    wanted = expected[name]
    if found["dtype"] != wanted.dtype:
        raise DamagedWeights(
            f"{name}: expected dtype {wanted.dtype}, got {str(found['dtype'])[:40]!r}"
        )
    start, shape = (
        tuple(_count(x, f"{name}: {part}") for x in _list(found[part], f"{name}: {part}"))
        for part in ("start", "shape")
    )
    inside = len(start) == len(shape) == len(wanted.shape) and all(
        s + n <= w for s, n, w in zip(start, shape, wanted.shape, strict=True)
    )
    if not inside:
        raise DamagedWeights(
            f"{name}: expected a piece inside shape {list(wanted.shape)}, got shape "
            f"{list(shape)[:16]} at {list(start)[:16]}"
        )
    _checksum(found["sha256"], f"{name}: sha256")
    return PieceInfo(name, start, shape, wanted.dtype, found["sha256"])


def _link(value: Any, pieces: Sequence[PieceInfo], full: bool) -> Link:
    found = _fields(value, ("sizes", "where"), "a payload")
    sizes = tuple(_count(x, "sizes") for x in _list(found["sizes"], "sizes"))
    if len(sizes) != len(pieces):
        raise DamagedWeights(f"expected sizes of {len(pieces)} pieces, got {len(sizes)}")
    for size, piece in zip(sizes, pieces, strict=True):
        most = delta.most_bytes(piece.size, np.dtype(piece.dtype).itemsize)
        if (full and size != piece.num_bytes) or size > most:
            raise DamagedWeights(
                f"{piece.name}: expected {'' if full else 'at most '}"
                f"{piece.num_bytes if full else most} bytes, got {size}"
            )
    return Link(sizes, found["where"])


def _fields(value: Any, names: Sequence[str], what: str) -> dict[str, Any]:
    if type(value) is not dict or set(value) != set(names):
        got = sorted(value)[:16] if type(value) is dict else type(value).__name__
        raise DamagedWeights(f"{what}: expected the fields {sorted(names)}, got {got}")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if type(value) is not list:
        raise DamagedWeights(f"{what}: expected a list, got {type(value).__name__}")
    return value


def _count(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise DamagedWeights(f"{what}: expected a number from 0 to 2**63 - 1, got {value!r:.60}")
    return value


def _checksum(value: Any, what: str) -> str:
    if type(value) is not str or not _SHA256.fullmatch(value):
        raise DamagedWeights(f"{what}: expected 64 hexadecimal digits, got {value!r:.80}")
    return value
