"""Folders of config.json and safetensors: headers, tensors in and out, replacing a folder.

Callers know what the tensors mean (models/hf.py: policies; spec/eagle/files.py: drafters).
Weights are streamed tensor by tensor. No pickle, no hub.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from models.folder import Folder
from models.hf_config import escaped, shown
from models.params import leaves

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

CONFIG = "config.json"
GENERATION = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = ("F32", "BF16", "F16")  # by safetensors' names
MAX_JSON_BYTES = 64 * 2**20  # of a JSON file; an index of 100,000 tensors has ten
MAX_HEADER_BYTES = 100_000_000  # safetensors' own bound


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor: its name in the file, its shape, and its layout on a mesh."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtypes: tuple[str, ...] = FLOATS


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor's entry in a safetensors header."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    def opened(self) -> contextlib.AbstractContextManager[Any]:
        """Open its file, from which tensors of the same path can be read."""
        return _opened(self.path)

    def read(self, file: Any) -> np.ndarray:
        """Read its values in the layout of its file."""
        return np.asarray(file.get_tensor(self.name))

    def reader(self, file: Any) -> Callable[[tuple[slice, ...]], np.ndarray]:
        """Return a function that reads a part of it; each part is read from the file but once."""
        view = file.get_slice(self.name)
        parts: dict[str, np.ndarray] = {}

        def read(index: tuple[slice, ...]) -> np.ndarray:
            if (key := repr(index)) not in parts:
                is_whole = all(part == slice(None) for part in index)
                parts[key] = self.read(file) if is_whole else np.asarray(view[index])
            return parts[key]

        return read


def entries_of(names: Any, specs: Any) -> list[Entry]:
    """Return entries, in the order of the leaves, for a tree of names and one of `ParamSpec`."""
    pairs = zip(leaves(names), leaves(specs), strict=True)
    return [Entry(name, spec.shape, spec.axes) for name, spec in pairs]


def read_config(folder: Path) -> dict[str, Any]:
    """Read the folder's config.json; FileNotFoundError where one of the two is missing."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"expected a local Hugging Face folder, got {str(folder)!r}, which is not a directory: "
            "models are not downloaded here; fetch it first, for example: "
            "hf download Qwen/Qwen3-0.6B --local-dir downloads/Qwen3-0.6B"
        )
    if not (folder / CONFIG).is_file():
        files = sorted(folder.glob("*.gguf"))
        other = f", or the GGUF file itself, {files[0].name}" if files else ""
        raise FileNotFoundError(f"no {CONFIG} in {folder}: give the folder that holds it{other}")
    return read_json(folder / CONFIG)


def headers(folder: Path) -> dict[str, Stored]:
    """Return every tensor of a folder's safetensors files by name; no weights are read.

    Raises FileNotFoundError for missing files, ValueError for damaged ones.
    """
    stored: dict[str, Stored] = {}
    for path in _weight_files(folder):
        with _opened(path) as file:
            _refuse_repeated_names(path)
            for name in file.keys():
                if name in stored:
                    raise ValueError(
                        f"{folder}: {escaped(name)} is in {stored[name].path.name} and {path.name}"
                    )
                view = file.get_slice(name)
                stored[name] = Stored(path, name, tuple(view.get_shape()), view.get_dtype())
    return stored


def refuse_mismatch(
    folder: Path, entries: Sequence[Entry], stored: Mapping[str, Stored], hint: str
) -> None:
    """Raise one ValueError for all tensors that are missing, surplus, or wrong in shape or type."""
    expected = {entry.name: entry for entry in entries}
    missing = [name for name in expected if name not in stored]
    # Some old exports carry the rotary frequencies, which follow from the config.
    surplus = [
        escaped(name)
        for name in stored
        if name not in expected and not name.endswith("rotary_emb.inv_freq")
    ]
    there = [entry for name, entry in expected.items() if name in stored]
    wrong = [
        f"{entry.name} has shape {list(stored[entry.name].shape)}, expected {list(entry.shape)}"
        for entry in there
        if stored[entry.name].shape != entry.shape
    ]
    wrong += [
        f"{entry.name} is of type {stored[entry.name].dtype}, expected one of "
        f"{', '.join(entry.dtypes)}"
        for entry in there
        if stored[entry.name].dtype not in entry.dtypes
    ]
    tensors = "missing tensor" if len(missing) == 1 else "missing tensors"
    titled = ((tensors, missing), ("surplus", surplus), ("wrong", wrong))
    if problems := [_some(title, names) for title, names in titled if names]:
        raise ValueError(
            f"{folder}: the weights do not fit the config: {'; '.join(problems)}; {hint}"
        )


