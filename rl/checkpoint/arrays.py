"""The arrays of a checkpoint: written and read by Orbax, each process its own shards.

Orbax's Checkpointer is not used: its barriers between processes have no deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class ArrayWriter:
    """Writes one set of arrays after the other; with `by_all` every process of the job its part.

    Arrays that each process has on devices of its own are written by process 0.
    """

    def __init__(self, *, by_all: bool) -> None:
        import orbax.checkpoint as ocp

        self._placed: Callable[..., Any] = _own_or_shared if by_all else np.asarray
        if jax.process_count() == 1:
            self._placed = lambda x: x
        # OCDBT, Orbax's default, keeps memory at every save: tensorstore leaks its specs.
        self._handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
        self._writing: list[Any] = []

    def save(self, folder: Path, arrays: Mapping[str, jax.Array]) -> None:
        """Begin to write to an existing folder; returns once the values are on the host.

        Fails in a thread that runs an event loop, as a notebook's does.
        """
        import orbax.checkpoint as ocp
        from etils import epath

        given = {path: self._placed(x) for path, x in arrays.items()}
        saving = self._handler.async_save(epath.Path(folder), args=ocp.args.PyTreeSave(given))
        self._writing = asyncio.run(saving) or []

    def wait_until_finished(self) -> None:
        """Wait for this process's writes; raises their error."""
        writing, self._writing = self._writing, []
        for future in writing:
            future.result()

    def close(self) -> None:
        self._handler.close()


def read_arrays(folder: Path, wanted: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Return arrays by path, laid out as `wanted` (arrays or shapes), or on the first device."""
    import orbax.checkpoint as ocp
    from etils import epath

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
    handler = ocp.PyTreeCheckpointHandler()
    try:
        restored = handler.restore(epath.Path(folder), args=arguments)
    finally:
        handler.close()
    return {path: _free_as(leaf, restored[path]) for path, leaf in wanted.items()}


def _free_as(template: Any, restored: jax.Array) -> jax.Array:
    """Return `restored`, committed to a device only where the template is: jit tells them apart."""
    if getattr(template, "committed", True):
        return restored
    return jnp.array(np.asarray(restored))


def _own_or_shared(x: jax.Array) -> jax.Array | np.ndarray:
    """Return an array on this process's own devices as numpy's, which Orbax writes in process 0.

    Of a jax array it would take a slice from each process, which may have other values.
    """
    return np.asarray(x) if x.is_fully_addressable else x
