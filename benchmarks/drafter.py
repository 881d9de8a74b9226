"""Gains and costs of a learned drafter: `python -m benchmarks.drafter --json`

The policy and tasks of `configs/tiny_cpu.gin`, with a fixed number of drafter steps after each
rollout. Accept lengths are tokens a request and round, the bonus token included, of separate
rollouts over the prompts that come next, with the trees of `TREE`.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import environment
from reprise.models.decoder.transformer import Params
from reprise.models.formats import hf
from reprise.rl.assembly.system import System
from reprise.rl.drafter_training.spot_trainer import Span, SpotTrainer
from reprise.rl.drafter_training.trainer import BufferSink, DrafterTrainer
from reprise.rl.engine.engine import Engine
from reprise.rl.engine.rollout_spec import RolloutSpec, draft_with
from reprise.rl.gin.loader import load
from reprise.rl.learner import trainer
from reprise.rl.learner.optimizer import TrainState
from reprise.rl.metrics.writer import Timings
from reprise.rl.records.trajectory import Request
from reprise.rl.sessions.multi_engine import MultiEngine
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import Inputs, open_inputs
from reprise.rl.slots.config import EngineConfig
from reprise.rl.speculation.device_drafters import LearnedDrafter
from reprise.rl.steps.position import RunPosition
from reprise.rl.steps.rollouts import prompts_at
from reprise.rl.steps.step import train_step
from reprise.rl.workers.config import SchedConfig
from reprise.spec.config import SamplingConfig
from reprise.spec.eagle import model as eagle
from reprise.spec.eagle.config import TreeConfig
from reprise.spec.eagle.model import EagleParams, EagleWeights
from reprise.spec.eagle_training.training_data import DataBuffer
from reprise.spec.verification.sampling import step_key
from tests.support import tiny_run

CONFIG = environment.ROOT / "configs/tiny_cpu.gin"
SPOT = environment.ROOT / "configs/tlt_tiny_cpu.gin"
SETTINGS = (
    "Speculation.sources=('learned',)",
    "Speculation.budget='goodput'",
    "Engine.min_slots=64",
    "Engine.max_nodes=16",
    "Drafter.spot=False",
    "Drafter.steps_after_rollout=20",
    "Drafter.micro_batches=1",
    "Drafter.batch_rows=4",
    "DrafterTraining.learning_rate=1e-3",
    "Checkpoint.every_steps=0",
)
TREE = TreeConfig(max_depth=8, top_k=6)
ROUNDS = EngineConfig(slots=32, min_slots=32, max_nodes=64, max_round_nodes=2048)
NUM_PROMPTS, GROUP = 8, 8


def accept_lengths(
    first_steps: int, more_steps: int
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Train a policy and its drafter, probing twice; return also the drafter's metrics by step.

    Accept lengths are those of a drafter `trained` over the first steps and `untrained`, with the
    policy after these; and `adaptive`, trained over all steps, and `frozen` after the first ones,
    with the last policy.
    """
    overrides = [*SETTINGS, f"Run.steps={first_steps + more_steps}"]
    config = load(TrainConfig, [CONFIG], overrides)
    inputs = open_inputs(config)
    with tiny_run.opened(config, inputs) as (system, state):
        assert system.drafter is not None
        learned, place = system.drafter.trainer.learned, RunPosition()
        untrained, first = learned.drafter.params, Probe(system, inputs, state, place)
        state, place, rows = _train(system, state, place, first_steps)
        probe, frozen = first.after(state, place), learned.drafter.params
        found = {"trained": probe.accept_length(frozen)}
        found["untrained"] = probe.accept_length(untrained)
        state, place, more = _train(system, state, place, more_steps)
        probe = first.after(state, place)
        found["adaptive"] = probe.accept_length(learned.drafter.params)
        found["frozen"] = probe.accept_length(frozen)
    names = ("drafter/accuracy_top1", "drafter/accuracy_top3", "drafter/agreement", "reward")
    curve = [{n: round(float(row[n]), 4) for n in names if n in row} for row in (*rows, *more)]
    return found, curve


