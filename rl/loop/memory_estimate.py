"""An estimate of a run's device memory, compared with what a device has.

The estimate is arithmetic, for one device of each kind, before anything is compiled:

    total = what stays + max(what training adds, what rollouts add)

Arrays that exist for certain (weights, moments, gradients, keys and values) are counted shard by
shard. The temporary memory of a program is its largest arrays, times how many of them are alive at
once as XLA compiled it on a CPU (`_COPIES`, `_LOGITS`, …;
tests/rl/loop/test_memory_estimate.py holds them to what the compiler says). Kernels that never make
an array, as on accelerators they may not, need less.
"""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from models.config import ModelConfig
from models.layout import (
    CACHE_AXES,
    FEATURE_AXES,
    LONG_ROW_BLOCK_TOKENS,
    LONG_ROW_FEED_FORWARD_PARTS,
    LONG_ROW_TOKENS,
    PAGE_BLOCK_POSITIONS,
    causal_block_tokens,
    layers_kept_apart,
    rollout_tensor,
    shard_shape,
)
from models.params import leaves, param_specs
from rl import packing
from rl.loop.experiment import TrainConfig, drafter_shape
from spec.buckets import widest_tree

if TYPE_CHECKING:
    import jax

_FLOAT32 = 4
_LOGITS_TRAINING = 12  # of a chunk's logits: processing and its gradient
_LOGITS_ROLLOUT = 4  # of a round's
_SCORES_KEPT = 1.4  # of a layer's attention scores, for its gradient
_SCORES_AT_WORK = 2.2  # while a layer is computed, or its gradient
_LOSS_ARRAYS = 14  # [samples, positions] of a micro-batch: inputs and their gradients


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of a run: their count, bytes of each (None: unknown), and type.

    Each of so many processes has as many of them.
    """

    count: int = 1
    limit_bytes: int | None = None
    is_cpu: bool = True
    shared: bool = True  # one memory for all of them, as a host's virtual devices have
    processes: int = 1


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes of one device by part; `certain` are arrays, whatever a compiler makes of the rest."""

    parts: dict[str, int]
    total: int
    certain: int


