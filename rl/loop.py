"""The training loop: prompts → rollouts and rewards → advantages → update → checkpoint.

A step is a function of (configuration, step number, state before it). So a run
that was stopped anywhere and resumed writes the same bits as one that never was.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from models import hf
from models.sharding import make_mesh
from models.transformer import Params
from rl import engine_warm_up, experiment, trainer
from rl.advantages import group_advantages
from rl.batching import Shape
from rl.checkpoint import Checkpointer, NoWholeCheckpointError
from rl.data import DataOrder, prompts_for_step
from rl.engine import Engine
from rl.experiment import Inputs, Prompt, TrainConfig
from rl.metrics import Timings, open_metrics
from rl.optimizer import TrainState
from rl.progress import Progress
from rl.recipe import Recipe
from rl.reuse import Reuse, remember
from rl.rewards.pool import Job, RewardPool, Score
from rl.rewards.process import RewardWorkerError
from rl.round_times import load_or_measure
from rl.speculation import Speculation
from rl.step_metrics import sample_rows, step_metrics
from rl.tasks import Example
from rl.timeline import save_timeline
from rl.trajectory import Trajectory
from spec.rollout_cache import RolloutCache


class Stopped(Exception):
    """The run was asked to stop; everything up to the last whole step is saved."""


@dataclasses.dataclass(frozen=True, eq=False)
class System:
    """The parts of a run that live as long as it does."""

    config: TrainConfig
    inputs: Inputs
    recipe: Recipe
    shape: Shape
    engine: Engine
    cache: RolloutCache
    speculation: Speculation
    reuse: Reuse
    rewards: RewardPool
    order: DataOrder
    reference: Params | None
    show: Progress
    should_stop: Callable[[], bool]


@dataclasses.dataclass(frozen=True, eq=False)
class Rollouts:
    """What one step generated, and what was thought of it; all lists by request id."""

    examples: Sequence[Example]
    trajectories: list[Trajectory]
    scores: list[Score]
    completions: list[str]
    metrics: dict[str, float]


def train(
    config: TrainConfig,
    inputs: Inputs,
    folder: Path,
    *,
    show: Progress,
    should_stop: Callable[[], bool],
    clock: Callable[[], float],
) -> TrainState:
    """Run or resume in `folder`, up to `Run.steps`; raises Stopped where it was asked to stop."""
    with contextlib.ExitStack() as stack:
        mesh = run_mesh(config)
        if mesh is not None:
            stack.enter_context(jax.set_mesh(mesh))
        checkpoints = stack.enter_context(Checkpointer(folder / "checkpoints", config.checkpoint))
        metrics = stack.enter_context(open_metrics(config.metrics, folder))
        cache = RolloutCache(
            config.rollout.cache_bytes,
            folder / "rollouts",
            policy=inputs.shape_name,
            epochs=config.reuse.epochs,
        )
        speculation = stack.enter_context(Speculation(config.speculation, cache))
        pool = stack.enter_context(RewardPool(config.reward, tasks=config.task.specs))
        system, state = _build(
            config, inputs, folder, mesh, pool, cache, speculation, show, should_stop
        )
        done, num_tokens, state = _resume(checkpoints, state, system)
        metrics.truncate_to_step(done)
        saved = done
        with _saving_when_stopped(lambda: (saved, done, state, num_tokens), system, checkpoints):
            while done < config.run.steps:
                timings = Timings(clock)
                state, row, samples = train_step(system, state, done + 1, timings)
                done, num_tokens = done + 1, num_tokens + int(row.pop("rollout_tokens"))
                with timings.section("checkpoint"):
                    if config.checkpoint.due(done) or done == config.run.steps:
                        save_timeline(folder, done, system.engine.stats.timeline)
                        checkpoints.save(done, state, _host_state(system, num_tokens))
                        saved = done
                row |= {"num_tokens": num_tokens} | _speed(row, timings.seconds())
                metrics.write_samples(done, samples)
                show.step(metrics.write(done, row))
        return state


def train_step(
    system: System, state: TrainState, step: int, timings: Timings
) -> tuple[TrainState, dict[str, Any], list[dict[str, Any]]]:
    """One step of GRPO: generate, score, compare within groups, update.

    Returns the new state (the given one is donated), the step's metrics, and its
    samples as rows of samples.jsonl.
    """
    config = system.config
    rollouts = generate_and_score(system, state.params, step, timings)
    group_ids = [t.group_id for t in rollouts.trajectories]
    advantages, reward_metrics = group_advantages(
        [score.total for score in rollouts.scores],
        group_ids,
        normalise=config.algorithm.advantage_normalisation,
    )
    with timings.section("update"):
        state, update_metrics = trainer.update(
            state,
            rollouts.trajectories,
            advantages,
            recipe=system.recipe,
            shape=system.shape,
            sampling=config.sampling,
            step=step,
            seed=config.run.seed,
            reference=system.reference,
        )
    system.reuse.after_update(update_metrics)
    row = step_metrics(rollouts.trajectories, rollouts.scores, system.engine.stats)
    samples = sample_rows(
        system.inputs.tokenizer,
        rollouts.examples,
        rollouts.trajectories,
        rollouts.completions,
        rollouts.scores,
        advantages,
    )
    return state, row | rollouts.metrics | reward_metrics | update_metrics, samples


def generate_and_score(system: System, params: Params, step: int, timings: Timings) -> Rollouts:
    """The step's responses; each goes to the reward workers the moment it ends."""
    config, inputs = system.config, system.inputs
    examples, prompts, numbers = step_prompts(system, step)
    keys = [example.example_id for example in examples]
    drafter, budget = system.speculation.phase(keys, prompts)
    # first samples first: siblings that start apart have something to draft from
    requests = system.reuse.requests(keys, prompts, numbers, config.rollout.group_size)
    completions: dict[int, str] = {}
    scores: dict[int, Future[Score]] = {}

    def score(t: Trajectory) -> None:
        text = inputs.tokenizer.decode(t.response_ids.tolist())
        completions[t.request_id] = text
        job = Job(examples[t.group_id], text, tuple(t.response_ids.tolist()))
        scores[t.request_id] = system.rewards.submit(job)

    def watch(finished: int, tokens: int) -> None:
        system.show.rollout(finished, len(requests), tokens)
        if system.should_stop():
            raise Stopped

    with timings.section("rollout"):
        done = system.engine.run(
            trainer.cast_params(params, system.engine.dtype),
            requests,
            config.sampling,
            system.reuse.key(step),
            stop_token_ids=inputs.model.eos_token_ids,
            policy_version=step - 1,
            drafter=drafter,
            budget=budget,
            rule=system.reuse.rule(step),
            on_finish=score,
            on_round=watch,
        )
    with timings.section("reward"):  # what is left of it once the last response has ended
        done.sort(key=lambda t: (t.group_id, t.sample_index))
        results = [scores[t.request_id].result() for t in done]
    trajectories = [
        dataclasses.replace(t, reward=s.total) for t, s in zip(done, results, strict=True)
    ]
    num_tokens = sum(t.num_tokens for t in trajectories)
    metrics = system.reuse.metrics(system.engine.stats, num_tokens, step)
    metrics |= _remember(system, keys, trajectories, step)
    texts = [completions[t.request_id] for t in trajectories]
    return Rollouts(examples, trajectories, results, texts, metrics)


