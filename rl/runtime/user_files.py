"""Python files of a user: a setting names an object in one as `PATH.py:name`.

    open_named(setting, name, table, protocol)  →  a row of the table, or the object in the file

A relative path starts in the current folder of the command. A file is imported once in each
process, for all its names, and like a script it can import its neighbours. Such a file is trusted
code of the user; nothing else that a configuration says is executed.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import inspect
import os
import sys
import traceback
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NewType, TypeVar

from reprise.rl.runtime.run_files import resolve_path

T = TypeVar("T")
FORM = "PATH.py:name"
UserName = NewType("UserName", str)  # the type of a setting that may have this form
_MODULE = "reprise_user_"  # prefix of user modules
_MAX_SHOWN = 30  # names in a message
_MAX_SENTENCE = 1000
_OUR_FOLDER = str(Path(__file__).parents[1]) + os.sep


# --- names ------------------------------------------------------------------------------


def is_user_name(name: str) -> bool:
    """Return whether a name has the form `PATH.py:name`; nothing is opened."""
    path, colon, attribute = name.rpartition(":")
    return bool(colon) and path.endswith(".py") and attribute.isidentifier()


def split_user_name(name: str) -> tuple[Path, str]:
    """Split `PATH.py:name` into the absolute path and the name. Raises ValueError."""
    path, _, attribute = name.rpartition(":")
    try:
        return resolve_path(path).absolute(), attribute
    except RuntimeError as error:  # no such user
        raise ValueError(f"{name}: {error}") from error


def check_name(field: str, name: str, known: Iterable[str]) -> None:
    """Raise ValueError unless a name is `known` or has the form `PATH.py:name`; open nothing."""
    names = tuple(known)
    if name not in names and not is_user_name(name):
        raise ValueError(
            f"expected {field} of {', '.join(names)} or {FORM}, got {name!r}"
            f"{did_you_mean(name, names)}"
        )


def check_file(setting: str, name: str) -> None:
    """Raise FileNotFoundError or ValueError unless the file of a name exists; do not run it."""
    try:
        path, attribute = split_user_name(name)
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from error
    if not path.is_file():
        raise FileNotFoundError(f"{setting}: there is no file {path} (for {attribute})")


def files_of(names: Iterable[str]) -> dict[str, str]:
    """Return the path of the file of each name, by a description; for comparing programs."""
    return {f"file of {name}": str(split_user_name(name)[0]) for name in names}


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return a hint for an error message, or an empty text."""
    close = difflib.get_close_matches(name, choices, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


# --- objects ----------------------------------------------------------------------------


def open_named(setting: str, name: str, table: Mapping[str, T], protocol: Any) -> T:
    """Return the row of `table` with this name, or the object that `PATH.py:name` names.

    An object of a user must take the parameters of `protocol.__call__`. Raises ValueError or
    FileNotFoundError with the setting, also for errors while the file is imported.
    """
    if name in table:
        return table[name]
    try:
        check_name("a name", name, table)
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from error
    check_file(setting, name)
    try:
        value = load_user_name(name)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{setting}: {describe(error)}") from error
    _check_parameters(f"{setting}: {name}", value, protocol.__call__)
    return value  # type: ignore[no-any-return]


def load_user_name(name: str) -> Any:
    """Import the file of `PATH.py:name`, and return its function or class.

    Raises ValueError, and the errors of the file.
    """
    path, attribute = split_user_name(name)
    module = _user_module(path)
    if callable(result := getattr(module, attribute, None)):
        return result
    if attribute in vars(module):
        kind = type(result).__name__
        raise ValueError(f"{path}: expected {attribute} as a function or class, got {kind}")
    functions = [one for one, value in vars(module).items() if callable(value) and one[0] != "_"]
    names = ", ".join(functions[:_MAX_SHOWN]) or "none"
    raise ValueError(
        f"{path} defines no function or class {attribute!r}{did_you_mean(attribute, functions)}; "
        f"it has {names}"
    )


def make_once(setting: str, name: str, make: Any, protocol: type, **example: Any) -> None:
    """Call what `open_named` returned, and check that the result has the methods of `protocol`.

    `example` holds the arguments. Raises ValueError.
    """
    where = f"{setting}: {name}"
    given = ", ".join(example)
    base = f"{protocol.__module__}.{protocol.__name__}"
    try:
        made = make(**example)
    except (Exception, SystemExit) as error:
        text = f"{where}({given}) raised {describe(error)}"
        raise ValueError(f"{text}; expected an object with the methods of {base}") from error
    for method, wanted in vars(protocol).items():
        if method.startswith("_"):
            continue
        if not hasattr(made, method):
            raise ValueError(
                f"{where}: expected {method} of {base}, got a {type(made).__name__} without it: "
                "define it, or derive the class from that one, which may have a default"
            )
        if isinstance(wanted, types.FunctionType):
            _check_parameters(f"{where}.{method}", getattr(made, method), wanted)


def _check_parameters(where: str, value: Any, wanted: Any) -> None:
    """Raise ValueError unless a callable takes the parameters of a method, without `self`."""
    parameters = list(inspect.signature(wanted).parameters.values())[1:]
    by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    by_place = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    if not callable(value):
        raise ValueError(f"{where}: expected a function or class, got {type(value).__name__}")
    taken = inspect.signature(value)
    try:
        taken.bind(*by_place, **dict.fromkeys(by_name))
    except TypeError as error:
        shown = ", ".join([*by_place, *["*"][: len(by_name)], *by_name])
        raise ValueError(
            f"{where}: expected the parameters ({shown}), got {taken}: {error}"
        ) from error


@functools.cache
def _user_module(path: Path) -> types.ModuleType:
    """Import a user file once for all its names; like a script, it can import neighbours."""
    others = [module for name, module in sys.modules.items() if name.startswith(_MODULE)]
    spec = importlib.util.spec_from_file_location(f"{_MODULE}{len(others)}_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} cannot be imported as Python; expected a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and the like look up their module there
    for folder in (Path.cwd(), path.parent):  # our packages, which the file may hide, come later
        sys.path[:] = [str(folder), *(place for place in sys.path if place != str(folder))]
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    for other in others:
        _refuse_same_names(path.parent, Path(str(other.__file__)).parent)
    return module


def _refuse_same_names(one: Path, other: Path) -> None:
    """Raise ValueError if two folders have modules of one name: a process imports only one."""
    for name, module in [*sys.modules.items()] if one != other else ():
        in_both = all((f / f"{name}.py").is_file() or (f / name).is_dir() for f in (one, other))
        if in_both and not {one, other}.isdisjoint(
            Path(getattr(module, "__file__", None) or "").parents
        ):
            raise ValueError(
                f"{one} and {other} both have a module {name}, and user files share one process: "
                "rename one of them"
            )


# --- errors of a file -------------------------------------------------------------------


def describe(error: BaseException) -> str:
    """Return the type, message and innermost user line of an error, as a single line."""
    frames = user_frames(error)
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} (at {error.filename}:{error.lineno})"[:500]
    if not frames and isinstance(error, ValueError):
        return str(error)[:_MAX_SENTENCE]  # one of our messages
    where = f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[:500] + where


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an error outside of our packages and of the import system of Python."""
    frames = traceback.extract_tb(error.__traceback__)
    return [
        frame
        for frame in frames
        if not frame.filename.startswith((_OUR_FOLDER, "<frozen importlib"))
    ]