def estimate(config: TrainConfig, model: ModelConfig, devices: Devices) -> Estimate:
    """The memory of one device, of those that hold most."""
    itemsize = _itemsize(config, devices)
    trainer, workers = _meshes(config, model, devices)
    stays = _state(config, model, trainer, itemsize)
    training = _training(config, model, trainer, itemsize, devices)
    rollouts = _rollouts(config, model, workers, itemsize, devices.is_cpu)
    own = devices.count // devices.processes
    needed = trainer.count + devices.processes * workers.count
    apart = config.sched.beside_training and needed <= devices.count
    if not apart and itemsize == _FLOAT32 and _have_one_layout(config, trainer, workers):
        rollouts["rollout weights"] = 0  # the master weights serve
    if not apart:  # several workers of a device each have their own
        each = -(-config.sched.workers // max(1, own // workers.count))
        rollouts = {name: size * each for name, size in rollouts.items()}
    sure = {"gradients", "rollout weights", "KV cache"}
    held = sum(stays.values())

    def most(names: set[str] | None) -> int:
        train, roll = (
            sum(size for name, size in parts.items() if names is None or name in names)
            for parts in (training, rollouts)
        )
        return max(held + train, roll) if apart else held + max(train, roll)

    return Estimate(stays | training | rollouts, most(None), most(sure))


def verdict(found: Estimate, devices: Devices) -> str | None:
    """Return a warning for a run that may not fit; None where it does, or nobody knows.

    Raises ValueError where the arrays that exist for certain exceed a device's memory.
    """
    if devices.limit_bytes is None:
        return None
    ways = devices.count if devices.shared else 1
    total, certain, limit = found.total * ways, found.certain * ways, devices.limit_bytes
    mend = (
        "lower Engine.slots, Sampling.max_new_tokens or Trainer.micro_batch_tokens, set "
        "Trainer.remat = 'layer' (or 'layer:4'), split weights over more devices (Mesh.fsdp, "
        "Mesh.tensor), or take a smaller policy"
    )
    if certain > limit:
        raise ValueError(
            f"expected a run that fits {limit / 2**30:.1f} GiB of memory, got weights, optimizer "
            f"and keys and values of {certain / 2**30:.1f} GiB alone: {mend}"
        )
    if total > limit:
        return (
            f"this run may need {total / 2**30:.1f} GiB of memory where {limit / 2**30:.1f} GiB "
            f"are there: {mend}"
        )
    return None


def devices_of(found: Sequence[jax.Device]) -> Devices:
    """Describe devices that jax has opened; a CPU's memory is the host's."""
    is_cpu = found[0].platform == "cpu"
    stats: Any = None if is_cpu else found[0].memory_stats()
    limit = _host_bytes() if is_cpu else (stats or {}).get("bytes_limit")
    processes = len({device.process_index for device in found})
    return Devices(len(found), limit, is_cpu, shared=is_cpu, processes=processes)


def devices_unopened() -> Devices:
    """Describe the devices without opening one: NVIDIA's tool, else the host's memory."""
    asked = os.environ.get("JAX_PLATFORMS", "").partition(",")[0]
    if asked == "cpu":
        return Devices(1, _host_bytes())
    try:
        command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        sizes = [int(line) * 2**20 for line in done.stdout.split("\n") if line.strip()]
    except (OSError, ValueError, subprocess.SubprocessError):
        sizes = []
    if sizes:
        # jax takes three quarters of it, unless told otherwise
        share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75"))
        return Devices(len(sizes), int(min(sizes) * share), is_cpu=False, shared=False)
    return Devices(1, None if asked else _host_bytes())


def _host_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


# --- the parts ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Mesh:
    sizes: dict[str, int]

    @property
    def count(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def tensor(self) -> int:
        return self.sizes["tensor"]

    @property
    def batch(self) -> int:
        return self.sizes["data"] * self.sizes["fsdp"]


def _itemsize(config: TrainConfig, devices: Devices) -> int:
    """Bytes of a value in products."""
    name = config.trainer.compute_dtype
    return 2 if name == "bfloat16" or (name == "auto" and not devices.is_cpu) else _FLOAT32


def _meshes(config: TrainConfig, model: ModelConfig, devices: Devices) -> tuple[_Mesh, _Mesh]:
    """The trainer's mesh, and that of one rollout worker."""
    sched, mesh = config.sched, config.mesh
    own, count = devices.processes * sched.workers * sched.devices_per_worker, devices.count
    left = count - own if sched.beside_training and own < count else count
    inner = mesh.fsdp * mesh.tensor
    data = max(1, left // inner) if mesh.data == -1 else mesh.data
    trainer = _Mesh({"data": data, "fsdp": mesh.fsdp, "tensor": mesh.tensor})
    size, ways = sched.devices_per_worker, sched.devices_per_worker
    asked: int | Literal["auto"] = "auto"
    if _is_one_engine(config):
        size, ways, asked = trainer.count, inner, mesh.rollout_tensor
        if devices.processes > 1 and config.cluster.rollouts == "local":
            size = -(-size // devices.processes)
    if asked != "auto" and size % asked:
        asked = "auto"  # refused once the devices are known
    tensor = rollout_tensor(size, ways, model.num_kv_heads, asked)
    return trainer, _Mesh({"data": size // tensor, "fsdp": 1, "tensor": tensor})


def _have_one_layout(config: TrainConfig, trainer: _Mesh, workers: _Mesh) -> bool:
    """Return whether rollouts have the weights where the trainer has them."""
    same = trainer.sizes["fsdp"] == 1 and trainer.tensor == workers.tensor
    return trainer.sizes == workers.sizes or (_is_one_engine(config) and same)


def _is_one_engine(config: TrainConfig) -> bool:
    """Return whether rollouts have one engine a process, on the trainer's devices."""
    return config.sched.mode == "sync" and config.sched.workers == 1


def _weights(model: ModelConfig, mesh: _Mesh, itemsize: int) -> int:
    specs = leaves(param_specs(model))
    return itemsize * sum(
        math.prod(shard_shape(mesh.sizes, spec.shape, spec.axes)) for spec in specs
    )


def _state(config: TrainConfig, model: ModelConfig, mesh: _Mesh, itemsize: int) -> dict[str, int]:
    weights = _weights(model, mesh, _FLOAT32)
    reference = _weights(model, mesh, itemsize)
    halved = config.optimizer.first_moment == "bfloat16"
    return {
        "master weights": weights,
        "Adam moments": weights + (weights // 2 if halved else weights),
        "reference policy": reference if config.algorithm.needs_reference else 0,
        "critic": 4 * weights if config.algorithm.resolved.needs_critic else 0,
    }


def _training(
    config: TrainConfig, model: ModelConfig, mesh: _Mesh, itemsize: int, devices: Devices
) -> dict[str, int]:
    """The bytes of a micro-batch, the state aside."""
    trainer, weights = config.trainer, _weights(model, mesh, _FLOAT32)
    shape = packing.batch_shape(
        trainer.positions_of_micro_batch, config.longest_tokens, row_multiple=mesh.batch
    )
    rows, length = shape.rows // mesh.batch, shape.length
    tokens = rows * length
    is_long = length >= LONG_ROW_TOKENS
    layer = tokens * itemsize * _values_of_layer(model, mesh.tensor, is_long)
    scores = _FLOAT32 * rows * _causal_scores(model, length) // mesh.tensor
    remat = trainer.remat_on(devices.is_cpu)
    kept = model.num_layers * (layer + int(_SCORES_KEPT * scores))
    if remat != "none":
        kept = tokens * itemsize * _values_kept(model, mesh.tensor, is_long, remat)
    mask = 0 if is_long else rows * length * length
    copies = weights * itemsize // _FLOAT32 if itemsize < _FLOAT32 else 0
    whole = _weights(model, _Mesh(mesh.sizes | {"fsdp": 1}), itemsize) if mesh.batch > 1 else 0
    gradients = weights  # of this micro-batch, beside those of all so far
    if remat != "none":  # weights are rounded and gathered, and gradients added, layer by layer
        parts = model.num_layers + 2
        copies, whole, gradients = (2 * x // parts for x in (copies, whole, gradients))
    chunk_tokens = min(trainer.logprob_chunk_tokens // mesh.batch or 1, tokens)
    logits = _LOGITS_TRAINING * _FLOAT32 * chunk_tokens * model.vocab_size // mesh.tensor
    at_work = layer + int(_SCORES_AT_WORK * scores)
    return {
        "gradients": weights + gradients,
        "compute copies": copies,
        "gathered weights": whole if mesh.sizes["fsdp"] > 1 else 0,
        "activations": kept + mask,
        "a layer's gradient, or logits": max(at_work, logits),
        "loss arrays": _LOSS_ARRAYS * _FLOAT32 * shape.samples * length // mesh.batch,
    }


def _rollouts(
    config: TrainConfig, model: ModelConfig, mesh: _Mesh, itemsize: int, is_cpu: bool
) -> dict[str, int]:
    """The bytes of a rollout: its largest buckets of slots, positions and nodes."""
    engine = config.engine.over(mesh.batch)
    slots = engine.slot_bucket(config.rollout.num_requests)
    longest_tokens = config.longest_prompt_tokens + config.sampling.max_new_tokens
    positions = engine.position_sizes(longest_tokens)[-1]
    cache = _cache(config, model, mesh, slots, positions, itemsize)
    gathered = _cache(config, model, mesh, engine.prefill_rows, positions, itemsize)
    grows, gathered = cache // model.num_layers, mesh.batch * gathered // model.num_layers
    is_paged = engine.is_paged(is_cpu)
    chunks = engine.prefill_rows, engine.chunk_tokens(longest_tokens, is_paged)
    if is_paged:  # attention reads a block of positions at a time
        pages = engine.num_pages(slots, longest_tokens, mesh.batch)
        cache = _cache(config, model, mesh, pages, engine.page_tokens, itemsize)
        positions, grows, gathered = min(positions, PAGE_BLOCK_POSITIONS), 0, 0
    nodes = (
        engine.most_nodes(slots) if config.speculation.enabled or config.reuse.enabled else slots
    )
    # attention pads rows to at most so many: models.attention.attend_nodes
    queries = slots * (widest_tree(slots, nodes, engine.max_nodes) if nodes > slots else 1)
    seen = positions * queries // nodes
    beside = min([nodes, *engine.sizes_beside_prompts(slots)[-1:]])
    passes = {
        "a round": _pass(model, mesh, itemsize, _shard(nodes, mesh.batch), 1, seen),
        "prompts": _pass(model, mesh, itemsize, _shard(beside, mesh.batch), 1, seen)
        + gathered
        + _prompts(config, model, mesh, itemsize, positions, chunks),
    }
    return {
        "rollout weights": _weights(model, mesh, itemsize),
        "KV cache": cache,
        "a layer of the cache, as it grows": grows,
        "a round, or prompts": max(passes.values()),
    }


def _cache(
    config: TrainConfig, model: ModelConfig, mesh: _Mesh, slots: int, positions: int, itemsize: int
) -> int:
    """Bytes of the keys, values and features of `slots` rows."""
    heads = (slots, model.num_kv_heads, positions, model.head_dim)
    values = 2 * model.num_layers * math.prod(shard_shape(mesh.sizes, heads, CACHE_AXES))
    shape = drafter_shape(config, model) if config.speculation.learns else None
    if shape is not None:
        wide = (slots, 1, positions, model.d_model * (len(shape.feature_layers) + 1))
        values += math.prod(shard_shape(mesh.sizes, wide, FEATURE_AXES))
    return itemsize * values


def _prompts(
    config: TrainConfig,
    model: ModelConfig,
    mesh: _Mesh,
    itemsize: int,
    positions: int,
    chunks_TC: tuple[int, int],
) -> int:
    """A round's chunks of prompts, but for the rows that a layer gathers: their entries, a pass.

    There are T chunks of C tokens.
    """
    (rows, chunk), whole = chunks_TC, _Mesh(mesh.sizes | {"data": 1})
    # every copy of the weights has the entries of all chunks
    entries = _cache(config, model, whole, rows, chunk, itemsize)
    seen = positions + rows * chunk
    chunks = _pass(model, mesh, itemsize, _shard(rows, mesh.batch), chunk, seen, logits=False)
    return entries + chunks


def _pass(
    model: ModelConfig,
    mesh: _Mesh,
    itemsize: int,
    rows: int,
    nodes: int,
    positions: int,
    logits: bool = True,
) -> int:
    """The largest arrays of a forward pass over a cache: a layer's, its scores, the logits."""
    heads = _shard(model.num_heads, mesh.tensor)
    scores = _SCORES_AT_WORK * _FLOAT32 * rows * heads * nodes * positions
    layer = rows * nodes * itemsize * _values_of_layer(model, mesh.tensor)
    drawn = _LOGITS_ROLLOUT * _FLOAT32 * rows * nodes * _shard(model.vocab_size, mesh.tensor)
    return max(int(scores) + layer, drawn if logits else 0)


def _values_of_layer(model: ModelConfig, tensor: int, is_long: bool = False) -> int:
    """Values a token that the gradient of a layer keeps: each array as often as XLA does."""
    features = model.d_ff // LONG_ROW_FEED_FORWARD_PARTS if is_long else model.d_ff
    split = 5 * features + (5 * model.num_heads + 8 * model.num_kv_heads) * model.head_dim
    return 5 * model.d_model + split // tensor


def _values_kept(model: ModelConfig, tensor: int, is_long: bool, remat: str) -> int:
    """Values a token that all layers keep for their gradients (models.remat)."""
    layers, apart = model.num_layers, layers_kept_apart(remat)
    inputs = _shard(model.d_model, tensor)
    if remat == "dots":
        features = 0 if is_long else 2 * model.d_ff  # long rows compute them again in any case
        split = features + (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        return layers * (inputs + 2 * model.d_model + split // tensor)
    several = apart if apart > 1 else 0  # whose gradients are computed
    return (-(-layers // apart) + min(several, layers)) * inputs


def _causal_scores(model: ModelConfig, length: int) -> int:
    """Attention scores of a row and layer, its queries in blocks (models.layout).

    Of long rows those of one block of queries with one of keys.
    """
    if length >= LONG_ROW_TOKENS:
        return model.num_heads * LONG_ROW_BLOCK_TOKENS**2
    size = causal_block_tokens(length)
    return model.num_heads * sum(size * end for end in range(size, length + 1, size))


def _shard(size: int, ways: int) -> int:
    """One device's part of `size`; all of it where it does not divide."""
    return size // ways if size % ways == 0 else size
