"""Values of a configuration: the types that a field may have, and conversion to these types."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal

from reprise.models.hints import program
from reprise.rl.runtime.user_files import FORM, UserName, is_user_name

AUTO: Literal["auto"] = "auto"  # a size that `rl.preflight.sizes` finds


class ConfigError(ValueError):
    """A configuration that cannot be used; the message says where, why and how to fix it."""


class Mismatch(Exception):
    """A value that is not of the wanted type."""


def coerce(value: Any, hint: Any) -> Any:
    """Return `value` as type `hint`, with ints as floats and lists as tuples. Raises Mismatch."""
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if hint in (bool, int, str, types.NoneType):
        if type(value) is hint:
            return value
    elif hint is float:
        if type(value) in (int, float) and not (type(value) is int and abs(value) > 2**1023):
            return float(value)
    elif hint is UserName:
        if type(value) is str and is_user_name(value):
            return value
    elif origin is Literal:
        if any(type(value) is type(a) and value == a for a in args):
            return value
    elif origin in (typing.Union, types.UnionType):
        if type(value) in args:  # before any conversion, since 1 stays an int in `float | int`
            return value
        for member in args:
            try:
                return coerce(value, member)
            except Mismatch:
                continue
    elif origin is tuple:
        if isinstance(value, (list, tuple)):
            members = [args[0]] * len(value) if args[1:] == (...,) else args
            if len(members) == len(value):
                return tuple(coerce(v, m) for v, m in zip(value, members, strict=True))
    else:
        raise TypeError(
            f"a configuration field cannot be of type {hint}: use bool, int, float, str, "
            "Literal, UserName, `T | None` or `tuple[T, ...]`"
        )
    raise Mismatch


def found_size(name: str, size: int | Literal["auto"]) -> int:
    """Return a size. Raises ValueError if it is still "auto"."""
    if size == AUTO:
        raise ValueError(
            f"{name}: expected a number, got {AUTO!r}, for which {program('preflight')} and "
            f"{program('train')}, as one process, find one: write the number that preflight finds"
        )
    return size


def has_half_a_pair(text: str) -> bool:
    """Return whether text holds half of a surrogate pair, which no file or tokenizer accepts."""
    return any("\ud800" <= character <= "\udfff" for character in set(text))


def choices(hint: Any) -> tuple[Any, ...]:
    """Return the values of all Literals in a type."""
    args = typing.get_args(hint)
    return args if typing.get_origin(hint) is Literal else sum(map(choices, args), ())


def spell(hint: Any) -> str:
    """Return a type in words."""
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, args))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(spell, args))
    if origin is tuple:
        return f"tuple of {spell(args[0])}" if args[1:] == (...,) else str(hint)
    if hint is UserName:
        return FORM
    return "None" if hint is types.NoneType else hint.__name__


def example_of(hint: Any) -> Any:
    """Return an example value of a type."""
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if origin is Literal:
        return args[0]
    if origin in (typing.Union, types.UnionType):
        return next(example_of(a) for a in args if a is not types.NoneType)
    if origin is tuple:
        return tuple(example_of(a) for a in (args if args[1:] != (...,) else args[:1] * 2))
    return {bool: True, int: 1, float: 0.5, str: "text", UserName: FORM}[hint]


def literal(value: object) -> str:
    """Return `value` in the gin grammar, which has no word for infinity."""
    if isinstance(value, tuple):
        return "(" + ", ".join(map(literal, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, float):
        if value != value:
            raise ConfigError("expected a number, got nan: gin has no word for it")
        return repr(value).replace("inf", "1e999")
    return repr(value)


def nearest(name: str, names: Iterable[str], prefix: str = "", cutoff: float = 0.6) -> str:
    """Return a hint at the closest of `names`, with a leading space; '' if none is close.

    Initials count as close too, such as `lr` for `learning_rate`.
    """
    by_lower = {n.lower(): n for n in names}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    close += [n for n in by_lower if "".join(w[:1] for w in n.split("_")) == name.lower()]
    return f" Did you mean {prefix}{by_lower[close[0]]}?" if close else ""
