"""A run on a target's devices, as shapes: what it holds between programs, and its programs.

Nothing is computed here and no weight is read. Programs are those that the run itself lowers:
`rl.learner.trainer.calls`, `rl.warm_up.Pool`.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from models import hf, transformer
from models.config import ModelConfig
from models.sharding import make_mesh, rollout_mesh
from rl.config.loader import resolve_path
from rl.engine.engine import Engine
from rl.learner import critic, trainer
from rl.learner.config import TrainSpec
from rl.learner.optimizer import TrainState, make_optimizer, state_shapes
from rl.loop.experiment import TrainConfig, drafter_shape, recipe
from rl.loop.first_programs import rollout_reach
from rl.speculation.device_drafters import DeviceDrafters, DeviceDrafterSource
from rl.speculation.draft_model import DraftModel
from rl.speculation.learned_drafter import LearnedDrafter
from rl.warm_up import compile_buckets
from rl.warm_up.rollout_programs import WHOLE_MODEL, Pool, Program
from rl.workers.multi_engine import split_devices
from spec.budget.config import LEARNED, MODEL
from spec.eagle import model as eagle
from spec.eagle.model import EagleWeights
from spec.verify import verify_round

TRAINING, ROLLOUTS = "training", "rollouts"
# Arguments of the programs of rollouts that stay on a device from one program to the next.
WEIGHTS, ENTRIES = "rollout weights", "keys and values"
DRAFTED = "a drafter's keys and values"
HELD = {
    "params": WEIGHTS,
    "cache": ENTRIES,
    "pending": "entries that wait to be written",
    "slots": "slots",
    "draft_cache": DRAFTED,
    "given": "a drafter's weights",
}
PARTS_OF_HELD = ("rows", "features_B1SW")  # arrays of a cache
# Passes over the weights of the training's programs; a gradient is two, and one more with remat.
PASSES = {"accumulate": 3, "token_logprobs": 1, "token_values": 1}


@dataclasses.dataclass(frozen=True, eq=False)
class RunProgram:
    """One program of a run and how it is lowered.

    `held_bytes` of its arguments lie on a device between programs too. `tokens` pass through the
    model `passes` times; without any it is not a whole-model program. Programs of one `kind`
    differ in their sizes, of which `order` says what is larger.
    """

    part: str
    kind: str
    sizes: str
    lower: Callable[[], Any]
    held_bytes: int
    order: int
    tokens: int = 0
    passes: int = 1

    @property
    def is_deep(self) -> bool:
        """Return whether compiling takes long because of its layers."""
        return self.part == TRAINING or self.tokens > 0

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.sizes}" if self.sizes else self.kind


class RunShapes:
    """The programs of a configuration for devices that may be anywhere.

    Raises ValueError where the mesh does not cover the devices, as a run does.
    """

    def __init__(
        self, config: TrainConfig, model: ModelConfig, devices: Sequence[Any], *, is_cpu: bool
    ) -> None:
        self.config, self.model = _resolved(config, is_cpu=is_cpu), model
        self.recipe: TrainSpec = recipe(self.config, model)
        own, workers = _split(self.config, devices)
        self.apart = not set(own) & set(workers)
        self.mesh = make_mesh(config.mesh, own)
        self.worker_mesh, alike = _worker_mesh(self.config, model, self.mesh, workers)
        self.workers_of_device = alike
        shape = drafter_shape(self.config, model)
        self.engine = Engine(
            model,
            self.config.engine,
            mesh=self.worker_mesh,
            dtype=self.recipe.trainer.dtype,
            feature_layers=None if shape is None else shape.feature_layers,
        )

    # -- what stays on a device --------------------------------------------------------

    @cached_property
    def state(self) -> TrainState:
        """The shapes of the training state."""
        optimizer = make_optimizer(self.config.optimizer, self.recipe.total_steps)
        state = self._in_mesh(state_shapes, transformer.param_specs(self.model), optimizer)
        if self.config.algorithm.resolved.needs_critic:
            state = dataclasses.replace(state, critic=self._in_mesh(critic.shapes, self.recipe))
        return state

    def held(self) -> dict[str, dict[str, int]]:
        """Return the bytes of a device that stay there between programs, by part and name."""
        state, weights = self.state, shard_bytes(self.state.params)
        training = {"master weights": weights, "optimizer's state": shard_bytes(state.opt_state)}
        if self.config.algorithm.needs_reference:
            training["reference policy"] = weights
        if state.critic is not None:
            training["critic and its optimizer's state"] = shard_bytes(state.critic)
        rollouts: dict[str, int] = {}
        for _, names in self._rollouts:
            for name, size in names.items():
                rollouts[name] = max(rollouts.get(name, 0), size)
        if self._shares_weights:
            rollouts[WEIGHTS] = 0  # the master weights serve
        rollouts = {name: size * self.workers_of_device for name, size in rollouts.items()}
        return {TRAINING: training, ROLLOUTS: rollouts}

    @property
    def _shares_weights(self) -> bool:
        same = self.worker_mesh.shape == self.mesh.shape
        return not self.apart and same and self.engine.dtype == np.float32

    # -- programs ----------------------------------------------------------------------

    def programs(self) -> list[RunProgram]:
        """Return what a run compiles for training and rollouts, those of training first."""
        return [*self._training(), *(program for program, _ in self._rollouts)]

    def _in_mesh(self, make: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with jax.set_mesh(self.mesh):
            return make(*args, **options)

    def _training(self) -> Iterator[RunProgram]:
        shape = self._in_mesh(trainer.batch_shape, self.recipe, self.config.longest_tokens)
        tokens, state = shape.rows * shape.length, self.state
        sizes = f"{shape.rows} rows of {shape.length} tokens"
        weights, both = shard_bytes(state.params), shard_bytes((state.params, state.opt_state))
        held = {"accumulate": weights, "apply": both, "token_logprobs": weights}
        if state.critic is not None:
            held["token_values"] = shard_bytes(state.critic.params)
        seen = set[str]()
        for call in self._in_mesh(trainer.calls, state, shape, recipe=self.recipe):
            name = call.step.__name__
            kind = f"{name} of the critic" if name in seen else name
            seen.add(name)
            passes = PASSES.get(name, 0)
            passes += name == "accumulate" and self.config.trainer.remat not in (False, "none")
            yield RunProgram(
                *(TRAINING, kind, sizes if passes else "", partial(self._in_mesh, call.lower)),
                *(held.get(name, 0), tokens, tokens if passes else 0, passes),
            )
        if not self._shares_weights:
            cast = trainer.cast_call(state.params, self.engine.dtype)
            lower = partial(self._in_mesh, cast.lower)
            yield RunProgram(TRAINING, "weights for rollouts", "", lower, weights, 0)

    @cached_property
    def _rollouts(self) -> list[tuple[RunProgram, dict[str, int]]]:
        """The programs of rollouts, each with what it is given that stays, by name."""
        return [self._of_rollouts(program) for program in self.of_rollouts()]

    def of_rollouts(self) -> Iterator[Program]:
        """Yield the engine's programs; as each is yielded, arguments are shapes on its mesh."""
        engine, specs = self.engine, transformer.param_specs(self.model)
        with engine.mesh_context(), engine.shapes_only():
            shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, engine.dtype), specs)
            reach = dataclasses.replace(rollout_reach(self.config), drafters=self._drafters())
            settings = engine, engine.place(shapes), self.config.sampling, reach
            yield from Pool(*settings).programs()

    def _of_rollouts(self, program: Program) -> tuple[RunProgram, dict[str, int]]:
        args, options = program.arguments()
        step = program.step
        given = dict(zip(inspect.signature(step).parameters, args, strict=False))
        is_drafters = "drafting" in options and "draft_cache" not in given
        held = {HELD[name]: shard_bytes(x) for name, x in given.items() if name in HELD}
        if is_drafters and "cache" in given:
            held[DRAFTED] = held.pop(ENTRIES)
        part_of_held = sum(shard_bytes(x) for name, x in given.items() if name in PARTS_OF_HELD)
        tokens = _tokens(given) if step in WHOLE_MODEL else 0
        verifies = step is verify_round and given["chunks_TX"] is not None
        kind = step.__name__ + (" beside prompts" if verifies else "")
        one = RunProgram(
            *(ROLLOUTS, kind, _sizes(given, program.num_positions)),
            partial(self._lowered, program),
            *(sum(held.values()) + part_of_held, shard_bytes(args), tokens),
        )
        return one, held

    def _lowered(self, program: Program) -> Any:
        with self.engine.mesh_context():
            return compile_buckets.lowered(self.engine, program)

    def _drafters(self) -> DeviceDrafters:
        """The drafters on the device, of weights that are shapes."""
        config, model, found = self.config, self.model, dict[str, DeviceDrafterSource]()
        shape = drafter_shape(config, model)
        if shape is not None:
            key = jax.eval_shape(partial(jax.random.key, 0))
            weights = jax.eval_shape(partial(eagle.init, shape), key)
            size = shape.draft_vocab_size
            ids_U = np.arange(size, dtype=np.int32) if size else None
            found[LEARNED] = LearnedDrafter(
                EagleWeights(shape, weights, ids_U), config.drafter.tree
            )
        if config.speculation.asks_model:
            draft = hf.shape(resolve_path(str(config.draft_model.directory)))
            specs = transformer.param_specs(draft)
            params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32), specs)
            found[MODEL] = DraftModel(draft, params, config.draft_model)
        return found


