"""Sample the warm start's policy on held-out questions and score its answers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.warmstart import solutions
from models import kv_cache, tokenizer, transformer
from models.config import ModelConfig
from rl.data.answers import extract_answer

EVAL_ROWS = 64  # prompts sampled at once


@functools.partial(jax.jit, static_argnums=(0, 5))
def sample(
    model: ModelConfig,
    params: transformer.Params,
    prompts_BP: jax.Array,
    prompt_lengths_B: jax.Array,
    key: jax.Array,
    max_new_tokens: int,
) -> jax.Array:
    """Sample responses at temperature 1, int32 [B, max_new_tokens], pad after the end token."""
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
    """Mean rewards of one task's sampled responses, their lengths, and how many were cut off."""

    task: str
    reward: float
    worked_fraction: float
    worked_reward: float
    direct_reward: float
    truncated_fraction: float
    length_quantiles_tokens: tuple[int, ...]  # 50%, 90%, 99%, 100%


def evaluate(
    model: ModelConfig,
    params: transformer.Params,
    tok: tokenizer.Tokenizer,
    num_prompts: int,
    max_new_tokens: int,
    seed: int,
) -> list[TaskReport]:
    """Sample and score each task's held-out prompts as RL would; the last report is of all."""
    sources = [
        solutions.dataset(task, solutions.FIRST_SEED, num_prompts) for task in solutions.TASKS
    ]
    asked = [(source, source[i]) for source in sources for i in range(num_prompts)]
    scored = []
    for start in range(0, len(asked), EVAL_ROWS):
        part = asked[start : start + EVAL_ROWS]
        prompts = [tok.encode(entry["question"] + solutions.PROMPT_SUFFIX) for _, entry in part]
        padded = np.zeros((EVAL_ROWS, model.max_positions - max_new_tokens), np.int32)
        lengths = np.ones(EVAL_ROWS, np.int32)
        for row, ids in enumerate(prompts):
            padded[row, : len(ids)], lengths[row] = ids, len(ids)
        key = jax.random.fold_in(jax.random.key(seed), start)
        drawn = np.asarray(sample(model, params, padded, lengths, key, max_new_tokens))
        scored += [_score(*question, ids, tok) for question, ids in zip(part, drawn, strict=False)]
    reports = [
        _report(task.spec, scored[i * num_prompts : (i + 1) * num_prompts])
        for i, task in enumerate(solutions.TASKS)
    ]
    return [*reports, _report("all", scored)]


def _score(
    source: Any, entry: solutions.Entry, ids: np.ndarray, tok: tokenizer.Tokenizer
) -> tuple[float, bool, int, bool]:
    """Return the reward, if it was worked, its tokens with the end token, and if it was cut off."""
    ends = np.flatnonzero(np.isin(ids, tok.eos_token_ids))
    length = int(ends[0]) + 1 if len(ends) else len(ids)
    text = tok.decode(ids[:length])
    answer = extract_answer("hash", text) if len(ends) else None
    reward = 0.0 if answer is None else float(source.score_answer(answer, entry))
    return reward, not text.startswith(solutions.ANSWER_MARK), length, not len(ends)


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


def show(reports: Sequence[TaskReport]) -> None:
    """Print one line per task."""
    for r in reports:
        lengths = "/".join(str(q) for q in r.length_quantiles_tokens)
        print(
            f"  reward {r.reward:.3f}  worked {r.worked_fraction:.2f} "
            f"(earns {r.worked_reward:.2f}, direct {r.direct_reward:.2f})  "
            f"cut {r.truncated_fraction:.2f}  tokens 50/90/99/100% {lengths}  {r.task}",
            flush=True,
        )
