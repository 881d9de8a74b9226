"""Conversion of `.gin` text to bindings, with only the grammar of the gin-config parser.

Nothing is imported or called on behalf of a file: `%macro` and `@reference` become inert markers,
which `rl.gin.loader` expands or refuses. The amount of text is bounded.
"""

from __future__ import annotations

import dataclasses
import io
import re
import tokenize
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from reprise.rl.gin.values import ConfigError

MAX_FILES = 64  # read for one configuration, counting repeated includes
MAX_INCLUDE_DEPTH = 16
MAX_TEXT_BYTES = 2**18  # of these files together
MAX_JOINED_STRINGS = 100  # 'a' 'b' 'c', since gin rereads all strings for each new string


@dataclasses.dataclass(frozen=True)
class Binding:
    """A `name = value` of a file or an override; a name without a dot is a macro."""

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
    """A factory of inert markers for the gin parser."""

    macro = Macro

    def configurable_reference(self, name: str, evaluate: bool) -> Reference:
        return Reference(name)


def read_files(paths: Iterable[Path], resolve: Callable[[str], Path]) -> list[Binding]:
    """Return the bindings of files in order, with included files in place. Raises ConfigError.

    An included file is in the folder of the including file, or at the path that `resolve` returns.
    """
    sizes = list[int]()
    return [binding for path in paths for binding in _read_file(path, (), sizes, resolve)]


def _read_text(path: Path, sizes: list[int]) -> str:
    """Read a file within the bounds; append its size to the `sizes` of earlier files."""
    if len(sizes) == MAX_FILES:
        raise ConfigError(
            f"{path}: expected a configuration of at most {MAX_FILES} files, got more, "
            "counted as often as they are included: include fewer"
        )
    left = MAX_TEXT_BYTES - sum(sizes)
    with path.open("rb") as file:
        content = file.read(left + 1)
    if len(content) > left:
        raise ConfigError(
            f"{path}: expected a configuration of at most {MAX_TEXT_BYTES} bytes, included "
            "files among them, got more: leave something out"
        )
    sizes.append(len(content))
    try:
        return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8 text, got {error}") from error


def _read_file(
    path: Path, including: tuple[Path, ...], sizes: list[int], resolve: Callable[[str], Path]
) -> list[Binding]:
    including = (*including, path.resolve())
    if path.resolve() in including[:-1]:
        raise ConfigError(f"{path} includes itself: {' -> '.join(map(str, including))}")
    if len(including) > MAX_INCLUDE_DEPTH + 1:
        raise ConfigError(
            f"{path}: expected files included at most {MAX_INCLUDE_DEPTH} deep, got one more: "
            "include this one from the first file"
        )
    from gin import config_parser as grammar

    bindings: list[Binding] = []
    for statement in _statements(path, _read_text(path, sizes)):
        where = f"{path}:{statement.location.line_num}"
        if isinstance(statement, grammar.IncludeStatement):
            beside = path.parent / statement.filename
            included = beside if beside.is_file() else resolve(statement.filename)
            if not included.is_file():
                raise ConfigError(
                    f"{where}: included file {statement.filename} does not exist beside {path}, "
                    "in this folder, or in the checkout"
                )
            bindings += _read_file(included, including, sizes, resolve)
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


def _statements(path: Path, text: str) -> Iterable[Any]:
    """Return the gin statements of a file. Raises ConfigError for every failure."""
    from gin import config_parser as grammar

    try:
        _refuse_many_strings(text)
        parser = grammar.ConfigParser(text, _Delegate())
        statements = []
        while (statement := parser.parse_statement()) is not None:
            statements.append(statement)
        return statements
    except SyntaxError as error:
        message = (error.msg or "cannot be parsed").strip()
        if token := re.search(r"Failed to parse token '(\w+)'", message):
            message = f"{token[1]} is not a value; strings need quotes: '{token[1]}'"
        raise ConfigError(f"{path}:{error.lineno}: {message}") from error
    except tokenize.TokenError as error:
        raise ConfigError(f"{path}:{error.args[1][0]}: {error.args[0]}") from error
    except (StopIteration, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be parsed: an unfinished or too deep value") from error


def _refuse_many_strings(text: str) -> None:
    """Raise SyntaxError for very many adjacent strings, since gin takes quadratic time."""
    joined = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.STRING:
            joined += 1
        elif token.type not in (tokenize.NL, tokenize.COMMENT):
            joined = 0
        if joined > MAX_JOINED_STRINGS:
            message = f"expected at most {MAX_JOINED_STRINGS} strings side by side, got more"
            raise SyntaxError(message, ("", token.start[0], 0, ""))


def read_override(override: str) -> Binding:
    """Return the binding of `Section.field=value`; a value outside the gin grammar is text."""
    name, equals, text = override.partition("=")
    name = name.strip()
    text = text.strip()
    if not equals or not text or not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?", name):
        raise ConfigError(
            f"override {override!r}: expected Section.field=value, "
            "for example Sampling.temperature=0.7 (write '' for an empty text)"
        )
    return Binding(name, _parse_value(text), f"override {override!r}")


def _parse_value(text: str) -> object:
    from gin import config_parser as grammar

    try:
        _refuse_many_strings(text)
        parser = grammar.ConfigParser(text, _Delegate())
        value = parser.parse_value()
        while parser.current_token.type in (tokenize.NEWLINE, tokenize.NL):
            parser._advance_one_token()
    except (SyntaxError, tokenize.TokenError, StopIteration, RecursionError):
        return text
    return value if parser.current_token.type == tokenize.ENDMARKER else text