def _train(
    system: System, state: TrainState, place: RunPosition, steps: int
) -> tuple[TrainState, RunPosition, list[dict[str, Any]]]:
    rows = []
    for _ in range(steps):
        timings = Timings(time.perf_counter)
        state, place, wrote = train_step(system, state, place, timings)
        rows.append(wrote.metrics)
    return state, place, rows


class Probe:
    """Rollouts of the current policy over the prompts that come next, by a separate engine."""

    def __init__(
        self,
        system: System,
        inputs: Inputs,
        state: TrainState,
        place: RunPosition,
        *,
        max_nodes: int = 64,
        depth: int = TREE.max_depth,
        rounds_per_fetch: int = ROUNDS.rounds_per_fetch,
    ) -> None:
        self.system, self.inputs, self.state, self.place = system, inputs, state, place
        assert system.drafter is not None
        self.learned = system.drafter.trainer.learned
        self.tree = dataclasses.replace(TREE, max_depth=depth)
        sizes = {"max_nodes": max_nodes, "rounds_per_fetch": rounds_per_fetch}
        config = dataclasses.replace(ROUNDS, **sizes)
        layers = self.learned.config.feature_layers
        self.engine = Engine(inputs.model, config, feature_layers=layers)

    def after(self, state: TrainState, place: RunPosition) -> Probe:
        """Return a probe of a later policy with the same engine."""
        later = copy.copy(self)
        later.state, later.place = state, place
        return later

    def accept_length(self, params: EagleParams) -> float:
        weights = EagleWeights(self.learned.config, params, self.learned.draft_ids_U)
        prompts = prompts_at(self.system, self.place.cursor, NUM_PROMPTS).tokens
        requests = [
            Request(g * GROUP + i, p, g, i) for g, p in enumerate(prompts) for i in range(GROUP)
        ]
        policy = trainer.cast_params(self.state.params, self.engine.dtype)
        sampling, key = self.system.config.sampling, step_key(99, self.place.step)
        spec = RolloutSpec(policy, sampling, key, self.inputs.model.eos_token_ids)
        drafter = LearnedDrafter(weights, self.tree)
        drafts = draft_with(drafter.drafter_for(self.engine.drafter_context(spec)))
        self.engine.run(dataclasses.replace(spec, drafts=drafts), requests)
        return accept_length(self.engine)


def accept_length(engine: Engine) -> float:
    """Tokens a request and round with draft tokens, of the engine's last rollout."""
    rounds = [r for r in engine.stats.timeline if r.drafted]
    return sum(int(r.emitted_A.sum()) for r in rounds) / sum(int(r.rounds_A.sum()) for r in rounds)


class SpotTeam:
    """Workers that share this machine's devices and train a drafter while idle."""

    def __init__(
        self, inputs: Inputs, params: Params, config: TrainConfig, *, workers: int = 4
    ) -> None:
        engine = EngineConfig(slots=8, min_slots=8, rounds_per_fetch=4)
        self.engines = [Engine(inputs.model, engine, feature_layers=()) for _ in range(workers)]
        shape = eagle.config_for(inputs.model)
        start = EagleWeights(shape, eagle.init(shape, jax.random.key(0)))
        learned, buffer = LearnedDrafter(start, config.drafter.tree), DataBuffer(config.data_buffer)
        given = config.drafter, config.drafter_training, learned, buffer
        self.trainer = DrafterTrainer(*given, seed=0, temperature=1.0)
        self.spot = SpotTrainer(self.trainer, 1, time.perf_counter)
        sched = SchedConfig(policy="seer", workers=workers, chunk_tokens=64)
        self._team = MultiEngine(self.engines, sched, spot=self.spot)
        self._inputs, self._params, self._config = inputs, params, config
        self.trainer.warm_up(self.trainer.context(self.engines[0], params))
        self._rng = np.random.default_rng(0)

    def rollout(self, number: int, num_prompts: int = 4) -> tuple[list[Span], float]:
        """Spans of training in one rollout, and when its last response ended."""
        inputs, ended_s = self._inputs, list[float]()
        examples = self._rng.integers(0, len(inputs.task), num_prompts).tolist()
        prompts = [inputs.encode(inputs.task[i], self._config.task) for i in examples]
        self.spot.prepare(self._params, number)
        sampling, sink = SamplingConfig(max_new_tokens=256), BufferSink(self.trainer.buffer, number)
        stops = inputs.model.eos_token_ids
        spec = RolloutSpec(self._params, sampling, step_key(7, number), stops, sink=sink)
        requests = [Request(4 * g + i, p, g, i) for g, p in enumerate(prompts) for i in range(4)]
        self._team.run(spec, requests, on_finish=lambda _: ended_s.append(time.perf_counter()))
        return self.spot.take_spans(), ended_s[-1]


