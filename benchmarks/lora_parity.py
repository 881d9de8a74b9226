"""Parity of low-rank adapters with `peft`: logits, gradients, and greedy tokens of both exports.

    python -m benchmarks.lora_parity --json

For tiny random models of every family, tied and untied, and each rank, with adapters of all
projections: `peft` loads the folder that `models.formats.peft_files` writes, next to the base
model's. Differences are of logits, and of gradients of Σ cos(logits) for A and B, relative to the
largest. `differing_tokens` are of greedy responses of the merged export, by `transformers`, and of
the adapter's folder, by `peft`. Needs torch and peft, which the project does not.
"""

from __future__ import annotations

import argparse
import dataclasses
import runpy
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import environment
from reprise.models.config import (
    LORA_TARGETS,
    LoraShape,
    ModelConfig,
    Params,
    lora_specs,
    with_adapters,
)
from reprise.models.decoder import lora, transformer
from reprise.models.formats import hf, peft_files

GOLDENS = runpy.run_path(str(environment.ROOT / "tests" / "golden" / "make_goldens.py"))
SEED = 200  # not the goldens' seeds
NEW_TOKENS = 64


def compare(name: str, rank: int, folder: Path) -> dict[str, Any]:
    """Return the differences of one family and rank."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def opened(path: Path) -> Any:
        loaded = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
        return loaded.float().eval()

    GOLDENS["build"](name, SEED).save_pretrained(folder / "base")
    plain, base = hf.load_pretrained(folder / "base", dtype=jnp.float32)
    config = dataclasses.replace(plain, lora=LoraShape(rank, 2.0 * rank, tuple(LORA_TARGETS)))
    adapter = random_adapter(config)
    peft_files.write(folder / "adapter", config, adapter, str(folder / "base"))
    merged = lora.merge(config, with_adapters(base, adapter, config.lora))
    hf.save_pretrained(folder / "merged", *merged)

    theirs = PeftModel.from_pretrained(opened(folder / "base"), folder / "adapter")
    for key, value in theirs.named_parameters():
        value.requires_grad_("lora_" in key)
    tokens = GOLDENS["tokens_of"](SEED)
    logits = theirs(torch.tensor(tokens)).logits
    torch.cos(logits).sum().backward()
    gradients = {key: x.grad.numpy() for key, x in theirs.named_parameters() if x.requires_grad}

    ours, own_gradients = logits_and_gradients(config, base, adapter, tokens)
    prompt = torch.tensor(tokens[:, :8])
    greedy = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    with torch.no_grad():
        by_peft = theirs.generate(input_ids=prompt, **greedy)
        by_merged = opened(folder / "merged").generate(input_ids=prompt, **greedy)
    named = {key.replace(".default.", "."): x for key, x in gradients.items()}
    pairs = zip(peft_files.names(config), jax.tree.leaves(own_gradients), strict=True)
    differences = [relative(own, named.pop(key)) for key, own in pairs]
    assert not named, f"peft trains what we do not: {sorted(named)}"
    return {
        "model": name,
        "rank": rank,
        "logits": relative(ours, logits.detach().numpy()),
        "gradients": max(differences),
        "differing_tokens": int((by_peft != by_merged).sum()),
        "tokens": int(by_peft.shape[0] * NEW_TOKENS),
    }


def random_adapter(config: ModelConfig) -> Params:
    """Return an adapter whose B is not 0, which changes logits by as much as the base has."""
    rng = np.random.default_rng(SEED)

    def one(spec: Any) -> jax.Array:
        width = (spec.shape[1] + config.d_model) ** -0.5
        return jnp.asarray(rng.normal(0, width, spec.shape), jnp.float32)

    return jax.tree.map(one, lora_specs(config))


@partial(jax.jit, static_argnums=0)
def logits_and_gradients(
    config: ModelConfig, base: Params, adapter: Params, tokens_BT: np.ndarray
) -> tuple[jax.Array, Params]:
    lora_shape = config.lora
    assert lora_shape is not None

    def loss(adapter: Params) -> tuple[jax.Array, jax.Array]:
        params = with_adapters(base, adapter, lora_shape)
        logits_BTV = transformer.logits(config, params, tokens_BT)
        return jnp.sum(jnp.cos(logits_BTV)), logits_BTV

    gradients, logits_BTV = jax.grad(loss, has_aux=True)(adapter)
    return logits_BTV, gradients


def relative(ours: Any, theirs: np.ndarray) -> float:
    return float(np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max())


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for name in GOLDENS["CASES"]:
        for rank in arguments.ranks:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(compare(name, rank, Path(folder)))
            environment.progress(rows[-1])
    return {
        "max_logits": max(row["logits"] for row in rows),
        "max_gradients": max(row["gradients"] for row in rows),
        "differing_tokens": sum(row["differing_tokens"] for row in rows),
        "tokens": sum(row["tokens"] for row in rows),
        "rows": rows,
    }


if __name__ == "__main__":
    packages = (*environment.JAX, "torch", "transformers", "peft")
    environment.run(__doc__, measure, packages, ranks=(1, 8, 32))
