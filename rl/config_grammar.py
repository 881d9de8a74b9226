"""`.gin` text to bindings: gin-config's parser, its grammar and nothing else.

Nothing is imported, called or looked up on behalf of a file: `%macro` and
`@reference` become inert markers, and it is for `rl.config` to judge them.
"""

from __future__ import annotations

import dataclasses
import re
import tokenize
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rl.config_types import ConfigError


@dataclasses.dataclass(frozen=True)
class Binding:
    """One `name = value` of a file or an override; a name without a dot is a macro."""

    name: str
    value: object
    where: str


@dataclasses.dataclass(frozen=True)
class Macro:
    name: str


@dataclasses.dataclass(frozen=True)
class Reference:
    name: str


class _Delegate:
    """What gin's parser builds for `%macro` and `@reference`: inert markers."""

    def macro(self, name: str) -> Macro:
        return Macro(name)

    def configurable_reference(self, name: str, evaluate: bool) -> Reference:
        return Reference(name)


def read_file(path: Path, including: tuple[Path, ...]) -> list[Binding]:
    """The bindings of a file, those of included files in their places."""
    if path.resolve() in including:
        chain = " -> ".join(str(p) for p in (*including, path.resolve()))
        raise ConfigError(f"{path} includes itself: {chain}")
    from gin import config_parser as grammar

    bindings: list[Binding] = []
    for statement in _statements(path):
        where = f"{path}:{statement.location.line_num}"
        if isinstance(statement, grammar.IncludeStatement):
            included = path.parent / statement.filename
            if not included.is_file():
                raise ConfigError(f"{where}: included file {included} does not exist")
            bindings += read_file(included, (*including, path.resolve()))
        elif isinstance(statement, grammar.ImportStatement):
            raise ConfigError(
                f"{where}: `{statement.format()}`: a configuration holds values and may not "
                "import code; delete this line"
            )
        elif isinstance(statement, grammar.BindingStatement):
            if statement.scope:
                raise ConfigError(f"{where}: scopes ({statement.scope}/...) are not supported")
            name = ".".join(part for part in (statement.selector, statement.arg_name) if part)
            bindings.append(Binding(name, statement.value, where))
    return bindings


def _statements(path: Path) -> Iterable[Any]:
    """gin's statements of a file; every way it can fail becomes a ConfigError."""
    from gin import config_parser as grammar

    try:
        parser = grammar.ConfigParser(path.read_text(encoding="utf-8"), _Delegate())
        statements = []
        while (statement := parser.parse_statement()) is not None:
            statements.append(statement)
        return statements
    except SyntaxError as error:
        message = (error.msg or "cannot be parsed").strip()
        if word := re.search(r"Failed to parse token '(\w+)'", message):
            message = f"{word[1]} is not a value; strings need quotes: '{word[1]}'"
        raise ConfigError(f"{path}:{error.lineno}: {message}") from error
    except tokenize.TokenError as error:
        raise ConfigError(f"{path}:{error.args[1][0]}: {error.args[0]}") from error
    except (StopIteration, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be parsed: an unfinished or too deep value") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8 text, got {error}") from error


def read_override(override: str) -> Binding:
    """`Section.field=value`; a value outside gin's grammar is its own text."""
    name, equals, text = override.partition("=")
    name, text = name.strip(), text.strip()
    if not equals or not text or not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?", name):
        raise ConfigError(
            f"override {override!r}: expected Section.field=value, "
            "for example Sampling.temperature=0.7 (write '' for an empty text)"
        )
    return Binding(name, _parse_value(text), f"override {override!r}")


def _parse_value(text: str) -> object:
    from gin import config_parser as grammar

    try:
        parser = grammar.ConfigParser(text, _Delegate())
        value = parser.parse_value()
        while parser.current_token.type in (tokenize.NEWLINE, tokenize.NL):
            parser._advance_one_token()
    except (SyntaxError, tokenize.TokenError, StopIteration, RecursionError):
        return text
    return value if parser.current_token.type == tokenize.ENDMARKER else text
