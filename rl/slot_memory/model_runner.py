"""A policy on its devices: static arguments of its steps, and placement of its arrays."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from reprise.models import layout, sharding
from reprise.models.attention import kv_cache
from reprise.models.attention.entries import Entries, Kind, Pending, no_pending
from reprise.models.attention.kv_cache import KVCache
from reprise.models.config import ModelConfig
from reprise.models.decoder import transformer
from reprise.models.layout import CACHE_AXES, ENTRY_AXES, FEATURE_AXES
from reprise.rl.records.trajectory import Request, check_requests
from reprise.rl.runtime import devices
from reprise.rl.slot_memory import cache_ops
from reprise.rl.slots.config import EngineConfig
from reprise.rl.slots.lockstep import LaunchRecord, Lockstep
from reprise.spec.buckets import widest_tree
from reprise.spec.budget.budget import DraftDecision
from reprise.spec.config import Draw, SamplingConfig
from reprise.spec.draft_cache.drafting import Shape
from reprise.spec.page_table import spread
from reprise.spec.verification.verify import Draws

T = TypeVar("T")
# jax lists the shards of an array at its first read; concurrent threads can see a partial list
_placing = threading.Lock()
MOST_AT_ONCE = 2  # programs of a CPU; each program uses several cores
MAX_DRAWING_TOKENS = 32  # of a chunk


@dataclasses.dataclass(eq=False, repr=False)
class ModelRunner:
    """The shape and settings of a policy on the devices of one worker.

    Sizes follow from `longest_tokens` of prompt and response, and from `most_slots` (`expect`).
    Without a mesh, a `device` of None is the process default: arrays on a named device are bound to
    it, and a mixture would compile another program. Hidden states are kept after `feature_layers`
    and after the last layer, unless `feature_layers` is None.
    """

    model: ModelConfig
    config: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    _: dataclasses.KW_ONLY
    dtype: Any = jnp.float32
    mesh: Mesh | None = None
    device: jax.Device | None = None
    feature_layers: tuple[int, ...] | None = None
    clock: Callable[[], float] = time.perf_counter
    number: int = 0  # among the workers of a run
    may_cut: bool = True  # whether top-k or top-p of any request cuts
    lockstep: Lockstep | None = None  # of a mesh that spans several processes
    longest_tokens: int = 0
    most_slots: int = 0

    def __post_init__(self) -> None:
        self.dtype = np.dtype(self.dtype)
        if self.mesh is not None:
            self.config = self.config.over(self.batch_ways)
        self.spans_processes = self.mesh is not None and self.mesh.is_multi_process
        self.record = None if self.lockstep is None else LaunchRecord(self.lockstep)
        self._threads = ThreadPoolExecutor(MOST_AT_ONCE)
        self._held = threading.local()  # per thread: another thread may run rounds
        self.first_slots: set[int] = set()  # the buckets that rollouts start in, if set

    def check(self, requests: Sequence[Request], sampling: SamplingConfig) -> None:
        """Raise ValueError for requests that cannot run."""
        check_requests(self.model, requests, sampling)
        assert self.may_cut or not sampling.may_cut, "an engine without cuts"
        assert self.may_cut or not any(r.sampling and r.sampling.may_cut for r in requests)

    @property
    def is_cpu(self) -> bool:
        """Return whether the devices are CPUs, whose keys are stored transposed."""
        return self._first_device.platform == "cpu"

    @property
    def _first_device(self) -> jax.Device:
        named = self.device if self.mesh is None else self.mesh.devices.flat[0]
        return named or jax.devices()[0]

    @property
    def batch_ways(self) -> int:
        return 1 if self.mesh is None else layout.axis_ways(self.mesh.shape, "batch")

    @property
    def num_pages(self) -> int:
        """The number of cache pages. Raises ValueError if the longest request does not fit."""
        slots = max(self.most_slots, self.config.slot_bucket(1))
        return self.config.num_pages(slots, self.longest_tokens, self.batch_ways)

    def kv_tokens(self, num_slots: int, longest_tokens: int) -> int:
        """Return how many positions `num_slots` requests can hold in total, however distributed."""
        needed = num_slots * longest_tokens
        if not self.config.pages:
            return needed
        pages = self.config.num_pages(num_slots, longest_tokens, self.batch_ways)
        return max(longest_tokens, min(needed, (pages - num_slots) * self.config.page_tokens))

    @property
    def slot_pages(self) -> int:
        """The maximum number of pages of a slot."""
        return self.config.slot_pages(self.longest_tokens)

    @property
    def num_positions(self) -> int:
        """The maximum number of positions of a slot."""
        return self.slot_pages * self.config.page_tokens

    def empty_cache(self, num_slots: int) -> KVCache:
        """Return an empty cache, allocated shard by shard on these devices."""
        return self.cache_of(self.model, num_slots, self.feature_layers)

    def cache_of(
        self, model: ModelConfig, num_slots: int, feature_layers: tuple[int, ...] | None = None
    ) -> KVCache:
        """Return an empty cache for the policy or a draft `model`."""
        return kv_cache.init(
            model,
            num_slots,
            self.slot_pages,
            self.num_pages,
            self.config.page_tokens,
            self.dtype,
            for_cpu=self.is_cpu,
            feature_layers=feature_layers,
            zeros=self.zero_pages,
        )

    def full_cache(self, num_slots: int) -> KVCache:
        """Return an empty cache with all positions readable, to time rounds with."""
        table_BN = spread(num_slots, self.slot_pages, self.num_pages, self.batch_ways)
        return dataclasses.replace(self.empty_cache(num_slots), table_BN=self.put(table_BN))

    def empty_states(self, num_slots: int) -> Any:
        """Return the hidden states of an empty cache, without its keys and values."""
        assert self.feature_layers is not None, "a cache that keeps none"
        width = self.model.d_model * (len(self.feature_layers) + 1)
        shape = self.num_pages, 1, self.config.page_tokens, width
        pages = self.zero_pages(shape, self.dtype, FEATURE_AXES)
        table_BN = self.zero_pages((num_slots, self.slot_pages), jnp.int32, (None, None))
        return kv_cache.PagedStates(pages, table_BN)

    def empty_pending(self, num_slots: int) -> Pending:
        """Return room on these devices for the entries of the largest round."""
        return self._no_pending(self.config.most_nodes(num_slots))

    def empty_entries(self, num_chunks: int, chunk_tokens: int | None = None) -> Entries:
        """Return zeroed entries for the chunks of a round, on these devices."""
        none = self._no_pending(num_chunks * (chunk_tokens or self.chunk_tokens))
        return Entries(none.keys, none.values, none.features)

    def _no_pending(self, num_entries: int) -> Pending:
        def zeros(shape: Sequence[int], dtype: Any) -> Any:
            where = self._whole
            if self.mesh is not None:
                where = sharding.fitting_sharding(self.mesh, shape, ENTRY_AXES[: len(shape)])
            return self._zeros(shape, dtype, where)

        return no_pending(self.model, num_entries, self.dtype, self.feature_layers, zeros)

    def zero_pages(
        self, shape: Sequence[int], dtype: Any, axes: Sequence[str | None] = CACHE_AXES
    ) -> Any:
        """Return zeroed keys, values or features; each device makes its shard."""
        return self._zeros(shape, dtype, self._cache_sharding(shape, axes))

    def _zeros(self, shape: Sequence[int], dtype: Any, where: Sharding | None) -> Any:
        if self.makes_shapes:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=where)
        return jnp.zeros(shape, dtype, device=where)

    @contextlib.contextmanager
    def shapes_only(self) -> Iterator[None]:
        """Make shapes instead of arrays in this thread, so that steps can be lowered on them."""
        before = self.makes_shapes
        self._held.shapes = True
        try:
            yield
        finally:
            self._held.shapes = before

    @property
    def makes_shapes(self) -> bool:
        """Return whether this thread is inside `shapes_only`."""
        return getattr(self._held, "shapes", False)

    def made(self, make: Callable[..., T], *args: Any) -> T:
        """Return the arrays `make(*args)`, replicated on these devices, or their shapes."""
        if not self.makes_shapes:
            return make(*args)
        return jax.tree.map(self._made, jax.eval_shape(make, *args))

    def _made(self, x: jax.ShapeDtypeStruct) -> Any:
        """Return the shape of a replicated result; the spec of random keys names each axis."""
        if self.mesh is None or not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return self.put(x)
        return _shape(x, NamedSharding(self.mesh, PartitionSpec(*[None] * x.ndim)))

    def expect(self, num_requests: int, longest_tokens: int) -> None:
        """Extend the sizes for `num_requests` requests of `longest_tokens`."""
        self.longest_tokens = max(self.longest_tokens, longest_tokens)
        self.most_slots = max(self.most_slots, self.config.slot_bucket(num_requests))

    @property
    def chunk_tokens(self) -> int:
        """The number of prompt tokens that a round computes in one chunk."""
        # a set number of tokens does not open a device
        is_cpu = not self.config.prefill_chunk_tokens and self.is_cpu
        return self.config.chunk_tokens(self.longest_tokens, is_cpu=is_cpu)

    @property
    def drawing_tokens(self) -> int:
        """The tokens of a chunk that draws, few because draws count up to the first difference."""
        return min(MAX_DRAWING_TOKENS, self.chunk_tokens)

    def drawing_chunks(self, num_slots: int) -> list[int]:
        """Return the chunk counts of passes that draw after each token, smallest first."""
        return self.config.drawing_chunks(num_slots, self.drawing_tokens)

    def pass_parts(self, num_rows: int, num_slots: int) -> list[int]:
        """Return the chunk counts of the programs that draw for `num_rows` rows, one chunk a row.

        With enough rows there are at least `num_at_once` programs.
        """
        sizes = self.drawing_chunks(num_slots)
        parts = list[int]()
        each = max(num_rows // self.num_at_once, sizes[0])
        while num_rows > 0:
            fitting = [n for n in sizes if n <= min(each, num_rows)]
            parts.append(max(fitting, default=sizes[0]))
            num_rows -= parts[-1]
        return parts

    @property
    def beside_chunks(self) -> list[int]:
        """Return the chunk counts of passes that draw together with a round; more gain nothing."""
        return [self.batch_ways]

    def slots_for(self, num_requests: int) -> int:
        """Return the bucket of slots that a rollout starts in, and computes its prompts in."""
        needed = self.config.slot_bucket(num_requests)
        return min((B for B in self.first_slots if B >= needed), default=needed)

    def no_chunks(self, num_chunks: int, chunk_tokens: int | None = None) -> np.ndarray:
        """Return a table for `Chunks.of_table` with nothing but padding."""
        table_TX = np.zeros((num_chunks, 2 + (chunk_tokens or self.chunk_tokens)), np.int32)
        table_TX[:, 0] = -1
        return table_TX

    def decode_options(self, scheme: Draw) -> dict[str, Any]:
        """Return the static arguments of `decode_rounds`."""
        return self.prompt_options(scheme) | {"max_rounds": self.config.rounds_per_fetch}

    def prompt_options(self, scheme: Draw) -> dict[str, Any]:
        """Return the static arguments of rounds that compute chunks of prompts or that draw."""
        return {"config": self.model, "draws": Draws(scheme, self.may_cut)}

    def verify_options(
        self, scheme: Draw, num_slots: int, num_nodes: int, *, chains: bool = False
    ) -> dict[str, Any]:
        """Return the static arguments of `verify_round`; `chains`: no slot has two paths."""
        max_nodes = widest_tree(num_slots, num_nodes, self.config.max_nodes)
        num_paths = num_slots if chains else num_nodes
        sizes = {"max_nodes": max_nodes, "num_paths": num_paths}
        return {**self.prompt_options(scheme), **sizes}

    def has_chains(self, num_slots: int, num_nodes: int) -> bool:
        """Return whether rounds of chains are separate programs.

        The number of paths is static: GPUs copy keys and values of each, TPUs tables of each.
        """
        return not self.is_cpu and num_nodes > 2 * num_slots

    def draft_options(
        self, scheme: Draw, num_slots: int, decision: DraftDecision
    ) -> dict[str, Any]:
        """Return the static arguments of `draft_rounds`, except its drafter."""
        num_nodes = decision.num_nodes
        tree_nodes = num_nodes // num_slots
        if decision.tree_tokens >= tree_nodes:
            tree_nodes = widest_tree(num_slots, num_nodes, self.config.max_nodes)
        shape = Shape(num_nodes, tree_nodes, self.config.rounds_per_fetch)
        return {**self.prompt_options(scheme), "shape": shape}

    def slot_arguments(
        self, ints_BC: np.ndarray, processing_B2: np.ndarray, key: jax.Array
    ) -> tuple[Any, ...]:
        """Return the arguments of `cache_ops.make_slots` for table columns and a `put` key."""
        return self.argument(ints_BC), self.argument(processing_B2), key

    def argument(self, x: np.ndarray) -> Any:
        """Return a host array as an argument of one call; without a mesh, jit beats `put`."""
        return x if self.mesh is None else self.put(x)

    def cast(self, x: Any) -> Any:
        """Return an array, on the host or a device, in the type that this policy computes in."""
        if self.makes_shapes:
            return jax.ShapeDtypeStruct(x.shape, self.dtype)
        return x.astype(self.dtype)

    def put(self, x: Any) -> jax.Array:
        """Replicate an array on these devices."""
        if self.makes_shapes:
            return _shape(x, self._whole)
        where = self.device if self.mesh is None else self._whole
        return sharding.put(x, where) if self.spans_processes else jax.device_put(x, where)

    def readable(self, x: jax.Array) -> jax.Array:
        """Return an array that this process can read; all processes must call it."""
        return self.in_turn(cache_ops.gathered(x)) if self.spans_processes else x

    def in_turn(self, results: T) -> T:
        """Return the results of a program; wait for them if the next program may not overlap."""
        return devices.in_turn(results) if self.spans_processes else results

    @property
    def _whole(self) -> Sharding | None:
        """The sharding of arrays that are replicated on these devices."""
        if self.mesh is not None:
            return NamedSharding(self.mesh, PartitionSpec())
        return None if self.device is None else SingleDeviceSharding(self.device)

    def place(
        self, params: transformer.Params, model: ModelConfig | None = None
    ) -> transformer.Params:
        """Put weights of the policy or another `model` on these devices; safe from any thread."""
        with _placing:
            return self._place(params, model or self.model)

    def _place(self, params: transformer.Params, model: ModelConfig) -> transformer.Params:
        if self.makes_shapes and self.mesh is None:
            return jax.tree.map(self.put, params)
        if self.mesh is None:
            arrays = [x for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
            scattered = any(len(x.devices()) > 1 for x in arrays)  # over the mesh of a trainer
            device = jax.local_devices()[0] if scattered and self.device is None else self.device
            return jax.device_put(params, device)
        shardings = sharding.param_shardings(self.mesh, transformer.param_specs(model))
        return jax.tree.map(_shape if self.makes_shapes else sharding.put, params, shardings)

    def put_kv(self, x: np.ndarray, kind: Kind) -> jax.Array:
        """Put keys, values or features, sharded like a cache."""
        return sharding.put(x, self._cache_sharding(x.shape, kind.axes))

    def _cache_sharding(self, shape: Sequence[int], axes: Sequence[str | None]) -> Sharding | None:
        if self.mesh is not None:
            return sharding.fitting_sharding(self.mesh, shape, axes)
        return None if self.device is None else SingleDeviceSharding(self.device)

    @property
    def num_at_once(self) -> int:
        """Return how many programs these devices run concurrently; more than one only on a CPU.

        On a mesh, devices would run the programs of two threads in different orders.
        """
        is_one_cpu = self.mesh is None and self.is_cpu
        return min(MOST_AT_ONCE, os.cpu_count() or 1) if is_one_cpu else 1

    def at_once(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Return the results of independent calls; on a CPU, threads let the calls overlap."""
        if min(self.num_at_once, len(calls)) == 1:
            return [call() for call in calls]

        def here(call: Callable[[], T]) -> T:
            with self.mesh_context():
                return call()

        return list(self._threads.map(here, calls))

    def mesh_context(self) -> Any:
        """Return the context that steps on these devices are called in."""
        if self.mesh is not None:
            return jax.set_mesh(self.mesh)
        return jax.default_device(self.device)  # None resets another runner's device


def _shape(x: Any, where: Sharding | None) -> Any:
    """Return the shape of an array with this sharding, or uncommitted (None)."""
    aval = jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=where, weak_type=aval.weak_type)
