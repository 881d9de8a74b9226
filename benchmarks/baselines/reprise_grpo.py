"""`python -m rl.train`, which waits for a command before every step.

An update without a gradient, of groups with equal rewards, moves no weight: Adam's momentum waits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.end_to_end.protocol import Given, Parent
from benchmarks.environment import ROOT, TRAINING
from reprise.models.formats import hf
from reprise.rl.assembly.system import System
from reprise.rl.commands import train
from reprise.rl.data.prompts import DataOrder
from reprise.rl.learner.optimizer import TrainState
from reprise.rl.metrics.writer import Timings
from reprise.rl.run import loop
from reprise.rl.runtime.signals import Stopped, leave
from reprise.rl.steps.position import RunPosition
from reprise.rl.steps.step import StepRecord
from reprise.rl.weights.gathering import host_copy

VARIANTS = ("as shipped",)
Stepped = tuple[TrainState, RunPosition, StepRecord]


class CommandedStep:
    """`rl.steps.step.train_step`, on command: a step lasts until the loop asks for the next one."""

    def __init__(self, parent: Parent) -> None:
        self._parent, self._train_step = parent, loop.train_step
        self._figures: dict[str, Any] = {}

    def __call__(
        self,
        system: System,
        state: TrainState,
        position: RunPosition,
        timings: Timings,
        rollouts_of: Any,
    ) -> Stepped:
        def save(folder: Path) -> None:
            hf.save_pretrained(folder, system.inputs.model, host_copy(state.params, keep=True))

        if not self._parent.next_step(self._figures, save):
            raise Stopped
        done = self._train_step(system, state, position, timings, rollouts_of)
        metrics, seconds = done[2].metrics, timings.seconds()
        self._figures = {
            "reward": metrics["reward"],
            "tokens": round(metrics["completions/mean_length"] * metrics["completions/count"]),
            "updates": round(metrics["batch/optimizer_steps"]),
            "rollout_s": seconds["time/rollout"],
            "update_s": seconds["time/update"],
        }
        return done


def settings(given: Given) -> list[str]:
    """Return the command line of the run: the settings of the file and of all systems."""
    scratch = Path(given.scratch)
    questions = scratch / "questions.jsonl"
    _write_for_data_order(given, questions)
    bindings = {
        "Policy.directory": given.policy,
        "Task.specs": (f"jsonl:{questions}",),
        "Task.prompt_suffix": "",
        "Reward.functions": (f"{ROOT}/benchmarks/end_to_end/reward.py:{given.reward}",),
        "Run.directory": str(scratch / "run"),
        "Run.seed": given.seed,
        "Run.steps": 10_000,
        "Run.hang_limit_s": 1_000_000,  # it waits while the others compute
        "Rollout.prompts_per_step": given.prompts_per_step,
        "Rollout.group_size": given.group_size,
        "Sampling.max_new_tokens": given.max_new_tokens,
        "Trainer.minibatches": given.updates_per_step,
        "Optimizer.learning_rate": given.learning_rate,
        "Optimizer.schedule": "constant",
        "Optimizer.warmup_steps": 0,
        "Optimizer.b2": 0.99,
        "Eval.num_prompts": 0,
        "Checkpoint.every_steps": 0,
        "Checkpoint.every_minutes": 0,
        "Metrics.tensorboard": False,
    }
    if given.environment:
        bindings["Reward.functions"] = ("environment",)
    return [f"--gin_file={given.config}", *(f"--gin.{k}={v!r}" for k, v in bindings.items())]


def _write_for_data_order(given: Given, path: Path) -> None:
    """Write the questions so that the run's order of data is that of the given file."""
    rows = given.rows()
    places = DataOrder(len(rows), given.seed).indices(0, len(rows))
    lines = dict(zip(places.tolist(), map(json.dumps, rows), strict=True))
    path.write_text("".join(lines[i] + "\n" for i in range(len(rows))), encoding="utf-8")


def main() -> int:
    parent = Parent(VARIANTS, TRAINING)
    loop.train_step = CommandedStep(parent)  # type: ignore[assignment]
    return train.main(settings(parent.given))


if __name__ == "__main__":
    leave(main())
