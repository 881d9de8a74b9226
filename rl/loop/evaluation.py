"""Evaluation of a policy: its section, its questions, its responses, and pass@k.

The command is `rl.evaluate`. Nothing here prints.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from models.config import ModelConfig
from rl.data.tasks import Example, open_tasks
from rl.engine.rollout_spec import RolloutSpec
from rl.loop.experiment import Inputs, TrainConfig
from rl.rewards.pool import RewardPool, Score, ScoreJob
from rl.runtime.run_files import CHECKPOINTS
from rl.trajectory import Request, Trajectory

_CANDIDATES = 4  # questions looked at for each one wanted: training may hold some of them


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """The section of an evaluation: `samples` responses to each of `num_prompts` questions a task.

    A response counts as correct where its reward is at least `correct_at`. `ks` are
    those of pass@k; empty means the powers of two up to `samples`. `seed` draws the
    questions and the noise.
    """

    samples: int = 8
    num_prompts: int = 100
    ks: tuple[int, ...] = ()
    correct_at: float = 1.0
    seed: int = 1_000_000_007

    def __post_init__(self) -> None:
        for field in ("samples", "num_prompts"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        wrong = [k for k in self.ks if not 1 <= k <= self.samples]
        if wrong:
            raise ValueError(
                f"ks must be in 1 … samples={self.samples}, got {wrong}: pass@k needs k responses "
                "to each question; raise samples"
            )
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed must be in 0 … 2³¹−1, got {self.seed}")

    @property
    def all_ks(self) -> tuple[int, ...]:
        return self.ks or tuple(2**i for i in range(self.samples.bit_length()))


@dataclasses.dataclass(frozen=True)
class EvaluationConfig(TrainConfig):
    """A run's configuration, and how to evaluate it."""

    evaluate: EvaluateConfig


@dataclasses.dataclass(frozen=True, eq=False)
class Questions:
    """The questions of an evaluation: `examples` in order, by task; `seen` counts those that
    training holds.
    """

    examples: tuple[Example, ...]
    seen: dict[str, int]


@dataclasses.dataclass(frozen=True)
class EvalResponse:
    """The figures of one response."""

    task: str
    prompt: int
    reward: float | None
    num_tokens: int
    truncated: bool
    failed: bool


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """1 − C(n−c, k) / C(n, k): the probability that k of n responses hold one of c correct ones.

    Unbiased over n draws. Raises ValueError unless 0 ≤ c ≤ n and 1 ≤ k ≤ n.
    Source: arXiv 2107.03374, section 2.1.
    """
    if not 0 <= num_correct <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(
            f"expected 0 ≤ correct ≤ samples and 1 ≤ k ≤ samples, got correct={num_correct}, "
            f"k={k}, samples={num_samples}"
        )
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def summarise(responses: Sequence[EvalResponse], config: EvaluateConfig) -> dict[str, Any]:
    """Means over responses; pass@k is the mean over prompts. Without a reward: not correct."""
    correct: collections.Counter[int] = collections.Counter()
    for r in responses:
        correct[r.prompt] += r.reward is not None and r.reward >= config.correct_at
    rewards = [r.reward for r in responses if r.reward is not None]
    return {
        "prompts": len(correct),
        "mean_reward": math.fsum(rewards) / len(rewards) if rewards else None,
        "pass_at_k": {
            str(k): math.fsum(pass_at_k(config.samples, c, k) for c in correct.values())
            / len(correct)
            for k in config.all_ks
        },
        "mean_length_tokens": sum(r.num_tokens for r in responses) / len(responses),
        "truncated_share": sum(r.truncated for r in responses) / len(responses),
        "reward_failures": sum(r.failed for r in responses),
    }


# --- what is asked ----------------------------------------------------------------------


def as_evaluation(config: EvaluationConfig, policy: str) -> EvaluationConfig:
    """The configuration whose inputs are this evaluation's: its seed, enough questions, no mix."""
    task = dataclasses.replace(
        config.task, weights=(), size=_CANDIDATES * config.evaluate.num_prompts
    )
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, seed=config.evaluate.seed),
        policy=dataclasses.replace(config.policy, directory=policy),
        task=task,
    )


def choose(inputs: Inputs, config: EvaluateConfig, training: TrainConfig | None) -> Questions:
    """`num_prompts` different questions of each task, none of training's where there are others.

    A task too small to have others keeps those that training saw, counted in `seen`.
    """
    seen = _prompts_of(training) if training is not None else frozenset()
    unseen_by_task: dict[str, dict[str, Example]] = collections.defaultdict(dict)
    seen_by_task: dict[str, dict[str, Example]] = collections.defaultdict(dict)
    for index in range(len(inputs.task)):
        example = inputs.task[index]
        key = _key(example)
        by_task = seen_by_task if key in seen else unseen_by_task
        by_task[example.task].setdefault(key, example)
    chosen: list[Example] = []
    counts: dict[str, int] = {}
    for task in sorted({*unseen_by_task, *seen_by_task}):
        pool = unseen_by_task[task] or seen_by_task[task]
        questions = list(pool.values())[: config.num_prompts]
        counts[task] = 0 if unseen_by_task[task] else len(questions)
        chosen += questions
    return Questions(tuple(chosen), counts)


