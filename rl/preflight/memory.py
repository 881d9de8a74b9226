"""Arrays that a run keeps on its devices, in bytes per device; no device is opened.

Shapes give exact sizes. Activations, attention scores and logits are extra;
`python -m rl.preflight` compiles the programs that need this extra memory.
"""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from reprise.models.attention import kv_cache
from reprise.models.attention.entries import no_pending
from reprise.models.config import ModelConfig, param_specs, trained_specs
from reprise.models.formats import hf
from reprise.models.layout import CACHE_AXES, ENTRY_AXES, axis_ways, rollout_tensor, shard_shape
from reprise.rl.assembly.first_programs import rollout_reach
from reprise.rl.learner import critic
from reprise.rl.learner.optimizer import make_optimizer
from reprise.rl.placement.engines import evaluation_engine
from reprise.rl.runtime.run_files import resolve_path
from reprise.rl.settings.config import TrainConfig, drafter_shape
from reprise.rl.slot_memory import cache_ops
from reprise.rl.warm_up.rollout_programs import Reach

TRAINING = "training"
ROLLOUTS = "rollouts"
USABLE_SHARE = 0.9  # of device memory, since figures are extrapolated, and allocators leave gaps
FIX = (
    "lower Engine.slots, Engine.pages, Sampling.max_new_tokens or Trainer.micro_batch_tokens, set "
    "Trainer.remat = 'layer' (or 'layer:4'), split weights over more devices (Mesh.fsdp, "
    "Mesh.tensor), or take a smaller policy"
)
Parts = dict[str, dict[str, int]]  # bytes by TRAINING or ROLLOUTS, and by the name of the arrays


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of a run in `processes` of equal size; `bytes_each` is None if unknown."""

    count: int = 1
    bytes_each: int | None = None
    is_cpu: bool = True
    processes: int = 1


def opened_devices(devices: Sequence[jax.Device]) -> Devices:
    """Describe devices that jax has opened. CPU devices share the host memory."""
    count = len(devices)
    is_cpu = devices[0].platform == "cpu"
    processes = len({device.process_index for device in devices})
    if is_cpu:
        host_bytes = _host_bytes()
        return Devices(count, host_bytes and host_bytes // count, is_cpu, processes)
    stats: Any = devices[0].memory_stats()
    return Devices(count, (stats or {}).get("bytes_limit"), is_cpu, processes)


def unopened_devices() -> Devices:
    """Describe the GPUs that nvidia-smi lists, or else the host, without opening a device."""
    platform = os.environ.get("JAX_PLATFORMS", "").partition(",")[0]
    if platform == "cpu":
        return Devices(bytes_each=_host_bytes())
    try:
        command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        sizes = [int(line) * 2**20 for line in done.stdout.split("\n") if line.strip()]
    except (OSError, ValueError, subprocess.SubprocessError):
        sizes = []
    if sizes:
        # JAX allocates 3/4 of the memory by default
        share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75"))
        return Devices(len(sizes), int(min(sizes) * share), is_cpu=False)
    return Devices(bytes_each=None if platform else _host_bytes())


def _host_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


@dataclasses.dataclass(frozen=True)
class Layout:
    """The division of devices between training and rollouts.

    Each process trains on its first `num_training` devices. If the parts are disjoint
    (`is_disjoint`), workers run on the last `num_rollout` devices of each process, otherwise on all
    devices. `mesh` and `worker_mesh` (of one worker) are sizes by axis; `workers_each` workers
    share a device.
    """

    num_training: int
    num_rollout: int
    is_disjoint: bool
    mesh: dict[str, int]
    worker_mesh: dict[str, int]
    workers_each: int


def divide(config: TrainConfig, model: ModelConfig, count: int, processes: int = 1) -> Layout:
    """Return the layout of a run on `count` devices. Raises ValueError if workers do not fit."""
    sched = config.sched
    mesh = config.mesh
    cluster = config.cluster
    inner = mesh.fsdp * mesh.tensor
    processes = processes if cluster.kind == "spmd" else 1
    num_training = num_rollout = max(1, count // processes)
    needed = sched.workers * sched.devices_per_worker
    on_ray = cluster.kind == "ray"  # Ray workers have separate devices
    is_split = needed < num_training and (on_ray or sched.beside_training)
    if is_split:
        num_training = num_training - needed
        num_rollout = needed
    is_one = processes == 1 and mesh.data * inner == 1  # other devices stay unused
    if mesh.data != -1 and (sched.beside_training or is_one):
        num_training = min(num_training, math.ceil(mesh.data * inner / processes))
    data = max(1, num_training * processes // inner) if mesh.data == -1 else mesh.data
    if sched.has_trainer_devices and not on_ray:
        is_local = cluster.kind == "spmd" and cluster.rollouts == "local"
        size = num_training * (1 if is_local else processes)
        workers_each = 1
        tensor = rollout_tensor(size, inner, model.num_kv_heads, mesh.rollout_tensor)
    else:
        size = sched.devices_per_worker
        workers_each = math.ceil(needed / num_rollout)
        if size > 1 and needed > num_rollout:
            raise ValueError(
                f"expected {needed} devices for Sched.workers={sched.workers} of "
                f"Sched.devices_per_worker={size}, got {num_rollout}: lower either, or use "
                "more devices"
            )
        tensor = rollout_tensor(size, size, model.num_kv_heads)
    return Layout(
        num_training,
        num_rollout,
        is_split or on_ray,
        {"data": data, "fsdp": mesh.fsdp, "tensor": mesh.tensor},
        {"data": size // tensor, "fsdp": 1, "tensor": tensor},
        workers_each,
    )


def held_arrays(config: TrainConfig, model: ModelConfig, layout: Layout, *, is_cpu: bool) -> Parts:
    """Return the bytes per device of arrays that stay between programs."""
    dtype = config.trainer.dtype_on(is_cpu)
    training = _training(config, model, _Shards(layout.mesh), dtype)
    worker = _Shards(layout.worker_mesh)
    reach = rollout_reach(config)
    rollouts = _rollouts(config, model, worker, dtype, reach, is_cpu=is_cpu)
    if not layout.is_disjoint and _shares_weights(config, layout):
        rollouts["rollout weights"] = _beside_training(model, worker, dtype)
    rollouts = {name: size * layout.workers_each for name, size in rollouts.items()}
    return {TRAINING: training, ROLLOUTS: rollouts}


def _beside_training(model: ModelConfig, mesh: _Shards, dtype: Any) -> int:
    """Return the bytes of rollout weights that training does not hold.

    Rollouts read float32 master weights and frozen weights directly.
    """
    return 0 if dtype == jnp.float32 else num_bytes(mesh.params(trained_specs(model), dtype))


def _shares_weights(config: TrainConfig, layout: Layout) -> bool:
    """Return whether a device has the same part of the weights in training and in rollouts."""
    mesh = layout.mesh
    worker_mesh = layout.worker_mesh
    is_one_engine = config.sched.mode == "sync" and config.sched.workers == 1  # in each process
    is_split_alike = mesh["fsdp"] == 1 and mesh["tensor"] == worker_mesh["tensor"]
    return mesh == worker_mesh or (is_one_engine and is_split_alike)


class _Shards:
    """A factory for shard shapes of one device, on a mesh of these sizes."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes

    def zeros(
        self, shape: Sequence[int], dtype: Any, axes: Sequence[str | None] = CACHE_AXES
    ) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shard_shape(self.sizes, shape, axes), dtype)

    def entries(self, shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
        return self.zeros(shape, dtype, ENTRY_AXES[: len(shape)])

    def params(self, specs: Any, dtype: Any) -> Any:
        return jax.tree.map(lambda spec: self.zeros(spec.shape, dtype, spec.axes), specs)


def _training(config: TrainConfig, model: ModelConfig, mesh: _Shards, dtype: Any) -> dict[str, int]:
    specs = trained_specs(model)
    optimizer = make_optimizer(config.optimizer, total_steps=1)
    params = mesh.params(specs, jnp.float32)
    held = {
        "master weights": num_bytes(params),
        "optimizer's state": num_bytes(jax.eval_shape(optimizer.init, params)),
    }
    base = mesh.params(param_specs(dataclasses.replace(model, lora=None)), dtype)
    if model.lora is not None:  # also the reference policy
        held["frozen weights"] = num_bytes(base)
    elif config.algorithm.needs_reference:
        held["reference policy"] = num_bytes(base)
    if config.distill.teacher is not None:
        teacher = param_specs(hf.shape(resolve_path(config.distill.teacher)))
        held["teacher"] = num_bytes(mesh.params(teacher, dtype))
    if config.algorithm.resolved.needs_critic:
        values = mesh.params(critic.critic_specs(model), jnp.float32)
        held["critic and its optimizer's state"] = num_bytes(
            (values, jax.eval_shape(optimizer.init, values))
        )
    return held


def evaluation_bytes(
    config: TrainConfig, model: ModelConfig, layout: Layout, *, is_cpu: bool
) -> int:
    """Return the bytes that evaluations need on a training device if workers are separate; else 0.

    Training is idle during an evaluation, and this memory is freed afterwards.
    """
    if not (config.sched.beside_training and config.eval.num_prompts):
        return 0
    is_local = config.cluster.kind == "spmd" and config.cluster.rollouts == "local"
    size = layout.num_training if is_local else math.prod(layout.mesh.values())
    ways = layout.mesh["fsdp"] * layout.mesh["tensor"]
    tensor = rollout_tensor(size, ways, model.num_kv_heads, config.mesh.rollout_tensor)
    mesh = _Shards({"data": size // tensor, "fsdp": 1, "tensor": tensor})
    num_sets = len(config.eval.sets or config.task.specs)
    requests = num_sets * config.eval.num_prompts * config.eval.samples
    settings = evaluation_engine(config, requests, size // tensor)
    config = dataclasses.replace(config, engine=settings)
    dtype = config.trainer.dtype_on(is_cpu)
    reach = Reach(requests, config.rollout.max_prompt_tokens)
    arrays = _rollouts(config, model, mesh, dtype, reach, is_cpu=is_cpu, drafts=False)
    if layout.mesh["fsdp"] == 1 and layout.mesh["tensor"] == tensor:
        arrays["rollout weights"] = _beside_training(model, mesh, dtype)
    return sum(arrays.values())


def _rollouts(
    config: TrainConfig,
    model: ModelConfig,
    mesh: _Shards,
    dtype: Any,
    bounds: Reach,
    *,
    is_cpu: bool,
    drafts: bool = True,
) -> dict[str, int]:
    """Return the bytes of the arrays of one worker: weights, largest cache, and slot state."""
    ways = axis_ways(mesh.sizes, "batch")
    engine = config.engine.over(ways)
    max_tokens = bounds.max_prompt_tokens + config.sampling.max_any_new_tokens
    slots = engine.slot_bucket(bounds.max_requests)
    shape = drafter_shape(config, model) if drafts else None
    feature_layers = None if shape is None else shape.feature_layers

    def cache(of: ModelConfig, features: tuple[int, ...] | None = None) -> Any:
        return kv_cache.init(
            of,
            num_slots=slots,
            slot_pages=engine.slot_pages(max_tokens),
            num_pages=engine.num_pages(slots, max_tokens, ways),
            page_tokens=engine.page_tokens,
            dtype=dtype,
            for_cpu=is_cpu,
            feature_layers=features,
            zeros=mesh.zeros,
        )

    num_nodes = engine.most_nodes(slots)
    table = [
        jax.ShapeDtypeStruct((slots, len(cache_ops.COLUMNS)), jnp.int32),
        jax.ShapeDtypeStruct((slots, 2), jnp.float32),
        jax.eval_shape(partial(jax.random.key, 0)),
    ]
    arrays = {
        "rollout weights": mesh.params(param_specs(model), dtype),
        "keys and values": cache(model, feature_layers),
        "entries that wait to be written": no_pending(
            model, num_nodes, dtype, feature_layers, mesh.entries
        ),
        "slots": jax.eval_shape(cache_ops.make_slots, *table),
    }
    drafters = []
    if shape is not None:
        from reprise.spec.eagle import model as eagle

        whole = _Shards(dict.fromkeys(mesh.sizes, 1))
        drafters.append((shape.layer, whole.params(eagle.param_specs(shape), dtype)))
    if drafts and config.speculation.asks_model:
        draft = hf.shape(resolve_path(str(config.draft_model.directory)))
        drafters.append((draft, mesh.params(param_specs(draft), dtype)))
    if drafters:
        arrays["drafters' weights"] = [params for _, params in drafters]
        arrays["drafters' keys and values"] = [cache(of) for of, _ in drafters]
    return {name: num_bytes(tree) for name, tree in arrays.items()}


def num_bytes(tree: Any) -> int:
    """Return the bytes per device of the shapes in a tree; host arrays count 0."""
    return sum(_num_bytes(x) for x in jax.tree.leaves(tree))


def _num_bytes(x: Any) -> int:
    if not isinstance(x, jax.ShapeDtypeStruct):
        return 0
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return math.prod(shape) * (8 if is_key else x.dtype.itemsize)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The minimum of arrays that a run needs per device: resident arrays and gradients."""

    parts: Parts
    is_disjoint: bool

    @property
    def total_bytes(self) -> int:
        sums = [sum(part.values()) for part in self.parts.values()]
        return max(sums) if self.is_disjoint else sum(sums)

    def check(self, devices: Devices) -> str | None:
        """Return a warning if little memory is left for programs.

        Raises ValueError if the arrays exceed the memory of a device.
        """
        limit_bytes = devices.bytes_each
        if limit_bytes is None or self.total_bytes <= USABLE_SHARE * limit_bytes:
            return None
        arrays = (
            f"weights, optimizer, gradients and keys and values of {self.total_bytes / 2**30:.1f} "
            "GiB"
        )
        if self.total_bytes > limit_bytes:
            raise ValueError(
                f"expected a run that fits {limit_bytes / 2**30:.1f} GiB of memory of a device, "
                f"got {arrays} alone: {FIX}"
            )
        return (
            f"{arrays} leave little of {limit_bytes / 2**30:.1f} GiB of memory of a device for "
            f"activations and logits: {FIX}"
        )


def estimate(config: TrainConfig, model: ModelConfig, devices: Devices) -> Estimate:
    """Return the arrays that a run needs on these devices, or on all mesh devices if more."""
    mesh = config.mesh
    sched = config.sched
    ways = max(1, mesh.data) * mesh.fsdp * mesh.tensor
    if mesh.rollout_tensor != "auto":
        ways = math.lcm(ways, mesh.rollout_tensor)
    if sched.devices_per_worker > 1:
        ways = max(ways, sched.workers * sched.devices_per_worker)
    layout = divide(config, model, max(devices.count, ways), devices.processes)
    parts = held_arrays(config, model, layout, is_cpu=devices.is_cpu)
    gradients = parts[TRAINING]["gradients"] = parts[TRAINING]["master weights"]
    evaluation = evaluation_bytes(config, model, layout, is_cpu=devices.is_cpu)
    if evaluation > gradients:  # evaluations and gradients take turns
        parts[TRAINING]["evaluations, beyond gradients"] = evaluation - gradients
    return Estimate(parts, layout.is_disjoint)
