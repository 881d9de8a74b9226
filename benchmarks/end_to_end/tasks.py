"""The work of `benchmarks.end_to_end`: policies, their questions as files, and their evaluation."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.end_to_end import reward
from benchmarks.end_to_end.protocol import WEIGHTS
from reprise.models.formats import hf
from reprise.rl.data.prompts import DataOrder, encode_prompt
from reprise.rl.data.tasks import Example, open_tasks
from reprise.rl.engine.engine import Engine
from reprise.rl.gin.loader import load
from reprise.rl.python.generate import generate
from reprise.rl.records.trajectory import Request
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import open_policy
from reprise.spec.config import SamplingConfig
from reprise.spec.verification.sampling import step_key

TRAIN, TEST = 2000, 256  # questions
TEST_SEED = 1_000_003


@dataclasses.dataclass(frozen=True)
class Work:
    """A policy's step: a configuration, for tasks and the engine's sizes; a reward; sizes."""

    config: str
    reward: str
    prompts_per_step: int
    group_size: int
    max_new_tokens: int
    learning_rate: float
    updates_per_step: int
    environment: str = ""


WORK = {
    "policies/tiny": Work("configs/tiny_cpu.gin", "exact", 16, 8, 256, 1.2e-4, 4),
    "calculator": Work(
        "benchmarks/end_to_end/calculator.gin", "exact", 8, 8, 256, 1.2e-4, 2, "calculator"
    ),
    "downloads/smollm2": Work("configs/smollm2_epochs_cpu.gin", "brief", 4, 4, 64, 1e-5, 2),
}


def write_questions(work: Work, seed: int, path: Path) -> None:
    """Write the questions of training, in the order in which every system asks them."""
    config = load(TrainConfig, [work.config])
    specs = config.task.specs
    task = dataclasses.replace(config.task, size=-(-TRAIN // len(specs)))
    examples = open_tasks(task, seed)
    order = DataOrder(len(examples), seed).indices(0, TRAIN)
    _write((examples[int(i)] for i in order), config.task.prompt_suffix, path)


def write_unseen(work: Work, seeds: Iterable[int], path: Path) -> None:
    """Write other questions of the same tasks, none of which training with these seeds has."""
    config = load(TrainConfig, [work.config])
    size = -(-TRAIN // len(config.task.specs))
    known = {
        str(example.prompt)
        for seed in seeds
        for example in open_tasks(dataclasses.replace(config.task, size=size), seed)
    }
    unseen = {
        str(example.prompt): example
        for example in open_tasks(config.task, TEST_SEED)
        if str(example.prompt) not in known
    }
    _write(list(unseen.values())[:TEST], config.task.prompt_suffix, path)


def _write(examples: Iterable[Example], suffix: str, path: Path) -> None:
    rows = ({"prompt": f"{one.prompt}{suffix}", "answer": one.answer} for one in examples)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


class Judge:
    """Evaluates any policy of a shape by our engine: the same questions and noise each time."""

    def __init__(self, policy: Path, work: Work, questions: Path, samples: int) -> None:
        self._policy, self._score = policy, getattr(reward, work.reward)
        config = load(TrainConfig, [work.config])
        _, self._model, self._tokenizer = open_policy(str(policy), config.task)
        rows = [json.loads(line) for line in questions.read_text("utf-8").splitlines()]
        self._answers = [row["answer"] for row in rows for _ in range(samples)]
        examples = [Example(str(i), r["prompt"], r["answer"], {}, "") for i, r in enumerate(rows)]
        task = dataclasses.replace(config.task, prompt_suffix="")
        self._requests = [
            Request(g * samples + i, encode_prompt(self._tokenizer, example, task), g, i)
            for g, example in enumerate(examples)
            for i in range(samples)
        ]
        self._sampling = SamplingConfig(temperature=1.0, max_new_tokens=work.max_new_tokens)
        self._engine = Engine(self._model, config.engine, dtype=jnp.dtype("float32"))

    def complete(self, folder: Path) -> None:
        """Add the rest of the policy's folder to saved weights."""
        for file in self._policy.iterdir():
            if file.is_file() and file.name != WEIGHTS:
                shutil.copy(file, folder / file.name)

    def reward(self, folder: Path) -> float:
        """Return the mean reward of a policy's responses at temperature 1."""
        params = jax.block_until_ready(hf.load_pretrained(folder, dtype=jnp.float32)[1])
        done = generate(
            self._model,
            params,
            self._requests,
            self._sampling,
            key=step_key(0, 0),
            engine=self._engine,
            stop_token_ids=self._model.eos_token_ids,
        )
        texts = [self._tokenizer.decode(t.response_ids) for t in done]
        return float(np.mean(self._score(texts, self._answers)))
