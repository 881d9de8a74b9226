"""Make the base policy that ships: a small decoder, taught worked solutions, stopped early.

    python -m rl.warmstart --output policies/tiny --seed 0

Plain next-token training on the responses of `rl.worked`, until sampling at
temperature 1 earns `stop_at_reward` on average: good enough that GRPO has
something to reward, poor enough that it has somewhere to go. The run is a
function of its settings, up to the rounding of the machine's matrix products.
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

from models import hf, kv_cache, tokenizer, transformer
from models.config import ModelConfig
from rl import worked
from rl.rewards.extract import extract_answer

# Printable ASCII and the newline: what the questions are made of.
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
BATCHES_A_POOL = 16  # examples are sorted by length within a pool, so that padding is small
WIDTHS_TOKENS = (96, 128, 192, 256, 384)  # what batches are padded to: few shapes to compile
EVAL_ROWS = 64  # prompts sampled at once


@dataclasses.dataclass(frozen=True)
class WarmstartConfig:
    """Size of the policy, its training, and when to stop.

    `direct_fraction` of the responses skip the working. Every `eval_every_steps`
    the policy answers `eval_prompts` held-out prompts of each task at temperature
    1; training stops at the first mean of `stop_at_reward` or more.
    """

    output: str = "policies/tiny"
    seed: int = 0
    steps: int = 2000
    batch_size: int = 16
    learning_rate: float = 1.5e-3
    warmup_steps: int = 50
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    direct_fraction: float = 0.3
    eval_every_steps: int = 200
    eval_prompts: int = 32
    final_eval_prompts: int = 256
    stop_at_reward: float = 0.42
    max_new_tokens: int = 384
    num_layers: int = 4
    d_model: int = 128
    d_ff: int = 512

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "eval_every_steps", "eval_prompts", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be 1 or more, got {getattr(self, name)}")
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
    """Right-padded sequences, int32 [B, T], and which tokens count in the loss, bool [B, T]."""

    tokens_BT: np.ndarray
    in_loss_BT: np.ndarray


def pack(pairs: Sequence[tuple[list[int], list[int]]], pad_id: int) -> Batch:
    """(prompt ids, response ids) pairs as one batch; the response alone counts in the loss."""
    longest = max(len(p) + len(r) for p, r in pairs)
    width = next(width for width in WIDTHS_TOKENS if width >= longest)
    tokens_BT = np.full((len(pairs), width), pad_id, np.int32)
    in_loss_BT = np.zeros((len(pairs), width), bool)
    for row, (prompt, answer) in enumerate(pairs):
        tokens_BT[row, : len(prompt) + len(answer)] = prompt + answer
        in_loss_BT[row, len(prompt) : len(prompt) + len(answer)] = True
    return Batch(tokens_BT, in_loss_BT)


def batches(config: WarmstartConfig, tok: tokenizer.Tokenizer) -> Iterator[Batch]:
    """A stream of batches: pools sorted by length, cut, and shuffled.

    The few examples longer than the largest width are left out.
    """
    rng = np.random.default_rng(config.seed)
    eos = tok.eos_token_ids[0]
    pairs = (
        (tok.encode(example.prompt), [*tok.encode(example.response), eos])
        for example in worked.examples(worked.TASKS, config.seed, config.direct_fraction)
    )
    fitting = (pair for pair in pairs if len(pair[0]) + len(pair[1]) <= WIDTHS_TOKENS[-1])
    size = BATCHES_A_POOL * config.batch_size
    while len(pool := list(itertools.islice(fitting, size))) == size:
        pool.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
        for start in rng.permutation(BATCHES_A_POOL) * config.batch_size:
            yield pack(pool[start : start + config.batch_size], int(tok.pad_token_id or 0))


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


def loss(
    model: ModelConfig, params: transformer.Params, tokens_BT: jax.Array, in_loss_BT: jax.Array
) -> jax.Array:
    """Mean negative log-probability, in nats, of the tokens that count."""
    logits_BTV = transformer.logits(model, params, tokens_BT)
    # What wraps around to the last column is the first, a prompt's token: it weighs nothing.
    targets_BT = jnp.roll(tokens_BT, -1, axis=1)
    weight_BT = jnp.roll(in_loss_BT, -1, axis=1).astype(jnp.float32)
    nll_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT)
    return jnp.sum(nll_BT * weight_BT) / jnp.maximum(jnp.sum(weight_BT), 1.0)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def train_step(
    model: ModelConfig,
    update: Any,
    params: transformer.Params,
    state: Any,
    tokens_BT: jax.Array,
    in_loss_BT: jax.Array,
) -> tuple[transformer.Params, Any, jax.Array]:
    """One AdamW step; `update` is the optimizer's own function. Returns (params, state, loss)."""
    value, grads = jax.value_and_grad(loss, argnums=1)(model, params, tokens_BT, in_loss_BT)
    changes, state = update(grads, state, params)
    return optax.apply_updates(params, changes), state, value


