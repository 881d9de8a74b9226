"""Samples with advantages of tokens by a teacher, and metrics of its scores.

    A_t = task_weight · A + coefficient · (log p_teacher(y_t) − log p(y_t))

p is the policy as it was sampled, and both distributions are after temperature, top-k and top-p.
The second term is an estimate of −KL(p ‖ p_teacher) at the token, without a discount of later
tokens. Source: Thinking Machines, "On-Policy Distillation"; generalised KL: arXiv 2306.13649.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from reprise.rl.batches.micro_batches import TrainSample
from reprise.rl.losses.algorithms import DistillConfig


@dataclasses.dataclass(frozen=True, eq=False)
class TeacherScores:
    """Log-probs and entropies under the teacher at response tokens, float32 [num_tokens] each."""

    logprobs: list[np.ndarray]
    entropies: list[np.ndarray]

    def added_to(self, samples: Sequence[TrainSample], config: DistillConfig) -> list[TrainSample]:
        """Return the samples with the advantage of each token."""
        changed = []
        for sample, teacher_T in zip(samples, self.logprobs, strict=True):
            task = sample.advantage if sample.token_advantages is None else sample.token_advantages
            advantages = taught_advantages(task, teacher_T, sample.trajectory.logprobs, config)
            changed.append(dataclasses.replace(sample, token_advantages=advantages))
        return changed

    def metrics(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Return means over all response tokens, in nats; no metrics without samples."""
        if not samples:
            return {}
        drawn = np.concatenate([sample.trajectory.logprobs for sample in samples])
        gaps = drawn - np.concatenate(self.logprobs)
        entropies = np.concatenate(self.entropies)
        return {
            "distill/reverse_kl": float(gaps.mean(dtype=np.float64)),
            "distill/teacher_entropy": float(entropies.mean(dtype=np.float64)),
        }


def taught_advantages(
    task: float | np.ndarray, teacher_T: np.ndarray, drawn_T: np.ndarray, config: DistillConfig
) -> np.ndarray:
    """Return A_t of the module, float32 [T], for the advantage `task` of rewards.

    `teacher_T` and `drawn_T` are log-probs of the tokens. With a weight of 0, `task` is not read.
    """
    advantages_T = np.float32(config.coefficient) * (teacher_T - drawn_T)
    if config.task_weight:
        advantages_T = advantages_T + np.float32(config.task_weight) * np.float32(task)
    return advantages_T
