"""Meshes and shardings by the rules of models.layout; `constrain` reads the mesh in use."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from reprise.models.config import MeshConfig
from reprise.models.layout import AXES, Entry, axis_ways, fitting_axes, rollout_tensor

Axes = tuple[str | None, ...]  # logical axes of an array (models.layout)
GPU = ("gpu", "cuda")  # the platform name of devices, and of programs


def make_mesh(config: MeshConfig, devices: Sequence[Any]) -> Mesh:
    """Return a mesh of `devices` in the shape of the config; ValueError if they do not fit."""
    inner = config.fsdp * config.tensor
    data = len(devices) // inner if config.data == -1 else config.data
    if data < 1 or data * inner != len(devices):
        raise ValueError(
            f"Mesh.data={config.data} × fsdp={config.fsdp} × tensor={config.tensor} does not cover "
            f"{len(devices)} device(s): their product must be {len(devices)}"
        )
    grid = np.asarray(devices, dtype=object).reshape(data, config.fsdp, config.tensor)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def rollout_mesh(
    devices: Sequence[Any],
    num_kv_heads: int,
    weight_ways: int | None = None,
    asked: int | Literal["auto"] = "auto",
) -> Mesh:
    """Return the mesh of an engine, which splits weights only over `tensor` (`rollout_tensor`)."""
    ways = len(devices) if weight_ways is None else weight_ways
    tensor = rollout_tensor(len(devices), ways, num_kv_heads, asked)
    return make_mesh(MeshConfig(tensor=tensor), devices)


def fitting_sharding(mesh: Mesh, shape: Sequence[int], axes: Sequence[str | None]) -> NamedSharding:
    """Return the sharding of an array; dimensions that do not divide are not split."""
    return NamedSharding(mesh, fitting_spec(mesh.shape, shape, axes))


def fitting_spec(
    sizes: Mapping[str, int], shape: Sequence[int], axes: Sequence[str | None]
) -> PartitionSpec:
    """Return the specification as programs do, without axes of size 1 and trailing None."""
    spec = list[Entry]()
    for entry in fitting_axes(sizes, shape, axes):
        names = [n for n in ((entry,) if isinstance(entry, str) else entry or ()) if sizes[n] > 1]
        spec.append(names[0] if len(names) == 1 else tuple(names) or None)
    while spec and spec[-1] is None:
        spec.pop()
    return PartitionSpec(*spec)


def param_shardings(mesh: Mesh, specs: Any) -> Any:
    """Return the shardings of a tree of `ParamSpec` (anything with `.shape` and `.axes`)."""
    return jax.tree.map(lambda spec: fitting_sharding(mesh, spec.shape, spec.axes), specs)


def shapes(specs: Any, dtype: Any) -> Any:
    """Return a tree of `ParamSpec` as sharded shapes on the mesh in use, to lower steps on."""
    mesh = jax.sharding.get_mesh()

    def one(spec: Any) -> jax.ShapeDtypeStruct:
        where = None if mesh.empty else fitting_sharding(mesh, spec.shape, spec.axes)
        return jax.ShapeDtypeStruct(spec.shape, dtype, sharding=where)

    return jax.tree.map(one, specs)


def whole_shapes(tree: Any) -> Any:
    """Return the shapes of arrays that are replicated over the mesh in use."""
    mesh = jax.sharding.get_mesh()
    where = None if mesh.empty else NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where, weak_type=x.weak_type),
        tree,
    )


def replicated(tree: Any) -> Any:
    """Replicate arrays over every device of the mesh in use, so that any host can read them."""
    return jax.tree.map(lambda x: constrain(x, *[None] * x.ndim), tree)


def put(x: Any, where: jax.sharding.Sharding | None) -> jax.Array:
    """Put an array on devices; each of several processes puts the shards of its local copy.

    `jax.device_put` would compare the copies of all processes in a collective, and rejects keys.
    """
    if where is None or where.is_fully_addressable:
        return jax.device_put(x, where)
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(x)
        impl = jax.random.key_impl(x)
        return jax.random.wrap_key_data(put(data, where), impl=impl)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.device_put(x, where)
    copy = np.asarray(x)
    return jax.make_array_from_callback(copy.shape, where, copy.__getitem__)


def platform_in_use() -> str:
    """Return the platform of the mesh in use, else of jax; a GPU is "cuda", as in programs."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    return "cuda" if platform in GPU else platform


def sizes_in_use() -> dict[str, int]:
    """Return the sizes of the mesh in use by axis; {} without a mesh.

    An axis that an enclosing `shard_map` splits has size 1.
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = set(mesh.manual_axes)
    return {name: 1 if name in manual else size for name, size in mesh.shape.items()}


def ways_in_use(axis: str) -> int:
    """Return how many ways the mesh in use splits a logical axis; 1 without a mesh."""
    sizes = sizes_in_use()
    return axis_ways(sizes, axis) if sizes else 1


def ways_outside() -> int:
    """Return the number of parts into which an enclosing `shard_map` splits arrays."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[name] for name in mesh.manual_axes)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pin an activation to the sharding of its logical axes, under the mesh in use."""
    sizes = sizes_in_use()
    if math.prod(sizes.values()) == 1:
        return x
    spec = fitting_spec(sizes, x.shape, axes)
    return jax.lax.with_sharding_constraint(x, spec)


def by_device(
    function: Callable, inputs: Sequence[jax.Array], axes: Sequence[Axes], results: Sequence[tuple]
) -> Any:
    """Call a function on the shard of each input on each device; `results` are (shape, axes)."""
    sizes = sizes_in_use()
    if math.prod(sizes.values()) == 1:
        return function(*inputs)

    parts = tuple(fitting_spec(sizes, x.shape, of) for x, of in zip(inputs, axes, strict=True))
    out_parts = tuple(fitting_spec(sizes, *result) for result in results)
    left = set(sizes) - set(jax.sharding.get_abstract_mesh().manual_axes)
    specs: dict[str, Any] = {"in_specs": parts, "out_specs": out_parts, "axis_names": left}
    return jax.shard_map(function, **specs, check_vma=False)(*inputs)
