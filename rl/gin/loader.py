"""Configuration: frozen dataclasses are the schema, and `.gin` files bind their fields.

A configuration holds values, never code. A schema is a frozen dataclass with a field for each
section, and each section is a frozen dataclass too:

    class SamplingConfig: temperature: float = 1.0        Sampling.temperature = 0.7
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from reprise.models.formats.hf_files import shown
from reprise.rl.gin.grammar import Binding, Macro, Reference, read_files, read_override
from reprise.rl.gin.values import (
    ConfigError,
    Mismatch,
    choices,
    coerce,
    example_of,
    has_half_a_pair,
    literal,
    nearest,
    spell,
)
from reprise.rl.runtime.run_files import PROJECT_ROOT, resolve_path

MAX_VALUES = 10_000  # in a configuration, with macros expanded
MAX_DEPTH = 32  # of nested lists and macros

C = TypeVar("C")


def load(schema: type[C], files: Sequence[str | Path] = (), overrides: Sequence[str] = ()) -> C:
    """Return `schema` with its defaults, changed by `files` and then by `overrides`.

    Later files win over earlier files, and overrides (`"Sampling.temperature=0.7"`) win over files.
    A macro (`NAME = value`, used as `%NAME`) has its last value everywhere. Raises ConfigError.
    """
    bindings = read_files((_existing(file) for file in files), resolve_path)
    bindings += [read_override(override) for override in overrides]
    sections = _sections(schema)
    macros = _Macros({b.name: b for b in bindings if "." not in b.name})
    bound: dict[str, dict[str, Binding]] = {name: {} for name in sections}
    for binding in bindings:
        if "." in binding.name:
            section, field = _known_name(sections, binding)
            value = macros.expand(binding.value, binding.where, ())
            value = section.checked(value, field, binding.where)
            bound[section.name][field] = dataclasses.replace(binding, value=value)
    macros.refuse_unused(sections)
    built = {s.schema_field: s.build(bound[s.name]) for s in sections.values()}
    try:
        return schema(**built)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def dump(config: Any) -> str:
    """Return the whole configuration as `.gin` text; `load` reads back an equal configuration."""
    blocks = []
    for name, section in sorted(_sections(type(config)).items()):
        values = getattr(config, section.schema_field)
        lines = [f"# {doc}"] if (doc := _doc(section.cls).partition("\n")[0]) else []
        for field in section.fields:
            # A value that could not be read back must not be written.
            value = section.checked(getattr(values, field.name), field.name, "dump")
            lines.append(f"{name}.{field.name} = {literal(value)}")
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


@dataclasses.dataclass(frozen=True)
class FieldHelp:
    """A field as help shows it; `default` is "" if the field is required."""

    name: str
    type: str
    default: str
    doc: str


@dataclasses.dataclass(frozen=True)
class SectionHelp:
    """A section as help shows it: its docstring and its fields."""

    name: str
    doc: str
    fields: tuple[FieldHelp, ...]


def help_on(schema: type) -> list[SectionHelp]:
    """Return help on every section of a schema, sorted by name."""
    found = []
    for name, section in sorted(_sections(schema).items()):
        docs = _field_docs(section.cls)
        fields = []
        for field in section.fields:
            default = section.default(field)
            text = "" if default is dataclasses.MISSING else literal(default)
            kind = spell(section.hints[field.name])
            fields.append(FieldHelp(field.name, kind, text, docs.get(field.name, "")))
        found.append(SectionHelp(name, _doc(section.cls), tuple(fields)))
    return found


def describe(schema: type, only: str = "") -> str:
    """Return help on every field, on section `only`, or on field `only`, as `Section.field`.

    Raises ConfigError if it is unknown.
    """
    sections = {section.name: section for section in help_on(schema)}
    if not only:
        return "\n\n".join(map(_section_text, sections.values())) + "\n"
    name, dot, field = only.partition(".")
    if name not in sections:
        raise ConfigError(
            f"--list {only}: no such section.{nearest(name, sections)} "
            f"Sections: {', '.join(sorted(sections))}"
        )
    if not dot:
        return _section_text(sections[name]) + "\n"
    fields = {one.name: one for one in sections[name].fields}
    if field not in fields:
        raise ConfigError(
            f"--list {only}: no such field.{nearest(field, fields, f'{name}.')} "
            f"Fields of {name}: {', '.join(fields)}"
        )
    return _field_text(name, fields[field]) + "\n"


def _section_text(section: SectionHelp) -> str:
    doc = [f"    {line}".rstrip() for line in section.doc.splitlines()]
    fields = [_field_text(section.name, field) for field in section.fields]
    return "\n".join([section.name, *doc, *fields])


def _field_text(section: str, field: FieldHelp) -> str:
    value = f"= {field.default}" if field.default else "required"
    doc = textwrap.wrap(field.doc, 94, break_long_words=False, break_on_hyphens=False)
    lines = [f"  {section}.{field.name}: {field.type} {value}", *(f"      {line}" for line in doc)]
    return "\n".join(lines)


def fields_called(field: str, schema: type) -> list[str]:
    """Return the full names, `Section.field`, of all fields of `schema` with this name."""
    return [f"{name}.{field}" for name, s in _sections(schema).items() if field in s.hints]


def _existing(file: str | Path) -> Path:
    path = resolve_path(file)
    if not path.is_file():
        why = "is a directory" if path.is_dir() else "does not exist"
        folders = dict.fromkeys((Path.cwd(), PROJECT_ROOT))
        tried = "" if path.is_absolute() else f" (looked in {' and '.join(map(str, folders))})"
        beside = [p.name for f in folders for p in (f / path.parent).glob("*.gin")]
        prefix = "" if path.parent == Path() else f"{path.parent}/"
        hint = nearest(path.name, beside, prefix)
        raise ConfigError(f"configuration file {path} {why}{tried}.{hint}")
    return path


# --- sections -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Section:
    """A section of a schema, named after its class without `Config`."""

    name: str
    schema_field: str
    cls: type
    hints: Mapping[str, Any]
    instance: object | None  # the defaults, if the schema gives an instance

    @property
    def fields(self) -> list[dataclasses.Field[Any]]:
        return [field for field in dataclasses.fields(self.cls) if field.init]

    def default(self, field: dataclasses.Field[Any]) -> object:
        if self.instance is not None:
            return getattr(self.instance, field.name)
        return field.default

    def checked(self, value: object, field: str, where: str) -> object:
        """Return `value` as the type of the field. Raises ConfigError, with an example."""
        hint = self.hints[field]
        try:
            return coerce(value, hint)
        except Mismatch:
            example = next(self.default(f) for f in self.fields if f.name == field)
            if example is dataclasses.MISSING or example is None:
                example = self.example(field)
            known = [choice for choice in choices(hint) if isinstance(choice, str)]
            texts = value if isinstance(value, (list, tuple)) else (value,)
            unknown = [w for w in texts if isinstance(w, str) and w not in known]
            near = next(filter(None, (nearest(term, known) for term in unknown)), "")
            raise ConfigError(
                f"{where}: {self.name}.{field}: expected {spell(hint)}, got "
                f"{type(value).__name__} {shown(value, 200)}.{near} "
                f"For example {self.name}.{field} = {literal(example)}"
            ) from None

    def example(self, field: str) -> object:
        """Return a plausible value, from `EXAMPLES` of the section or else by the field type."""
        examples: Mapping[str, object] = getattr(self.cls, "EXAMPLES", {})
        return examples[field] if field in examples else example_of(self.hints[field])

    def build(self, bound: Mapping[str, Binding]) -> Any:
        """Make the section from its bindings. Raises ConfigError for unset or refused fields."""
        for field in self.fields:
            if field.name not in bound and self.default(field) is dataclasses.MISSING:
                name = f"{self.name}.{field.name}"
                raise ConfigError(
                    f"{name} is not set and has no default; "
                    f"add, for example, {name} = {literal(self.example(field.name))}"
                )
        values = {field: binding.value for field, binding in bound.items()}
        try:
            if self.instance is None:
                return self.cls(**values)
            return dataclasses.replace(self.instance, **values)  # type: ignore[type-var]
        except ValueError as error:
            named = [b for f, b in bound.items() if re.search(rf"\b{f}\b", str(error))]
            lines = [f"\n  {b.name} is set at {b.where}" for b in named or bound.values()]
            raise ConfigError(f"{self.name}: {error}{''.join(lines)}") from error


def _sections(schema: type) -> dict[str, _Section]:
    """Return the sections of a schema by name, in schema order."""
    hints = typing.get_type_hints(schema)
    sections: dict[str, _Section] = {}
    for field in dataclasses.fields(schema):
        cls = hints[field.name]
        name = cls.__name__.removesuffix("Config")
        assert name not in sections
        default: Any = None if field.default is dataclasses.MISSING else field.default
        if field.default_factory is not dataclasses.MISSING and field.default_factory is not cls:
            default = field.default_factory()
        sections[name] = _Section(name, field.name, cls, typing.get_type_hints(cls), default)
    return sections


def _known_name(sections: Mapping[str, _Section], binding: Binding) -> tuple[_Section, str]:
    name, _, field = binding.name.rpartition(".")
    if name not in sections:
        homes = [known for known, section in sections.items() if field in section.hints]
        hint = nearest(name, homes) or _home_of(field, sections) or nearest(name, sections)
        raise ConfigError(
            f"{binding.where}: no section {name}.{hint} Sections: {', '.join(sorted(sections))}"
        )
    names = [f.name for f in sections[name].fields]
    if field not in names:
        hint = nearest(field, names, f"{name}.", cutoff=0.85)  # a plural or a typo
        hint = hint or _home_of(field, sections) or nearest(field, names, f"{name}.")
        raise ConfigError(
            f"{binding.where}: no field {name}.{field}.{hint} Fields of {name}: {', '.join(names)}"
        )
    return sections[name], field


def _home_of(field: str, sections: Mapping[str, _Section]) -> str:
    homes = [f"{name}.{field}" for name, s in sections.items() if field in s.hints]
    return f" Did you mean {' or '.join(homes)}?" if homes else ""


class _Macros:
    """The macros of a configuration, with the used macros and the number of expanded values."""

    def __init__(self, macros: Mapping[str, Binding]) -> None:
        self._macros = macros
        self._used: set[str] = set()
        self._num_values = 0

    def expand(self, value: object, where: str, via: tuple[str, ...], depth: int = 0) -> object:
        """Expand every macro in `value`; `via` names the enclosing macros."""
        self._num_values += 1
        if self._num_values > MAX_VALUES or depth > MAX_DEPTH:
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
                f"{shown(value, 200)}"
            )
        if isinstance(value, (list, tuple)):
            return type(value)(self.expand(item, where, via, depth + 1) for item in value)
        return value

    def refuse_unused(self, sections: Mapping[str, _Section]) -> None:
        """Raise ConfigError for an unused macro, such as `steps = 3` with a forgotten section."""
        for name, macro in self._macros.items():
            if name not in self._used:
                raise ConfigError(
                    f"{macro.where}: {name} has no section, and no %{name} uses it as a macro."
                    f"{_home_of(name, sections)}"
                )


def _doc(cls: type) -> str:
    """Return the docstring of a class, unless dataclass generated it."""
    doc = inspect.getdoc(cls) or ""
    return "" if doc.startswith(f"{cls.__name__}(") else doc


def _field_docs(cls: type) -> dict[str, str]:
    """Return the string below each field in the source, if the source is available."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return {}
    docs = {}
    [tree] = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    for field, below in itertools.pairwise(tree.body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            docs[field.target.id] = " ".join(str(below.value.value).split())
    return docs
