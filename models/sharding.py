"""One table from logical axes to mesh axes, for training and rollouts alike.

Mesh axes: `data` (replicas), `fsdp` (batch, and weights split over it), `tensor`
(heads, feed-forward and vocabulary). Nothing here holds a device: meshes are
made by `make_mesh` and handed on; `constrain` reads the mesh that the caller has
set with `jax.set_mesh`, and does nothing where there is none.
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
    """`mesh_axes` as jax spells it."""
    return PartitionSpec(*mesh_axes(axes))


def fitting_sharding(mesh: Mesh, shape: Sequence[int], axes: Sequence[str | None]) -> NamedSharding:
    """The sharding of an array, with dimensions that do not divide left whole."""
    return NamedSharding(mesh, PartitionSpec(*fitting_axes(mesh.shape, shape, axes)))


def param_shardings(mesh: Mesh, specs: Any) -> Any:
    """Shardings of a tree of `ParamSpec` (anything with `.shape` and `.axes`)."""
    return jax.tree.map(lambda spec: fitting_sharding(mesh, spec.shape, spec.axes), specs)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pin an activation's layout to the table, under the mesh that the caller has set."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    spec = PartitionSpec(*fitting_axes(mesh.shape, x.shape, axes))
    return jax.lax.with_sharding_constraint(x, spec)
