"""Reading checkpoints: the newest whole one, verified file by file before use.

Reading changes nothing, so that it may happen beside a run that is writing.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rl.checkpoint import host_state, manifest
from rl.checkpoint.folders import list_steps, step_folder
from rl.checkpoint.manifest import Problem

FILES_FOLDER = "files"  # of a step: linked, not copied
_SHOWN = 5  # paths or problems named in one message
_log = logging.getLogger(__name__)
PyTree = Any


class NoWholeCheckpointError(RuntimeError):
    """Nothing to restore; `problems` lists what is wrong, by step (empty: none there)."""

    def __init__(self, message: str, problems: dict[int, list[Problem]]) -> None:
        super().__init__(message)
        self.problems = problems


class StructureMismatchError(ValueError):
    """The checkpoint is whole, but holds other arrays than the template asks for."""


@dataclasses.dataclass(frozen=True, eq=False)
class Restored:
    """The contents of a checkpoint; `warnings` name the damaged ones that were skipped.

    `files` is the folder of linked files; those in `damaged_files` differ from what was linked.
    """

    step: int
    arrays: PyTree
    host: dict[str, Any]
    warnings: tuple[str, ...] = ()
    files: Path | None = None
    damaged_files: frozenset[str] = frozenset()


def restore(
    directory: Path | str,
    template: PyTree,
    step: int | None = None,
    *,
    subset: bool = False,
) -> Restored:
    """Restore the newest whole checkpoint (or exactly `step`), verified before use.

    `template` leaves are jax arrays or jax.ShapeDtypeStructs; arrays come back in its structure
    and on its shardings (the first local device where it has none), committed to their devices
    where the template's are. `subset` allows it to ask for fewer arrays than were saved (a
    policy alone). Raises NoWholeCheckpointError, or StructureMismatchError naming the first paths
    that differ.
    """
    directory = Path(directory).absolute()
    chosen, warnings, damaged = _choose(directory, step)
    folder = step_folder(directory, chosen)
    wanted = flatten(template, concrete=False)
    saved = manifest.read_manifest(folder)["extra"]["arrays"]
    _check_structure(folder, describe(wanted), saved, subset=subset)
    flat = _read_arrays(folder / "arrays", wanted)
    host = host_state.read(folder / "host", jax.process_index())
    treedef = jax.tree.structure(template)
    tree = treedef.unflatten([flat[path] for path in wanted])
    files = folder / FILES_FOLDER
    has_files = files.is_dir() and not files.is_symlink()
    return Restored(chosen, tree, host, warnings, files if has_files else None, damaged)


def problems_of(directory: Path | str, step: int) -> tuple[list[Problem], list[Problem]]:
    """Return what is wrong with the checkpoint of `step`, and with its linked files.

    The checkpoint is whole where the first list is empty: linked files can be done without.
    """
    folder = step_folder(Path(directory), step)
    found = manifest.verify(folder)
    linked = [p for p in found if p.file.startswith(f"{FILES_FOLDER}/")]
    problems = [p for p in found if p not in linked]
    if not problems:
        extra = manifest.read_manifest(folder)["extra"]
        arrays = extra.get("arrays")
        what = ""
        if extra.get("step") != step:
            what = f"expected a manifest of step {step}, found one of step {extra.get('step')}"
        elif not isinstance(arrays, dict) or any(type(x) is not str for x in arrays.values()):
            what = "expected a manifest that describes arrays"
        if what:
            problems = [Problem(folder, manifest.MANIFEST_NAME, what)]
    return problems, linked


def _choose(directory: Path, step: int | None) -> tuple[int, tuple[str, ...], frozenset[str]]:
    """Choose a step, the same on all hosts; return it, warnings and its damaged linked files."""
    if jax.process_count() == 1:
        return _choose_here(directory, step)
    from jax.experimental import multihost_utils

    chosen = -1
    warnings: tuple[str, ...] = ()
    damaged: frozenset[str] = frozenset()
    failure: NoWholeCheckpointError | None = None
    if jax.process_index() == 0:
        try:
            chosen, warnings, damaged = _choose_here(directory, step)
        except NoWholeCheckpointError as error:
            failure = error
    chosen = int(multihost_utils.broadcast_one_to_all(np.int32(chosen)))
    if failure is None and chosen < 0:
        failure = NoWholeCheckpointError(f"{directory}: process 0 found no whole checkpoint", {})
    if failure is not None:
        raise failure
    return chosen, warnings, damaged


def _choose_here(directory: Path, step: int | None) -> tuple[int, tuple[str, ...], frozenset[str]]:
    candidates = list_steps(directory) if step is None else [step]
    problems: dict[int, list[Problem]] = {}
    for candidate in candidates:
        problems[candidate], linked = problems_of(directory, candidate)
        if not problems[candidate]:
            skipped = [step for step in problems if step != candidate]
            warnings = tuple(f"skipped a damaged checkpoint: {_tell(problems[s])}" for s in skipped)
            for warning in warnings:
                _log.warning("%s", warning)
            return candidate, warnings, frozenset(Path(p.file).name for p in linked)
    if not candidates:
        raise NoWholeCheckpointError(f"expected a checkpoint in {directory}, found none", {})
    listing = "\n".join(f"  step {s}: {_tell(found)}" for s, found in problems.items())
    mend = "start a new run, or bring back the files from a copy"
    if step is not None:
        others = [s for s in list_steps(directory) if s != step]
        mend = f"other steps that are there: {others or 'none'}"
    raise NoWholeCheckpointError(
        f"expected a whole checkpoint in {directory}, got:\n{listing}\n{mend}", problems
    )


def _tell(problems: list[Problem]) -> str:
    more = len(problems) - _SHOWN
    return "; ".join(map(str, problems[:_SHOWN])) + (f"; and {more} more" if more > 0 else "")


def flatten(tree: PyTree, *, concrete: bool) -> dict[str, Any]:
    """Return the leaves by path (`jax.tree_util.keystr`): Orbax is given one flat dict."""
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
    folder: Path, wanted: dict[str, str], saved: dict[str, str], *, subset: bool
) -> None:
    paths = list(wanted) + ([] if subset else [path for path in saved if path not in wanted])
    wrong = [path for path in paths if wanted.get(path) != saved.get(path)]
    if not wrong:
        return
    lines = [
        f"  {path}: expected {wanted.get(path, 'no array')}, got {saved.get(path, 'no array')}"
        for path in wrong[:_SHOWN]
    ]
    raise StructureMismatchError(
        f"{folder} holds another model or optimizer: {len(wrong)} of {len(paths)} arrays differ, "
        "first\n" + "\n".join(lines) + "\nuse the configuration that wrote it, or another directory"
    )


def _read_arrays(folder: Path, wanted: dict[str, Any]) -> dict[str, jax.Array]:
    import orbax.checkpoint as ocp

    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    structs = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or here)
        for path, leaf in wanted.items()
    }
    arguments = ocp.args.PyTreeRestore(
        item=structs,
        restore_args=ocp.checkpoint_utils.construct_restore_args(structs),
        partial_restore=True,
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        restored = reader.restore(folder, args=arguments)
    return {path: _free_as(leaf, restored[path]) for path, leaf in wanted.items()}


def _free_as(template: Any, restored: jax.Array) -> jax.Array:
    """Return `restored`, committed to a device only where the template is: jit tells them apart."""
    if getattr(template, "committed", True):
        return restored
    return jnp.array(np.asarray(restored))
