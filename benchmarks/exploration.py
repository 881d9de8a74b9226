"""Exploration under reuse, in a table: `python -m benchmarks.exploration --json`

Each prompt has one right answer of `ANSWERS`, and the policy has a logit an answer, which GRPO
moves prompt by prompt. Nothing generalises: a prompt that no draw solves stays unsolved, while a
real policy also learns from other prompts. Requests, their noise and their cached responses are
those of `rl.speculation.reuse.Reuse` in a run with an epoch a step; an answer is the argmax of
logits plus Gumbel noise of the request's name. Figures are the prompts with a right answer so far,
and the expected reward of the last policy. In the `graded` table some wrong answers earn a little,
so that few groups have equal rewards.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import environment
from reprise.rl.losses.advantages import group_advantages
from reprise.rl.records.trajectory import FinishReason, Origin, Request, Trajectory
from reprise.rl.speculation.config import ReuseConfig
from reprise.rl.speculation.reuse import Reuse
from reprise.spec.reuse.rollout_cache import RolloutCache
from reprise.spec.verification.sampling import NOISE_NAMES

ANSWERS = 50
GROUP = 8
LEARNING_RATE = 1.0
REPORTED = (5, 10, 20, 40)  # epochs
PARTIAL = 5, 0.2  # wrong answers that earn a little in the graded table, and their reward
SHARE = ReuseConfig().fresh_share


def coupled(fresh_share: float = SHARE, *, renew_groups: bool = True) -> ReuseConfig:
    return ReuseConfig("coupled", fresh_share=fresh_share, renew_groups=renew_groups)


def lenient(fresh_share: float = SHARE, *, renew_groups: bool = True) -> ReuseConfig:
    return ReuseConfig("lenient:e^0.5", fresh_share=fresh_share, renew_groups=renew_groups)


WAYS = {
    "binary": {
        "fresh": ReuseConfig("off"),
        "coupled": coupled(),
        "coupled_groups_only": coupled(0.0),
        "coupled_share_only": coupled(renew_groups=False),
        "coupled_repeating": coupled(0.0, renew_groups=False),
        "lenient": lenient(),
        "lenient_repeating": lenient(0.0, renew_groups=False),
    },
    "graded": {
        "fresh": ReuseConfig("off"),
        "coupled": coupled(),
        "coupled_groups_only": coupled(0.0),
        "coupled_half_fresh": coupled(0.5),
        "coupled_repeating": coupled(0.0, renew_groups=False),
    },
}


@dataclasses.dataclass(frozen=True)
class Epochs:
    """Figures by epoch: prompts solved so far, expected and repeated share, as shares of 1."""

    solved: list[float]
    reward: list[float]
    repeated: list[float]
    reused: list[float]


class Table:
    """Prompts with a right answer each, and the logits of a policy over the answers."""

    def __init__(self, num_prompts: int, seed: int, *, is_graded: bool) -> None:
        self.right_P = np.random.default_rng(seed).integers(0, ANSWERS, num_prompts)
        self.logits_PV = np.zeros((num_prompts, ANSWERS))
        self.seed, self._is_graded = seed, is_graded

    def reward(self, prompt: int, answer: int) -> float:
        """Return 1 for the right answer, a little for the next few of a graded table."""
        distance = (answer - int(self.right_P[prompt])) % ANSWERS
        num_partial, partial = PARTIAL
        if distance == 0:
            return 1.0
        return partial if self._is_graded and distance <= num_partial else 0.0

    @property
    def probs_PV(self) -> np.ndarray:
        exps_PV = np.exp(self.logits_PV - self.logits_PV.max(1, keepdims=True))
        return exps_PV / exps_PV.sum(1, keepdims=True)

    def draw(self, request: Request, noise_step: int) -> int:
        """Return the policy's answer with the noise of the request's name."""
        words = self.seed, noise_step, request.request_id % NOISE_NAMES
        noise_V = np.random.default_rng(words).gumbel(size=ANSWERS)
        return int(np.argmax(self.logits_PV[request.group_id] + noise_V))

    def learn(self, answers_PG: np.ndarray, rewards_PG: np.ndarray) -> None:
        """Make a step of GRPO: Σ A_i · ∇ log p(answer_i) / G for each prompt."""
        num_prompts, size = answers_PG.shape
        groups = np.repeat(np.arange(num_prompts), size)
        flat = group_advantages(rewards_PG.ravel().tolist(), groups.tolist())
        advantages_PG = flat.reshape(num_prompts, size)
        gradient_PV = -advantages_PG.sum(1, keepdims=True) * self.probs_PV
        np.add.at(gradient_PV, (groups, answers_PG.ravel()), advantages_PG.ravel())
        self.logits_PV += LEARNING_RATE * gradient_PV / size


def play(
    config: ReuseConfig, num_prompts: int, num_epochs: int, seed: int, *, is_graded: bool = False
) -> Epochs:
    """Train a table for some epochs, of one step each."""
    table = Table(num_prompts, seed, is_graded=is_graded)
    cache = RolloutCache(epochs=config.epochs)
    reuse = Reuse(config, cache, seed=seed, greedy=False)
    numbers, keys = range(num_prompts), [str(p) for p in range(num_prompts)]
    prompts, found = [(p,) for p in numbers], Epochs([], [], [], [])
    solved_P = np.zeros(num_prompts, bool)
    for step in range(1, num_epochs + 1):
        rule, noise_step = reuse.rule(step), 0 if config.couples_noise else step
        logprobs_PV = np.log(table.probs_PV)
        done, num_reused = list[Trajectory](), 0
        for r in reuse.requests(keys, prompts, numbers, GROUP, step=step):
            answer, is_kept = table.draw(r, noise_step), False
            if r.cached is not None and rule is not None:
                [last] = r.cached.tokens.tolist()
                if config.couples_noise:
                    is_kept = last == answer
                else:
                    [bound] = rule.min_logprobs(r.request_id, r.cached, 1).tolist()
                    is_kept = logprobs_PV[r.group_id, last] >= bound
                    answer = last if is_kept else answer
            num_reused += is_kept
            done.append(_response(r, answer, table, logprobs_PV, step, is_kept=is_kept))
        metrics = reuse.remember(keys, done, step, cache)
        answers_PG, rewards_PG = _by_group(done, num_prompts)
        solved_P |= (rewards_PG == 1).any(1)
        table.learn(answers_PG, rewards_PG)
        found.solved.append(float(solved_P.mean()))
        found.reward.append(float(table.probs_PV[numbers, table.right_P].mean()))
        found.repeated.append(metrics.get("spec/repeated_fraction", 0.0))
        found.reused.append(num_reused / len(done))
    return found


def _response(
    r: Request, answer: int, table: Table, logprobs_PV: np.ndarray, step: int, *, is_kept: bool
) -> Trajectory:
    """Return a request's response of one token."""
    logprobs = np.array([logprobs_PV[r.group_id, answer]], np.float32)
    return Trajectory(
        r.request_id,
        r.group_id,
        r.sample_index,
        np.array(r.prompt_ids, np.int32),
        np.array([answer], np.int32),
        logprobs,
        np.array([step - 1], np.int32),
        np.array([Origin.REUSED if is_kept else Origin.PLAIN], np.uint8),
        FinishReason.STOP,
        table.reward(r.group_id, answer),
        emission_logprobs=logprobs,
    )


