"""Adapters as folders that `peft` and `transformers` load: adapter_config.json and safetensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from models import hf, hf_files
from models.config import ModelConfig, Params, lora_specs

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def write(directory: Path, config: ModelConfig, adapter: Params, base: str) -> None:
    """Write an adapter of the policy named `base`."""
    import jax

    lora, leaves = config.lora, jax.tree.leaves(adapter)
    assert lora is not None
    pairs = zip(names(config), leaves, strict=True)
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
        hf_files.write_tensors(folder, entries, leaves, sys.maxsize, whole=WEIGHTS)
        hf_files.write_json(folder / CONFIG, content)


def names(config: ModelConfig) -> Iterator[str]:
    """Yield the name of each tensor of an adapter, in the order of its leaves."""
    specs = lora_specs(config)
    pairs = [(f"model.layers.{i}.", vars(layer)) for i, layer in enumerate(specs.layers)]
    for prefix, fields in [*pairs, ("", {"head_VD": specs.head_VD})]:
        for field, low in fields.items():
            if low is not None:
                module = _PREFIX + prefix + hf.stored_name(field).removesuffix(".weight")
                yield from (f"{module}.lora_A.weight", f"{module}.lora_B.weight")