# --- checking by sampling ---------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(0, 5))
def sample(
    model: ModelConfig,
    params: transformer.Params,
    prompts_BP: jax.Array,
    prompt_lengths_B: jax.Array,
    key: jax.Array,
    max_new_tokens: int,
) -> jax.Array:
    """Responses at temperature 1, int32 [B, max_new_tokens], pad after the end token.

    A plain loop for this command's own checks; RL has the engine.
    """
    B, P = prompts_BP.shape
    S = P + max_new_tokens
    column_S = jnp.arange(S)
    eos, pad = jnp.asarray(model.eos_token_ids), model.pad_token_id or 0
    zero_B = jnp.zeros(B, jnp.int32)
    causal_BNS = jnp.broadcast_to(column_S <= jnp.arange(P)[:, None], (B, P, S))
    positions_BP = jnp.broadcast_to(jnp.arange(P), (B, P))
    cache = kv_cache.init(model, B, S, jnp.float32)
    _, cache = transformer.hidden_with_cache(
        model, params, cache, prompts_BP, positions_BP, zero_B, causal_BNS
    )
    last_B = jnp.take_along_axis(prompts_BP, prompt_lengths_B[:, None] - 1, axis=1)[:, 0]

    def step(carry: Any) -> Any:
        t, token_B, done_B, cache, out_BT = carry
        at_B = prompt_lengths_B - 1 + t  # the last prompt token is read again, in place
        mask_BNS = (column_S <= at_B[:, None])[:, None]
        x_BND, cache = transformer.hidden_with_cache(
            model, params, cache, token_B[:, None], at_B[:, None], at_B, mask_BNS
        )
        logits_BV = transformer.head(params, x_BND[:, 0])
        drawn_B = jax.random.categorical(jax.random.fold_in(key, t), logits_BV)
        drawn_B = jnp.where(done_B, pad, drawn_B).astype(jnp.int32)
        done_B = done_B | jnp.isin(drawn_B, eos)
        return t + 1, drawn_B, done_B, cache, out_BT.at[:, t].set(drawn_B)

    start = (0, last_B, zero_B > 0, cache, jnp.full((B, max_new_tokens), pad, jnp.int32))
    going = lambda carry: (carry[0] < max_new_tokens) & ~jnp.all(carry[2])  # noqa: E731
    return jax.lax.while_loop(going, step, start)[4]


@dataclasses.dataclass(frozen=True)
class TaskReport:
    """What sampling one task gave: mean reward, response lengths in tokens, and how they ended."""

    task: str
    reward: float
    worked_fraction: float
    worked_reward: float
    direct_reward: float
    truncated_fraction: float
    length_quantiles_tokens: tuple[int, ...]  # 50%, 90%, 99%, 100%


def evaluate(
    config: WarmstartConfig,
    model: ModelConfig,
    params: transformer.Params,
    tok: tokenizer.Tokenizer,
    num_prompts: int,
) -> list[TaskReport]:
    """Sample each task's held-out prompts and score them as RL would; the last is all tasks."""
    sources = [worked.dataset(task, worked.FIRST_SEED, num_prompts) for task in worked.TASKS]
    asked = [(source, source[i]) for source in sources for i in range(num_prompts)]
    scored = []
    for start in range(0, len(asked), EVAL_ROWS):
        part = asked[start : start + EVAL_ROWS]
        prompts = [tok.encode(entry["question"] + worked.PROMPT_SUFFIX) for _, entry in part]
        padded = np.zeros((EVAL_ROWS, model.max_positions - config.max_new_tokens), np.int32)
        lengths = np.ones(EVAL_ROWS, np.int32)
        for row, ids in enumerate(prompts):
            padded[row, : len(ids)], lengths[row] = ids, len(ids)
        key = jax.random.fold_in(jax.random.key(config.seed), start)
        drawn = np.asarray(sample(model, params, padded, lengths, key, config.max_new_tokens))
        scored += [_score(*question, ids, tok) for question, ids in zip(part, drawn, strict=False)]
    reports = [
        _report(task.spec, scored[i * num_prompts : (i + 1) * num_prompts])
        for i, task in enumerate(worked.TASKS)
    ]
    return [*reports, _report("all", scored)]


