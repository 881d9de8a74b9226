"""A policy, its questions, and responses to them that are generated once.

Responses and the updated policy lie in the working folder, so that the parts of the benchmark
share them and can be repeated one by one. A response is a function of policy, key and settings.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.real_policy import questions
from benchmarks.real_policy.questions import Question
from models import hf
from models.transformer import Params
from rl.engine.config import EngineConfig
from rl.engine.engine import Engine
from rl.engine.rollout_spec import RolloutSpec
from rl.learner import trainer
from rl.learner.advantages import group_advantages
from rl.learner.algorithms import AlgorithmConfig
from rl.learner.config import OptimizerConfig, TrainerConfig, TrainSpec
from rl.learner.optimizer import init_state, make_optimizer
from rl.loop.experiment import open_policy
from rl.rewards.functions import task_reward
from rl.speculation.reuse import COUPLED_STEP
from rl.trajectory import FinishReason, Origin, Request, Trajectory
from spec.config import Draw, SamplingConfig
from spec.reuse.prefix_rule import PrefixRule, parse_mode
from spec.reuse.rollout_cache import CachedResponse, Scores
from spec.sampling import step_key

STEP = 1  # whose noise draws the responses
MEASURED_RATE = 1e-4  # of the update that is made; Adam's first step is proportional to it


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Questions of each set, responses to each, and their tokens at most."""

    questions: int = 8
    group_size: int = 8
    new_tokens: int = 96
    slots: int = 64


