"""The rewards of `benchmarks.end_to_end`: one function for all systems, with TRL's signature."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

PER_WORD = 0.01


def exact(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """Return 1 where the rest of the line after the last `####` is the answer, else 0."""
    return [float(after_mark(text) == a) for text, a in zip(completions, answer, strict=True)]


def brief(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """Return 1 where the last number is the answer, less 0.01 a word, so that siblings differ."""
    return [
        (re.findall(r"-?\d+", text)[-1:] == [a]) - PER_WORD * len(text.split())
        for text, a in zip(completions, answer, strict=True)
    ]


def after_mark(text: str) -> str | None:
    """Return the rest of the line after the last `####`, stripped; None without one."""
    start = text.rfind("####")
    return text[start + 4 :].split("\n", 1)[0].strip() if start >= 0 else None
