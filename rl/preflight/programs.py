"""The programs that a run compiles, as shapes on devices that need not be attached."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from reprise.models import sharding
from reprise.models.config import MeshConfig, ModelConfig, trained_specs
from reprise.models.decoder import transformer
from reprise.models.formats import hf
from reprise.models.sharding import make_mesh
from reprise.rl.assembly.first_programs import rollout_reach
from reprise.rl.learner import critic, trainer
from reprise.rl.learner.distillation import Teacher, teacher_recipe
from reprise.rl.learner.optimizer import TrainState, make_optimizer, state_shapes
from reprise.rl.learner.trainer import Learner
from reprise.rl.placement.engines import engine_settings
from reprise.rl.placement.meshes import check_bits
from reprise.rl.preflight.memory import (
    ROLLOUTS,
    TRAINING,
    Parts,
    divide,
    evaluation_bytes,
    held_arrays,
    num_bytes,
)
from reprise.rl.runtime.run_files import resolve_path
from reprise.rl.settings.config import TrainConfig, drafter_shape, recipe
from reprise.rl.speculation.device_drafters import (
    DeviceDrafters,
    DeviceDrafterSource,
    DraftModel,
    LearnedDrafter,
)
from reprise.rl.warm_up import compile_buckets
from reprise.rl.warm_up.rollout_programs import WHOLE_MODEL, Pool, Program
from reprise.rl.workers.engines import make_engine
from reprise.spec.budget.config import LEARNED, MODEL
from reprise.spec.eagle import model as eagle
from reprise.spec.eagle.model import EagleWeights
from reprise.spec.verification.verify import verify_round

# Arguments of rollout programs that stay on a device from one program to the next.
HELD = {
    *("params", "cache", "pending", "slots", "draft_cache", "given", "constants"),
    *("table_RX", "limits_4", "scale_B"),  # of drafts on the device
    "pages_P1TF",  # of a cache
}
WHOLE_TRAINING = {"accumulate", "token_logprobs", "token_values"}  # steps that run the whole model


@dataclasses.dataclass(frozen=True, eq=False)
class RunProgram:
    """One program of a run, and a function that lowers it.

    Arguments of `held_bytes` stay on a device between programs. `num_tokens` tokens pass through
    the whole model (0 if the model does not run). Programs of one `kind` differ in sizes, and
    `order` sorts them.
    """

    part: str
    kind: str
    sizes: str
    lower: Callable[[], Any]
    held_bytes: int
    order: int
    num_tokens: int = 0

    @property
    def is_deep(self) -> bool:
        """Return whether model layers make the program slow to compile."""
        return self.part == TRAINING or self.num_tokens > 0

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.sizes}" if self.sizes else self.kind


class RunPrograms:
    """The programs of a configuration. Raises ValueError if the mesh does not cover the devices."""

    def __init__(
        self, config: TrainConfig, model: ModelConfig, devices: Sequence[Any], *, is_cpu: bool
    ) -> None:
        self.config = _resolved(config, is_cpu=is_cpu)
        self.model = model
        self._is_cpu = is_cpu
        self.recipe = recipe(self.config, model)
        by_process = dict[int, list[Any]]()
        for device in devices:
            process = device.process_index if config.cluster.kind == "spmd" else 0
            by_process.setdefault(process, []).append(device)
        groups = [by_process[process] for process in sorted(by_process)]
        self.layout = divide(config, model, len(devices), len(groups))
        trains = self.layout.num_training
        rolls = self.layout.num_rollout
        self.mesh = make_mesh(config.mesh, [d for group in groups for d in group[:trains]])
        with jax.set_mesh(self.mesh):  # which sets the target platform
            check_bits(self.config, model, self.mesh)
        tensor, size = (self.layout.worker_mesh[axis] for axis in ("tensor", "data"))
        place = [d for group in groups for d in group[-rolls:]][: tensor * size]
        self.worker_mesh = make_mesh(MeshConfig(tensor=tensor), place)
        self.engine = make_engine(engine_settings(self.config, model), self.worker_mesh)

    @cached_property
    def state(self) -> TrainState:
        """The shapes of the training state."""
        optimizer = make_optimizer(self.config.optimizer, self.recipe.total_steps)
        state = self._in_mesh(state_shapes, trained_specs(self.model), optimizer)
        if self.config.algorithm.resolved.needs_critic:
            state = dataclasses.replace(state, critic=self._in_mesh(critic.shapes, self.recipe))
        return state

    @property
    def _base(self) -> Any:
        """The shapes of frozen weights; None if all weights are trained."""
        if self.model.lora is None:
            return None
        specs = transformer.param_specs(dataclasses.replace(self.model, lora=None))
        return self._in_mesh(sharding.shapes, specs, self.recipe.trainer.dtype)

    @property
    def _teacher(self) -> Teacher | None:
        """The shapes of the teacher's weights; None without distillation."""
        if self.config.distill.teacher is None:
            return None
        model = hf.shape(resolve_path(self.config.distill.teacher))
        dtype = self.recipe.trainer.dtype
        params = self._in_mesh(sharding.shapes, transformer.param_specs(model), dtype)
        return Teacher(params, teacher_recipe(self.recipe, model))

    @cached_property
    def held(self) -> Parts:
        """The bytes per device of arrays that stay between programs."""
        return held_arrays(self.config, self.model, self.layout, is_cpu=self._is_cpu)

    @cached_property
    def evaluation_bytes(self) -> int:
        """The bytes that evaluations need on a training device if workers are separate; else 0."""
        return evaluation_bytes(self.config, self.model, self.layout, is_cpu=self._is_cpu)

    def all(self) -> list[RunProgram]:
        """Return the training programs, then the rollout programs."""
        return [*self._training(), *map(self._of_rollouts, self.of_rollouts())]

    def _in_mesh(self, make: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with jax.set_mesh(self.mesh):
            return make(*args, **options)

    def _training(self) -> Iterator[RunProgram]:
        shape = self._in_mesh(trainer.batch_shape, self.recipe, self.config.longest_tokens)
        num_tokens = shape.rows * shape.length
        state = self.state
        sizes = f"{shape.rows} rows of {shape.length} tokens"
        weights_bytes = num_bytes(state.params)
        base = self._base
        held = dict.fromkeys(WHOLE_TRAINING, weights_bytes + num_bytes(base))
        teacher = self._teacher
        held["apply"] = weights_bytes + num_bytes(state.opt_state)
        if state.critic is not None:
            held["token_values"] = num_bytes(state.critic.params)
        kinds = set[str]()
        sampling = self.config.sampling
        learner = Learner(self.recipe, shape, sampling, base=base, teacher=teacher)
        for call in self._in_mesh(trainer.calls, state, learner):
            name = call.step.__name__
            is_taught = teacher is not None and call.args[0] is teacher.params
            whose = "teacher" if is_taught else "critic"
            kind = f"{name} of the {whose}" if is_taught or name in kinds else name
            kinds.add(name)
            is_whole = name in WHOLE_TRAINING
            yield RunProgram(
                part=TRAINING,
                kind=kind,
                sizes=sizes if is_whole else "",
                lower=partial(self._in_mesh, call.lower),
                held_bytes=num_bytes(call.args[0]) if is_taught else held.get(name, 0),
                order=num_tokens,
                num_tokens=num_tokens if is_whole else 0,
            )
        if self.held[ROLLOUTS]["rollout weights"]:
            call = trainer.cast_call(state.params, self.engine.dtype)
            lower = partial(self._in_mesh, call.lower)
            yield RunProgram(TRAINING, "weights for rollouts", "", lower, weights_bytes, 0)

    def of_rollouts(self) -> Iterator[Program]:
        """Yield the engine programs; during iteration, arguments are shapes on the engine mesh."""
        engine = self.engine
        specs = transformer.param_specs(self.model)
        with engine.mesh_context(), engine.shapes_only():
            shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, engine.dtype), specs)
            bounds = dataclasses.replace(rollout_reach(self.config), drafters=self._drafters())
            pool = Pool(engine, engine.place(shapes), self.config.sampling, bounds)
            yield from pool.programs()

    def _of_rollouts(self, program: Program) -> RunProgram:
        args, _ = program.arguments()
        step = program.step
        named = dict(zip(inspect.signature(step).parameters, args, strict=False))
        held_bytes = sum(num_bytes(x) for name, x in named.items() if name in HELD)
        num_tokens = _num_tokens(named) if step in WHOLE_MODEL else 0
        verifies = step is verify_round and named["chunks_TX"] is not None
        kind = step.__name__ + (" beside prompts" if verifies else "")
        sizes = _sizes(named)
        lower = partial(self._lowered, program)
        return RunProgram(ROLLOUTS, kind, sizes, lower, held_bytes, num_bytes(args), num_tokens)

    def _lowered(self, program: Program) -> Any:
        with self.engine.mesh_context():
            return compile_buckets.lowered(self.engine, program)

    def _drafters(self) -> DeviceDrafters:
        """Return the on-device drafters, with shapes in place of weights."""
        config = self.config
        drafters = dict[str, DeviceDrafterSource]()
        shape = drafter_shape(config, self.model)
        if shape is not None:
            key = jax.eval_shape(partial(jax.random.key, 0))
            weights = jax.eval_shape(partial(eagle.init, shape), key)
            size = shape.draft_vocab_size
            ids_U = np.arange(size, dtype=np.int32) if size else None
            learned = EagleWeights(shape, weights, ids_U)
            drafters[LEARNED] = LearnedDrafter(learned, config.drafter.tree)
        if config.speculation.asks_model:
            draft = hf.shape(resolve_path(str(config.draft_model.directory)))
            specs = transformer.param_specs(draft)
            params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32), specs)
            drafters[MODEL] = DraftModel(draft, params, config.draft_model)
        return drafters


