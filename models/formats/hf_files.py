"""Files of Hugging Face folders: JSON and safetensors, and replacing a folder by a rename."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reprise.models.config import leaves
from reprise.models.folder import Folder
from reprise.models.hints import download_hint

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

_EXAMPLE = "hf download Qwen/Qwen3-0.6B --local-dir downloads/Qwen3-0.6B"
CONFIG = "config.json"
GENERATION = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = ("F32", "BF16", "F16")  # names in safetensors
MAX_JSON_BYTES = 64 * 2**20  # per file; an index of 100,000 tensors takes 10 MiB
MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors
MAX_TENSORS = 200_000  # of a file
_FINITE_BLOCK = 2**16
_EXPONENTS: dict[str, Any] = {
    "float32": np.uint32(0x7F800000),
    "bfloat16": np.uint16(0x7F80),
    "float16": np.uint16(0x7C00),
}
MAX_NAMED = 6  # tensors or options in an error


class WeightsError(ValueError):
    """A wrong value in weights, which is only found by reading them."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """An expected tensor: its name in the file, its shape and its layout on a mesh."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtypes: tuple[str, ...] = FLOATS


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file, known from the header."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    def opened(self) -> contextlib.AbstractContextManager[Any]:
        """Open the file, for `read` and `reader` of all tensors in the file."""
        return _open(self.path)

    def read(self, file: Any) -> np.ndarray:
        """Read the whole tensor. Raises WeightsError for a value that is not finite."""
        return finite(np.asarray(file.get_tensor(self.name)), f"{self.path}: {self.name}")

    def reader(self, file: Any) -> Callable[[tuple[slice, ...]], np.ndarray]:
        """Return a function that reads a part of the tensor, each part from disk only once."""
        view = file.get_slice(self.name)
        parts: dict[str, np.ndarray] = {}

        def read(index: tuple[slice, ...]) -> np.ndarray:
            if (key := repr(index)) not in parts:
                is_whole = all(part == slice(None) for part in index)
                part = self.read(file) if is_whole else np.asarray(view[index])
                parts[key] = part if is_whole else finite(part, f"{self.path}: {self.name}")
            return parts[key]

        return read


def finite(array: np.ndarray, name: str) -> np.ndarray:
    """Return an array of floats. Raises WeightsError if a value is not finite.

    Numbers with all exponent bits set are infinite or NaN. The check reads about 6 GB/s.
    """
    if array.dtype.name not in _EXPONENTS:
        return array
    exponent = _EXPONENTS[array.dtype.name]
    bits = array.reshape(-1).view(exponent.dtype)
    for start in range(0, bits.size, _FINITE_BLOCK):  # blocks that fit the processor cache
        if ((bits[start : start + _FINITE_BLOCK] & exponent) == exponent).any():
            raise WeightsError(
                f"{escaped(name, 300)} has values that are not finite: take another copy of the "
                "policy, or an earlier checkpoint"
            )
    return array


def shown(value: Any, max_characters: int = 80, max_items: int = 8) -> str:
    """Format a value from a file for error messages: escaped, on one line and truncated."""
    if isinstance(value, list) and len(value) > max_items:
        return f"{shown(value[:max_items], max_characters)} and {len(value) - max_items} more"
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply; more digits than Python prints
        return f"a {type(value).__name__} that cannot be printed"
    cut = len(text) > max_characters
    return f"{text[:max_characters]}… ({len(text)} characters)" if cut else text


def escaped(text: str, max_characters: int = 80) -> str:
    """Format text from a file, or from a library that quotes a file, as `shown` without quotes."""
    cut = f"… ({len(text)} characters)" if len(text) > max_characters else ""
    return repr(text[:max_characters])[1:-1] + cut


def entries_of(names: Any, specs: Any) -> list[Entry]:
    """Return entries in the order of the leaves of a tree of names and a tree of `ParamSpec`."""
    pairs = zip(leaves(names), leaves(specs), strict=True)
    return [Entry(name, spec.shape, spec.axes) for name, spec in pairs]


