"""Make the draft model that ships: a smaller decoder that imitates the shipped policy.

    python -m benchmarks.warmstart.distilled --output policies/tiny_draft --seed 0

The policy answers questions of its four tasks at temperature 1, and the draft model is
trained on these responses by KL(policy ‖ draft model) over each next token. What matters
in speculative decoding is how often its draft tokens are accepted, so that is measured, on
responses to held-out questions: the overlap of the two distributions, and how often the
draft model's draw under the policy's own noise is the policy's token. The run is a
function of its settings, up to the rounding of the machine's matrix products.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.warmstart import evaluation, solutions, supervised
from benchmarks.warmstart.supervised import BATCHES_A_STEP, Batch
from models import hf, tokenizer, transformer
from models.config import ModelConfig
from models.params import num_params
from spec import sampling
from spec.config import Draw

# Streams of questions, numbered as `solutions.examples` numbers them: far from the policy's own.
FIRST_STREAM = 1000
PROMPT_TOKENS = 128  # no question of the four tasks is longer
SAMPLED_ROWS = 128  # questions of one task answered at once
Model = tuple[ModelConfig, transformer.Params]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclasses.dataclass(frozen=True)
class DistillConfig:
    """The policy, size of its draft model, responses to train on, and the training.

    `responses` responses of the policy are each seen about `epochs` times, in steps of
    `step_examples`. The draft model is measured on `held_out_prompts` responses a task.
    """

    policy: str = "policies/tiny"
    output: str = "policies/tiny_draft"
    seed: int = 0
    responses: int = 16384
    epochs: int = 10
    step_examples: int = 32
    learning_rate: float = 5e-3
    warmup_steps: int = 50
    weight_decay: float = 0.01
    held_out_prompts: int = 128
    max_new_tokens: int = 256
    num_layers: int = 1
    d_model: int = 64
    d_ff: int = 192

    def __post_init__(self) -> None:
        for name in ("responses", "epochs", "held_out_prompts", "max_new_tokens", "num_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be 1 or more, got {getattr(self, name)}")
        if self.step_examples < 1 or self.step_examples % BATCHES_A_STEP:
            raise ValueError(
                f"--step_examples must be a multiple of {BATCHES_A_STEP}, got {self.step_examples}"
            )
        longest = supervised.WIDTHS_TOKENS[-1] - PROMPT_TOKENS
        if self.max_new_tokens > longest:
            raise ValueError(
                f"--max_new_tokens must be at most {longest}, got {self.max_new_tokens}"
            )


def draft_config(config: DistillConfig, policy: ModelConfig) -> ModelConfig:
    """The policy's shape, vocabulary and positions with fewer, narrower layers; heads as wide."""
    num_heads = config.d_model // policy.head_dim
    return dataclasses.replace(
        policy,
        d_model=config.d_model,
        num_layers=config.num_layers,
        num_heads=num_heads,
        num_kv_heads=max(1, num_heads // 2),
        d_ff=config.d_ff,
    )


# --- what the policy says -------------------------------------------------------------


def training_prompts(config: DistillConfig) -> list[list[str]]:
    """Return each task's questions to train on: `responses` in all, of a stream of their own."""
    stream = solutions.examples(solutions.TASKS, FIRST_STREAM + config.seed, 0.0)
    asked = list(itertools.islice(stream, config.responses))
    return [[e.prompt for e in asked if e.task_name == task.name] for task in solutions.TASKS]


def held_out_prompts(config: DistillConfig) -> list[list[str]]:
    """Return each task's questions to measure on: the first of those kept for measuring."""
    count = config.held_out_prompts
    sources = [solutions.dataset(task, solutions.FIRST_SEED, count) for task in solutions.TASKS]
    return [
        [source[i]["question"] + solutions.PROMPT_SUFFIX for i in range(count)]
        for source in sources
    ]


def answered(
    policy: Model,
    tok: tokenizer.Tokenizer,
    prompts: Sequence[str],
    key: jax.Array,
    max_new_tokens: int,
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (prompt ids, response ids) with one response a prompt, drawn at temperature 1."""
    config, params = policy
    for start in range(0, len(prompts), SAMPLED_ROWS):
        part = [tok.encode(prompt) for prompt in prompts[start : start + SAMPLED_ROWS]]
        # Rows that are left over answer the same questions again, and are not used.
        rows = list(itertools.islice(itertools.cycle(part), SAMPLED_ROWS))
        lengths_B = np.asarray([len(ids) for ids in rows], np.int32)
        prompts_BP = np.zeros((SAMPLED_ROWS, PROMPT_TOKENS), np.int32)
        for row, ids in enumerate(rows):
            prompts_BP[row, : len(ids)] = ids
        part_key = jax.random.fold_in(key, start)
        drawn_BT = np.asarray(
            evaluation.sample(config, params, prompts_BP, lengths_B, part_key, max_new_tokens)
        )
        for ids, drawn_T in zip(part, drawn_BT, strict=False):
            ends = np.flatnonzero(np.isin(drawn_T, config.eos_token_ids))
            yield ids, drawn_T[: ends[0] + 1 if len(ends) else None].tolist()


@functools.partial(jax.jit, static_argnums=0)
def next_token_logits(
    model: ModelConfig, params: transformer.Params, tokens_BT: jax.Array
) -> jax.Array:
    """Return float32 logits [B, T, V]; those at column t are of the token at column t + 1."""
    return transformer.logits(model, params, tokens_BT).astype(jnp.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class Lesson:
    """A batch of responses, and the policy's logits [B, T, V] there; float16 saves memory."""

    batch: Batch
    policy_logits_BTV: np.ndarray


def lessons(
    policy: Model,
    pairs: Sequence[tuple[list[int], list[int]]],
    num_rows: int,
) -> list[Lesson]:
    """Cut prompts and responses, sorted by length, into batches; the last ones may be left over."""
    config, params = policy
    ordered = sorted(pairs, key=lambda pair: len(pair[0]) + len(pair[1]))
    found = []
    for start in range(len(ordered) % num_rows, len(ordered), num_rows):
        batch = supervised.pack(ordered[start : start + num_rows], config.pad_token_id or 0)
        logits_BTV = next_token_logits(config, params, batch.tokens_BT)
        found.append(Lesson(batch, np.asarray(logits_BTV, np.float16)))
    return found


# --- training -------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def loss_and_grads(
    draft: ModelConfig,
    params: transformer.Params,
    tokens_BT: jax.Array,
    in_loss_BT: jax.Array,
    policy_logits_BTV: jax.Array,
    num_counted: float,
) -> tuple[jax.Array, transformer.Params]:
    """Return Σ KL(policy ‖ draft) / `num_counted` over response tokens, in nats, and its gradient.

    KL = Σ_v p_v (log p_v − log q_v), with p the policy's distribution and q the draft model's.
    """
    weight_BT = jnp.roll(in_loss_BT, -1, axis=1).astype(jnp.float32)  # column t predicts t + 1
    logp_BTV = jax.nn.log_softmax(policy_logits_BTV.astype(jnp.float32))

    def loss(params: transformer.Params) -> jax.Array:
        logq_BTV = jax.nn.log_softmax(transformer.logits(draft, params, tokens_BT))
        kl_BT = jnp.sum(jnp.exp(logp_BTV) * (logp_BTV - logq_BTV), axis=-1)
        return jnp.sum(kl_BT * weight_BT) / num_counted

    return jax.value_and_grad(loss)(params)


def train_step(
    draft: ModelConfig, update: Any, params: transformer.Params, state: Any, group: list[Lesson]
) -> tuple[transformer.Params, Any, float]:
    """Train on all responses of `group`; return (params, state, mean KL in nats)."""
    num_counted = float(sum(lesson.batch.in_loss_BT.sum() for lesson in group))
    parts = []
    for lesson in group:
        tokens_BT, in_loss_BT = lesson.batch.tokens_BT, lesson.batch.in_loss_BT
        logits_BTV = lesson.policy_logits_BTV
        parts.append(loss_and_grads(draft, params, tokens_BT, in_loss_BT, logits_BTV, num_counted))
    grads = [grads for _, grads in parts]
    params, state = supervised.apply_update(update, params, state, grads)
    return params, state, sum(float(value) for value, _ in parts)


def distill(
    config: DistillConfig, draft: ModelConfig, taught: Sequence[Lesson]
) -> tuple[transformer.Params, list[float]]:
    """Train a draft model from random weights; return it and each step's mean KL in nats."""
    each_epoch = max(1, len(taught) // BATCHES_A_STEP)
    settings = supervised.WarmstartConfig(
        steps=config.epochs * each_epoch,
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup_steps,
        weight_decay=config.weight_decay,
    )
    optim = supervised.optimizer(settings)
    params = transformer.init(draft, jax.random.key(config.seed))
    state, rng, losses = optim.init(params), np.random.default_rng(config.seed), []
    for epoch in range(config.epochs):
        # Batches are of equal lengths, steps of random batches; up to three are left over.
        order = rng.permutation(len(taught))[: each_epoch * BATCHES_A_STEP]
        for indices in order.reshape(each_epoch, -1):
            group = [taught[i] for i in indices]
            params, state, value = train_step(draft, optim.update, params, state, group)
            losses.append(value)
        mean = np.mean(losses[-each_epoch:])
        print(f"epoch {epoch + 1:3d}  KL {mean:.4f} nats", flush=True)
    return params, losses


# --- measuring ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How near the draft model is to the policy on one task's response tokens; means over them.

    `kl_nats` is KL(policy ‖ draft) and `overlap` Σ_v min(p_v, q_v). `gumbel` and `cdf` are the
    shares of tokens where both draw the same under the same noise, `likeliest` that where the
    policy's `gumbel` draw is the draft model's likeliest token.
    """

    task: str
    tokens: int
    kl_nats: float
    overlap: float
    gumbel: float
    cdf: float
    likeliest: float

    @classmethod
    def of(cls, task: str, measured_5N: np.ndarray) -> Agreement:
        """The means of what `measure` returns."""
        means = (round(float(mean), 4) for mean in measured_5N.mean(axis=1))
        return cls(task, measured_5N.shape[1], *means)


@jax.jit
def _measured(p_logits_BTV: jax.Array, q_logits_BTV: jax.Array, keys_BT: jax.Array) -> jax.Array:
    """Return the five measures of `Agreement` at every token, float32 [5, B, T]."""
    both = p_logits_BTV, q_logits_BTV
    logp_BTV, logq_BTV = (jax.nn.log_softmax(logits_BTV) for logits_BTV in both)
    temperature_BT = jnp.ones(keys_BT.shape)

    def drawn(scheme: Draw) -> list[jax.Array]:
        return [sampling.draw(logits, keys_BT, temperature_BT, scheme)[0] for logits in both]

    (p_gumbel_BT, q_gumbel_BT), (p_cdf_BT, q_cdf_BT) = drawn("gumbel"), drawn("cdf")
    measures = [
        jnp.sum(jnp.exp(logp_BTV) * (logp_BTV - logq_BTV), axis=-1),
        jnp.sum(jnp.exp(jnp.minimum(logp_BTV, logq_BTV)), axis=-1),
        p_gumbel_BT == q_gumbel_BT,
        p_cdf_BT == q_cdf_BT,
        p_gumbel_BT == jnp.argmax(q_logits_BTV, axis=-1),
    ]
    return jnp.stack([measure.astype(jnp.float32) for measure in measures])


def measure(policy: Model, draft: Model, batch: Batch, key: jax.Array) -> np.ndarray:
    """Compare two models on each response token, with noise as a rollout's; float32 [5, N]."""
    B, T = batch.tokens_BT.shape
    keys_B = sampling.request_keys(key, jnp.arange(B))
    keys_BT = sampling.position_keys(keys_B, jnp.broadcast_to(jnp.arange(T), (B, T)))
    both = (next_token_logits(*model, batch.tokens_BT) for model in (policy, draft))
    return np.asarray(_measured(*both, keys_BT))[:, np.roll(batch.in_loss_BT, -1, axis=1)]


def held_out(
    config: DistillConfig, policy: Model, draft: Model, tok: tokenizer.Tokenizer
) -> list[Agreement]:
    """Measure on the policy's responses to held-out questions; the last report is of all tasks."""
    reports, measured = [], []
    for index, (task, prompts) in enumerate(
        zip(solutions.TASKS, held_out_prompts(config), strict=True)
    ):
        # Two keys of a task: for the responses, and for the draws that are compared.
        said, noise = (sampling.step_key(config.seed, 2 * index + i) for i in (1, 2))
        pairs = list(answered(policy, tok, prompts, said, config.max_new_tokens))
        batch = supervised.pack(pairs, policy[0].pad_token_id or 0)
        measured.append(measure(policy, draft, batch, noise))
        reports.append(Agreement.of(task.spec, measured[-1]))
    return [*reports, Agreement.of("all", np.concatenate(measured, axis=1))]


# --- the command ----------------------------------------------------------------------


def run(config: DistillConfig) -> list[Agreement]:
    """Sample, train, write the folder, and measure on held-out questions."""
    began_s = time.perf_counter()
    policy = hf.load_pretrained(config.policy)
    tok = tokenizer.load(config.policy)
    draft = draft_config(config, policy[0])
    key = sampling.step_key(config.seed, 0)
    pairs = [
        pair
        for index, prompts in enumerate(training_prompts(config))
        for pair in answered(
            policy, tok, prompts, jax.random.fold_in(key, index), config.max_new_tokens
        )
    ]
    num_tokens = sum(len(response) for _, response in pairs)
    taught = lessons(policy, pairs, config.step_examples // BATCHES_A_STEP)
    sample_s = time.perf_counter() - began_s
    print(f"{len(pairs):,} responses of {num_tokens:,} tokens, {sample_s:.0f} s", flush=True)

    params, losses = distill(config, draft, taught)
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        shutil.copyfile(Path(config.policy) / name, output / name)
    hf.save_pretrained(output, draft, params)
    train_s = time.perf_counter() - began_s - sample_s
    print(f"{num_params(draft):,} parameters, {len(losses)} steps, {train_s:.0f} s", flush=True)
    reports = held_out(config, policy, (draft, params), tok)
    show(reports)
    counts = {
        "parameters": num_params(draft),
        "response_tokens": num_tokens,
        "steps_run": len(losses),
        "sample_s": round(sample_s),
        "train_s": round(train_s),
    }
    write_report(output, config, counts, reports)
    return reports


def write_report(
    output: Path, config: DistillConfig, counts: dict[str, int], reports: Sequence[Agreement]
) -> None:
    """Write settings and measurements beside the weights, to `distilled.json`."""
    content = {
        "settings": dataclasses.asdict(config),
        **counts,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "reports": [dataclasses.asdict(r) for r in reports],
    }
    (output / "distilled.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def show(reports: Sequence[Agreement]) -> None:
    """Print one line per task."""
    for r in reports:
        print(
            f"  overlap {r.overlap:.3f}  gumbel {r.gumbel:.3f}  cdf {r.cdf:.3f}  likeliest "
            f"{r.likeliest:.3f}  KL {r.kl_nats:.3f} nats  {r.tokens:,} tokens  {r.task}",
            flush=True,
        )


def parse(arguments: Sequence[str]) -> DistillConfig:
    prog = "python -m benchmarks.warmstart.distilled"
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    return supervised.parse_settings(parser, DistillConfig, arguments)


if __name__ == "__main__":
    run(parse(sys.argv[1:]))
