"""Configuration: frozen dataclasses are the schema, `.gin` files bind their fields.

gin-config lends its grammar and nothing else: a configuration holds values,
never code. Imports and `@references` are refused. A schema is a frozen
dataclass whose fields are sections, themselves frozen dataclasses:

    class SamplingConfig: temperature: float = 1.0        Sampling.temperature = 0.7

Names and types are checked before anything else happens, so that a slip costs
a second and not a queue slot.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rl.config.grammar import Binding, Macro, Reference, read_files, read_override
from rl.config.values import (
    ConfigError,
    Mismatch,
    choices,
    coerce,
    example_of,
    has_half_a_pair,
    literal,
    nearest,
    shown,
    spell,
)
from rl.runtime.progress import printable, say

PROJECT_ROOT = Path(__file__).resolve().parents[2]

MAX_VALUES = 10_000  # in a configuration, its macros in their places
MAX_DEPTH = 32  # of lists and macros in one another

C = TypeVar("C")


@dataclasses.dataclass(frozen=True)
class _Section:
    schema_field: str
    cls: type
    hints: Mapping[str, Any]
    default: object | None  # an instance, where the schema gives one


# --- public ---------------------------------------------------------------------------


def load(schema: type[C], files: Sequence[str | Path] = (), overrides: Sequence[str] = ()) -> C:
    """The configuration that `files`, then `overrides`, make of `schema`'s defaults.

    Later files win over earlier ones, overrides (`"Sampling.temperature=0.7"`)
    over files. A macro (`NAME = value`, used as `%NAME`) has its last value
    everywhere, so that an override of it reaches every use.

    Raises ConfigError for a missing file, a syntax error, an unknown or unset
    name, a wrong type, an unused macro, values that a section refuses, and beyond
    `MAX_DEPTH`, `MAX_VALUES` and the bounds of rl/config/grammar.py.
    """
    bindings = read_files(_existing(file) for file in files)
    bindings += [read_override(override) for override in overrides]
    sections = _sections(schema)
    macros = _Macros({b.name: b for b in bindings if "." not in b.name})
    bound: dict[str, dict[str, Binding]] = {name: {} for name in sections}
    for binding in bindings:
        if "." in binding.name:
            section, field = _known_name(sections, binding)
            value = macros.expand(binding.value, binding.where, ())
            value = _checked(value, sections[section], section, field, binding.where)
            bound[section][field] = dataclasses.replace(binding, value=value)
    macros.refuse_unused(sections)
    built = {s.schema_field: _build(name, s, bound[name]) for name, s in sections.items()}
    try:
        return schema(**built)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def dump(config: Any) -> str:
    """The whole configuration as `.gin` text: `load(type(config), [dumped], []) == config`."""
    blocks = []
    for name, section in sorted(_sections(type(config)).items()):
        values = getattr(config, section.schema_field)
        lines = [f"# {doc}"] if (doc := _doc(section.cls).partition("\n")[0]) else []
        for field in _fields(section.cls):
            value = getattr(values, field.name)
            # A value that could not be read back must not be written.
            value = _checked(value, section, name, field.name, "dump")
            lines.append(f"{name}.{field.name} = {literal(value)}")
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def describe(schema: type, only: str = "") -> str:
    """Help text: every section and field, or those of section `only`, with type and default.

    Raises ConfigError where there is no such section.
    """
    sections = _sections(schema)
    if only and only not in sections:
        raise ConfigError(
            f"--list {only}: no such section.{nearest(only, sections)} "
            f"Sections: {', '.join(sorted(sections))}"
        )
    blocks = []
    for name, section in sorted(sections.items()):
        if only not in ("", name):
            continue
        lines = [
            name,
            *(f"    {line}".rstrip() for line in _doc(section.cls).splitlines()),
        ]
        comments = _field_comments(section.cls)
        for field in _fields(section.cls):
            default = _default(section, field)
            value = "required" if default is dataclasses.MISSING else f"= {literal(default)}"
            lines.append(f"  {name}.{field.name}: {spell(section.hints[field.name])} {value}")
            if field.name in comments:
                lines.append(f"      {comments[field.name]}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def list_fields(schema: type, only: str) -> int:
    """Print what `describe` says, as `--list` asks; returns the exit code."""
    try:
        say(describe(schema, only).rstrip())
    except ConfigError as error:
        say(f"error: {error}", sys.stderr)
        return 2
    return 0


def resolve_path(path: str | Path) -> Path:
    """`path` as it stands if it exists, else under the project root if it exists there."""
    path = Path(path).expanduser()
    in_project = PROJECT_ROOT / path
    return in_project if not path.exists() and in_project.exists() else path


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--gin_file`, `--gin.Section.field` and `--list` to a command's parser."""
    parser.add_argument(
        "--gin_file",
        action="append",
        default=[],
        metavar="FILE",
        help="a configuration file; may be repeated, later ones win",
    )
    add_field_arguments(parser)