def _score(
    source: Any, entry: worked.Entry, ids: np.ndarray, tok: tokenizer.Tokenizer
) -> tuple[float, bool, int, bool]:
    """Reward, whether there was working, tokens with the end token, whether it was cut off."""
    ends = np.flatnonzero(np.isin(ids, tok.eos_token_ids))
    length = int(ends[0]) + 1 if len(ends) else len(ids)
    text = tok.decode(ids[:length])
    answer = extract_answer("hash", text) if len(ends) else None
    reward = 0.0 if answer is None else float(source.score_answer(answer, entry))
    return reward, not text.startswith(worked.ANSWER_MARK), length, not len(ends)


def _report(name: str, rows: Sequence[tuple[float, bool, int, bool]]) -> TaskReport:
    reward, steps, length, cut = (np.asarray(column) for column in zip(*rows, strict=True))
    quantiles = np.quantile(length, [0.5, 0.9, 0.99, 1.0], method="nearest")
    return TaskReport(
        task=name,
        reward=float(reward.mean()),
        worked_fraction=float(steps.mean()),
        worked_reward=float(reward[steps].mean()) if steps.any() else 0.0,
        direct_reward=float(reward[~steps].mean()) if not steps.all() else 0.0,
        truncated_fraction=float(cut.mean()),
        length_quantiles_tokens=tuple(int(q) for q in quantiles),
    )


# --- the command ----------------------------------------------------------------------


def run(config: WarmstartConfig) -> list[TaskReport]:
    """Train, stop at the wanted reward, write the folder, and report on fresh prompts."""
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    tokenizer.save_character_tokenizer(output, CHARACTERS)
    tok = tokenizer.load(output)
    model = model_config(config, tok)
    params = transformer.init(model, jax.random.key(config.seed))
    optim = optimizer(config)
    state = optim.init(params)
    print(f"{transformer.num_params(model):,} parameters, tasks:", flush=True)
    for task in worked.TASKS:
        print(f"  {task.spec}", flush=True)

    began_s, num_tokens, losses = time.perf_counter(), 0, []
    for step, batch in enumerate(itertools.islice(batches(config, tok), config.steps), start=1):
        params, state, value = train_step(
            model, optim.update, params, state, batch.tokens_BT, batch.in_loss_BT
        )
        losses.append(float(value))
        num_tokens += batch.tokens_BT.size
        if step % 20 == 0 or step == config.steps:
            rate = num_tokens / (time.perf_counter() - began_s)
            print(
                f"step {step:5d}  loss {np.mean(losses[-20:]):.4f}  {rate:,.0f} tokens/s",
                flush=True,
            )
        if step % config.eval_every_steps == 0 and step < config.steps:
            reports = evaluate(config, model, params, tok, config.eval_prompts)
            show(reports)
            hf.save_pretrained(output, model, params)
            if reports[-1].reward >= config.stop_at_reward:
                break
    train_s = time.perf_counter() - began_s
    hf.save_pretrained(output, model, params)
    reports = evaluate(config, model, params, tok, config.final_eval_prompts)
    print(f"stopped after {step} steps, {num_tokens:,} tokens, {train_s:.0f} s", flush=True)
    show(reports)
    write_report(output, config, step, num_tokens, train_s, reports)
    return reports


def show(reports: Sequence[TaskReport]) -> None:
    """One line a task."""
    for r in reports:
        lengths = "/".join(str(q) for q in r.length_quantiles_tokens)
        print(
            f"  reward {r.reward:.3f}  worked {r.worked_fraction:.2f} "
            f"(earns {r.worked_reward:.2f}, direct {r.direct_reward:.2f})  "
            f"cut {r.truncated_fraction:.2f}  tokens 50/90/99/100% {lengths}  {r.task}",
            flush=True,
        )


def write_report(
    output: Path,
    config: WarmstartConfig,
    step: int,
    num_tokens: int,
    train_s: float,
    reports: Sequence[TaskReport],
) -> None:
    """Leave settings and measurements beside the weights, in `warmstart.json`."""
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


def parse(arguments: Sequence[str]) -> WarmstartConfig:
    """Settings from `--name value` pairs; every field of `WarmstartConfig` is one."""
    parser = argparse.ArgumentParser(prog="python -m rl.warmstart", description=__doc__)
    for field in dataclasses.fields(WarmstartConfig):
        kind = type(field.default)
        parser.add_argument(f"--{field.name}", type=kind, default=field.default)
    return WarmstartConfig(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    run(parse(sys.argv[1:]))
