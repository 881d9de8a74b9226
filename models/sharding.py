"""Meshes and shardings from the table of models.layout, for training and rollouts alike.

Nothing here holds a device: meshes are made by `make_mesh` and passed on; `constrain` reads the
mesh that the caller has set with `jax.set_mesh`, and does nothing where there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from models.config import MeshConfig
from models.layout import AXES, fitting_axes, mesh_axes


def make_mesh(config: MeshConfig, devices: Sequence[Any]) -> Mesh:
    """Make a mesh of `devices` in the shape of the config; ValueError where they do not fit it."""
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
    """Return `mesh_axes` as a PartitionSpec."""
    return PartitionSpec(*mesh_axes(axes))


def fitting_sharding(mesh: Mesh, shape: Sequence[int], axes: Sequence[str | None]) -> NamedSharding:
    """Return the sharding of an array; dimensions that do not divide are not split."""
    return NamedSharding(mesh, PartitionSpec(*fitting_axes(mesh.shape, shape, axes)))


def param_shardings(mesh: Mesh, specs: Any) -> Any:
    """Return the shardings of a tree of `ParamSpec` (anything with `.shape` and `.axes`)."""
    return jax.tree.map(lambda spec: fitting_sharding(mesh, spec.shape, spec.axes), specs)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pin an activation to the sharding of its logical axes, under the mesh that is set."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    spec = PartitionSpec(*fitting_axes(mesh.shape, x.shape, axes))
    return jax.lax.with_sharding_constraint(x, spec)
