"""Adapters as folders that `peft` and `transformers` load: adapter_config.json and safetensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from models import hf, hf_files
from models.config import ModelConfig, Params, lora_specs

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def write(
    directory: Path, config: ModelConfig, adapter: Params, base: str, dtype: Any = None
) -> None:
    """Write an adapter of the policy named `base`; weights are rounded once to `dtype`."""
    import jax
    from safetensors.numpy import save_file

    lora = config.lora
    assert lora is not None
    tensors = dict[str, np.ndarray]()
    for name, leaf in zip(names(config), jax.tree.leaves(adapter), strict=True):
        host = np.ascontiguousarray(jax.device_get(leaf), dtype or leaf.dtype)
        tensors[name] = hf_files.finite(host, name)
    modules = sorted({name.split(".")[-3] for name in tensors})
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
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / WEIGHTS).chmod(folder.stat().st_mode & 0o666)
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
