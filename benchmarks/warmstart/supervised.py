"""Make the base policy that ships: a small decoder, taught worked solutions, stopped early.

    python -m benchmarks.warmstart.supervised --output policies/tiny --seed 0

Plain next-token training on the responses of `benchmarks.warmstart.solutions`: first a drill (the
bare problem and its worked solution: short, so that most tokens teach something), then
the questions as RL asks them, in both styles, until sampling at temperature 1 earns
`stop_at_reward` on average: good enough that GRPO has something to reward, poor
enough that it has somewhere to go. The run is a function of its settings, up to the
rounding of the machine's matrix products.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.warmstart import solutions
from benchmarks.warmstart.evaluation import TaskReport, evaluate, show
from models import hf, tokenizer, transformer
from models.config import ModelConfig
from models.params import num_params

# Printable ASCII and the newline: what the questions are made of.
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
BATCHES_A_STEP = 4  # a step's examples, sorted by length and cut, so that padding is small
WIDTHS_TOKENS = (64, 96, 128, 192, 256, 384)  # what batches are padded to: few to compile
DRILL_TOKENS = 128  # the longest example of the drill


@dataclasses.dataclass(frozen=True)
class WarmstartConfig:
    """Size of the policy, its training, and when to stop.

    The first `drill_steps` of at most `steps` are the drill. After it,
    `direct_fraction` of the responses skip the working. Every `eval_every_steps`
    the policy answers `eval_prompts` held-out prompts of each task at temperature
    1; training stops at the first mean of `stop_at_reward` or more.
    """

    output: str = "policies/tiny"
    seed: int = 0
    steps: int = 2000
    drill_steps: int = 1300
    step_examples: int = 32
    learning_rate: float = 2e-3
    warmup_steps: int = 50
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    direct_fraction: float = 0.5
    eval_every_steps: int = 100
    eval_prompts: int = 16
    final_eval_prompts: int = 128
    stop_at_reward: float = 0.47
    max_new_tokens: int = 384
    num_layers: int = 4
    d_model: int = 128
    d_ff: int = 512

    def __post_init__(self) -> None:
        for name in ("steps", "eval_every_steps", "eval_prompts", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be 1 or more, got {getattr(self, name)}")
        if self.step_examples < 1 or self.step_examples % BATCHES_A_STEP:
            raise ValueError(
                f"--step_examples must be a multiple of {BATCHES_A_STEP}, got {self.step_examples}"
            )
        if not 0 <= self.direct_fraction <= 1:
            raise ValueError(f"--direct_fraction must lie in 0..1, got {self.direct_fraction}")


def model_config(config: WarmstartConfig, tok: tokenizer.Tokenizer) -> ModelConfig:
    """A Qwen3 decoder with heads of 32, two key/value heads and tied embeddings."""
    return ModelConfig(
        architecture="qwen3",
        vocab_size=tok.vocab_size,
        d_model=config.d_model,
        num_layers=config.num_layers,
        num_heads=config.d_model // 32,
        num_kv_heads=2,
        head_dim=32,
        d_ff=config.d_ff,
        tied_embeddings=True,
        qk_norm=True,
        max_positions=512,
        eos_token_ids=tok.eos_token_ids,
        pad_token_id=tok.pad_token_id,
    )


# --- data -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Right-padded tokens, int32 [B, T], and the mask of those in the loss, bool [B, T]."""

    tokens_BT: np.ndarray
    in_loss_BT: np.ndarray


def pack(pairs: Sequence[tuple[list[int], list[int]]], pad_id: int) -> Batch:
    """Pack pairs of prompt and response ids into a batch; only responses are in the loss."""
    longest = max(len(p) + len(r) for p, r in pairs)
    width = next(width for width in WIDTHS_TOKENS if width >= longest)
    tokens_BT = np.full((len(pairs), width), pad_id, np.int32)
    in_loss_BT = np.zeros((len(pairs), width), bool)
    for row, (prompt, answer) in enumerate(pairs):
        tokens_BT[row, : len(prompt) + len(answer)] = prompt + answer
        in_loss_BT[row, len(prompt) : len(prompt) + len(answer)] = True
    return Batch(tokens_BT, in_loss_BT)


def step_batches(config: WarmstartConfig, tok: tokenizer.Tokenizer) -> Iterator[list[Batch]]:
    """Yield each step's examples, sorted by length and cut into batches.

    The drill comes first. Examples longer than `DRILL_TOKENS` or the largest width are left out.
    """
    eos = tok.eos_token_ids[0]

    def fitting(seed: int, drill: bool) -> Iterator[tuple[list[int], list[int]]]:
        direct_fraction = 0.0 if drill else config.direct_fraction
        longest = DRILL_TOKENS if drill else WIDTHS_TOKENS[-1]
        for example in solutions.examples(solutions.TASKS, seed, direct_fraction):
            prompt = example.stem if drill else example.prompt
            pair = tok.encode(prompt), [*tok.encode(example.response), eos]
            if len(pair[0]) + len(pair[1]) <= longest:
                yield pair

    # Two streams a seed: twice the seed for the drill, and the next one for the questions.
    drill, questions = fitting(2 * config.seed, True), fitting(2 * config.seed + 1, False)
    size = config.step_examples // BATCHES_A_STEP
    for step in itertools.count():
        stream = drill if step < config.drill_steps else questions
        pool = list(itertools.islice(stream, config.step_examples))
        pool.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
        parts = (pool[start : start + size] for start in range(0, len(pool), size))
        yield [pack(part, int(tok.pad_token_id or 0)) for part in parts]


