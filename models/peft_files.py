"""Adapters as folders that `peft` and `transformers` load: adapter_config.json and safetensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from jax.sharding import Mesh

from models import hf, hf_files
from models.config import ModelConfig, Params, leaves, lora_specs

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def write(directory: Path, config: ModelConfig, adapter: Params, base: str) -> None:
    """Write an adapter of the policy named `base`."""
    import jax

    lora, weights = config.lora, jax.tree.leaves(adapter)
    assert lora is not None
    pairs = zip(names(config), weights, strict=True)
    entries = [hf_files.Entry(name, leaf.shape, ()) for name, leaf in pairs]
    modules = sorted({name.split(".")[-3] for name in names(config)})
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with hf_files.replacing(directory) as folder:
        hf_files.write_tensors(folder, entries, weights, sys.maxsize, whole=WEIGHTS)
        hf_files.write_json(folder / CONFIG, content)


def read(directory: Path, config: ModelConfig, mesh: Mesh | None = None) -> Params:
    """Return an adapter of the policy's rank, alpha and targets, in float32.

    Raises FileNotFoundError, or ValueError for an adapter of another shape.
    """
    import jax
    import jax.numpy as jnp

    lora = config.lora
    assert lora is not None
    content = hf_files.read_json(directory / CONFIG)
    if (content.get("r"), content.get("lora_alpha")) != (lora.rank, lora.alpha):
        raise ValueError(
            f"{directory}: expected r={lora.rank} and lora_alpha={lora.alpha}, got "
            f"{content.get('r')!r:.50} and {content.get('lora_alpha')!r:.50}"
        )
    specs = lora_specs(config)
    pairs = zip(names(config), leaves(specs), strict=True)
    entries = [hf_files.Entry(name, spec.shape, spec.axes) for name, spec in pairs]
    stored = hf_files.headers_of(directory / WEIGHTS)
    hf_files.refuse_mismatch(directory, entries, stored, "is it an adapter of another policy?")
    tensors = hf_files.read_tensors(entries, stored, mesh, jnp.float32)
    adapter: Params = jax.tree.structure(specs).unflatten(tensors)
    return adapter


def names(config: ModelConfig) -> Iterator[str]:
    """Yield the name of each tensor of an adapter, in the order of its leaves."""
    specs = lora_specs(config)
    pairs = [(f"model.layers.{i}.", vars(layer)) for i, layer in enumerate(specs.layers)]
    for prefix, fields in [*pairs, ("", {"head_VD": specs.head_VD})]:
        for field, low in fields.items():
            if low is not None:
                module = _PREFIX + prefix + hf.stored_name(field).removesuffix(".weight")
                yield from (f"{module}.lora_A.weight", f"{module}.lora_B.weight")