def is_gguf(path: Path) -> bool:
    """Return whether a path names a GGUF file; other policies are folders."""
    return path.is_file() or (path.suffix.lower() == ".gguf" and not path.is_dir())


def require_folder(folder: Path) -> None:
    """Raise FileNotFoundError unless a folder exists."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"expected a local Hugging Face folder, got {str(folder)!r}, which is not a directory: "
            "models are not downloaded here; fetch it first, for example: "
            f"{download_hint(folder) or _EXAMPLE}"
        )


def has_file(path: Path) -> bool:
    """Return whether a file exists. Raises ValueError for anything else, also a dangling link."""
    if path.is_file():
        return True
    if os.path.lexists(path):
        got = "a link to nothing" if not path.exists() else "something else"
        got = "a folder" if path.is_dir() else got
        raise ValueError(f"{path}: expected a file, got {got}: copy it again, or remove it")
    return False


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json. Raises FileNotFoundError if it or the folder is missing."""
    require_folder(folder)
    if not has_file(folder / CONFIG):
        files = sorted(folder.glob("*.gguf"))
        other = f", or the GGUF file itself, {files[0].name}" if files else ""
        raise FileNotFoundError(f"no {CONFIG} in {folder}: give the folder that holds it{other}")
    return read_json(folder / CONFIG)


def headers(folder: Path) -> dict[str, Stored]:
    """Return every tensor of a folder by name, unread. Raises FileNotFoundError or ValueError."""
    stored: dict[str, Stored] = {}
    for path in _weight_files(folder):
        for name, tensor in headers_of(path).items():
            if name in stored:
                raise ValueError(
                    f"{folder}: {escaped(name)} is in {stored[name].path.name} and {path.name}"
                )
            stored[name] = tensor
    return stored


def headers_of(path: Path) -> dict[str, Stored]:
    """Return every tensor of a file by name, unread. Raises FileNotFoundError or ValueError."""
    stored: dict[str, Stored] = {}
    with _open(path) as file:
        names = file.keys()
        if len(names) > MAX_TENSORS:
            raise ValueError(f"{path}: expected at most {MAX_TENSORS:,} tensors: export again")
        _refuse_repeated_names(path)
        for name in names:
            view = file.get_slice(name)
            stored[name] = Stored(path, name, tuple(view.get_shape()), view.get_dtype())
    return stored


def metadata_of(path: Path) -> dict[str, str]:
    """Return the text in the header of a file, or {}. Raises FileNotFoundError or ValueError."""
    with _open(path) as file:
        return dict(file.metadata() or {})


def refuse_mismatch(
    folder: Path, entries: Sequence[Entry], stored: Mapping[str, Stored], hint: str
) -> None:
    """Raise one ValueError for all tensors that are missing, surplus, or wrong in shape or type."""
    missing = []
    wrong = []
    for entry in entries:
        got = stored.get(entry.name)
        if got is None:
            missing.append(entry.name)
        elif got.shape != entry.shape:
            wrong.append(f"{entry.name} has shape {list(got.shape)}, expected {list(entry.shape)}")
        if got is not None and got.dtype not in entry.dtypes:
            types = ", ".join(entry.dtypes)
            wrong.append(f"{entry.name} is of type {got.dtype}, expected one of {types}")
    # some old exports hold the rotary frequencies, which follow from the config
    names = {entry.name for entry in entries}
    extra = [n for n in stored if n not in names and not n.endswith("rotary_emb.inv_freq")]
    surplus = [escaped(name) for name in extra]
    problems = []
    for title, items in (("missing tensor", missing), ("surplus", surplus), ("wrong", wrong)):
        title += "s" if items is missing and len(items) > 1 else ""
        more = f" and {len(items) - MAX_NAMED} more" if len(items) > MAX_NAMED else ""
        problems += [f"{title}: {', '.join(items[:MAX_NAMED])}{more}"] if items else []
    if problems:
        raise ValueError(
            f"{folder}: the weights do not fit the config: {'; '.join(problems)}; {hint}"
        )


