"""The contents of a checkpoint: arrays by Orbax, host state as JSON and npz.

Each process writes its shards. Orbax's Checkpointer is not used, because its barriers between
processes have no deadline. Host state is plain data and numpy arrays; encoding refuses values that
would not be read back with equal value and type.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_ARRAY = "$array"  # {"$array": "3"} in the JSON is entry "3" of the npz
_NAME = "process_0"  # the state is the same on all processes; process 0 writes it
_KINDS = "biufcSUmM"  # dtype kinds that npz keeps without pickle
_report = sys.unraisablehook


class ArrayWriter:
    """Writes sets of arrays, one at a time; with `by_all`, every process writes its shards."""

    def __init__(self, *, by_all: bool) -> None:
        import orbax.checkpoint as ocp

        self._placed: Callable[..., Any] = _own_or_shared if by_all else np.asarray
        if jax.process_count() == 1:
            self._placed = lambda x: x
        sys.unraisablehook = _hook
        # OCDBT, Orbax's default, leaks memory at every save, since tensorstore leaks its specs.
        self._handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
        self._writing: list[Any] = []

    def save(self, folder: Path, arrays: Mapping[str, jax.Array]) -> None:
        """Start to write to an existing folder; return once the values are on the host."""
        import orbax.checkpoint as ocp
        from etils import epath

        placed = {path: self._placed(x) for path, x in arrays.items()}
        saving = self._handler.async_save(epath.Path(folder), args=ocp.args.PyTreeSave(placed))
        self._writing = asyncio.run(saving) or []

    def wait_until_finished(self) -> None:
        """Wait for the writes of this process. Raises their error."""
        writing = self._writing
        self._writing = []
        for future in writing:
            future.result()

    def close(self) -> None:
        self._handler.close()


def _hook(unraisable: Any) -> None:
    """Report an error that no caller can catch, unless it only follows from another error.

    The first failed write closes its event loop; tensorstore then reports a closed loop for each of
    the other writes.
    """
    if str(unraisable.exc_value) != "Event loop is closed":
        _report(unraisable)


def read_arrays(folder: Path, wanted: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Return arrays by path, laid out as `wanted` (arrays or shapes), or on the first device."""
    import orbax.checkpoint as ocp
    from etils import epath

    one_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    structs = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or one_device)
        for path, leaf in wanted.items()
    }
    arguments = ocp.args.PyTreeRestore(
        item=structs,
        restore_args=ocp.checkpoint_utils.construct_restore_args(structs),
        partial_restore=True,
    )
    handler = ocp.PyTreeCheckpointHandler()
    try:
        restored = handler.restore(epath.Path(folder), args=arguments)
    finally:
        handler.close()
    # popped, so that an array is held twice only while it is copied
    return {path: _free_as(leaf, restored.pop(path)) for path, leaf in wanted.items()}


def _free_as(template: Any, restored: jax.Array) -> jax.Array:
    """Return `restored`, committed to a device only if the template is; jit distinguishes both."""
    if getattr(template, "committed", True):
        return restored
    return jnp.array(np.asarray(restored))


def _own_or_shared(x: jax.Array) -> jax.Array | np.ndarray:
    """Return a process-local array as a numpy array, which Orbax writes in process 0.

    From a jax array, Orbax would take a slice of each process, and these may have other values.
    """
    return np.asarray(x) if x.is_fully_addressable else x


@dataclasses.dataclass(frozen=True, eq=False)
class HostState:
    """Encoded host state, which shares no memory with the trainer."""

    text: str
    arrays: dict[str, Any]  # numpy arrays by their name in the npz


def encode_host(host: dict[str, Any]) -> HostState:
    """Copy nested dicts, lists, plain data and arrays. Raises TypeError, by path, for others."""
    arrays: dict[str, np.ndarray] = {}
    return HostState(json.dumps(_plain(host, "host", arrays)), arrays)


def write_host(folder: Path, state: HostState) -> None:
    """Write the text and arrays of a host state."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{_NAME}.json").write_text(state.text, encoding="utf-8")
    if state.arrays:
        np.savez(folder / f"{_NAME}.npz", **state.arrays)


def read_host(folder: Path) -> dict[str, Any]:
    """Read a folder of `write_host`. Raises FileNotFoundError or ValueError (compressed file)."""
    arrays: dict[str, np.ndarray] = {}
    if (npz := folder / f"{_NAME}.npz").exists():
        with zipfile.ZipFile(npz) as packed:  # entries may unpack to any size, or overlap
            entries = packed.infolist()
            size_bytes = npz.stat().st_size
        if any(e.compress_type for e in entries) or sum(e.file_size for e in entries) > size_bytes:
            raise ValueError(f"{npz}: expected arrays as they are, got compressed ones")
        with np.load(npz, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}

    def filled(entry: dict[str, Any]) -> Any:
        return arrays[entry[_ARRAY]] if _ARRAY in entry else entry

    text = (folder / f"{_NAME}.json").read_text(encoding="utf-8")
    return json.loads(text, object_hook=filled)


def read_plain_host(folder: Path) -> dict[str, Any]:
    """Read the plain data of a folder of `write_host`, with None for its arrays.

    Raises FileNotFoundError or ValueError.
    """
    text = (folder / f"{_NAME}.json").read_text(encoding="utf-8")
    host = json.loads(text, object_hook=lambda entry: None if _ARRAY in entry else entry)
    if not isinstance(host, dict):
        raise ValueError(f"{folder}: expected a JSON object, got {type(host).__name__}")
    return host


def _plain(value: Any, path: str, arrays: dict[str, np.ndarray]) -> Any:
    if type(value) is dict:
        for key in value:
            if type(key) is not str or key.startswith("$"):
                raise TypeError(
                    f"{path}: expected keys that are text without a leading $, got {key!r}"
                )
        return {key: _plain(entry, f"{path}[{key!r}]", arrays) for key, entry in value.items()}
    if type(value) is list:
        return [_plain(entry, f"{path}[{i}]", arrays) for i, entry in enumerate(value)]
    if type(value) is np.ndarray and value.dtype.kind in _KINDS:
        name = str(len(arrays))
        arrays[name] = value.copy()
        return {_ARRAY: name}
    if value is None or type(value) in (str, int, float, bool):
        return value
    got = f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    raise TypeError(
        f"{path}: expected dict, list, str, int, float, bool, None or a numpy array of a plain "
        f"dtype, got {got}: convert it (a tuple to a list, a numpy scalar with .item())"
    )