def _remember(
    system: System, keys: Sequence[str], trajectories: Sequence[Trajectory], step: int
) -> dict[str, float]:
    """Keep the step's responses for the next epoch, and start on the next step's history."""
    speculation, scored = system.speculation, system.reuse.mode.enabled
    if speculation.keeps_history or scored:
        remember(system.cache, keys, trajectories, scored=scored)
    metrics = speculation.history_metrics()
    for problem in [*system.cache.new_problems(), *system.reuse.new_problems()]:
        system.show.message(f"warning: {problem}")
    if speculation.keeps_history and step < system.config.run.steps:
        examples, prompts, _ = step_prompts(system, step + 1)
        coming = zip(examples, prompts, strict=True)
        speculation.prepare({example.example_id: prompt for example, prompt in coming})
    return metrics


def step_prompts(system: System, step: int) -> tuple[tuple[Example, ...], list[Prompt], list[int]]:
    """The examples that a step answers, their prompts as tokens, and their numbers in the data."""
    P = system.config.rollout.prompts_per_step
    cursor = (step - 1) * P
    examples = prompts_for_step(system.inputs.task, system.order, cursor, P)
    prompts = [system.inputs.encode(e, system.config.task) for e in examples]
    return examples, prompts, system.order.indices(cursor, P).tolist()


