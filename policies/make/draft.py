"""Make the draft model that ships: a smaller decoder that imitates the base policy.

    python -m policies.make.draft --output policies/tiny_draft

The policy answers questions of its four tasks at temperature 1, and the draft model is trained on
these responses by KL(policy ‖ draft model) over each next token.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from policies.make import solutions
from policies.make.policy import (
    BATCHES_PER_STEP,
    Batch,
    make_optimizer,
    pack,
    respond,
    train_step,
    write_report,
)
from reprise.models.config import ModelConfig
from reprise.models.decoder import transformer
from reprise.models.formats import hf
from reprise.models.text import tokenizer
from reprise.rl.engine.engine import Engine
from reprise.spec.verification import sampling

FIRST_STREAM = 1000  # of questions; far from the policy's own
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
Model = tuple[ModelConfig, transformer.Params]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Responses to train on, seen `epochs` times each, and the size of the draft model."""

    seed: int = 0
    responses: int = 16384
    epochs: int = 10
    step_examples: int = 32
    learning_rate: float = 5e-3
    max_new_tokens: int = 256
    num_layers: int = 1
    d_model: int = 64
    d_ff: int = 192


def draft_config(settings: Settings, policy: ModelConfig) -> ModelConfig:
    """Return the policy's shape with fewer, narrower layers; heads as wide, equal vocabulary."""
    num_heads = settings.d_model // policy.head_dim
    return dataclasses.replace(
        policy,
        d_model=settings.d_model,
        num_layers=settings.num_layers,
        num_heads=num_heads,
        num_kv_heads=max(1, num_heads // 2),
        d_ff=settings.d_ff,
    )


def training_prompts(settings: Settings) -> list[str]:
    stream = solutions.examples(FIRST_STREAM + settings.seed, 0.0)
    return [example.prompt for example in itertools.islice(stream, settings.responses)]


_logits = jax.jit(transformer.logits, static_argnums=0)


def teach(policy: Model, pairs: Sequence[Any], num_rows: int) -> list[Batch]:
    """Batch (prompt ids, response ids) by length, with the policy's logits as targets."""
    pairs = sorted(pairs, key=lambda pair: len(pair[0]) + len(pair[1]))
    batches = []
    for start in range(len(pairs) % num_rows, len(pairs), num_rows):
        batch = pack(pairs[start : start + num_rows])
        logits_BTV = _logits(*policy, batch.tokens_BT)
        batches.append(batch._replace(target=np.asarray(logits_BTV, np.float16)))
    return batches


def distill(
    settings: Settings, draft: ModelConfig, batches: Sequence[Batch]
) -> tuple[transformer.Params, list[float]]:
    """Train a draft model from random weights; return it and each step's mean KL in nats."""
    steps_per_epoch = max(1, len(batches) // BATCHES_PER_STEP)
    optimizer = make_optimizer(
        settings.learning_rate, settings.epochs * steps_per_epoch, weight_decay=0.01
    )
    params = transformer.init(draft, jax.random.key(settings.seed))
    state, rng, losses = optimizer.init(params), np.random.default_rng(settings.seed), []
    for epoch in range(settings.epochs):
        order = rng.permutation(len(batches))[: steps_per_epoch * BATCHES_PER_STEP]
        for indices in order.reshape(steps_per_epoch, -1):
            step = [batches[i] for i in indices]
            params, state, loss = train_step(draft, optimizer.update, params, state, step)
            losses.append(loss)
        mean = np.mean(losses[-steps_per_epoch:])
        print(f"epoch {epoch + 1:3d}  KL {mean:.4f} nats", flush=True)
    return params, losses


def make(policy_folder: Path, output: Path, settings: Settings) -> None:
    """Sample responses, train, and write the folder."""
    policy, tok = hf.load_pretrained(policy_folder), tokenizer.load(policy_folder)
    prompts, key = training_prompts(settings), sampling.step_key(settings.seed, 0)
    responses = respond(Engine(policy[0]), policy[1], tok, prompts, key, settings.max_new_tokens)
    pairs = [(t.prompt_ids.tolist(), t.response_ids.tolist()) for t in responses]
    batches = teach(policy, pairs, settings.step_examples // BATCHES_PER_STEP)
    model = draft_config(settings, policy[0])
    params, losses = distill(settings, model, batches)
    output.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        shutil.copyfile(policy_folder / name, output / name)
    hf.save_pretrained(output, model, params)
    num_tokens = sum(len(response) for _, response in pairs)
    figures = {"response_tokens": num_tokens, "steps_run": len(losses), "kl_nats": losses[-1]}
    write_report(output / "distilled.json", settings, **figures)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m policies.make.draft", description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--policy", type=Path, default=Path("policies/tiny"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make(arguments.policy, arguments.output, Settings(seed=arguments.seed))


if __name__ == "__main__":
    main()
