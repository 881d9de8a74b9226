"""Which results are older than the code that they measure, by git: docs/older.json.

A result has the commit that it was measured at, and docs/results.toml the paths of the code that
each command measures. A path has changed if one of its files has, by whatever name it had; of
Python files, comments, docstrings, layout and the places of our modules do not count, of .gin
files comments. The file keeps what git has last said, for copies without git.
"""

from __future__ import annotations

import ast
import functools
import io
import json
import subprocess
import tokenize
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
OLDER = ROOT / "docs" / "older.json"


def measure_of(table: Mapping[str, Any], file: str) -> Mapping[str, Any]:
    """Return the measure of a result file: its command and the paths of the code."""
    found = [measure for measure in table["measure"] if file in measure["files"]]
    assert len(found) == 1, f"{file}: expected one [[measure]] with this file, got {len(found)}"
    return found[0]


def paths_of(
    table: Mapping[str, Any], file: str, row: Mapping[str, Any] | None = None
) -> list[str]:
    """Return the paths that a row measures, or its file: a name of `[rooms]` stands for several."""
    named = (row or {}).get("paths") or measure_of(table, file)["paths"]
    return [path for name in named for path in table["rooms"].get(name, [name])]


def no_git() -> str:
    """Return why git cannot compare this copy with earlier commits; "" if it can."""
    try:
        found = _git("rev-parse", "--show-toplevel", "--is-shallow-repository").splitlines()
    except FileNotFoundError:
        return "git is not installed"
    if not found or Path(found[0]) != ROOT:
        return "this copy is not a git repository"
    return "this copy has no earlier commits (a shallow clone)" if found[-1] == "true" else ""


def by_git(table: Mapping[str, Any], known: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return by result file a path of each row that has changed since the file's commit.

    It is a path that is `known` to have changed, as long as it has, so that reasons last.
    """
    found = dict[str, set[str]]()
    for section in table["section"]:
        for row in section["row"]:
            if "removed_after" in row:
                continue
            for file in [file for _, file in section.get("columns", ())] or [row["file"]]:
                commit = json.loads((RESULTS / file).read_text(encoding="utf-8"))["commit"]
                paths = paths_of(table, file, row)
                paths = [*(path for path in paths if path in known.get(file, ())), *paths]
                if changed := next((path for path in paths if has_changed(commit, path)), None):
                    found.setdefault(file, set()).add(changed)
    return {file: sorted(paths) for file, paths in sorted(found.items())}


@functools.cache
def has_changed(commit: str, path: str) -> bool:
    """Return whether a path's code differs from a commit's; True if the commit is unknown."""
    if not _git("rev-parse", "--quiet", "--verify", f"{commit}^{{commit}}"):
        return True
    files = _git("diff", "--name-only", commit, "--", path, must_work=True).splitlines()
    return any(file_has_changed(commit, file) for file in files)


@functools.cache
def file_has_changed(commit: str, file: str) -> bool:
    """Return whether a file that differs from a commit's differs in more than comments.

    A file that has moved is compared where it is now.
    """
    file = _names_now(commit).get(file, file)
    reads = READS.get(Path(file).suffix)
    if reads is None or not (ROOT / file).is_file():
        return True
    before = _git("show", f"{commit}:{_names_at(commit).get(file, file)}")
    now = (ROOT / file).read_text(encoding="utf-8")
    return reads(before) != reads(now)


@functools.cache
def _names_at(commit: str) -> dict[str, str]:
    """Return the names that files which have moved since had at a commit, by their names now."""
    lines = _git("diff", "-M", "--diff-filter=R", "--name-status", commit).splitlines()
    moves = [line.split("\t") for line in lines]
    return {now: before for _, before, now in moves}


@functools.cache
def _names_now(commit: str) -> dict[str, str]:
    """Return the names now of files which have moved since a commit, by their names then."""
    return {before: now for now, before in _names_at(commit).items()}


def code_of(text: str) -> str:
    """Return a Python file's names imported, and statements without comments and docstrings."""
    tree = ast.parse(text.replace("reprise.", ""))  # earlier commits imported `models`, `rl`, …
    imported = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [x for x in node.body if not _is_text(x)]
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported.update(ast.dump(alias) for alias in node.names)
        for name, statements in ast.iter_fields(node):
            if name in ("body", "orelse", "finalbody") and isinstance(statements, list):
                is_import = ast.Import | ast.ImportFrom
                setattr(node, name, [x for x in statements if not isinstance(x, is_import)])
    return "\n".join([*sorted(imported), ast.dump(tree)])


def _is_text(statement: ast.stmt) -> bool:
    """Return whether a statement is a docstring, of a definition or of a field."""
    is_value = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_value and isinstance(statement.value.value, str)


def settings_of(text: str) -> str:
    """Return a .gin file's tokens without comments and empty lines."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    skipped = tokenize.COMMENT, tokenize.NL
    return repr([token.string for token in tokens if token.type not in skipped])


READS = {".py": code_of, ".gin": settings_of}


def _git(*arguments: str, must_work: bool = False) -> str:
    """Return what git prints; nothing if it fails, or an error if it `must_work`."""
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=must_work)
    return done.stdout