class Ground:
    """The policy of a folder, asked the questions of a kind. Its responses lie in `work`."""

    def __init__(self, policy: Path, kind: str, work: Path, sizes: Sizes) -> None:
        self.folder, self.model, self.tokenizer = open_policy(str(policy))
        self.work, self.sizes, self.kind = work, sizes, kind
        self.questions = questions.ask(kind, self.tokenizer, sizes.questions)
        work.mkdir(parents=True, exist_ok=True)
        settings = {"kind": kind, **dataclasses.asdict(sizes)}
        kept = work / "settings.json"
        if kept.is_file() and json.loads(kept.read_text()) != settings:
            raise ValueError(
                f"{work} holds responses of other sizes, {kept.read_text()}: expected "
                f"{json.dumps(settings)}; give another --work, or the same sizes"
            )
        kept.write_text(json.dumps(settings))

    @functools.cached_property
    def params(self) -> Params:
        _, params = hf.load_pretrained(self.folder, dtype=jnp.float32)
        return jax.block_until_ready(params)

    @functools.cached_property
    def engine(self) -> Engine:
        return Engine(self.model, self.engine_config())

    def engine_config(self, **options: Any) -> EngineConfig:
        """Return buckets that are few: compiling costs a CPU as much as generating does."""
        longest = max(len(q.prompt_ids) for q in self.questions)
        defaults = {
            "slots": self.sizes.slots,
            "min_slots": max(1, self.sizes.slots // 4),
            "min_positions": -(-(longest + self.sizes.new_tokens + 16) // 64) * 64,
            "prefill_chunk_tokens": -(-longest // 64) * 64,
        }
        return EngineConfig(**defaults | options)

    def sampling(self, draw: Draw = "cdf", temperature: float = 1.0) -> SamplingConfig:
        return SamplingConfig(temperature, max_new_tokens=self.sizes.new_tokens, draw=draw)

    def requests(
        self, past: Sequence[Trajectory] = (), chosen: Sequence[int] | None = None
    ) -> list[Request]:
        """Return a group for each question, or the `chosen` ones; group g answers question g."""
        G, by_id = self.sizes.group_size, {t.request_id: cached(t) for t in past}
        groups = range(len(self.questions)) if chosen is None else chosen
        return [
            Request(g * G + i, self.questions[g].prompt_ids, g, i, cached=by_id.get(g * G + i))
            for i in range(G)
            for g in groups
        ]

    # -- responses ---------------------------------------------------------------------

    def responses(
        self, draw: Draw = "cdf", temperature: float = 1.0, *, rate: float = 0.0
    ) -> list[Trajectory]:
        """Return responses, by request id, of the policy or of the one after an update.

        Those after an update at the learning rate `rate` start from what coupled reuse keeps of
        the policy's own, under the same noise: they are the draws of the updated policy.
        """
        name = f"responses-{draw}-{temperature:g}" + (f"-{rate:g}" if rate else "")
        path = self.work / f"{name}.npz"
        if not path.is_file():
            before = self.responses(draw, temperature) if rate else ()
            params = self.updated(rate) if rate else self.params
            rule = PrefixRule(parse_mode("coupled"), 0.0, 0, COUPLED_STEP) if rate else None
            spec = self.rollout_spec(params, draw, temperature, rule=rule)
            began_s = time.perf_counter()
            done = self.engine.run(spec, self.requests(before))
            seconds = time.perf_counter() - began_s
            tokens = sum(t.num_tokens for t in done)
            print(f"{name}: {tokens} tokens in {seconds:.0f} s", file=sys.stderr, flush=True)
            _save(path, done)
        return _load(path, self.requests(), self.stop_token_ids)

    def past(self, temperature: float = 1.0) -> list[Trajectory]:
        """Return the last epoch's responses: of the same policy, under other noise.

        They are those of the `gumbel` draw, whose noise has nothing to do with that of `cdf`.
        """
        return self.responses("gumbel", temperature)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self.model.eos_token_ids

    def rollout_spec(
        self,
        params: Params,
        draw: Draw = "cdf",
        temperature: float = 1.0,
        **options: Any,
    ) -> RolloutSpec:
        sampling, key = self.sampling(draw, temperature), step_key(0, STEP)
        return RolloutSpec(params, sampling, key, self.stop_token_ids, **options)

    def by_question(self, done: Sequence[Trajectory]) -> list[list[Trajectory]]:
        """Return the responses to each question, in the order of their samples."""
        groups: list[list[Trajectory]] = [[] for _ in self.questions]
        for t in sorted(done, key=lambda t: (t.group_id, t.sample_index)):
            groups[t.group_id].append(t)
        return groups

    # -- one update --------------------------------------------------------------------

    def rewards(self, done: Sequence[Trajectory]) -> list[float | None]:
        """Return the project's reward of each response; None where nothing can score it."""
        return [self._reward(self.questions[t.group_id], t) for t in done]

    def _reward(self, question: Question, t: Trajectory) -> float | None:
        if question.of.extract is None:
            return None
        example = question.example
        text = self.tokenizer.decode(t.response_ids)
        columns = {**example.columns, "answer": example.answer}
        return task_reward(text, columns, example.task, question.of.extract)

    def updated(self, rate: float) -> Params:
        """Return the policy after one GRPO update from its own responses, at this learning rate.

        The update is made once, at `MEASURED_RATE`. The first step of Adam moves each weight by
        the learning rate times what its gradient's sign and size decide, so that the policies of
        other rates lie on the line through both.
        """
        folder = self.work / "updated"
        if not folder.is_dir():
            self._update(folder)
        _, after = hf.load_pretrained(folder, dtype=jnp.float32)
        scale = rate / MEASURED_RATE
        return jax.block_until_ready(
            jax.tree.map(lambda a, b: a + scale * (b - a), self.params, after)
        )

    @property
    def update_figures(self) -> dict[str, Any]:
        """The metrics of the update; `updated` comes first."""
        return json.loads((self.work / "update.json").read_text())

    def _update(self, folder: Path) -> None:
        done = self.responses()
        rewards = self.rewards(done)
        scored = [(t, r) for t, r in zip(done, rewards, strict=True) if r is not None]
        trajectories = [dataclasses.replace(t, reward=r) for t, r in scored]
        advantages = group_advantages([r for _, r in scored], [t.group_id for t in trajectories])
        longest = max(len(q.prompt_ids) for q in self.questions) + self.sizes.new_tokens
        settings = TrainerConfig(micro_batch_tokens=1024, logprob_chunk_tokens=256, remat="layer")
        optimizer = OptimizerConfig(learning_rate=MEASURED_RATE)
        recipe = TrainSpec(self.model, AlgorithmConfig(), settings, optimizer, total_steps=1)
        shape = trainer.batch_shape(recipe, longest)
        learner = trainer.Learner(recipe, shape, self.sampling())
        copy = jax.tree.map(jnp.copy, self.params)
        state = init_state(copy, make_optimizer(optimizer, 1))
        began_s = time.perf_counter()
        state, metrics = trainer.update(state, trajectories, advantages, 1, learner)
        seconds = time.perf_counter() - began_s
        print(f"update: {seconds:.0f} s, {metrics}", file=sys.stderr, flush=True)
        groups = {t.group_id for t, a in zip(trajectories, advantages, strict=True) if a}
        figures = {
            "responses": len(trajectories),
            "reward": round(float(np.mean([r for _, r in scored])), 4),
            "groups": len({t.group_id for t in trajectories}),
            "groups_with_gradient": len(groups),
            "grad_norm": round(metrics["grad_norm"], 4),
        }
        (self.work / "update.json").write_text(json.dumps(figures))
        hf.save_pretrained(folder, self.model, state.params)


def cached(t: Trajectory) -> CachedResponse:
    """Return a response as the rollout cache keeps it."""
    scores = Scores(t.logprobs, t.emission_logprobs, t.policy_versions)
    return CachedResponse(t.sample_index, t.response_ids, 1.0, scores)


def _save(path: Path, done: Sequence[Trajectory]) -> None:
    ordered = sorted(done, key=lambda t: t.request_id)
    arrays = {
        "request_ids": [t.request_id for t in ordered],
        "lengths": [t.num_tokens for t in ordered],
        "tokens": np.concatenate([t.response_ids for t in ordered]),
        "logprobs": np.concatenate([t.logprobs for t in ordered]),
    }
    part = path.with_suffix(".part.npz")
    np.savez(part, **arrays)
    part.rename(path)


def _load(path: Path, requests: Sequence[Request], stop: Sequence[int]) -> list[Trajectory]:
    with np.load(path, allow_pickle=False) as held:
        ends = np.cumsum(held["lengths"])[:-1]
        tokens, logprobs = (np.split(held[name], ends) for name in ("tokens", "logprobs"))
        ids = held["request_ids"].tolist()
    asked = {r.request_id: r for r in requests}
    done = []
    for request_id, own, own_logprobs in zip(ids, tokens, logprobs, strict=True):
        request, n = asked[request_id], len(own)
        done.append(
            Trajectory(
                request_id,
                request.group_id,
                request.sample_index,
                np.asarray(request.prompt_ids, np.int32),
                own.astype(np.int32),
                own_logprobs,
                np.zeros(n, np.int32),
                np.full(n, Origin.PLAIN, np.uint8),
                FinishReason.STOP if int(own[-1]) in stop else FinishReason.LENGTH,
                emission_logprobs=own_logprobs,
            )
        )
    return done
