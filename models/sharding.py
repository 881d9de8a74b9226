"""One table from logical axes to mesh axes, for training and rollouts alike.

Mesh axes: `data` (replicas), `fsdp` (batch, and weights split over it), `tensor`
(heads, feed-forward and vocabulary). Nothing here holds a device: meshes are
made by `make_mesh` and handed on; `constrain` reads the mesh that the caller has
set with `jax.set_mesh`, and does nothing where there is none.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")

RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
}


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How many devices along each mesh axis; data=-1 takes what the others leave."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        if self.fsdp < 1 or self.tensor < 1 or (self.data < 1 and self.data != -1):
            raise ValueError(
                f"mesh sizes must be positive (data may be -1 for 'the rest'), got "
                f"data={self.data} fsdp={self.fsdp} tensor={self.tensor}"
            )


def make_mesh(config: MeshConfig, devices: Sequence[Any]) -> Mesh:
    """A mesh of `devices` in the shape of the config; an error says which counts would fit."""
    inner = config.fsdp * config.tensor
    data = len(devices) // inner if config.data == -1 else config.data
    if data < 1 or data * inner != len(devices):
        raise ValueError(
            f"Mesh.data={config.data} × fsdp={config.fsdp} × tensor={config.tensor} does not cover "
            f"{len(devices)} device(s): their product must be {len(devices)}"
        )
    grid = np.asarray(devices, dtype=object).reshape(data, config.fsdp, config.tensor)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def partition_spec(axes: Sequence[str | None]) -> PartitionSpec:
    """Mesh axes of an array whose dimensions have these logical names.

    Raises ValueError where two dimensions would use the same mesh axis.
    """
    entries = [None if axis is None else RULES[axis] for axis in axes]
    used = [name for e in entries if e for name in ((e,) if isinstance(e, str) else e)]
    if len(used) != len(set(used)):
        raise ValueError(f"logical axes {tuple(axes)} map to {entries}: a mesh axis is used twice")
    return PartitionSpec(*entries)


def _fitting_spec(
    sizes: Mapping[str, int], shape: Sequence[int], axes: Sequence[str | None]
) -> PartitionSpec:
    """`partition_spec`, with dimensions that do not divide left whole; `sizes` of the mesh axes."""
    entries = []
    for size, entry in zip(shape, partition_spec(axes), strict=True):
        names = () if entry is None else (entry,) if isinstance(entry, str) else entry
        ways = math.prod(sizes[name] for name in names)
        entries.append(entry if ways > 1 and size % ways == 0 else None)
    return PartitionSpec(*entries)


def shard_shape(
    sizes: Mapping[str, int], shape: Sequence[int], axes: Sequence[str | None]
) -> tuple[int, ...]:
    """What one device holds of an array, on a mesh of these sizes by axis."""
    ways = []
    for entry in _fitting_spec(sizes, shape, axes):
        names = () if entry is None else (entry,) if isinstance(entry, str) else entry
        ways.append(math.prod(sizes[name] for name in names))
    return tuple(size // way for size, way in zip(shape, ways, strict=True))


def fitting_sharding(mesh: Mesh, shape: Sequence[int], axes: Sequence[str | None]) -> NamedSharding:
    """The sharding of an array, with dimensions that do not divide left whole."""
    return NamedSharding(mesh, _fitting_spec(mesh.shape, shape, axes))


def param_shardings(mesh: Mesh, specs: Any) -> Any:
    """Shardings of a tree of `ParamSpec` (anything with `.shape` and `.axes`)."""
    return jax.tree.map(lambda spec: fitting_sharding(mesh, spec.shape, spec.axes), specs)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pin an activation's layout to the table, under the mesh that the caller has set."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, _fitting_spec(mesh.shape, x.shape, axes))