def add_field_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--gin.Section.field` and `--list` to a command's parser."""
    parser.allow_abbrev = False  # `--gin` must not pass for `--gin_file`
    # For usage and help: `split_overrides` takes the real ones before argparse sees them.
    parser.add_argument(
        "--gin.Section.field",
        metavar="VALUE",
        help="set one field, wins over files; as --gin.Run.steps=50",
    )
    parser.add_argument(
        "--list",
        nargs="?",
        const="",
        metavar="SECTION",
        help="show the fields of a section, or of all of them, with types and defaults",
    )


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """`argv` as (overrides for `load`, the other arguments).

    `--gin.A.b=1` and `--gin.A.b 1` both give `A.b=1`.
    """
    overrides, rest = [], []
    arguments = iter(argv)
    for argument in arguments:
        if argument == "--":
            rest += ["--", *arguments]
        elif not argument.startswith("--gin."):
            rest.append(argument)
        else:
            name, equals, value = argument.removeprefix("--gin.").partition("=")
            if not equals:
                value = next(arguments, "--")
                if value.startswith("--"):
                    raise ConfigError(f"{argument} has no value; write {argument}=value")
            overrides.append(f"{name}={value}")
    return overrides, rest


def parse_command_line(
    parser: argparse.ArgumentParser, argv: Sequence[str], schema: type | None = None
) -> tuple[argparse.Namespace, list[str]]:
    """Parses `argv` into (the parser's own arguments, overrides for `load`).

    Exits as argparse does, with the nearest match, on a flag nobody knows: one of the command's,
    or a field of `schema`.
    """
    try:
        overrides, rest = split_overrides(argv)
    except ConfigError as error:
        parser.error(str(error))
    arguments, unknown = parser.parse_known_args(rest)
    if unknown:
        hint = _meant(unknown[0], parser, schema)
        parser.error(printable(f"unknown argument {unknown[0]}.{hint}", sys.stderr))
    return arguments, overrides


def _meant(argument: str, parser: argparse.ArgumentParser, schema: type | None) -> str:
    """The hint at what an unknown argument may have been meant as."""
    flag, equals, value = argument.partition("=")
    name = flag.removeprefix("--")
    if re.fullmatch(r"[A-Z]\w*\.\w+", name):
        return f" Did you mean --gin.{name}{equals}{value}?"
    sections = _sections(schema) if schema else {}
    homes = [f"--gin.{n}.{name}" for n, s in sections.items() if name in s.hints]
    if homes:
        return f" Did you mean {' or '.join(home + equals + value for home in homes)}?"
    return nearest(flag, re.findall(r"--[\w-]+", parser.format_help()))


def _existing(file: str | Path) -> Path:
    path = resolve_path(file)
    if not path.is_file():
        why = "is a directory" if path.is_dir() else "does not exist"
        folders = dict.fromkeys((Path.cwd(), PROJECT_ROOT))
        tried = "" if path.is_absolute() else f" (looked in {' and '.join(map(str, folders))})"
        raise ConfigError(f"configuration file {path} {why}{tried}")
    return path


# --- names, macros and types ----------------------------------------------------------


def _sections(schema: type) -> dict[str, _Section]:
    """Section name (class name less `Config`) -> section, in the schema's order."""
    hints = typing.get_type_hints(schema)
    sections: dict[str, _Section] = {}
    for field in dataclasses.fields(schema):
        cls = hints[field.name]
        if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
            raise TypeError(f"{schema.__name__}.{field.name} must be a dataclass, is {cls}")
        name = cls.__name__.removesuffix("Config")
        if name in sections:
            raise TypeError(f"{schema.__name__} has two sections called {name}")
        default: Any = None if field.default is dataclasses.MISSING else field.default
        if field.default_factory is not dataclasses.MISSING and field.default_factory is not cls:
            default = field.default_factory()
        sections[name] = _Section(field.name, cls, typing.get_type_hints(cls), default)
    return sections


def _fields(cls: type) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(cls) if field.init]


def _default(section: _Section, field: dataclasses.Field[Any]) -> object:
    if section.default is not None:
        return getattr(section.default, field.name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _known_name(sections: Mapping[str, _Section], binding: Binding) -> tuple[str, str]:
    section, _, field = binding.name.rpartition(".")
    if section not in sections:
        hint = nearest(section, sections) or _home_of(field, sections)
        raise ConfigError(
            f"{binding.where}: no section {section}.{hint} Sections: {', '.join(sorted(sections))}"
        )
    names = [f.name for f in _fields(sections[section].cls)]
    if field not in names:
        hint = nearest(field, names, f"{section}.") or _home_of(field, sections)
        raise ConfigError(
            f"{binding.where}: no field {section}.{field}.{hint} "
            f"Fields of {section}: {', '.join(names)}"
        )
    return section, field


def _home_of(field: str, sections: Mapping[str, _Section]) -> str:
    homes = [f"{n}.{field}" for n, s in sections.items() if field in s.hints]
    return f" Did you mean {' or '.join(homes)}?" if homes else ""


class _Macros:
    """The macros of a configuration by name, which of them were used, and how much they made."""

    def __init__(self, macros: Mapping[str, Binding]) -> None:
        self._macros = macros
        self._used: set[str] = set()
        self._values = 0

    def expand(self, value: object, where: str, via: tuple[str, ...], depth: int = 0) -> object:
        """`value` with every macro replaced by its value; `via` names the macros it is part of."""
        self._values += 1
        if self._values > MAX_VALUES or depth > MAX_DEPTH:
            raise ConfigError(
                f"{where}: expected at most {MAX_VALUES} values in a configuration, macros in "
                f"their places, and lists and macros at most {MAX_DEPTH} deep, got more: "
                "leave something out"
            )
        if isinstance(value, Reference):
            raise ConfigError(
                f"{where}: @{value.name}: references to code are not allowed; "
                "write a value, or the name of a strategy as a string"
            )
        if isinstance(value, Macro):
            if value.name in via:
                raise ConfigError(f"{where}: macro %{value.name} is defined by itself")
            if value.name not in self._macros:
                hint = nearest(value.name, self._macros, "%")
                raise ConfigError(f"{where}: no macro %{value.name}.{hint}")
            self._used.add(value.name)
            macro = self._macros[value.name]
            return self.expand(macro.value, macro.where, (*via, value.name), depth + 1)
        if isinstance(value, str) and has_half_a_pair(value):
            raise ConfigError(
                f"{where}: expected text of whole characters, got half of a surrogate pair in "
                f"{shown(value)}"
            )
        if isinstance(value, (list, tuple)):
            return type(value)(self.expand(item, where, via, depth + 1) for item in value)
        return value

    def refuse_unused(self, sections: Mapping[str, _Section]) -> None:
        """`steps = 3` is a macro to gin: without this, a forgotten section would pass unseen."""
        for name, macro in self._macros.items():
            if name not in self._used:
                raise ConfigError(
                    f"{macro.where}: {name} has no section, and no %{name} uses it as a macro."
                    f"{_home_of(name, sections)}"
                )


def _checked(value: object, section: _Section, name: str, field: str, where: str) -> object:
    hint = section.hints[field]
    try:
        return coerce(value, hint)
    except Mismatch:
        example = next(_default(section, f) for f in _fields(section.cls) if f.name == field)
        if example is dataclasses.MISSING or example is None:
            example = _example(section, field)
        near = ""
        known = [choice for choice in choices(hint) if isinstance(choice, str)]
        for word in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(word, str) and word not in known:
                near = near or nearest(word, known)
        raise ConfigError(
            f"{where}: {name}.{field}: expected {spell(hint)}, got {type(value).__name__} "
            f"{shown(value)}.{near} For example {name}.{field} = {literal(example)}"
        ) from None


def _example(section: _Section, field: str) -> object:
    """A value that could be meant: of the section's `EXAMPLES`, else any of the field's type."""
    examples: Mapping[str, object] = getattr(section.cls, "EXAMPLES", {})
    return examples[field] if field in examples else example_of(section.hints[field])


# --- building and describing ----------------------------------------------------------


def _build(name: str, section: _Section, bound: Mapping[str, Binding]) -> Any:
    for field in _fields(section.cls):
        if field.name not in bound and _default(section, field) is dataclasses.MISSING:
            example = literal(_example(section, field.name))
            raise ConfigError(
                f"{name}.{field.name} is not set and has no default; "
                f"add, for example, {name}.{field.name} = {example}"
            )
    values = {field: binding.value for field, binding in bound.items()}
    try:
        if section.default is None:
            return section.cls(**values)
        return dataclasses.replace(section.default, **values)  # type: ignore[type-var]
    except ValueError as error:
        named = [b for f, b in bound.items() if re.search(rf"\b{f}\b", str(error))]
        places = [f"\n  {b.name} is set at {b.where}" for b in named or bound.values()]
        raise ConfigError(f"{name}: {error}{''.join(places)}") from error


def _doc(cls: type) -> str:
    """The docstring, unless dataclass made it up."""
    doc = inspect.getdoc(cls) or ""
    return "" if doc.startswith(f"{cls.__name__}(") else doc


def _field_comments(cls: type) -> dict[str, str]:
    """The comment behind each field in the source, where the source can be had."""
    try:
        source = inspect.getsource(cls)
    except (OSError, TypeError):
        return {}
    return dict(re.findall(r"^ +(\w+):[^#\n]*?  # (.+)$", source, re.MULTILINE))
