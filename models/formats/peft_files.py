"""Adapters as folders that `peft` and `transformers` load: adapter_config.json and safetensors.

An adapter of peft is read with the product that peft computes, scale · B · A, or it is refused.
Each entry of adapter_config.json must have no effect on products, have one of the values of plain
LoRA, or be off.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from reprise.models.config import (
    LORA_TARGETS,
    LoraShape,
    LowRank,
    ModelConfig,
    Params,
    leaves,
    lora_specs,
    with_adapters,
)
from reprise.models.formats import hf, hf_files
from reprise.models.formats.hf_files import shown

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_ALPHA = 1e6
_PREFIX = "base_model.model."
_BASE = "base_digest"  # in the header of the weights
_READ = ("r", "lora_alpha", "use_rslora", "target_modules", "base_model_name_or_path")
_NO_PRODUCT = (  # entries that name files, describe training, or belong to a feature that is off
    *("auto_mapping", "peft_version", "revision", "inference_mode", "lora_dropout"),
    *("megatron_core", "qalora_group_size", "eva_config", "runtime_config"),
)
_VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
    # other values (pissa, olora, corda, loftq, lora_ga) also change the base weights
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica"),
}
_OFF: tuple[Any, ...] = (None, False, "", [], {})
_MERGE = "fix: merge it into its base with peft, and give the merged folder as the policy"


@dataclasses.dataclass(frozen=True)
class Base:
    """The policy that an adapter folder names, with its digest if Reprise wrote the folder."""

    name: str
    digest: str = ""


def write(
    directory: Path, config: ModelConfig, adapter: Params, base: str, base_digest: str = ""
) -> None:
    """Write an adapter of the policy named `base`, with the lowest rank that represents it.

    The last ranks that are 0 in all A and B (`models.decoder.lora.cut_to`) are left out; the scale
    is the same.
    """
    import jax

    assert config.lora is not None
    adapter = jax.device_get(adapter)
    lora = _lowest_rank(config.lora, adapter)
    adapter = _with_rank(adapter, lora.rank, 1.0)
    specs = lora_specs(dataclasses.replace(config, lora=lora))
    weights = jax.tree.leaves(adapter)
    pairs = zip(names(config), leaves(specs), strict=True)
    entries = [hf_files.Entry(name, spec.shape, ()) for name, spec in pairs]
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({module.rpartition(".")[2] for module in _modules(config)}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    metadata = {_BASE: base_digest} if base_digest else {}
    with hf_files.replacing(directory) as folder:
        options: dict[str, Any] = {"whole": WEIGHTS, "metadata": metadata}
        hf_files.write_tensors(folder, entries, weights, sys.maxsize, **options)
        hf_files.write_json(folder / CONFIG, content)


def read(directory: Path, config: ModelConfig, mesh: Mesh | None = None) -> Params:
    """Return an adapter of the policy shape, in float32, with the product that peft computes.

    The scale of peft is α / r, or α / √r with `use_rslora`. B is multiplied by the scale of peft
    over the policy scale. A lower rank is padded with zeros, which stay zero in training. Raises
    FileNotFoundError, or ValueError for anything but plain LoRA of the same weights.
    """
    import jax
    import jax.numpy as jnp

    from reprise.models.sharding import param_shardings, put

    assert config.lora is not None
    content = hf_files.read_json(directory / CONFIG)
    rank, scale = _read_scale(directory, content, config.lora)
    own = dataclasses.replace(config, lora=dataclasses.replace(config.lora, rank=rank))
    specs = lora_specs(own)
    pairs = zip(names(own), leaves(specs), strict=True)
    entries = [hf_files.Entry(name, spec.shape, spec.axes) for name, spec in pairs]
    stored = hf_files.headers_of(directory / WEIGHTS)
    hf_files.refuse_mismatch(directory, entries, stored, "is it an adapter of another policy?")
    _check_modules(directory, content.get("target_modules"), config)
    tensors = hf_files.read_tensors(entries, stored, mesh, jnp.float32)
    adapter: Params = jax.tree.structure(specs).unflatten(tensors)
    ratio = scale / config.lora.scale
    if math.isclose(ratio, 1.0, rel_tol=1e-12):
        ratio = 1.0
    if rank == config.lora.rank and ratio == 1.0:
        return adapter
    adapter = _with_rank(adapter, config.lora.rank, ratio)
    if not all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(adapter)):
        raise ValueError(
            f"{directory}: its scale {scale:g} over the policy's, {config.lora.scale:g}, leaves "
            "float32's range; fix: open the policy with a larger Policy.lora_alpha"
        )
    if mesh is not None:
        adapter = jax.tree.map(put, adapter, param_shardings(mesh, lora_specs(config)))
    return adapter


def read_base(directory: Path) -> Base:
    """Return the policy that an adapter belongs to. Raises FileNotFoundError or ValueError."""
    name = hf_files.read_json(directory / CONFIG).get("base_model_name_or_path")
    digest = hf_files.metadata_of(directory / WEIGHTS).get(_BASE, "")
    return Base(name if isinstance(name, str) else "" if name is None else shown(name), digest)


def load_merged(
    folder: Path, config: ModelConfig, adapter: Params, mesh: Mesh | None = None
) -> tuple[ModelConfig, Params]:
    """Return the policy of a folder in float32 with a merged adapter, and its config."""
    import jax.numpy as jnp

    from reprise.models.decoder import lora

    assert config.lora is not None
    base = hf.load_pretrained(folder, mesh, dtype=jnp.float32)[1]
    return lora.merge(config, with_adapters(base, adapter, config.lora))


def names(config: ModelConfig) -> Iterator[str]:
    """Yield the name of each tensor of an adapter, in the order of its leaves."""
    for module in _modules(config):
        yield from (f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight")


def _modules(config: ModelConfig) -> Iterator[str]:
    """Yield the name of each module with an adapter, as in the weights of the policy."""
    specs = lora_specs(config)
    pairs = [(f"model.layers.{i}.", vars(layer)) for i, layer in enumerate(specs.layers)]
    for prefix, fields in [*pairs, ("", {"head_VD": specs.head_VD})]:
        for field, low in fields.items():
            if low is not None:
                yield prefix + hf.stored_name(field).removesuffix(".weight")


# --- ranks and scales -------------------------------------------------------------------


def _low_ranks(adapter: Params) -> list[LowRank]:
    import jax

    result: list[LowRank] = jax.tree.leaves(adapter, is_leaf=lambda x: isinstance(x, LowRank))
    return result


def _lowest_rank(lora: LoraShape, adapter: Params) -> LoraShape:
    """Return the shape without the last ranks that are 0 in all A and B, at the same scale."""
    import numpy as np

    used_R = np.zeros(lora.rank, bool)
    for low in _low_ranks(adapter):
        used_R |= np.any(low.down_RI != 0, axis=1) | np.any(low.up_OR != 0, axis=0)
    rank = max(1, int(np.flatnonzero(used_R).max(initial=0)) + 1)
    if rank == lora.rank:
        return lora
    return dataclasses.replace(lora, rank=rank, alpha=lora.scale * rank)


def _with_rank(adapter: Params, rank: int, ratio: float) -> Params:
    """Return an adapter cut or padded to a rank, with B times `ratio`."""
    import jax
    import jax.numpy as jnp

    def one(low: LowRank) -> LowRank:
        down_RI = low.down_RI[:rank]
        up_OR = low.up_OR[:, :rank]
        more = rank - down_RI.shape[0]
        if more:
            down_RI = jnp.pad(down_RI, ((0, more), (0, 0)))
            up_OR = jnp.pad(up_OR, ((0, 0), (0, more)))
        return LowRank(down_RI, up_OR if ratio == 1.0 else up_OR * ratio)

    fitted: Params = jax.tree.map(one, adapter, is_leaf=lambda x: isinstance(x, LowRank))
    return fitted


# --- adapter_config.json ----------------------------------------------------------------


def _read_scale(directory: Path, content: Mapping[str, Any], lora: LoraShape) -> tuple[int, float]:
    """Return rank and scale of plain LoRA. Raises ValueError for another kind or a higher rank."""
    file = directory / CONFIG
    for name in dict.fromkeys(("peft_type", *content)):
        values = _VALUES.get(name, _OFF)
        if name in (*_READ, *_NO_PRODUCT) or _is_among(content.get(name), values):
            continue
        expected = " or ".join(map(json.dumps, values[:2] if values is _OFF else values))
        raise ValueError(
            f"{file}: expected {hf_files.escaped(name)} to be {expected}, got "
            f"{shown(content.get(name))}: only plain LoRA and rsLoRA are read; {_MERGE}"
        )
    rank: Any = content.get("r")
    alpha: Any = content.get("lora_alpha")
    uses_root = content.get("use_rslora", False)
    if type(rank) is not int or not 1 <= rank <= lora.rank:
        raise ValueError(
            f"{file}: expected r of 1 to {lora.rank}, got {shown(rank)}; fix: open the policy with "
            "a Policy.lora_rank of at least as much"
        )
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha <= MAX_ALPHA:
        raise ValueError(
            f"{file}: expected lora_alpha above 0 and up to {MAX_ALPHA:,.0f}, got {shown(alpha)}"
        )
    if type(uses_root) is not bool:
        raise ValueError(f"{file}: expected use_rslora of true or false, got {shown(uses_root)}")
    return rank, alpha / (math.sqrt(rank) if uses_root else rank)


def _is_among(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Return whether a JSON value is among `allowed`; 0 and 1 are not booleans."""
    return any(type(value) is type(x) and value == x for x in allowed)


def _check_modules(directory: Path, wanted: Any, config: ModelConfig) -> None:
    """Raise ValueError unless `target_modules` are the modules that have tensors.

    Names are compared as peft does: a name matches a whole module name, or its end after a dot.
    """
    assert config.lora is not None
    own = list(_modules(config))
    every = _modules(
        dataclasses.replace(
            config, lora=dataclasses.replace(config.lora, targets=tuple(LORA_TARGETS))
        )
    )
    candidates = [*every, "model.embed_tokens"]
    got: set[str] | None = None
    if wanted == "all-linear":
        got = {module for module in candidates if module.startswith("model.layers.")}
    elif isinstance(wanted, list) and len(wanted) <= len(candidates):
        matches = [
            {m for m in candidates if m == name or m.endswith(f".{name}")}
            for name in wanted
            if isinstance(name, str)
        ]
        if len(matches) == len(wanted) and all(matches):
            got = set[str]().union(*matches)
    if got != set(own):
        modules = sorted({module.rpartition(".")[2] for module in own})
        raise ValueError(
            f"{directory / CONFIG}: expected target_modules to name the modules that have tensors, "
            f"{modules}, got {shown(wanted)}: peft would leave others out; fix: list these names, "
            "if the adapter was trained on them"
        )
