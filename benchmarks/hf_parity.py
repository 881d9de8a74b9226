"""Parity with Hugging Face, both ways: logits, weights and token ids.

    python -m benchmarks.hf_parity --json

For tiny random models of every family, tied and untied, saved by `transformers`:
`load_max_logit_difference` compares our logits of their folder with theirs;
`export_max_logit_difference` compares theirs of our re-export with theirs of the
original, whose weights must come back bit for bit. Then 1,000 seeded chats:
our ids against `transformers`' own and against the `tokenizers` library on the
rendered text. Needs torch, which the project does not; prints one JSON line.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import runpy
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import environment
from reprise.models.decoder import transformer
from reprise.models.formats import hf
from reprise.models.text import tokenizer as our_tokenizer

GOLDENS = runpy.run_path(str(environment.ROOT / "tests" / "golden" / "make_goldens.py"))
CHATS = runpy.run_path(str(environment.ROOT / "tests" / "golden" / "chat_cases.py"))
SEED = 100  # not the goldens' seeds


def compare_model(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Differences of one case: their folder read by us, and our export read by them."""
    import torch
    from transformers import AutoModelForCausalLM

    stored = getattr(torch, GOLDENS["CASES"][name][2])
    model, tokens = GOLDENS["build"](name, seed), GOLDENS["tokens_of"](seed)
    theirs = GOLDENS["logits_of"](model, tokens)
    model.to(stored).save_pretrained(folder / "theirs")
    config, params = hf.load_pretrained(folder / "theirs")
    hf.save_pretrained(folder / "ours", config, params, max_shard_bytes=40_000)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    ours = np.asarray(jax.jit(transformer.logits, static_argnums=0)(config, wide, tokens))
    again = AutoModelForCausalLM.from_pretrained(folder / "ours", attn_implementation="eager")
    before, after = model.state_dict(), again.state_dict()
    return {
        "head_dim": config.head_dim,
        "d_over_heads": config.d_model // config.num_heads,
        "stored": str(stored).removeprefix("torch."),
        "max_abs_logit": float(np.abs(theirs).max()),
        "load_max_logit_difference": float(np.abs(ours - theirs).max()),
        "export_max_logit_difference": float(
            np.abs(GOLDENS["logits_of"](again.float().eval(), tokens) - theirs).max()
        ),
        "export_weights_bitwise_equal": set(before) == set(after)
        and all(torch.equal(before[k], after[k].to(stored)) for k in before),
    }


def compare_chats(count: int, folder: Path) -> dict[str, int]:
    """How many of the conversations have equal ids by each way of computing them."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    CHATS["save_chatml_tokenizer"](folder)
    ours = our_tokenizer.load(folder)
    theirs = AutoTokenizer.from_pretrained(str(folder))
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rng = random.Random(SEED)
    equal = {"conversations": count, "equal_transformers": 0, "equal_tokenizers": 0, "decoded": 0}
    for _ in range(count):
        messages, prompt = CHATS["conversation"](rng), rng.random() < 0.5
        ids = ours.apply_chat_template(messages, add_generation_prompt=prompt)
        encoded = theirs.apply_chat_template(messages, add_generation_prompt=prompt)
        text = theirs.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
        equal["equal_transformers"] += ids == list(encoded["input_ids"])
        equal["equal_tokenizers"] += ids == raw.encode(text, add_special_tokens=False).ids
        equal["decoded"] += ours.decode(ids, skip_ends=False) == text
    return equal


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    if importlib.util.find_spec("torch") is None:
        raise SystemExit(
            "hf_parity compares with transformers' models, which need torch: expected it "
            "installed, got no module; pip install torch in an environment of its own"
        )
    models = {}
    with tempfile.TemporaryDirectory() as scratch, jax.default_matmul_precision("highest"):
        for i, name in enumerate(GOLDENS["CASES"]):
            models[name] = compare_model(name, SEED + i, Path(scratch) / name)
            environment.progress(name, models[name])
        chats = compare_chats(arguments.conversations, Path(scratch) / "chats")
    rows = list(models.values())
    return {
        "max_load_logit_difference": max(m["load_max_logit_difference"] for m in rows),
        "max_export_logit_difference": max(m["export_max_logit_difference"] for m in rows),
        "all_exports_bitwise_equal": all(m["export_weights_bitwise_equal"] for m in rows),
        "chats": chats,
        "models": models,
    }


if __name__ == "__main__":
    packages = ("jax", "numpy", "safetensors", "tokenizers", "torch", "transformers")
    environment.run(__doc__, measure, packages, conversations=1000)
