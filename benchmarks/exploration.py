"""What reuse costs in exploration: `python -m benchmarks.exploration --json`

A table of prompts with one right answer of `ANSWERS` each, and a policy of a logit an answer that
GRPO moves, prompt by prompt: nothing generalises, so a prompt that is never solved by a draw stays
unsolved. A real policy also moves prompts that it does not solve. Requests, their noise and their
cached responses are those of `rl.speculation.reuse.Reuse` in a run of an epoch a step; an answer is
argmax(logit + Gumbel noise of the request's name). Counted are the prompts with at least one right
answer so far, and the expected reward of the last policy.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import environment
from rl.learner.advantages import group_advantages
from rl.speculation.config import ReuseConfig
from rl.speculation.reuse import Reuse
from rl.trajectory import FinishReason, Origin, Request, Trajectory
from spec.reuse.rollout_cache import RolloutCache
from spec.sampling import NOISE_NAMES

ANSWERS, GROUP, LEARNING_RATE = 50, 8, 1.0
REPORTED = (5, 10, 20, 40)  # epochs
SHARE = ReuseConfig().fresh_share
WAYS = {
    "fresh": ReuseConfig("off"),
    **{
        f"{name}{title}": ReuseConfig(mode, fresh_share=share, renew_groups=renews)
        for name, mode in (("coupled", "coupled"), ("lenient", "lenient:e^0.5"))
        for title, share, renews in (
            ("", SHARE, True),
            ("_share_only", SHARE, False),
            ("_groups_only", 0.0, True),
            ("_repeating", 0.0, False),
        )
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

    def __init__(self, num_prompts: int, seed: int) -> None:
        self.right_P = np.random.default_rng(seed).integers(0, ANSWERS, num_prompts)
        self.logits_PV = np.zeros((num_prompts, ANSWERS))
        self.seed = seed

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


def play(config: ReuseConfig, num_prompts: int, num_epochs: int, seed: int) -> Epochs:
    """Train a table for some epochs, of one step each."""
    table, cache = Table(num_prompts, seed), RolloutCache(epochs=config.epochs)
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
        solved_P |= rewards_PG.any(1)
        table.learn(answers_PG, rewards_PG)
        found.solved.append(float(solved_P.mean()))
        found.reward.append(float(table.probs_PV[numbers, table.right_P].mean()))
        found.repeated.append(metrics.get("reuse/repeated_fraction", 0.0))
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
        float(answer == table.right_P[r.group_id]),
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
    num_epochs, seeds = max(REPORTED), range(arguments.seeds)
    ways = dict[str, Any]()
    for name, config in WAYS.items():
        runs = [play(config, arguments.prompts, num_epochs, seed) for seed in seeds]
        mean = {
            figure: np.mean([getattr(run, figure) for run in runs], 0)
            for figure in ("solved", "reward", "repeated", "reused")
        }
        ways[name] = {
            figure: {f"after_{e}": round(float(values[e - 1]), 3) for e in REPORTED}
            for figure, values in mean.items()
        }
        environment.progress(name, ways[name])
    last, fresh = f"after_{num_epochs}", ways["fresh"]
    ratios = {
        f"{name}_{figure}_over_fresh": round(way[figure][last] / fresh[figure][last], 3)
        for name, way in ways.items()
        if name != "fresh"
        for figure in ("solved", "reward")
    }
    return {**ratios, "epochs": num_epochs, "fresh_share": SHARE, "ways": ways}


if __name__ == "__main__":
    packages = ("jax", "jaxlib", "numpy")
    environment.run(__doc__, measure, packages, prompts=400, seeds=3)
