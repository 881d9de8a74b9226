"""GRPO steps of a policy of 0.6B parameters, plain and then with drafts, as `rl.train` makes them.

`policies/countdown` grows to the width, layers and vocabulary of a real policy: it has the logits
of the small one, up to rounding, and the cost of its own size, so that drafts from history and
siblings are accepted as in a real run. Both rows start from the same weights and seed. In bfloat16
a round of another shape may draw another token: tokens are compared. Nothing is saved at the end.
"""

from __future__ import annotations

import itertools
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import environment
from benchmarks.accelerator.budget import Figures, Log
from benchmarks.accelerator.sizes import Size
from policies.make.grow import grow
from reprise.models.config import num_params
from reprise.rl.assembly import setup
from reprise.rl.gin.loader import load
from reprise.rl.metrics.writer import Timings
from reprise.rl.runtime.progress import Progress
from reprise.rl.runtime.signals import Watch
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import open_inputs
from reprise.rl.steps.position import RunPosition
from reprise.rl.steps.rollouts import Rollouts, generate
from reprise.rl.steps.step import speed_metrics, train_step

POLICY = environment.ROOT / "policies" / "countdown"
CONFIG = environment.ROOT / "configs" / "countdown_cpu.gin"
PLAIN = "Speculation.sources=()", "Speculation.budget='off'"
KEPT = {  # figures of a step
    "rollout_s": "time/rollout",
    "update_s": "time/update",
    "step_s": "step_time",
    "tail_s": "rollout/tail_s",
    "draft_s": "spec/draft_seconds",
    "rounds": "rollout/rounds",
    "generated_tokens": "rollout/generated_tokens",
    "accept_rate": "spec/accept_rate",
    "drafted_tokens": "spec/speculated_fraction",
    "tokens_per_round": "spec/tokens_per_round",
    "longest_tokens": "completions/max_length",
    "mean_tokens": "completions/mean_length",
    "reward": "reward",
    "entropy": "entropy",
    "gradient_norm": "grad_norm",
    "logprob_difference": "sampling/sampling_logp_difference/mean",
}


class Steps:
    """The steps of both kinds, with the responses of the plain ones to compare with."""

    def __init__(self, size: Size, folder: Path) -> None:
        self.size = size
        self.folder = folder
        self.plain = dict[int, dict[int, np.ndarray]]()  # by step and request

    def policy(self, log: Log) -> Path:
        """Return the folder of the grown policy, which is kept for other rows and calls."""
        grown = self.size.grown
        output = self.folder / f"policy_{self.size.name}"
        if not output.exists():
            log.phase("grow the policy")
            part = output.with_suffix(".part")  # a call that is killed leaves no half of it
            shutil.rmtree(part, ignore_errors=True)
            grow(
                POLICY,
                part,
                width=grown.width,
                num_layers=grown.num_layers,
                head_width=grown.head_width,
                vocab_size=grown.vocab_size,
            )
            part.rename(output)
        return output

    def questions(self) -> Path:
        """Return a file of the questions of a step, so that each step is an epoch."""
        few = (POLICY / "few.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        path = self.folder / f"questions_{self.size.name}.jsonl"
        path.write_text("".join(few[: self.size.grown.prompts_per_step]), encoding="utf-8")
        return path

    def settings(self, kind: str, policy: Path) -> tuple[str, ...]:
        grown = self.size.grown
        drafts = (f"Speculation.budget='{grown.budget}'",)
        return (
            f"Policy.directory='{policy}'",
            f"Task.specs=('jsonl:{self.questions()}',)",
            f"Run.steps={grown.steps}",
            f"Rollout.prompts_per_step={grown.prompts_per_step}",
            f"Rollout.group_size={grown.group_size}",
            f"Sampling.max_new_tokens={grown.new_tokens}",
            f"Engine.slots={grown.slots}",
            f"Engine.min_slots={grown.slots}",
            f"Engine.max_nodes={grown.max_nodes}",
            f"Engine.max_round_nodes={grown.max_round_nodes}",
            f"Trainer.micro_batch_tokens={grown.micro_batch_tokens}",
            f"Trainer.compute_dtype='{self.size.dtype}'",
            "Trainer.minibatches=1",
            "Optimizer.warmup_steps=0",
            f"Optimizer.learning_rate={2e-5 / grown.width}",
            "Eval.every_steps=0",
            *(PLAIN if kind == "plain" else drafts),
        )

    def run(self, kind: str, log: Log) -> Iterator[Figures]:
        """Yield the figures of each step."""
        config = load(TrainConfig, [CONFIG], self.settings(kind, self.policy(log)))
        log.phase("load")
        inputs = open_inputs(config)
        parameters = num_params(inputs.model)
        times: Any = {"show": Phases(log), "watch": Watch(), "clock": time.perf_counter}
        run = self.folder / f"run_{kind}"
        with setup.build(config, inputs, run, **times) as (system, state):
            position = RunPosition()
            responses = dict[int, np.ndarray]()

            def rolled_out(*given: Any) -> Rollouts:
                found = generate(*given)
                responses.update({t.request_id: t.response_ids for t in found.trajectories})
                return found

            for step in range(1, config.run.steps + 1):
                timings = Timings(time.perf_counter, log.phase)
                responses.clear()
                state, position, record = train_step(system, state, position, timings, rolled_out)
                jax.block_until_ready(state.params)
                row = record.metrics | speed_metrics(record.metrics, timings.seconds())
                figures: Figures = {"step": step, "parameters": parameters}
                figures |= {name: _short(row[key]) for name, key in KEPT.items() if key in row}
                yield figures | self._compared(kind, step, responses)

    def _compared(self, kind: str, step: int, responses: Mapping[int, np.ndarray]) -> Figures:
        """Keep plain responses; count the others that differ from the plain ones of their step."""
        tokens = sum(map(len, responses.values()))
        if kind == "plain":
            self.plain[step] = dict(responses)
            return {"tokens": tokens}
        plain = self.plain.get(step)
        if plain is None or plain.keys() != responses.keys():
            return {"tokens": tokens, "tokens_compared": 0}  # the plain row has not been measured
        pairs = [(plain[i], responses[i]) for i in plain]
        return {
            "tokens": tokens,
            "tokens_compared": tokens,
            "responses": len(pairs),
            "responses_that_differ": sum(not np.array_equal(x, y) for x, y in pairs),
            "tokens_from_a_difference": sum(map(_rest, pairs)),
        }


def _rest(pair: tuple[np.ndarray, np.ndarray]) -> int:
    """Return the tokens of the second response from the first that differs."""
    one, other = (x.tolist() for x in pair)
    same = itertools.takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False))
    return len(other) - sum(1 for _ in same)


def _short(value: Any) -> float | None:
    return None if value is None else float(f"{float(value):.4g}")


class Phases(Progress):
    """A display that makes the parts of a run the phases of a row."""

    def __init__(self, log: Log) -> None:
        super().__init__(sys.stderr)
        self._log = log

    def compiling(self, what: str, done: int, total: int) -> None:
        if done == 0:
            self._log.phase("compile")
        self._log.note(compiled=f"{done} of {total} programs of {what}")
