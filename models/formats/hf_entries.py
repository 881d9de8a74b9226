"""Entries of the JSON files of policies and drafters, read and checked one by one."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeGuard

from reprise.models.formats.hf_files import escaped, shown

MAX_INT = 2**31 - 1  # sizes and token ids are int32 on devices
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {  # the check and description of kinds
    "size": (lambda x: type(x) is int and 1 <= x <= MAX_INT, f"a whole number from 1 to {MAX_INT}"),
    "number": (
        lambda x: type(x) in (int, float) and 1.2e-38 <= x <= 3.4e38,
        "a positive number that float32 holds",
    ),
    "flag": (lambda x: type(x) is bool, "true or false, without quotes"),
    "id": (  # old exports write −1 for no id
        lambda x: x is None or (type(x) is int and -1 <= x <= MAX_INT),
        "a token id or null",
    ),
    "ids": (
        lambda x: all(type(i) is int for i in (x if isinstance(x, list) else [x])),
        "a number or a list",
    ),
}
_MAX_COMPARED = 1000  # entries of a file that are compared with known names


def refuse_misspelt(content: Mapping[str, Any], where: str, names: Collection[str]) -> None:
    """Raise ValueError for an entry that looks like a misspelt absent name."""
    absent = [name for name in names if name not in content]
    for got in itertools.islice(content, _MAX_COMPARED):
        if got not in names and (near := difflib.get_close_matches(got[:64], absent, 1, 0.9)):
            raise ValueError(f"{where}: expected {near[0]}, got {escaped(got)}: correct its name")


def read_entry(
    content: Mapping[str, Any], name: str, kind: str, where: str, default: Any = None
) -> Any:
    """Return an entry, or `default` if null or absent; ValueError if it is not of the kind."""
    value = content.get(name)
    value = default if value is None else value
    is_valid, expected = _KINDS[kind]
    if not is_valid(value):
        raise ValueError(f"{where}: expected {name} as {expected}, got {shown(value)}")
    return value


def end_ids(content: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """Return `eos_token_id` as a tuple; the entry may be absent, an id or a list."""
    ids = read_entry(content, "eos_token_id", "ids", where, default=[])
    return tuple(ids) if isinstance(ids, list) else (ids,)


def is_one_name(names: Any) -> TypeGuard[list[str]]:
    """Return whether `architectures` has the usual form: a list of one string."""
    return isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)