def read_tensor(stored: Stored) -> np.ndarray:
    """Read one tensor in the layout of its file."""
    with stored.opened() as file:
        return stored.read(file)


def read_tensors(
    entries: Sequence[Entry],
    stored: Mapping[str, Stored],
    mesh: Mesh | None = None,
    dtype: Any = None,
) -> list[jax.Array]:
    """Read the entries' tensors in our layout; with a mesh each goes straight onto its shards.

    `dtype` None keeps each tensor's own. Host memory holds one tensor at a time, and of that what
    this process's devices hold.
    """
    from models import transformer  # noqa: F401, registers the trees of weights with jax

    arrays: dict[str, jax.Array] = {}
    first = {stored[entry.name].path: stored[entry.name] for entry in entries}
    for path in sorted(first):
        with first[path].opened() as file:
            for entry in entries:
                at = stored[entry.name]
                if at.path == path:
                    arrays[entry.name] = _place(at, file, entry, mesh, dtype)
    return [arrays[entry.name] for entry in entries]


def fitting_leaves(params: Any, entries: Sequence[Entry], tree: Any) -> list[jax.Array]:
    """Return the leaves of `params`; ValueError where they do not fit the entries."""
    import jax

    weights, got = jax.tree.flatten(params)
    if got != tree:
        raise ValueError(
            f"the parameters are not those of the config: expected {len(entries)} tensors, got a "
            f"tree of another form, of {len(weights)}: save them with the config they were made "
            "with"
        )
    for entry, leaf in zip(entries, weights, strict=True):
        if tuple(leaf.shape) != entry.shape:
            raise ValueError(
                f"{entry.name} has shape {list(leaf.shape)}, expected {list(entry.shape)}: save "
                "the parameters with the config they were made with"
            )
    return weights


@contextlib.contextmanager
def replacing(directory: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a new folder that replaces `directory` if the block ends without error.

    It is made beside `directory` and renamed, so that a killed process never leaves half a folder
    there. Files of an existing folder other than config and weights (its tokenizer) are kept.
    Raises NotADirectoryError for a file, and for a link, which itself would be replaced.
    """
    target = Path(directory).absolute()
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        kind = "link" if target.is_symlink() else "file"
        raise NotADirectoryError(f"expected a folder to write to, got the {kind} {target}")
    parent = Folder(target.parent, create=True)
    partial = f".{target.name}.partial-{os.getpid()}"
    try:
        if parent.exists(partial):  # of a killed process, or a link that somebody has left
            parent.remove(partial)
        if target.exists():
            # links stay behind: what is written to later would go through them
            shutil.copytree(target, parent.path / partial, ignore=_left_out, copy_function=_link)
        yield parent.folder(partial).path
        _swap(parent, partial, target.name)
    finally:
        if parent.exists(partial):
            parent.remove(partial)
        parent.close()


def write_tensors(
    folder: Path,
    entries: Sequence[Entry],
    leaves: Sequence[Any],
    max_shard_bytes: int,
    dtype: Any = None,
) -> None:
    """Write one file, or an index and several, of at most `max_shard_bytes` or of one tensor.

    Tensors are rounded to `dtype`, to the nearest and ties to even; None keeps each one's own. Host
    memory holds one file at a time, beside the leaves.
    """
    import jax
    import jax.numpy as jnp
    from safetensors.numpy import save_file

    dtypes = [jnp.dtype(leaf.dtype if dtype is None else dtype) for leaf in leaves]
    shards: list[list[int]] = [[]]
    filled_bytes, total_bytes = 0, 0
    for i, leaf in enumerate(leaves):
        size_bytes = math.prod(leaf.shape) * dtypes[i].itemsize
        if shards[-1] and filled_bytes + size_bytes > max_shard_bytes:
            shards.append([])
            filled_bytes = 0
        shards[-1].append(i)
        filled_bytes += size_bytes
        total_bytes += size_bytes
    weight_map = {}
    for n, shard in enumerate(shards, start=1):
        file = WEIGHTS if len(shards) == 1 else f"model-{n:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for i in shard:
            host = np.asarray(jax.device_get(leaves[i]))
            # safetensors writes the memory of any view as it lies, hence the copy
            tensors[entries[i].name] = np.ascontiguousarray(host, dtypes[i])
            weight_map[entries[i].name] = file
        save_file(tensors, folder / file, metadata={"format": "pt"})
        # safetensors makes files that only their owner reads; follow the folder instead.
        (folder / file).chmod(folder.stat().st_mode & 0o666)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        write_json(folder / INDEX, index)


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; ValueError for other content, and over `MAX_JSON_BYTES`."""
    if (size := path.stat().st_size) > MAX_JSON_BYTES:
        raise ValueError(
            f"{path}: expected at most {MAX_JSON_BYTES} bytes of JSON, got {size}: copy it again"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; copy it again") from error
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply to be read: copy it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        found = sorted(p.name for p in folder.iterdir())
        pickled = [name for name in found if name.endswith((".bin", ".pt", ".pth"))]
        why = (
            f"only torch files ({pickled[0]}), which are pickles and not read"
            if pickled
            else found[:12]
        )
        raise FileNotFoundError(
            f"no weights in {folder}: expected {WEIGHTS} or {INDEX}, got {why}; "
            "save the model with safetensors"
        )
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{folder / INDEX} has no weight_map: copy the index again")
    wrong = [name for name in weight_map.values() if not isinstance(name, str)]
    if wrong:
        raise ValueError(
            f"{folder / INDEX}: expected the names of files in weight_map, got {shown(wrong[0])}: "
            "copy the index again"
        )
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or "\0" in name:
            raise ValueError(
                f"{folder / INDEX} names {shown(name)}: expected a file of the same folder"
            )
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder / INDEX} names {escaped(name)}, which is not there: expected "
                f"{len(names)} weight files; copy the missing one"
            )
    return [folder / name for name in names]


