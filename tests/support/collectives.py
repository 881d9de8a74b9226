"""The collectives of a compiled program, and what each gives a device."""

from __future__ import annotations

import dataclasses
import math
import re

_CALL = re.compile(
    r" = (?P<results>\(.*?\)|\S+) "
    r"(?P<kind>all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(-start)?\("
)
_ARRAY = re.compile(r"[a-z]+\d*\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True, order=True)
class Collective:
    """A collective by its largest result on one device: so many elements."""

    elements: int
    kind: str
    text: str


def collectives(text: str) -> list[Collective]:
    """Return the collectives of a program, the largest first; `text` is its compiled text."""
    found = []
    for line in text.splitlines():
        if (call := _CALL.search(line)) is not None:
            shapes = _ARRAY.findall(call["results"])
            sizes = [math.prod(int(n) for n in shape.split(",") if n) for shape in shapes]
            found.append(Collective(max(sizes), call["kind"], line.strip()))
    return sorted(found, reverse=True)
