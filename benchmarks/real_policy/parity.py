"""Logits, greedy tokens and chat ids against transformers, from the same float32 weights.

transformers runs in a process of its own (`benchmarks.baselines.transformers_parity`). Where a
greedy token differs, `gap` is the difference of our logits of the two tokens there: sums in
another order round differently, and a near tie falls either way.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import environment
from benchmarks.real_policy.ground import Ground
from benchmarks.real_policy.questions import Question, ask
from models import transformer
from models.config import ModelConfig
from rl.rollout import generate
from rl.trajectory import Request
from spec.config import SamplingConfig

NEAR_TIE = 1e-3  # of logits, which also bounds their own difference
SYSTEM = "Answer briefly and in plain words."
EARLIER = (("user", "Hello! Who are you?"), ("assistant", "I am here to help. What is it about?"))
ROW_TOKENS = 64  # rows of logits are a multiple of this long


def chats(ground: Ground, count: int) -> tuple[list[Any], list[list[int]]]:
    """Return chats, of which some have a system message or an earlier turn, and our ids of them.

    A policy without a chat template gets the questions as plain text.
    """
    words, asked = ground.tokenizer, _questions(ground, count)
    if not words.has_chat_template:
        return [q.asked for q in asked], [list(words.encode(q.asked)) for q in asked]
    found: list[Any] = []
    for i, question in enumerate(asked):
        turns = [("system", SYSTEM)] if i % 2 else []
        turns += [*EARLIER] if i % 4 > 1 else []
        turns.append(("user", question.asked))
        found.append([{"role": role, "content": text} for role, text in turns])
    return found, [words.apply_chat_template(m, add_generation_prompt=True) for m in found]


def _questions(ground: Ground, count: int) -> list[Question]:
    """Return `count` questions, the sets in turns."""
    num_sets = len({q.of.name for q in ground.questions})
    each = -(-count // num_sets)
    found = ask(ground.kind, ground.tokenizer, each)
    return [found[s * each + i] for i in range(each) for s in range(num_sets)][:count]


def measure(ground: Ground, torch_python: str, count: int, new_tokens: int) -> dict[str, Any]:
    """Run transformers on the chats, and compare."""
    messages, ids = chats(ground, count)
    work = ground.work / "parity"
    work.mkdir(exist_ok=True)
    (work / "chats.json").write_text(json.dumps({"chats": messages, "new_tokens": new_tokens}))
    module = "benchmarks.baselines.transformers_parity"
    command = [torch_python, "-m", module, str(ground.folder.absolute()), str(work.absolute())]
    subprocess.run(command, cwd=environment.ROOT, check=True)
    theirs = json.loads((work / "theirs.json").read_text())
    figures = {
        "chats": count,
        "chat_ids_equal": sum(a == b for a, b in zip(ids, theirs["ids"], strict=True)),
        "chat_template": ground.tokenizer.has_chat_template,
        **_logits(ground, theirs["ids"]),
        **_greedy(ground, theirs["ids"], theirs["responses"], new_tokens),
        "versions": theirs["versions"],
    }
    shutil.rmtree(work)
    return figures


def _logits(ground: Ground, ids: Sequence[Sequence[int]]) -> dict[str, Any]:
    differences, sizes, positions = [], [], 0
    for i, tokens in enumerate(ids):
        theirs_TV = np.load(ground.work / "parity" / "logits" / f"{i}.npy")
        ours_TV = logits_of(ground, tokens)
        differences.append(float(np.abs(ours_TV - theirs_TV).max()))
        sizes.append(float(np.abs(theirs_TV).max()))
        positions += len(tokens)
    return {
        "max_logit_difference": max(differences),
        "max_abs_logit": max(sizes),
        "positions": positions,
    }


def logits_of(ground: Ground, tokens: Sequence[int]) -> np.ndarray:
    """Return our logits at all positions of a text; float32 [T, V]."""
    tokens_1T = np.zeros((1, -(-len(tokens) // ROW_TOKENS) * ROW_TOKENS), np.int32)
    tokens_1T[0, : len(tokens)] = tokens
    return np.asarray(_forward(ground.model, ground.params, tokens_1T))[0, : len(tokens)]


@functools.partial(jax.jit, static_argnums=0)
def _forward(config: ModelConfig, params: transformer.Params, tokens_1T: np.ndarray) -> jax.Array:
    return transformer.logits(config, params, tokens_1T)


def _greedy(
    ground: Ground,
    ids: Sequence[Sequence[int]],
    theirs: Sequence[Sequence[int]],
    new_tokens: int,
) -> dict[str, Any]:
    """Compare greedy responses of the engine; ends with the first end token."""
    requests = [Request(i, tuple(tokens)) for i, tokens in enumerate(ids)]
    sampling = SamplingConfig(temperature=0.0, max_new_tokens=new_tokens)
    done = generate(ground.model, ground.params, requests, sampling, engine=ground.engine)
    gaps, tokens = [], 0
    for t, padded in zip(done, theirs, strict=True):
        other = _ended(padded, ground.stop_token_ids)
        ours = t.response_ids.tolist()
        tokens += len(ours)
        if ours != other:
            gaps.append(_gap(ground, list(ids[t.request_id]), ours, other))
    return {
        "greedy_responses": len(done),
        "greedy_equal": len(done) - len(gaps),
        "greedy_tokens": tokens,
        "greedy_gaps": gaps,
        "greedy_unexplained": sum(not gap < NEAR_TIE for gap in gaps),
    }


def _ended(tokens: Sequence[int], stop: Sequence[int]) -> list[int]:
    end = next((i for i, token in enumerate(tokens) if token in stop), len(tokens) - 1)
    return list(tokens[: end + 1])


def _gap(ground: Ground, prompt: list[int], ours: list[int], other: list[int]) -> float:
    """Return the difference of the two tokens' logits where they first differ; inf by length."""
    n = min(len(ours), len(other))
    at = next((i for i in range(n) if ours[i] != other[i]), None)
    if at is None:
        return float("inf")
    logits_V = logits_of(ground, prompt + ours[:at])[-1]
    return float(abs(logits_V[ours[at]] - logits_V[other[at]]))