def _refuse_repeated_names(path: Path) -> None:
    """Raise ValueError for a tensor named twice: readers differ in which one they take."""
    with path.open("rb") as file:
        size = min(int.from_bytes(file.read(8), "little"), MAX_HEADER_BYTES)
        text = file.read(size)

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise ValueError(
                    f"{path}: expected every name once in its header, got {shown(name)} twice: "
                    "export again"
                )
            found[name] = value
        return found

    json.loads(text, object_pairs_hook=once)


def _some(title: str, items: list[str], most: int = 6) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return f"{title}: {', '.join(items[:most])}{more}"


def _place(at: Stored, file: Any, entry: Entry, mesh: Mesh | None, dtype: Any) -> jax.Array:
    """Put a stored tensor, as `dtype`, on its shards."""
    import jax
    import jax.numpy as jnp

    from models.sharding import fitting_sharding

    def cast(host: np.ndarray) -> np.ndarray:
        return host if dtype is None else host.astype(jnp.dtype(dtype), copy=False)

    if mesh is None:
        return jnp.asarray(cast(at.read(file)))
    sharding, read = fitting_sharding(mesh, at.shape, entry.axes), at.reader(file)
    return jax.make_array_from_callback(at.shape, sharding, lambda index: cast(read(index)))


def _left_out(folder: str, names: list[str]) -> list[str]:
    """Name the files not to keep: links, and those that are written or would be stale."""
    own = {CONFIG, GENERATION, INDEX}
    return [
        n
        for n in names
        if n in own
        or (n.startswith("model") and n.endswith(".safetensors"))
        or os.path.islink(os.path.join(folder, n))
    ]


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # no hard links on this file system
        shutil.copy2(source, target)


def _swap(parent: Folder, partial: str, target: str) -> None:
    if not parent.exists(target):
        parent.rename(partial, target)
        return
    old = f".{target}.old-{os.getpid()}"
    if parent.exists(old):
        parent.remove(old)
    parent.rename(target, old)  # killed here: both folders are whole, under their other names
    parent.rename(partial, target)
    parent.remove(old)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(str(path), framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} ({path.stat().st_size} bytes) is not a whole safetensors file: "
            f"{escaped(str(error), 300)}; copy it again (a clone without git-lfs leaves "
            "small text files in their place)"
        ) from error
    with file:
        yield file
