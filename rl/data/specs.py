"""Specs of tasks, `kind:target?key=value&…` or `NAME=kind:…`, parsed and bounded."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from urllib.parse import unquote

from reprise.rl.data import reasoning_gym_tasks

KINDS = ("reasoning_gym", "jsonl", "parquet", "json", "datasets", "gsm8k", "math")

MAX_SPEC_CHARACTERS = 10_000
MAX_PROMPT_CHARACTERS = 1_000_000

_NAMED = re.compile(r"([A-Za-z][A-Za-z0-9_-]*)=(.*)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Spec:
    """The parts of a spec, `kind:target?key=value&...` or `name=kind:...`."""

    text: str  # the whole spec
    name: str  # by default the text
    kind: str
    target: str
    query: Mapping[str, str]


def parse_spec(text: str) -> Spec:
    """Parse a spec. Raises ValueError for an unknown kind, a bad query or a bad task name."""
    check_text(text, "a task", MAX_SPEC_CHARACTERS)
    named = _NAMED.fullmatch(text)
    name, source = named.groups() if named else (text, text)
    head, _, tail = source.partition("?")
    kind, colon, target = head.partition(":")
    if not colon or kind not in KINDS or not target:
        close = difflib.get_close_matches(kind, KINDS, n=1)
        hint = f"did you mean {close[0]}:…?" if close else "for example reasoning_gym:gcd"
        raise ValueError(
            f"task {text!r}: expected one of {', '.join(KINDS)}, a colon and a name or path; {hint}"
        )
    query: dict[str, str] = {}
    for part in tail.split("&") if tail else ():
        key, equals, value = part.partition("=")
        if not key or not equals or key in query:
            raise ValueError(f"task {text!r}: expected key=value once for each key, got {part!r}")
        query[key] = unquote(value)  # not unquote_plus: `operators=+,-` means a plus
    if kind == "reasoning_gym":
        reasoning_gym_tasks.check_name(target)
    return Spec(text, name, kind, target, query)


def check_text(text: str, where: str, max_characters: int) -> None:
    """Raise ValueError for text that is too long, or is not valid Unicode."""
    if len(text) > max_characters:
        raise ValueError(
            f"{where}: expected at most {max_characters:,} characters, got {len(text):,}"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: half of a surrogate pair at character {error.start}") from error
