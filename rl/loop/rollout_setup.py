"""What a run answers prompts with: one engine or several workers, made and warmed up."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from models.transformer import Params
from rl.engine.engine import Engine, RolloutEngine
from rl.loop.drafter_run import DrafterRun
from rl.loop.experiment import Inputs, TrainConfig
from rl.runtime.parallel_compile import OnCompiled, unwatched
from rl.speculation.sources import Speculation
from rl.warm_up import compile_buckets, transfer_times
from rl.warm_up.host_kernels import compile_host_kernels
from rl.warm_up.measured_run import MOVES_FILE, ROUNDS_FILE
from rl.warm_up.round_times import load_or_measure
from rl.workers.multi_engine import MultiEngine, make_engines
from spec.budget.bandit_budget import node_counts
from spec.budget.config import BANDIT
from spec.sampling import step_key


def make_engine(
    config: TrainConfig,
    inputs: Inputs,
    mesh: Mesh | None,
    dtype: np.dtype,
    drafter: DrafterRun | None = None,
) -> RolloutEngine:
    """One engine on the trainer's devices, or several workers on devices of their own."""
    options: dict[str, Any] = {"dtype": dtype}
    if drafter is not None:
        options["feature_layers"] = drafter.trainer.learned.config.feature_layers
    if config.sched.workers == 1 and config.sched.mode == "sync":
        return Engine(inputs.model, config.engine, mesh=mesh, **options)
    engines = make_engines(inputs.model, config.engine, config.sched, **options)
    spot = None if drafter is None else drafter.spot
    limit_s = config.run.hang_limit_s
    return MultiEngine(engines, config.sched, seed=config.run.seed, spot=spot, hang_limit_s=limit_s)


def node_sizes(config: TrainConfig) -> compile_buckets.NodeSizes | None:
    """The sizes of trees that rounds can have, by slots; None: all.

    A bandit has one for each range of batch sizes, so that fewer programs are kept.
    """
    if config.speculation.budget != BANDIT:
        return None
    engine, tuner = config.engine, config.tuner
    sizes = engine.node_sizes(engine.max_nodes)

    def nodes(num_slots: int) -> set[int]:
        wanted = node_counts(tuner, num_slots)
        return {next(n for n in sizes if n >= count) for count in wanted}

    return nodes


def warm_up(
    config: TrainConfig,
    engine: RolloutEngine,
    weights: Params,
    speculation: Speculation,
    folder: Path,
    told: OnCompiled = unwatched,
) -> None:
    """Compile all that rollouts can need, and time what the budget and the scheduler decide by."""
    engine.do(partial(_warm_up, config, engine, weights, speculation, folder, told))
    jax.block_until_ready(step_key(0, 0))  # in this thread, under the trainer's mesh


def _warm_up(
    config: TrainConfig,
    engine: RolloutEngine,
    weights: Params,
    speculation: Speculation,
    folder: Path,
    told: OnCompiled,
) -> None:
    reach = compile_buckets.Reach(
        config.rollout.num_requests,
        config.rollout.max_prompt_tokens,
        speculative=config.speculation.enabled,
        reuse=config.reuse.enabled,
        moves=isinstance(engine, MultiEngine),
        drafters=speculation.drafters,
        nodes=node_sizes(config),
    )
    for one in engine.engines:
        placed = one.place(weights)
        compile_buckets.warm_up(one, placed, config.sampling, reach, told)
    # workers are alike: the last one's times are those of all
    if isinstance(engine, MultiEngine):
        most = {"max_requests": reach.max_requests, "max_tokens": config.longest_tokens}
        moves = transfer_times.measure(one, placed, **most, path=folder / MOVES_FILE)
        engine.prefer_pool = moves.prefers_copy
    if reach.speculative:
        path, sampling = folder / ROUNDS_FILE, config.sampling
        speculation.times = load_or_measure(path, one, placed, sampling, reach)
        compile_host_kernels(
            config.speculation,
            speculation.times,
            one,
            placed,
            sampling,
            speculation.drafters,
            config.tuner,
        )
