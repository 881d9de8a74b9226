"""The meshes of a run and of its engines, and whether all passes there compute the same bits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from reprise.models.config import ModelConfig
from reprise.models.layout import axis_ways
from reprise.models.sharding import make_mesh, platform_in_use, rollout_mesh
from reprise.rl.learner.config import why_other_bits, why_other_bits_on_accelerators
from reprise.rl.runtime import devices
from reprise.rl.settings.config import TrainConfig
from reprise.rl.weights.gathering import own_devices
from reprise.rl.workers.engines import split_devices


def engine_mesh(
    config: TrainConfig, model: ModelConfig, mesh: Mesh | None, *, own: bool = False
) -> Mesh | None:
    """Return the mesh of an engine on all trainer devices, or if `own`, on the local devices.

    Raises ValueError if `Mesh.rollout_tensor` does not fit the devices or the policy.
    """
    if mesh is None:
        return None
    devices_here = own_devices(mesh) if own else list(mesh.devices.flat)
    ways = config.mesh.fsdp * config.mesh.tensor
    tensor = config.mesh.rollout_tensor
    return rollout_mesh(devices_here, model.num_kv_heads, ways, tensor)


def open_mesh(
    config: TrainConfig, model: ModelConfig, *, own: bool = False
) -> tuple[Mesh | None, str | None]:
    """Return the mesh of a policy, and a remark if its passes compute different bits.

    Every program that opens a policy calls this before loading weights. If `own`, engines use the
    devices of this process. Raises ValueError.
    """
    devices.keep_order(config.numerics.same_bits)
    mesh = run_mesh(config)
    engine_mesh(config, model, mesh, own=own)
    return mesh, check_bits(config, model, mesh)


def check_bits(config: TrainConfig, model: ModelConfig, mesh: Mesh | None) -> str | None:
    """Return why passes compute different bits; None without a reason or if `same_bits` is False.

    Raises ValueError if `NumericsConfig.same_bits` requires the same bits.
    """
    reason = _why_other_bits(config, model, mesh)
    if reason is None or config.numerics.same_bits is False:
        return None
    if config.numerics.same_bits is True:
        raise ValueError(f"Numerics.same_bits=True: {reason}")
    return f"tokens and ratios are exact up to rounding: {reason}"


def _why_other_bits(config: TrainConfig, model: ModelConfig, mesh: Mesh | None) -> str | None:
    tensor_ways = 1 if mesh is None else mesh.shape["tensor"]
    platform = platform_in_use()
    if platform == "cpu":
        return why_other_bits(model, tensor_ways)
    if platform not in ("cuda", "tpu"):
        return f"expected CPUs, TPUs or GPUs, whose kernels sum in one order, got a {platform}"
    if config.cluster.rollouts != "local":
        return f"expected Cluster.rollouts='local', got {config.cluster.rollouts!r}"
    if config.cluster.kind == "ray":
        return "expected Cluster.kind='local' or 'spmd': workers on Ray have flags of their own"
    if platform == "tpu" and (reason := _large_rounds(config, model, mesh)):
        return reason
    if platform == "cuda" and (reason := _single_rows(config, model, mesh)):
        return reason
    return why_other_bits_on_accelerators(
        platform,
        model,
        tensor_ways,
        dtype=config.trainer.dtype,
        page_tokens=config.engine.page_tokens,
    )


def _large_rounds(config: TrainConfig, model: ModelConfig, mesh: Mesh | None) -> str | None:
    """Return why the pages and tokens of a round do not fit into the memories of a TPU core."""
    from reprise.models.kernels.tpu.page_attention_tpu import why_too_large

    engines = engine_mesh(config, model, mesh)
    sizes = {} if engines is None else engines.shape
    ways = axis_ways(sizes, "batch") if sizes else 1
    engine = config.engine.over(ways)
    prompts = engine.prefill_rows * engine.chunk_tokens(config.longest_tokens, is_cpu=False)
    return why_too_large(
        (engine.max_slots // ways, engine.slot_pages(config.longest_tokens)),
        max(prompts, engine.max_round_nodes, 2 * engine.max_slots),
        model.num_kv_heads // sizes.get("tensor", 1),
        model.head_dim,
        config.trainer.dtype,
    )


def _single_rows(config: TrainConfig, model: ModelConfig, mesh: Mesh | None) -> str | None:
    """Return why a GPU has one-row products, which XLA sums in another order than its tiles."""
    engines = engine_mesh(config, model, mesh, own=True)
    ways = 1 if engines is None else axis_ways(engines.shape, "batch")
    engine = config.engine.over(ways)
    prompts = engine.prefill_rows * engine.chunk_tokens(config.longest_tokens, is_cpu=False)
    rows = {"min_slots": engine.min_slots, "prefill_rows × prefill_chunk_tokens": prompts}
    for name, size in rows.items():
        if size < 2 * ways:
            return (
                f"expected Engine.{name} of at least {2 * ways}, two for each of {ways} part(s) of "
                f"the devices, got {size}: one row of a product has another order of sums"
            )
    return None


def run_mesh(config: TrainConfig) -> Mesh | None:
    """Return the mesh of a configuration, with an equal number of devices from each process.

    Return None if one device is enough. Raises ValueError for too many or too few devices.
    """
    of_processes: dict[int, list[jax.Device]] = {}
    for device in devices.found():
        of_processes.setdefault(device.process_index, []).append(device)
    rows: list[Sequence[jax.Device]] = list(of_processes.values())
    if config.cluster.kind != "ray":  # Ray workers have other devices
        rows = [split_devices(config.sched, row)[0] for row in rows]
    sizes = config.mesh.data, config.mesh.fsdp, config.mesh.tensor
    is_single = jax.process_count() == 1
    if is_single and (sizes == (1, 1, 1) or (len(rows[0]) == 1 and sizes == (-1, 1, 1))):
        return None
    if config.sched.beside_training and config.mesh.data != -1:
        each = math.ceil(math.prod(sizes) / len(rows))
        rows = [row[:each] for row in rows]
    return make_mesh(config.mesh, [device for row in rows for device in row])