def _num_tokens(named: dict[str, Any]) -> int:
    """Return the number of tokens that pass through the model in one round."""
    nodes = named.get("nodes_5M")
    chunks = named.get("chunks_TX")
    num_nodes = named["slots"].active.shape[0] if nodes is None else nodes.shape[1]
    return num_nodes + (0 if chunks is None else chunks.shape[0] * (chunks.shape[1] - 2))


def _sizes(named: dict[str, Any]) -> str:
    """Return a text that names the sizes of a rollout program."""
    nodes = named.get("nodes_5M")
    slots = 0
    if "slots" in named:
        slots = named["slots"].active.shape[0]
    slots = getattr(named.get("cache"), "num_slots", slots)
    sizes = {"slots": slots, "nodes": 0 if nodes is None else nodes.shape[1]}
    cache = named.get("cache")
    if cache is not None and cache.table_BN is not None:
        sizes["positions"] = cache.num_positions
    return ", ".join(f"{size} {name}" for name, size in sizes.items() if size)


def _resolved(config: TrainConfig, *, is_cpu: bool) -> TrainConfig:
    """Return the configuration with device-dependent settings resolved for the target."""
    dtype = config.trainer.dtype_on(is_cpu).name
    remat = config.trainer.remat_on(is_cpu)
    settings = dataclasses.replace(config.trainer, compute_dtype=dtype, remat=remat)
    return dataclasses.replace(config, trainer=settings)