def _by_group(done: Sequence[Trajectory], num_prompts: int) -> tuple[np.ndarray, np.ndarray]:
    """Return answers and rewards by prompt and sample."""
    answers_PG = np.zeros((num_prompts, GROUP), np.int64)
    rewards_PG = np.zeros((num_prompts, GROUP))
    for t in done:
        answers_PG[t.group_id, t.sample_index] = t.response_ids[0]
        rewards_PG[t.group_id, t.sample_index] = t.reward
    return answers_PG, rewards_PG


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    num_prompts, num_epochs = arguments.prompts, max(REPORTED)
    found: dict[str, Any] = {}
    for table, ways in WAYS.items():
        for name, config in ways.items():
            runs = [
                play(config, num_prompts, num_epochs, seed, is_graded=table == "graded")
                for seed in range(arguments.seeds)
            ]
            found.setdefault(table, {})[name] = row = _means(runs)
            environment.progress(table, name, row)
    last = f"after_{num_epochs}"
    ratios = {
        f"{table}_{name}_{figure}_over_fresh": round(
            row[figure][last] / ways["fresh"][figure][last], 3
        )
        for table, ways in found.items()
        for name, row in ways.items()
        for figure in ("solved", "reward")
        if name != "fresh"
    }
    return {**ratios, "epochs": num_epochs, "fresh_share": SHARE, "tables": found}


def _means(runs: Sequence[Epochs]) -> dict[str, dict[str, float]]:
    """Return the mean of each figure over runs, after some epochs."""
    figures = [field.name for field in dataclasses.fields(Epochs)]
    means = {name: np.mean([getattr(run, name) for run in runs], 0) for name in figures}
    return {
        name: {f"after_{e}": round(float(values[e - 1]), 3) for e in REPORTED}
        for name, values in means.items()
    }


if __name__ == "__main__":
    environment.run(__doc__, measure, prompts=400, seeds=3)