def shard_bytes(tree: Any) -> int:
    """Return the bytes of a tree's arrays on one device of those that they are split over."""
    return sum(_shard_bytes(x) for x in jax.tree.leaves(tree))


def _shard_bytes(x: Any) -> int:
    if not isinstance(x, jax.ShapeDtypeStruct):
        return 0  # from the host, for one call
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    itemsize = 8 if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x.dtype.itemsize
    return math.prod(shape) * itemsize


def _tokens(given: dict[str, Any]) -> int:
    """Return how many tokens pass through the model in one round."""
    nodes, chunks = given.get("nodes_5M"), given.get("chunks_TX")
    slots = given["slots"].active.shape[0]
    found = slots if nodes is None else nodes.shape[1]
    return found + (0 if chunks is None else chunks.shape[0] * (chunks.shape[1] - 2))


def _sizes(given: dict[str, Any], num_positions: int) -> str:
    """Say what sizes a program of rollouts is for."""
    found, nodes = [], given.get("nodes_5M")
    slots = given["slots"].active.shape[0] if "slots" in given else None
    slots = getattr(given.get("cache"), "num_slots", slots)
    if slots is not None:
        found.append(f"{slots} slots")
    if nodes is not None:
        found.append(f"{nodes.shape[1]} nodes")
    if num_positions:
        found.append(f"{num_positions} positions")
    return ", ".join(found)


