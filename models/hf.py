"""Policies in and out of Hugging Face folders, and in from GGUF files; no pickle, no hub."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from models import hf_config, hf_files
from models.config import ModelConfig
from models.hf_files import Entry, Stored
from models.params import Layer, Params, param_specs

if TYPE_CHECKING:
    from jax.sharding import Mesh

MAX_SHARD_BYTES = 2_000_000_000  # per file of weights
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LAYER_NAMES = {
    "attention_norm_D": "input_layernorm.weight",
    "query_QD": "self_attn.q_proj.weight",
    "key_PD": "self_attn.k_proj.weight",
    "value_PD": "self_attn.v_proj.weight",
    "output_DQ": "self_attn.o_proj.weight",
    "mlp_norm_D": "post_attention_layernorm.weight",
    "gate_FD": "mlp.gate_proj.weight",
    "up_FD": "mlp.up_proj.weight",
    "down_DF": "mlp.down_proj.weight",
    "query_bias_Q": "self_attn.q_proj.bias",
    "key_bias_P": "self_attn.k_proj.bias",
    "value_bias_P": "self_attn.v_proj.bias",
    "query_norm_h": "self_attn.q_norm.weight",
    "key_norm_h": "self_attn.k_norm.weight",
}


def load_pretrained(
    directory: str | os.PathLike[str], mesh: Mesh | None = None, dtype: Any = None
) -> tuple[ModelConfig, Params]:
    """Read a policy; with a mesh every tensor goes straight onto its shards.

    `dtype` None keeps each tensor's own, float32 from a GGUF file. Host memory holds one tensor at
    a time. Raises as `check` does, and ValueError for tied embeddings with another lm_head.
    """
    config, policy_entries, stored = _checked(Path(directory))
    _refuse_other_head(config, stored)
    import jax

    tensors = hf_files.read_tensors(policy_entries, stored, mesh, dtype)
    return config, jax.tree.structure(param_specs(config)).unflatten(tensors)


def check(directory: str | os.PathLike[str]) -> ModelConfig:
    """Return the config of a policy whose tensors all have the right names, shapes and types.

    Reads config.json and headers of the weights only. Raises FileNotFoundError, or ValueError for
    anything unknown, unsupported, missing or surplus.
    """
    return _checked(Path(directory))[0]


def shape(directory: str | os.PathLike[str]) -> ModelConfig:
    """Return the config of a folder without looking at weights, or of a GGUF file as `check`."""
    folder = Path(directory)
    if hf_files.is_gguf(folder):
        return check(folder)
    path = folder / hf_files.GENERATION
    config = hf_files.read_config(folder)
    return hf_config.parse(config, hf_files.read_json(path) if path.is_file() else {}, str(folder))


def save_pretrained(
    directory: str | os.PathLike[str],
    config: ModelConfig,
    params: Params,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a policy for `load_pretrained` and `transformers` (`hf_files.replacing`)."""
    with hf_files.replacing(directory) as folder:
        write_into(folder, config, params, max_shard_bytes=max_shard_bytes)


def write_into(
    folder: Path,
    config: ModelConfig,
    params: Params,
    *,
    dtype: Any = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    generation: Mapping[str, Any] | None = None,
) -> None:
    """Write config, weights and generation_config.json into a new folder.

    Weights are rounded once to `dtype`; None keeps it. `generation` has more settings of
    `generate`. Raises ValueError if the parameters do not fit the config.
    """
    import jax

    policy_entries, tree = entries(config), jax.tree.structure(param_specs(config))
    leaves = hf_files.fitting_leaves(params, policy_entries, tree)
    name = np.dtype(leaves[0].dtype if dtype is None else jax.numpy.dtype(dtype)).name
    content, tokens = hf_config.render(config, name)
    hf_files.write_tensors(folder, policy_entries, leaves, max_shard_bytes, dtype)
    hf_files.write_json(folder / hf_files.CONFIG, content)
    hf_files.write_json(folder / hf_files.GENERATION, {**tokens, **(generation or {})})


def entries(config: ModelConfig) -> list[Entry]:
    """Return every tensor of a policy in the order of the leaves of `Params`."""
    specs = param_specs(config)
    names = Params(
        embedding_VD=_EMBEDDING,
        layers=tuple(layer_names(y, f"model.layers.{i}.") for i, y in enumerate(specs.layers)),
        final_norm_D="model.norm.weight",
        head_VD=None if specs.head_VD is None else _HEAD,
    )
    return hf_files.entries_of(names, specs)


def layer_names(layer: Layer, prefix: str) -> Layer:
    """Return the stored names of a layer's weights, None for weights that it does not have."""
    names = {f: None if getattr(layer, f) is None else prefix + n for f, n in _LAYER_NAMES.items()}
    return Layer(**names)


def _checked(folder: Path) -> tuple[ModelConfig, list[Entry], dict[str, Stored]]:
    if hf_files.is_gguf(folder):
        from models import gguf, gguf_header

        header = gguf_header.read(folder)
        config = gguf.config_of(header)
        stored, rename = gguf.stored_of(header, config), gguf.renamed
    else:
        config, stored, rename = shape(folder), hf_files.headers(folder), None
    fix = "the config and the weights must come from one export"
    if config.num_layers > len(stored):  # before anything is made for each layer
        raise ValueError(
            f"{folder}: expected num_hidden_layers of at most the {len(stored)} tensors that the "
            f"headers of the weights name, got {config.num_layers}: {fix}"
        )
    policy_entries = entries(config)
    if rename is not None:
        policy_entries = rename(policy_entries, config)
    if [entry.name for entry in policy_entries if entry.name not in stored] == [_HEAD]:
        fix = "set tie_word_embeddings if the head is the embedding"
    expected = policy_entries
    if rename is None and config.tied_embeddings and _HEAD in stored:
        # tolerated; values are compared on loading
        expected = [*policy_entries, dataclasses.replace(policy_entries[0], name=_HEAD)]
    hf_files.refuse_mismatch(folder, expected, stored, fix)
    return config, policy_entries, stored


def _refuse_other_head(config: ModelConfig, stored: Mapping[str, Stored]) -> None:
    if not (config.tied_embeddings and _HEAD in stored):
        return
    embedding, head = (hf_files.read_tensor(stored[name]) for name in (_EMBEDDING, _HEAD))
    if not np.array_equal(embedding, head):
        raise ValueError(
            f"{stored[_HEAD].path}: config.json says tie_word_embeddings, so lm_head.weight was "
            "expected absent or equal to the embedding, got another tensor; set "
            "tie_word_embeddings=false to use it"
        )
