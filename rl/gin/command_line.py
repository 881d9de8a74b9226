"""Command lines of programs with `.gin` configuration files: flags, overrides, `--list`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

from reprise.models.hints import program
from reprise.rl.gin.loader import describe, fields_called
from reprise.rl.gin.values import ConfigError, nearest
from reprise.rl.runtime.progress import printable, say


def config_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Return a parser for `--gin_file`, `--gin.Section.field` and `--list`."""
    parser = argparse.ArgumentParser(
        prog=program(name),
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # `--gin` must not pass for `--gin_file`
    )
    parser.add_argument(
        "--gin_file",
        action="append",
        default=[],
        metavar="FILE",
        help="a configuration file; may be repeated, later ones win",
    )
    # Only for usage and help; `split_overrides` removes overrides before argparse runs.
    parser.add_argument(
        "--gin.Section.field",
        metavar="VALUE",
        help="set one field, wins over files; as --gin.Run.steps=50",
    )
    parser.add_argument(
        "--list",
        nargs="?",
        const="",
        metavar="SECTION[.FIELD]",
        help="show a setting, a section of settings, or all settings",
    )
    return parser


def parse_command_line(
    parser: argparse.ArgumentParser, argv: Sequence[str], schema: type
) -> tuple[argparse.Namespace, list[str]]:
    """Parse `argv` into arguments of the parser and overrides for `load`.

    Exits, as argparse does for `--help`, after `--list`, and for an unknown flag (with a hint at
    the nearest match).
    """
    try:
        overrides, rest = split_overrides(argv)
    except ConfigError as error:
        parser.error(str(error))
    arguments, unknown = parser.parse_known_args(rest)
    if unknown:
        hint = _meant(unknown[0], parser, schema)
        parser.error(printable(f"unknown argument {unknown[0]}.{hint}", sys.stderr))
    if getattr(arguments, "list", None) is not None:
        try:
            say(describe(schema, arguments.list).rstrip())
        except ConfigError as error:
            say(f"error: {error}", sys.stderr)
            parser.exit(2)
        parser.exit(0)
    return arguments, overrides


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split `argv` into overrides (`--gin.A.b=1`, `--gin.A.b 1` give `A.b=1`) and the rest."""
    overrides = []
    rest = []
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


def _meant(argument: str, parser: argparse.ArgumentParser, schema: type) -> str:
    """Return a hint at the flag or field closest to an unknown argument."""
    flag, equals, value = argument.partition("=")
    name = flag.removeprefix("--")
    if argument.endswith(".gin") and not argument.startswith("-"):
        return f" Did you mean --gin_file={argument}?"
    if flag == "--gin":
        return " Write --gin.Section.field=value, as --gin.Run.steps=3"
    if re.fullmatch(r"[A-Z]\w*\.\w+", name):
        return f" Did you mean --gin.{name}{equals}{value}?"
    if homes := fields_called(name, schema):
        return f" Did you mean {' or '.join(f'--gin.{base}{equals}{value}' for base in homes)}?"
    return nearest(flag, re.findall(r"--[\w-]+", parser.format_help()))