def read_tensor(stored: Stored) -> np.ndarray:
    """Read one tensor."""
    with stored.opened() as file:
        return stored.read(file)


def read_tensors(
    entries: Sequence[Entry],
    stored: Mapping[str, Stored],
    mesh: Mesh | None = None,
    dtype: Any = None,
) -> list[jax.Array]:
    """Read tensors in the order of the entries; with a mesh each goes straight onto its shards.

    `dtype` None keeps the type of each tensor. Host memory holds one tensor at a time, and only the
    parts for this process.
    """
    import jax
    import jax.numpy as jnp

    from reprise.models.decoder import transformer  # noqa: F401, registers the trees of weights with jax
    from reprise.models.sharding import fitting_sharding

    def cast(host: np.ndarray) -> np.ndarray:
        return host if dtype is None else host.astype(jnp.dtype(dtype), copy=False)

    def place(tensor: Stored, axes: tuple[str | None, ...], file: Any) -> jax.Array:
        if mesh is None:
            return jnp.asarray(cast(tensor.read(file)))
        sharding = fitting_sharding(mesh, tensor.shape, axes)
        read = tensor.reader(file)
        return jax.make_array_from_callback(tensor.shape, sharding, lambda index: cast(read(index)))

    arrays: dict[str, jax.Array] = {}
    first = {stored[entry.name].path: stored[entry.name] for entry in entries}
    for path in sorted(first):
        with first[path].opened() as file:
            for entry in entries:
                if (tensor := stored[entry.name]).path == path:
                    arrays[entry.name] = place(tensor, entry.axes, file)
    return [arrays[entry.name] for entry in entries]


def fitting_leaves(params: Any, entries: Sequence[Entry], tree: Any) -> list[jax.Array]:
    """Return the leaves of `params`; ValueError unless they fit the entries."""
    import jax

    weights, got = jax.tree.flatten(params)
    if got != tree:
        raise ValueError(
            f"the parameters do not fit the config: expected {len(entries)} tensors, got a tree of "
            f"another structure with {len(weights)}"
        )
    for entry, leaf in zip(entries, weights, strict=True):
        if tuple(leaf.shape) != entry.shape:
            shapes = f"shape {list(leaf.shape)}, expected {list(entry.shape)}"
            raise ValueError(f"the parameters do not fit the config: {entry.name} has {shapes}")
    return weights