def _resolved(config: TrainConfig, *, is_cpu: bool) -> TrainConfig:
    """Return the configuration with what is left to the device decided for the target's."""
    settings, changed = config.trainer, dict[str, Any]()
    if settings.compute_dtype == "auto":
        changed["compute_dtype"] = "float32" if is_cpu else "bfloat16"
    if settings.remat == "auto":
        changed["remat"] = settings.remat_on(is_cpu)
    return dataclasses.replace(config, trainer=dataclasses.replace(settings, **changed))


def _split(config: TrainConfig, devices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the trainer's devices and the workers', of the first process, as a run has them."""
    sched, mesh = config.sched, config.mesh
    rows = [list(devices)]
    if config.cluster.kind == "spmd":
        processes = sorted({device.process_index for device in devices})
        rows = [[d for d in devices if d.process_index == p] for p in processes]
    if config.cluster.kind == "ray":  # whose workers are programs with devices of their own
        needed = sched.workers * sched.devices_per_worker
        both = [(row[:-needed], row[-needed:]) if needed < len(row) else (row, row) for row in rows]
    else:
        both = [(list(a), list(b)) for a, b in (split_devices(sched, row) for row in rows)]
    own = [trains for trains, _ in both]
    if sched.beside_training and mesh.data != -1:
        each = math.ceil(mesh.data * mesh.fsdp * mesh.tensor / len(own))
        own = [trains[:each] for trains in own]
    return [device for trains in own for device in trains], both[0][1]


def _worker_mesh(
    config: TrainConfig, model: ModelConfig, own: Mesh, devices: Sequence[Any]
) -> tuple[Mesh, int]:
    """Return the mesh of one rollout worker, and how many workers share a device."""
    sched, cluster = config.sched, config.cluster
    if cluster.kind != "ray" and sched.workers == 1 and sched.mode == "sync":
        local = cluster.kind == "spmd" and cluster.rollouts == "local"
        first = own.devices.flat[0].process_index
        mine = [d for d in own.devices.flat if d.process_index == first]
        chosen = mine if local else list(own.devices.flat)
        ways, asked = config.mesh.fsdp * config.mesh.tensor, config.mesh.rollout_tensor
        return rollout_mesh(chosen, model.num_kv_heads, ways, asked), 1
    size, count = sched.devices_per_worker, sched.workers
    if size > 1 and size * count > len(devices):
        raise ValueError(
            f"expected {size * count} devices for Sched.workers={count} of "
            f"Sched.devices_per_worker={size}, got {len(devices)}: lower either, or name a larger "
            "target"
        )
    alike = math.ceil(count * size / len(devices))
    return rollout_mesh(devices[:size], model.num_kv_heads), alike
