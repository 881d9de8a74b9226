"""Host state of a checkpoint: plain data as JSON, numpy arrays as npz.

Invariant: values come back equal, in value and in type. Anything that JSON would change (tuples,
numpy scalars, enums, keys that are not text) is refused when it is encoded.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

_ARRAY = "$array"  # {"$array": "3"} in the JSON stands for entry "3" of the npz
_NAME = "process_0"  # the state is the same on all processes, and the first one writes it
_KINDS = "biufcSUmM"  # dtype kinds that npz keeps without pickle


@dataclasses.dataclass(frozen=True, eq=False)
class HostState:
    """Encoded host state, which shares no memory with the trainer."""

    text: str
    arrays: dict[str, Any]  # numpy arrays by their name in the npz


def encode(host: dict[str, Any]) -> HostState:
    """Copy nested dicts, lists, plain data and numpy arrays; TypeError, by path, for other data."""
    arrays: dict[str, np.ndarray] = {}
    return HostState(json.dumps(_plain(host, "host", arrays)), arrays)


def write(folder: Path, state: HostState) -> None:
    """Write the state's text and arrays."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{_NAME}.json").write_text(state.text, encoding="utf-8")
    if state.arrays:
        np.savez(folder / f"{_NAME}.npz", **state.arrays)


def read(folder: Path) -> dict[str, Any]:
    """Read a folder of `write`. Raises FileNotFoundError."""
    arrays: dict[str, np.ndarray] = {}
    if (npz := folder / f"{_NAME}.npz").exists():
        with np.load(npz, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}

    def filled(entry: dict[str, Any]) -> Any:
        return arrays[entry[_ARRAY]] if _ARRAY in entry else entry

    text = (folder / f"{_NAME}.json").read_text(encoding="utf-8")
    return json.loads(text, object_hook=filled)


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
