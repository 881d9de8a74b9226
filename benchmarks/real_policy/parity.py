"""Logits, greedy tokens and chat ids against transformers, from the same float32 weights.

transformers runs in another process (`benchmarks.baselines.transformers_parity`). If a greedy token
differs, its gap is the difference of our logits of the two tokens: sums in another order round
differently, hence near ties differ.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import environment
from benchmarks.real_policy.ground import Ground
from benchmarks.real_policy.questions import ask
from reprise.models.decoder import transformer
from reprise.rl.python.generate import generate
from reprise.rl.records.trajectory import Request
from reprise.spec.config import SamplingConfig

CHATS, GREEDY_TOKENS = 64, 64
NEAR_TIE = 1e-3  # of logits, which also bounds their own difference
SYSTEM = "Answer briefly and in plain words."
EARLIER = (("user", "Hello! Who are you?"), ("assistant", "I am here to help. What is it about?"))
ROW_TOKENS = 64  # rows of logits are a multiple of this long


def chats(ground: Ground) -> tuple[list[Any], list[list[int]]]:
    """Return chats, or plain questions without a chat template, and our ids of them."""
    tokenizer = ground.tokenizer
    num_sets = len({q.of.name for q in ground.questions})
    each = -(-CHATS // num_sets)
    found = ask(ground.kind, tokenizer, each)
    questions = [found[s * each + i].asked for i in range(each) for s in range(num_sets)][:CHATS]
    if not tokenizer.has_chat_template:
        return questions, [list(tokenizer.encode(q)) for q in questions]
    messages: list[Any] = []
    for i, question in enumerate(questions):
        turns = [("system", SYSTEM)] if i % 2 else []
        turns += [*EARLIER] if i % 4 > 1 else []
        turns.append(("user", question))
        messages.append([{"role": role, "content": text} for role, text in turns])
    return messages, [
        tokenizer.apply_chat_template(m, add_generation_prompt=True) for m in messages
    ]


def measure(ground: Ground, torch_python: str) -> dict[str, Any]:
    """Run transformers on the chats, and compare."""
    messages, ids = chats(ground)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        request = {"chats": messages, "new_tokens": GREEDY_TOKENS}
        (work / "chats.json").write_text(json.dumps(request))
        module = "benchmarks.baselines.transformers_parity"
        command = [torch_python, "-m", module, str(ground.folder.absolute()), folder]
        subprocess.run(command, cwd=environment.ROOT, check=True)
        theirs = json.loads((work / "theirs.json").read_text())
        differences, sizes = [], []
        for i, tokens in enumerate(theirs["ids"]):
            theirs_TV = np.load(work / "logits" / f"{i}.npy")
            differences.append(float(np.abs(logits_of(ground, tokens) - theirs_TV).max()))
            sizes.append(float(np.abs(theirs_TV).max()))
    return {
        "chats": len(ids),
        "chat_ids_equal": sum(a == b for a, b in zip(ids, theirs["ids"], strict=True)),
        "chat_template": ground.tokenizer.has_chat_template,
        "max_logit_difference": max(differences),
        "max_abs_logit": max(sizes),
        "positions": sum(map(len, theirs["ids"])),
        **compare_greedy(ground, theirs["ids"], theirs["responses"], GREEDY_TOKENS),
        "versions": theirs["versions"],
    }


_forward = jax.jit(transformer.logits, static_argnums=0)


def logits_of(ground: Ground, tokens: Sequence[int]) -> np.ndarray:
    """Return our logits at all positions of a text; float32 [T, V]."""
    tokens_1T = np.zeros((1, -(-len(tokens) // ROW_TOKENS) * ROW_TOKENS), np.int32)
    tokens_1T[0, : len(tokens)] = tokens
    return np.asarray(_forward(ground.model, ground.params, tokens_1T))[0, : len(tokens)]


def compare_greedy(
    ground: Ground, ids: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]], new_tokens: int
) -> dict[str, Any]:
    """Compare greedy responses of the engine with theirs, which are padded after the end token."""
    requests = [Request(i, tuple(tokens)) for i, tokens in enumerate(ids)]
    sampling = SamplingConfig(temperature=0.0, max_new_tokens=new_tokens)
    done = generate(ground.model, ground.params, requests, sampling, engine=ground.engine)
    gaps = []
    for t, padded in zip(done, theirs, strict=True):
        other = until_end(padded, ground.model.eos_token_ids)
        ours = t.response_ids.tolist()
        if ours != other:
            gaps.append(_gap(ground, list(ids[t.request_id]), ours, other))
    return {
        "greedy_responses": len(done),
        "greedy_equal": len(done) - len(gaps),
        "greedy_tokens": sum(t.num_tokens for t in done),
        "greedy_gaps": gaps,
        "greedy_unexplained": sum(not gap < NEAR_TIE for gap in gaps),
    }


def until_end(tokens: Sequence[int], stop: Sequence[int]) -> list[int]:
    end = next((i for i, token in enumerate(tokens) if token in stop), len(tokens) - 1)
    return list(tokens[: end + 1])


def _gap(ground: Ground, prompt: list[int], ours: list[int], other: list[int]) -> float:
    """Return the difference of the logits of the first tokens that differ; inf by length."""
    pairs = enumerate(zip(ours, other, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), None)
    if at is None:
        return float("inf")
    logits_V = logits_of(ground, prompt + ours[:at])[-1]
    return float(abs(logits_V[ours[at]] - logits_V[other[at]]))
