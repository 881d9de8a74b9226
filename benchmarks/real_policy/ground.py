"""A policy, its questions, and its responses, each generated once.

A response is a function of policy, key and settings.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.real_policy.questions import ask
from reprise.models.decoder.transformer import Params
from reprise.models.formats import hf
from reprise.rl.engine.engine import Engine
from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.learner import trainer
from reprise.rl.learner.config import OptimizerConfig, TrainerConfig, TrainSpec
from reprise.rl.learner.optimizer import init_state, make_optimizer
from reprise.rl.losses.advantages import group_advantages
from reprise.rl.losses.algorithms import AlgorithmConfig
from reprise.rl.records.trajectory import Request, Trajectory
from reprise.rl.rewards.functions import task_reward
from reprise.rl.settings.inputs import open_policy
from reprise.rl.slots.config import EngineConfig
from reprise.rl.speculation.reuse import COUPLED_STEP
from reprise.spec.config import Draw, SamplingConfig
from reprise.spec.reuse.prefix_rule import PrefixRule, parse_mode
from reprise.spec.reuse.rollout_cache import CachedResponse, Scores
from reprise.spec.verification.sampling import step_key

STEP = 1  # whose noise draws the responses
MEASURED_RATE = 1e-4  # of the update that is computed; Adam's first step is proportional to it


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Questions of each set, responses to each, and their maximum length."""

    questions: int = 8
    group_size: int = 8
    new_tokens: int = 96
    slots: int = 64


class Ground:
    """The policy of a folder and questions of a kind; request g·group_size + i is sample i of g."""

    def __init__(self, policy: Path, kind: str, sizes: Sizes) -> None:
        self.folder, self.model, self.tokenizer = open_policy(str(policy))
        self.sizes, self.kind = sizes, kind
        self.questions = ask(kind, self.tokenizer, sizes.questions)
        self.params: Params = hf.load_pretrained(self.folder, dtype=jnp.float32)[1]
        self.engine = Engine(self.model, self.engine_config())
        self._responses: dict[tuple[Draw, float, float], list[Trajectory]] = {}

    def engine_config(self, **options: Any) -> EngineConfig:
        """Return settings with few buckets: compiling takes a CPU as long as generating."""
        longest = max(len(q.prompt_ids) for q in self.questions)
        defaults = {
            "slots": self.sizes.slots,
            "min_slots": max(1, self.sizes.slots // 4),
            "prefill_chunk_tokens": -(-longest // 64) * 64,
        }
        return EngineConfig(**defaults | options)

    def requests(
        self, past: Sequence[Trajectory] = (), chosen: Sequence[int] | None = None
    ) -> list[Request]:
        """Return a group for each question, or for the `chosen` ones."""
        G, by_id = self.sizes.group_size, {t.request_id: cached(t) for t in past}
        groups = range(len(self.questions)) if chosen is None else chosen
        return [
            Request(g * G + i, self.questions[g].prompt_ids, g, i, cached=by_id.get(g * G + i))
            for i in range(G)
            for g in groups
        ]

    def rollout_spec(
        self, params: Params, draw: Draw = "cdf", temperature: float = 1.0, **options: Any
    ) -> RolloutSpec:
        sampling = SamplingConfig(temperature, max_new_tokens=self.sizes.new_tokens, draw=draw)
        stop = self.model.eos_token_ids
        return RolloutSpec(params, sampling, step_key(0, STEP), stop, **options)

    def responses(
        self, draw: Draw = "cdf", temperature: float = 1.0, rate: float = 0.0
    ) -> list[Trajectory]:
        """Return responses of the policy; after an update at `rate` by coupled reuse."""
        name = draw, temperature, rate
        if name not in self._responses:
            before = self.responses(draw, temperature) if rate else ()
            rule = PrefixRule(parse_mode("coupled"), 0.0, 0, COUPLED_STEP) if rate else None
            spec = self.rollout_spec(self.updated(rate), draw, temperature, rule=rule)
            self._responses[name] = self.engine.run(spec, self.requests(before))
        return self._responses[name]

    def past(self, temperature: float = 1.0) -> list[Trajectory]:
        """Return last epoch's responses: the `gumbel` draw, whose noise is independent of `cdf`."""
        return self.responses("gumbel", temperature)

    def by_question(self, done: Sequence[Trajectory]) -> list[list[Trajectory]]:
        """Return the responses to each question, in the order of their samples."""
        groups: list[list[Trajectory]] = [[] for _ in self.questions]
        for t in sorted(done, key=lambda t: (t.group_id, t.sample_index)):
            groups[t.group_id].append(t)
        return groups

    def updated(self, rate: float) -> Params:
        """Return the policy after one GRPO update from its own responses, at this learning rate.

        The update is computed once, at `MEASURED_RATE`. Adam's first step is proportional to the
        rate, hence policies of other rates lie on the line through both.
        """
        if not rate:
            return self.params
        after, scale = self.update[0], rate / MEASURED_RATE
        return jax.tree.map(lambda a, b: a + scale * (b - a), self.params, after)

    @functools.cached_property
    def update(self) -> tuple[Params, dict[str, Any]]:
        """The policy after one update at `MEASURED_RATE`, and figures of the update."""
        scored = [(t, r) for t in self.responses() if (r := self._reward(t)) is not None]
        trajectories = [dataclasses.replace(t, reward=r) for t, r in scored]
        rewards = [r for _, r in scored]
        advantages = group_advantages(rewards, [t.group_id for t in trajectories])
        longest = max(len(q.prompt_ids) for q in self.questions) + self.sizes.new_tokens
        settings = TrainerConfig(micro_batch_tokens=1024, logprob_chunk_tokens=256, remat="layer")
        optimizer = OptimizerConfig(learning_rate=MEASURED_RATE)
        recipe = TrainSpec(self.model, AlgorithmConfig(), settings, optimizer, total_steps=1)
        sampling = self.rollout_spec(self.params).sampling
        learner = trainer.Learner(recipe, trainer.batch_shape(recipe, longest), sampling)
        state = init_state(jax.tree.map(jnp.copy, self.params), make_optimizer(optimizer, 1))
        state, metrics = trainer.update(state, trajectories, advantages, 1, learner)
        groups = {t.group_id for t, a in zip(trajectories, advantages, strict=True) if a}
        return state.params, {
            "responses": len(trajectories),
            "reward": round(float(np.mean(rewards)), 4),
            "groups": len({t.group_id for t in trajectories}),
            "groups_with_gradient": len(groups),
            "grad_norm": round(metrics["grad_norm"], 4),
        }

    def _reward(self, t: Trajectory) -> float | None:
        """Return the project's reward of a response; None if its set has none."""
        question = self.questions[t.group_id]
        if question.of.extract is None:
            return None
        example, text = question.example, self.tokenizer.decode(t.response_ids)
        columns = {**example.columns, "answer": example.answer}
        return task_reward(text, columns, example.task, question.of.extract)


def cached(t: Trajectory) -> CachedResponse:
    """Return a response as the rollout cache stores it."""
    scores = Scores(t.logprobs, t.emission_logprobs, t.policy_versions)
    return CachedResponse(t.sample_index, t.response_ids, 1.0, scores)
