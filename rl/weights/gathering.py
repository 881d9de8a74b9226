"""Local copies of weights on a mesh over several processes.

All processes call these functions together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from reprise.models.config import MeshConfig, ModelConfig, ParamSpec
from reprise.models.decoder.transformer import Params, param_specs
from reprise.models.layout import AXES
from reprise.models.sharding import fitting_sharding, make_mesh
from reprise.rl.runtime.devices import in_turn

_Bounds = tuple[tuple[int, int], ...]  # (start, end) per axis, of a part of an array


def own_devices(mesh: Mesh) -> list[jax.Device]:
    """Return the devices of a mesh that belong to this process."""
    return [device for device in mesh.devices.flat if device.process_index == jax.process_index()]


def own_part(mesh: Mesh) -> Mesh | jax.Device:
    """Return a mesh of the devices of `mesh` in this process, or its only device."""
    mine = own_devices(mesh)
    if len(mine) == 1:
        return mine[0]
    tensor = math.gcd(mesh.shape["tensor"], len(mine))
    fsdp = math.gcd(mesh.shape["fsdp"], len(mine) // tensor)
    return make_mesh(MeshConfig(fsdp=fsdp, tensor=tensor), mine)


def laid_out(params: Params, specs: Params, mesh: Mesh) -> Params:
    """Return weights of these specs on another mesh of the same devices in the same order.

    Arrays move one by one. Weights on other devices are returned unchanged; memory may be shared
    with `params`. If there are more copies than before, an array is first split over the new copies
    too, then gathered: XLA would assemble the whole array on every device instead.
    """
    leaves, tree = jax.tree.flatten(params)
    before = getattr(leaves[0].sharding, "mesh", None)
    if before in (None, mesh) or list(before.devices.flat) != list(mesh.devices.flat):
        return params
    more = mesh.shape["data"] > before.shape["data"]

    def moved(x: jax.Array, spec: ParamSpec) -> jax.Array:
        if more:
            axes = ["copies" if axis == "embed" else axis for axis in spec.axes]
            x = in_turn(jax.device_put(x, fitting_sharding(mesh, spec.shape, axes)))
        return in_turn(jax.device_put(x, fitting_sharding(mesh, spec.shape, spec.axes)))

    pairs = zip(leaves, jax.tree.leaves(specs), strict=True)
    return tree.unflatten([moved(x, spec) for x, spec in pairs])


def local_weights(
    params: Params, model: ModelConfig, place: Mesh | jax.Device, dtype: Any
) -> Params:
    """Return the weights in `dtype` as arrays of this process only, laid out on `place`.

    `params` are on a mesh over several processes; `place` is one device of this process or a mesh
    of some, of the same form on every process. Missing parts come from devices of other processes,
    after rounding. Memory may be shared with `params`. Raises ValueError if the devices cannot be
    divided this way.
    """
    leaves, tree = jax.tree.flatten(params)
    local = place if isinstance(place, Mesh) else Mesh(np.full((1, 1, 1), place), AXES)
    specs = jax.tree.leaves(param_specs(model))
    shardings = [fitting_sharding(local, spec.shape, spec.axes) for spec in specs]
    everywhere = _copies_of(local, leaves[0].sharding.mesh)
    wide = [NamedSharding(everywhere, sharding.spec) for sharding in shardings]

    def own(x: jax.Array, sharding: NamedSharding) -> jax.Array:
        mine = {shard.device: shard.data for shard in x.addressable_shards}
        parts = [mine[device] for device in local.devices.flat]
        if not isinstance(place, Mesh):
            return parts[0]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)

    spread = _spread(leaves, wide, np.dtype(dtype))
    return tree.unflatten([own(x, s) for x, s in zip(spread, shardings, strict=True)])


def host_copy(tree: Any, *, keep: bool = True) -> Any:
    """Return numpy arrays if `keep`, else a tree of None.

    Arrays are gathered on the devices one at a time, so the devices hold only one whole array.
    """

    def one(x: jax.Array) -> np.ndarray | None:
        if not (x.is_fully_addressable or x.is_fully_replicated):
            whole = NamedSharding(x.sharding.mesh, PartitionSpec())
            x = jax.block_until_ready(jax.device_put(x, whole))  # only one array is whole at a time
        return np.asarray(x) if keep else None

    return jax.tree.map(one, tree)


def on_host(tree: Any) -> Any:
    """Return host copies of the arrays of this process, which an update would consume."""
    return jax.tree.map(lambda x: np.array(jax.device_get(x)), tree)


def own_shards(tree: Any) -> Any:
    """Return host copies of the parts of each array on devices of this process, each part once."""

    def one(x: jax.Array) -> dict[_Bounds, np.ndarray]:
        parts = {_bounds(shard.index, x.shape): shard.data for shard in x.addressable_shards}
        return {bounds: np.array(data) for bounds, data in parts.items()}

    return jax.tree.map(one, tree)


def from_shards(shards: Any, like: Any) -> Any:
    """Return arrays on the shardings of `like` from the parts that `own_shards` returned."""

    def one(x: jax.Array, parts: dict[_Bounds, np.ndarray]) -> jax.Array:
        part = lambda index: parts[_bounds(index, x.shape)]  # noqa: E731  # called at once
        return jax.make_array_from_callback(x.shape, x.sharding, part)

    return jax.tree.map(one, like, shards)


def _bounds(index: tuple[slice, ...], shape: Sequence[int]) -> _Bounds:
    return tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))


def _spread(
    leaves: Sequence[jax.Array], shardings: Sequence[NamedSharding], dtype: np.dtype
) -> list[jax.Array]:
    """Return the leaves in `dtype` on these shardings; constraints could leave them whole."""
    pairs = zip(in_turn(_rounded(tuple(leaves), dtype=dtype)), shardings, strict=True)
    return [in_turn(jax.device_put(x, sharding)) for x, sharding in pairs]


@partial(jax.jit, static_argnames=("dtype",))
def _rounded(leaves: tuple[jax.Array, ...], *, dtype: np.dtype) -> list[jax.Array]:
    """Return the leaves rounded to `dtype`, each on its devices."""
    return [leaf.astype(dtype) for leaf in leaves]


def _copies_of(local: Mesh, mesh: Mesh) -> Mesh:
    """Return the devices of `mesh` as copies of `local`, grouped by process.

    The mesh has the sizes (processes, copies per process, sizes of `local`). Devices keep their
    order if possible.
    """
    by_process: dict[int, list[jax.Device]] = {}
    for device in mesh.devices.flat:
        by_process.setdefault(device.process_index, []).append(device)
    mine = by_process.get(jax.process_index(), [])
    chosen = list(local.devices.flat)
    rows = list(by_process.values())
    missing = [d for d in chosen if d not in mine]
    if missing or len(mine) % len(chosen) or any(len(row) != len(mine) for row in rows):
        raise ValueError(
            f"expected a place for the weights among the {len(mine)} device(s) that this process "
            f"has in a mesh of {len(rows)} processes, which divides those of each, got "
            f"{len(chosen)} device(s), of which {len(missing)} are not among them"
        )
    order = [mine.index(d) for d in chosen]
    if order != list(range(order[0], order[0] + len(order))) or order[0] % len(order):
        order += [i for i in range(len(mine)) if i not in order]
    else:
        order = list(range(len(mine)))
    grid = np.array([[row[i] for i in order] for row in rows], dtype=object)
    shape = len(rows), len(mine) // len(chosen), *local.devices.shape
    names = ("process", "copy", *local.axis_names)
    return Mesh(grid.reshape(shape), names, axis_types=(local.axis_types[0],) * len(names))