@contextlib.contextmanager
def replacing(directory: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a new folder that replaces `directory` by a rename if the block raises no error.

    Files other than config and weights (a tokenizer) are kept. Raises NotADirectoryError for a file
    or a link.
    """
    target = Path(directory).absolute()
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        kind = "link" if target.is_symlink() else "file"
        raise NotADirectoryError(f"expected a folder to write to, got the {kind} {target}")
    parent = Folder(target.parent, create=True)
    partial = f".{target.name}.partial-{os.getpid()}"
    try:
        parent.remove(partial, missing_ok=True)  # from a killed process, or a planted link
        if target.exists():
            # without links: later writes would follow them
            shutil.copytree(target, parent.path / partial, ignore=_not_kept, copy_function=_link)
        yield parent.folder(partial).path
        old = f".{target.name}.old-{os.getpid()}"
        parent.remove(old, missing_ok=True)
        if parent.exists(target.name):
            parent.rename(target.name, old)  # if killed here, both folders are complete
        parent.rename(partial, target.name)
        parent.remove(old, missing_ok=True)
    finally:
        parent.remove(partial, missing_ok=True)
        parent.close()


def write_tensors(
    folder: Path,
    entries: Sequence[Entry],
    leaves: Sequence[Any],
    max_shard_bytes: int,
    dtype: Any = None,
    whole: str = WEIGHTS,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write files of at most `max_shard_bytes` (or of one tensor), with an index for several files.

    Tensors are rounded to `dtype`; None keeps their types. Host memory holds one file at a time.
    `whole` names the file if a single file has all tensors; `metadata` is text in the headers.
    """
    import jax
    import jax.numpy as jnp
    from safetensors.numpy import save_file

    dtypes = [jnp.dtype(leaf.dtype if dtype is None else dtype) for leaf in leaves]
    sizes = [leaf.size * kind.itemsize for leaf, kind in zip(leaves, dtypes, strict=True)]
    shards: list[list[int]] = [[]]
    for i, size_bytes in enumerate(sizes):
        if shards[-1] and sum(sizes[j] for j in shards[-1]) + size_bytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(i)
    weight_map = {}
    for n, shard in enumerate(shards, start=1):
        file = whole if len(shards) == 1 else f"model-{n:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for i in shard:
            # contiguous: safetensors writes the memory under a view
            host = np.ascontiguousarray(jax.device_get(leaves[i]), dtypes[i])
            tensors[entries[i].name] = finite(host, entries[i].name)
            weight_map[entries[i].name] = file
        save_file(tensors, folder / file, metadata={"format": "pt", **(metadata or {})})
        # safetensors makes files readable only by their owner; use the permissions of the folder
        (folder / file).chmod(folder.stat().st_mode & 0o666)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        write_json(folder / INDEX, index)


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; ValueError for other content or over `MAX_JSON_BYTES`."""
    if (size := path.stat().st_size) > MAX_JSON_BYTES:
        raise ValueError(
            f"{path}: expected at most {MAX_JSON_BYTES} bytes of JSON, got {size}: copy it again"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}; copy it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def optional_json(path: Path) -> dict[str, Any]:
    """Read a JSON object as `read_json`, or return {} if the file does not exist."""
    return read_json(path) if has_file(path) else {}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _weight_files(folder: Path) -> list[Path]:
    if has_file(folder / WEIGHTS):
        return [folder / WEIGHTS]
    index = folder / INDEX
    if not has_file(index):
        names = sorted(path.name for path in folder.iterdir())
        pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
        got = f"only torch files ({pickles[0]}), which are pickles" if pickles else names[:12]
        raise FileNotFoundError(
            f"no weights in {folder}: expected {WEIGHTS} or {INDEX}, got {got}; "
            "save the model with safetensors"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map: copy the index again")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name or "\0" in name:
            raise ValueError(
                f"{index} names {shown(name)}: expected a file of the same folder; copy the index "
                "again"
            )
        if not has_file(folder / name):
            raise FileNotFoundError(
                f"{index} names {escaped(name)}, which is not there: copy the missing file"
            )
    return [folder / name for name in sorted(set(weight_map.values()))]


def _refuse_repeated_names(path: Path) -> None:
    """Raise ValueError for a duplicate tensor name, because readers disagree on its tensor."""
    with path.open("rb") as file:
        size = min(int.from_bytes(file.read(8), "little"), MAX_HEADER_BYTES)
        text = file.read(size)

    def once(pairs: list[tuple[str, Any]]) -> None:
        if len({name for name, _ in pairs}) == len(pairs):
            return
        ((name, _),) = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(
            f"{path}: expected every name once in its header, got {shown(name)} twice: export again"
        )

    json.loads(text, object_pairs_hook=once)


def _not_kept(folder: str, names: list[str]) -> list[str]:
    """Return the files that a replaced folder does not keep: links, config and weights."""
    return [
        name
        for name in names
        if name in (CONFIG, GENERATION, INDEX)
        or (name.startswith("model") and name.endswith(".safetensors"))
        or os.path.islink(os.path.join(folder, name))
    ]


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # no hard links on this file system
        shutil.copy2(source, target)


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(path), framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} ({path.stat().st_size} bytes) is not a whole safetensors file: "
            f"{escaped(str(error), 300)}; copy it again (a clone without git-lfs leaves "
            "small text files in their place)"
        ) from error
