"""Reading of checkpoints, verified file by file, also while a run writes checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from reprise.rl.checkpoint import manifest
from reprise.rl.checkpoint.contents import read_arrays, read_host, read_plain_host
from reprise.rl.checkpoint.folders import list_steps, step_folder
from reprise.rl.checkpoint.manifest import Problem
from reprise.rl.cluster.processes import ALONE, Processes

ARRAYS = "arrays"
FILES_FOLDER = "files"  # folders of a step; files are linked, not copied
_SHOWN = 5  # paths or problems named in one message
PyTree = Any


class NoWholeCheckpointError(RuntimeError):
    """No checkpoint can be restored; `problems` are by step, empty without checkpoints."""

    def __init__(self, message: str, problems: dict[int, list[Problem]]) -> None:
        super().__init__(message)
        self.problems = problems


class StructureMismatchError(ValueError):
    """The arrays of a whole checkpoint do not match the arrays of the template."""


@dataclasses.dataclass(frozen=True, eq=False)
class Restored:
    """The contents of a checkpoint; `warnings` name the damaged checkpoints that were skipped.

    `files` is the folder of linked files; files in `damaged_files` have changed since they were
    linked. Parts in `lacking` were not saved, and come from the template.
    """

    step: int
    arrays: PyTree
    host: dict[str, Any]
    warnings: tuple[str, ...] = ()
    files: Path | None = None
    damaged_files: frozenset[str] = frozenset()
    lacking: tuple[str, ...] = ()


def restore(
    directory: Path | str,
    template: PyTree,
    step: int | None = None,
    *,
    subset: bool = False,
    optional: Sequence[str] = (),
    frees: Sequence[str] = (),
    processes: Processes = ALONE,
) -> Restored:
    """Restore the newest whole checkpoint (or exactly `step`), verified before use.

    Leaves of `template` are jax arrays or jax.ShapeDtypeStructs. Restored arrays have the
    structure, types (floats are rounded) and shardings of the template, by default on the first
    local device. `subset` allows fewer arrays than were saved. Parts with a path prefix in
    `optional` may be missing from either template or checkpoint. Arrays of the template with a
    prefix in `frees` are deleted before the saved arrays are read, so that devices hold one state.
    All `processes` of a mesh restore together. Raises NoWholeCheckpointError, or
    StructureMismatchError naming the first paths that differ.
    """
    directory = Path(directory).absolute()
    chosen, warnings, damaged = _choose(directory, step, processes, subset=subset)
    folder = step_folder(directory, chosen)
    wanted = flatten(template, concrete=False)
    saved = manifest.read_manifest(folder)["extra"]["arrays"]
    missing = _check_structure(folder, describe(wanted), saved, optional, subset=subset)
    own = {path: x for path, x in wanted.items() if path.startswith(missing)}
    rest = {path: x for path, x in wanted.items() if path not in own}
    try:
        host = read_host(folder / "host")
    except ValueError as error:
        raise StructureMismatchError(f"{folder} was not written by a run: {error}") from error
    for path, x in rest.items():
        if path.startswith(tuple(frees)) and isinstance(x, jax.Array):
            x.delete()
    flat = own | read_arrays(folder / ARRAYS, rest)
    tree = jax.tree.structure(template).unflatten([flat[path] for path in wanted])
    files = folder / FILES_FOLDER
    linked = files if files.is_dir() and not files.is_symlink() else None
    return Restored(chosen, tree, host, tuple(warnings), linked, frozenset(damaged), missing)


def newest_host(directory: Path) -> tuple[int, dict[str, Any]]:
    """Return the step and plain host state of the newest readable checkpoint; else (0, {})."""
    for step in list_steps(directory):
        with contextlib.suppress(OSError, ValueError, RecursionError):
            return step, read_plain_host(step_folder(directory, step) / "host")
    return 0, {}


def check_structure(directory: Path, template: PyTree, optional: Sequence[str] = ()) -> None:
    """Raise StructureMismatchError if the newest readable manifest does not match `template`."""
    for step in list_steps(directory):
        with contextlib.suppress(manifest.ManifestError):
            folder = step_folder(directory, step)
            extra = manifest.read_manifest(folder)["extra"]
            saved = extra.get("arrays")
            if isinstance(saved, dict) and manifest.DROPPED not in extra:
                wanted = describe(flatten(template, concrete=False))
                _check_structure(folder, wanted, saved, optional, subset=False)
                return


def problems_of(
    directory: Path | str, step: int, processes: Processes = ALONE, *, subset: bool = False
) -> tuple[list[Problem], list[Problem]]:
    """Return the problems of the checkpoint of `step` (empty if whole), and of its linked files.

    Each of `processes` reads a part of the files. A checkpoint that was reduced to the policy is
    whole only for a `subset`.
    """
    folder = step_folder(Path(directory), step)
    own = [
        (problem.file, problem.what)
        for problem in manifest.verify(folder, part=(processes.index, processes.count))
    ]
    answers = processes.gather_large(f"files of step {step}", json.dumps(own).encode())
    every = dict.fromkeys((file, what) for one in answers for file, what in json.loads(one))
    problems = list[Problem]()
    linked = list[Problem]()
    for file, what in sorted(every):
        problem = Problem(folder, file, what)
        is_linked = problem.file.startswith(f"{FILES_FOLDER}/")
        (linked if is_linked else problems).append(problem)
    if not problems:
        extra = manifest.read_manifest(folder)["extra"]
        arrays = extra.get("arrays")
        what = ""
        if extra.get("step") != step:
            what = f"expected a manifest of step {step}, found one of step {extra.get('step')}"
        elif manifest.DROPPED in extra and not subset:
            what = "holds the policy alone, kept as the best step by evaluation: expected a state"
        elif not isinstance(arrays, dict) or any(type(x) is not str for x in arrays.values()):
            what = "expected a manifest that describes arrays"
        if what:
            problems = [Problem(folder, manifest.MANIFEST_NAME, what)]
    return problems, linked


def _choose(
    directory: Path, step: int | None, processes: Processes, *, subset: bool
) -> tuple[int, list[str], list[str]]:
    """Choose a step; return the step, warnings and damaged linked files, on all processes."""

    def kept() -> bytes:
        return json.dumps(list_steps(directory) if step is None else [step]).encode()

    candidates = json.loads(processes.from_first("kept checkpoints", kept))
    problems: dict[int, list[Problem]] = {}
    for candidate in candidates:
        result, linked = problems_of(directory, candidate, processes, subset=subset)
        if not result:
            warnings = [f"skipped a damaged checkpoint: {_listed(p)}" for p in problems.values()]
            return candidate, warnings, sorted({Path(p.file).name for p in linked})
        problems[candidate] = result
    if not candidates:
        raise NoWholeCheckpointError(f"expected a checkpoint in {directory}, found none", {})
    listing = "\n".join(f"  step {s}: {_listed(result)}" for s, result in problems.items())
    fix = "start a new run, or bring back the files from a copy"
    if step is not None:
        others = [s for s in list_steps(directory) if s != step]
        fix = f"other steps that are there: {others or 'none'}"
    raise NoWholeCheckpointError(
        f"expected a whole checkpoint in {directory}, got:\n{listing}\n{fix}", problems
    )


def _listed(problems: list[Problem]) -> str:
    more = len(problems) - _SHOWN
    return "; ".join(map(str, problems[:_SHOWN])) + (f"; and {more} more" if more > 0 else "")


def flatten(tree: PyTree, *, concrete: bool) -> dict[str, Any]:
    """Return the leaves by path (`jax.tree_util.keystr`), as one flat dict for Orbax."""
    flat: dict[str, Any] = {}
    kinds = jax.Array if concrete else (jax.Array, jax.ShapeDtypeStruct)
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
        path = jax.tree_util.keystr(keys)
        if path in flat:
            raise ValueError(f"{path}: expected one array, got two with this path")
        if not isinstance(leaf, kinds):
            raise TypeError(
                f"{path}: expected a jax array, got {type(leaf).__name__}: "
                "numpy arrays and plain data belong in `host`"
            )
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise TypeError(f"{path}: expected plain numbers, got a key: use jax.random.key_data")
        if leaf.size == 0:
            raise ValueError(f"{path}: expected at least one element, got shape {leaf.shape}")
        flat[path] = leaf
    if not flat:
        raise ValueError("expected a pytree with at least one array, got none")
    return flat


def describe(flat: dict[str, Any]) -> dict[str, str]:
    """Return dtype and shape of each leaf as text, like `float32[4, 8]`."""
    return {path: f"{leaf.dtype.name}{list(leaf.shape)}" for path, leaf in flat.items()}


def _check_structure(
    folder: Path,
    wanted: dict[str, str],
    saved: dict[str, str],
    optional: Sequence[str],
    *,
    subset: bool,
) -> tuple[str, ...]:
    """Return the wanted optional parts that were not saved. Raises StructureMismatchError."""

    def lack(part: str, paths: Iterable[str]) -> bool:
        return not any(path.startswith(part) for path in paths)

    missing = tuple(p for p in optional if lack(p, saved) and not lack(p, wanted))
    unwanted = tuple(p for p in optional if lack(p, wanted))
    paths = [path for path in wanted if not path.startswith(missing)]
    if not subset:
        paths += [path for path in saved if path not in wanted and not path.startswith(unwanted)]
    wrong = [path for path in paths if not _fits(wanted.get(path), saved.get(path))]
    if not wrong:
        return missing
    lines = [
        f"  {path}: expected {wanted.get(path, 'no array')}, got {saved.get(path, 'no array')}"
        for path in wrong[:_SHOWN]
    ]
    raise StructureMismatchError(
        f"{folder} holds another model or optimizer: {len(wrong)} of {len(paths)} arrays differ, "
        "first\n" + "\n".join(lines) + "\nuse the configuration that wrote it, or another directory"
    )


def _fits(wanted: str | None, saved: str | None) -> bool:
    """Return whether a saved array has the wanted shape and type; all float types match."""
    if wanted is None or saved is None:
        return False
    one, shape = wanted.split("[")
    other, saved_shape = saved.split("[")
    return shape == saved_shape and (one == other or ("float" in one and "float" in other))