def _build(
    config: TrainConfig,
    inputs: Inputs,
    folder: Path,
    mesh: Mesh | None,
    pool: RewardPool,
    cache: RolloutCache,
    speculation: Speculation,
    show: Progress,
    should_stop: Callable[[], bool],
) -> tuple[System, TrainState]:
    """Load the policy, lay out the training state, and compile all that the run can need."""
    recipe = experiment.recipe(config, inputs.model)
    _, params = hf.load_pretrained(inputs.policy, mesh, dtype=jnp.float32)
    reference = jax.tree.map(jnp.copy, params) if config.algorithm.needs_reference else None
    state = trainer.init_state(params, trainer.make_optimizer(config.optimizer, recipe.total_steps))
    greedy = config.sampling.temperature == 0
    reuse = Reuse(config.reuse, cache, seed=config.run.seed, greedy=greedy)
    engine = Engine(
        inputs.model,
        config.engine,
        dtype=recipe.trainer.dtype,
        mesh=mesh,
        context_tokens=reuse.mode.context_tokens,
    )
    longest = config.rollout.max_prompt_tokens + config.sampling.max_new_tokens
    shape = trainer.batch_shape(recipe, longest)
    show.message("compiling…")
    weights = trainer.cast_params(state.params, engine.dtype)
    sizes = {
        "max_requests": config.rollout.num_requests,
        "max_prompt_tokens": config.rollout.max_prompt_tokens,
    }
    speculative, lookup = config.speculation.enabled, config.speculation.may_look_up
    engine_warm_up.warm_up(
        engine,
        weights,
        config.sampling,
        speculative=speculative,
        lookup=lookup,
        reuse=config.reuse.enabled,
        **sizes,
    )
    if speculative:
        path = folder / "round_times.json"
        speculation.times = load_or_measure(
            path, engine, weights, config.sampling, lookup=lookup, **sizes
        )
    state = trainer.warm_up(state, shape, recipe=recipe)
    order = DataOrder(len(inputs.task), config.run.seed)
    system = System(
        config,
        inputs,
        recipe,
        shape,
        engine,
        cache,
        speculation,
        reuse,
        pool,
        order,
        reference,
        show,
        should_stop,
    )
    return system, state


def _resume(
    checkpoints: Checkpointer, state: TrainState, system: System
) -> tuple[int, int, TrainState]:
    """(steps done, tokens so far, state): from the newest whole checkpoint, else the start."""
    try:
        restored = checkpoints.restore(state)
    except NoWholeCheckpointError as error:
        if error.problems:
            raise
        return 0, 0, state
    for warning in restored.warnings:
        system.show.message(f"warning: {warning}")
    system.show.message(f"resuming after step {restored.step}")
    if cached := restored.host.get("rollouts"):
        system.cache.load_state(cached)
    system.reuse.load_state(restored.host.get("reuse", {}))
    return restored.step, int(restored.host["num_tokens"]), restored.arrays


@contextlib.contextmanager
def _saving_when_stopped(
    now: Callable[[], tuple[int, int, TrainState, int]],
    system: System,
    checkpoints: Checkpointer,
) -> Iterator[None]:
    """Save the last whole step before what ends the run goes on its way.

    Not where an update was refused after others of its step had been applied: the
    whole step's buffers are gone then, and the newest checkpoint stands.
    """
    try:
        yield
    except (Stopped, trainer.NonFiniteUpdate, RewardWorkerError):
        saved, done, state, num_tokens = now()
        whole = not any(x.is_deleted() for x in jax.tree.leaves(state))
        if done > saved and whole:
            checkpoints.save(done, state, _host_state(system, num_tokens))
        checkpoints.wait()
        raise


def _host_state(system: System, num_tokens: int) -> dict[str, Any]:
    """What a resumed run needs besides arrays: the data cursor follows from the step."""
    system.speculation.settle()
    return {
        "num_tokens": num_tokens,
        "rollouts": system.cache.state(),
        "reuse": system.reuse.state(),
    }


def run_mesh(config: TrainConfig) -> Mesh | None:
    """The mesh that a configuration asks for; None where one device serves."""
    devices = jax.devices()
    single = len(devices) == 1 or (config.mesh.data, config.mesh.fsdp, config.mesh.tensor) == (
        1,
        1,
        1,
    )
    return None if single else make_mesh(config.mesh, devices)


def _speed(row: dict[str, Any], seconds: dict[str, float]) -> dict[str, float]:
    """Clock-dependent metrics; their names set them apart (`rl.metrics.deterministic_view`)."""
    total = sum(seconds.values())
    tokens = row["completions/mean_length"] * row["completions/count"]
    return seconds | {
        "step_time": total,
        "perf/throughput": tokens / total,
        "perf/rollout_tokens_per_s": tokens / max(seconds["time/rollout"], 1e-9),
    }


def policy_params(state: TrainState) -> Params:
    """The trained weights, ready for `models.hf.save_pretrained`."""
    return jax.tree.map(np.asarray, state.params)