# --- training -------------------------------------------------------------------------


def optimizer(config: WarmstartConfig) -> optax.GradientTransformation:
    """AdamW after clipping, linear warm-up and a cosine to a tenth; no decay on vectors."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        config.learning_rate,
        min(config.warmup_steps, config.steps),
        max(config.steps, config.warmup_steps + 1),
        0.1 * config.learning_rate,
    )
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            schedule,
            b2=0.95,
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda weight: weight.ndim > 1, params),
        ),
    )


@functools.partial(jax.jit, static_argnums=0)
def loss_and_grads(
    model: ModelConfig,
    params: transformer.Params,
    tokens_BT: jax.Array,
    in_loss_BT: jax.Array,
    num_counted: float,
) -> tuple[jax.Array, transformer.Params]:
    """Return Σ −log p / `num_counted` over the tokens in the loss, in nats, and its gradient."""
    # The first column wraps around to the last; it is a prompt token and has no weight.
    targets_BT = jnp.roll(tokens_BT, -1, axis=1)
    weight_BT = jnp.roll(in_loss_BT, -1, axis=1).astype(jnp.float32)

    def loss(params: transformer.Params) -> jax.Array:
        logits_BTV = transformer.logits(model, params, tokens_BT)
        nll_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT)
        return jnp.sum(nll_BT * weight_BT) / num_counted

    return jax.value_and_grad(loss)(params)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def apply_update(
    update: Any, params: transformer.Params, state: Any, parts: list[transformer.Params]
) -> tuple[transformer.Params, Any]:
    """Apply one optimizer step with the sum of the batches' gradients."""
    grads = jax.tree.map(lambda *leaves: sum(leaves), *parts)
    changes, state = update(grads, state, params)
    return optax.apply_updates(params, changes), state


def train_step(
    model: ModelConfig, update: Any, params: transformer.Params, state: Any, step: list[Batch]
) -> tuple[transformer.Params, Any, float]:
    """Train on all tokens of `step`; return (params, state, mean loss in nats)."""
    num_counted = float(sum(batch.in_loss_BT.sum() for batch in step))
    parts = [
        loss_and_grads(model, params, batch.tokens_BT, batch.in_loss_BT, num_counted)
        for batch in step
    ]
    params, state = apply_update(update, params, state, [grads for _, grads in parts])
    return params, state, sum(float(value) for value, _ in parts)


# --- the command ----------------------------------------------------------------------


def run(config: WarmstartConfig) -> list[TaskReport]:
    """Train, stop at the wanted reward, write the folder, and report on more prompts."""
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    tokenizer.save_character_tokenizer(output, CHARACTERS)
    tok = tokenizer.load(output)
    model = model_config(config, tok)
    params = transformer.init(model, jax.random.key(config.seed))
    optim = optimizer(config)
    state = optim.init(params)
    print(f"{num_params(model):,} parameters, tasks:", flush=True)
    for task in solutions.TASKS:
        print(f"  {task.spec}", flush=True)

    def measure(params: transformer.Params, num_prompts: int) -> list[TaskReport]:
        reports = evaluate(model, params, tok, num_prompts, config.max_new_tokens, config.seed)
        show(reports)
        return reports

    began_s, num_tokens, losses = time.perf_counter(), 0, []
    for step, group in enumerate(
        itertools.islice(step_batches(config, tok), config.steps), start=1
    ):
        params, state, value = train_step(model, optim.update, params, state, group)
        losses.append(value)
        num_tokens += sum(batch.tokens_BT.size for batch in group)
        if step % 20 == 0 or step == config.steps:
            rate = num_tokens / (time.perf_counter() - began_s)
            print(
                f"step {step:5d}  loss {np.mean(losses[-20:]):.4f}  {rate:,.0f} tokens/s",
                flush=True,
            )
        if step % config.eval_every_steps == 0 and config.drill_steps < step < config.steps:
            reports = measure(params, config.eval_prompts)
            hf.save_pretrained(output, model, params)
            if reports[-1].reward >= config.stop_at_reward:
                break
    train_s = time.perf_counter() - began_s
    hf.save_pretrained(output, model, params)
    print(f"stopped after {step} steps, {num_tokens:,} tokens, {train_s:.0f} s", flush=True)
    reports = measure(params, config.final_eval_prompts)
    write_report(output, config, step, num_tokens, train_s, reports)
    return reports


def write_report(
    output: Path,
    config: WarmstartConfig,
    step: int,
    num_tokens: int,
    train_s: float,
    reports: Sequence[TaskReport],
) -> None:
    """Write settings and measurements beside the weights, to `warmstart.json`."""
    content = {
        "settings": dataclasses.asdict(config),
        "steps_run": step,
        "train_tokens": num_tokens,
        "train_s": round(train_s),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "reports": [dataclasses.asdict(r) for r in reports],
    }
    (output / "warmstart.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def parse_settings(parser: argparse.ArgumentParser, kind: Any, arguments: Sequence[str]) -> Any:
    """Parse `--name value` pairs into settings of this kind, whose every field is a flag."""
    for field in dataclasses.fields(kind):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    return kind(**vars(parser.parse_args(arguments)))


def parse(arguments: Sequence[str]) -> WarmstartConfig:
    prog = "python -m benchmarks.warmstart.supervised"
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    return parse_settings(parser, WarmstartConfig, arguments)


if __name__ == "__main__":
    run(parse(sys.argv[1:]))