def _prompts_of(training: TrainConfig) -> frozenset[str]:
    task = open_tasks(training.task, training.run.seed)
    return frozenset(_key(task[i]) for i in range(len(task)))


def _key(example: Example) -> str:
    return json.dumps(example.prompt, sort_keys=True)


# --- asking -----------------------------------------------------------------------------


def respond(
    config: EvaluationConfig,
    inputs: Inputs,
    examples: Sequence[Example],
    params: Any,
    mesh: Any = None,
    on_round: Callable[[int, int], None] | None = None,
) -> list[EvalResponse]:
    """Generate and score `samples` responses to every example, in the order of the examples."""
    from rl.engine.engine import Engine
    from rl.learner.trainer import cast_params
    from rl.loop.experiment import recipe
    from spec.sampling import step_key

    n = config.evaluate.samples
    engine = Engine(
        inputs.model, config.engine, dtype=recipe(config, inputs.model).trainer.dtype, mesh=mesh
    )
    prompts = [inputs.encode(example, config.task) for example in examples]
    requests = [Request(p * n + i, prompts[p], p, i) for p in range(len(prompts)) for i in range(n)]
    scores: dict[int, Future[Score]] = {}
    with RewardPool(config.reward, tasks=config.task.specs) as pool:

        def score(t: Trajectory) -> None:
            text = inputs.tokenizer.decode(t.response_ids.tolist())
            job = ScoreJob(examples[t.group_id], text, tuple(t.response_ids.tolist()))
            scores[t.request_id] = pool.submit(job)

        spec = RolloutSpec(
            cast_params(params, engine.dtype),
            config.sampling,
            step_key(config.evaluate.seed, 0),
            inputs.model.eos_token_ids,
        )
        trajectories = engine.run(spec, requests, on_finish=score, on_round=on_round)
        results = [pool.result(scores[t.request_id]) for t in trajectories]
    return [
        EvalResponse(
            examples[t.group_id].task,
            t.group_id,
            s.total,
            t.num_tokens,
            t.truncated,
            s.failure is not None,
        )
        for t, s in zip(trajectories, results, strict=True)
    ]


def load_checkpoint(
    run: Path, model: ModelConfig, mesh: Any = None, step: int | None = None
) -> tuple[Any, int, tuple[str, ...]]:
    """(parameters, step, warnings) of a run's newest whole checkpoint, or of `step`, on `mesh`.

    Raises NoWholeCheckpointError, or StructureMismatchError where the policy folder
    has another shape than the run's.
    """
    import jax
    import jax.numpy as jnp

    from models.sharding import param_shardings
    from models.transformer import param_specs
    from rl.checkpoint.reader import restore
    from rl.learner.optimizer import SavedArrays

    specs = param_specs(model)
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shardings = (
        jax.tree.map(lambda _: here, specs) if mesh is None else param_shardings(mesh, specs)
    )
    params = jax.tree.map(
        lambda spec, sharding: jax.ShapeDtypeStruct(spec.shape, jnp.float32, sharding=sharding),
        specs,
        shardings,
    )
    template = SavedArrays(None, params, ())  # type: ignore[arg-type]  # of the state, this alone
    found = restore(run / CHECKPOINTS, template, step, subset=True)
    return found.arrays.params, found.step, found.warnings


def result(
    config: EvaluationConfig,
    questions: Questions,
    responses: Sequence[EvalResponse],
    training_is_known: bool,
) -> dict[str, Any]:
    """The figures by task and over all, with what they depend on; plain JSON."""
    by_task: dict[str, list[EvalResponse]] = {}
    for response in responses:
        by_task.setdefault(response.task, []).append(response)
    tasks = {
        task: summarise(of_task, config.evaluate) | {"seen_in_training": questions.seen[task]}
        for task, of_task in by_task.items()
    }
    if not training_is_known:
        for row in tasks.values():
            row["seen_in_training"] = None
    return {
        "samples_per_prompt": config.evaluate.samples,
        "correct_at": config.evaluate.correct_at,
        "seed": config.evaluate.seed,
        "sampling": dataclasses.asdict(config.sampling),
        "reward_functions": list(config.reward.functions),
        "tasks": tasks,
        "overall": summarise(responses, config.evaluate),
    }