def preemption_waits(
    inputs: Inputs, params: Params, config: TrainConfig, *, rollouts: int
) -> dict[str, float]:
    """Measure waits for the ends of rollouts, in drafter steps, while workers train."""
    team, waits_s, spans = SpotTeam(inputs, params, config), list[float](), list[Span]()
    for number in range(rollouts):
        found, ended_s = team.rollout(number)
        spans += found
        waits_s.append(max([0.0, *(s.ended_s - ended_s for s in found)]))
    gradient_s, update_s = (
        statistics.median([s.ended_s - s.began_s for s in spans if s.kind == kind])
        for kind in ("gradient", "update")
    )
    step_s = config.drafter.micro_batches * gradient_s + update_s
    waits = np.asarray(waits_s) / step_s
    return {
        "preemption_wait_steps": round(float(np.quantile(waits, 0.99)), 4),
        "preemption_wait_steps_median": round(float(np.median(waits)), 4),
        "drafter_step_s": round(step_s, 4),
        "spot_steps": team.trainer.step,
        "spot_rollouts": rollouts,
    }


def spot_rollout(
    inputs: Inputs, params: Params, config: TrainConfig
) -> tuple[list[tuple[int, float, float]], list[Span], float]:
    """Return a rollout's rounds as (worker, start, seconds), spans of training, and its end."""
    team = SpotTeam(inputs, params, config)
    team.rollout(0)  # compiles, and fills the buffer
    spans, ended_s = team.rollout(1, num_prompts=8)
    rounds = [(i, r) for i, engine in enumerate(team.engines) for r in engine.stats.timeline]
    first_s = min(r.began_s for _, r in rounds)
    ends = ({"began_s": s.began_s - first_s, "ended_s": s.ended_s - first_s} for s in spans)
    moved = [dataclasses.replace(s, **at) for s, at in zip(spans, ends, strict=True)]
    played = [(i, r.began_s - first_s, r.ended_s - r.began_s) for i, r in rounds]
    return played, moved, ended_s - first_s


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all figures, the timed ones first."""
    config, steps = load(TrainConfig, [SPOT]), (arguments.first_steps, arguments.more_steps)
    inputs = open_inputs(config)
    _, params = hf.load_pretrained(inputs.policy, dtype=jnp.float32)
    waits = preemption_waits(inputs, params, config, rollouts=arguments.rollouts)
    lengths, curve = accept_lengths(*steps)
    return {
        **waits,
        **{f"accept_{name}": round(length, 4) for name, length in lengths.items()},
        "accept_trained_ratio": round(lengths["trained"] / lengths["untrained"], 4),
        "accept_adaptive_ratio": round(lengths["adaptive"] / lengths["frozen"], 4),
        **dict(zip(("first_steps", "more_steps"), steps, strict=True)),
        "curve": curve,
    }


if __name__ == "__main__":
    sizes = {"first_steps": 10, "more_steps": 50, "rollouts": 60}
    environment.run(__doc__, measure, environment.TRAINING, **sizes)
