"""Policies read from and written to Hugging Face folders, or read from GGUF files.

Uses no pickle and no hub. Options of config.json that would change the mathematics are refused by
name; others (dropout, use_cache, …) are ignored. The names of `transformers` 5 (`rope_parameters`,
`dtype`) and of older versions (`rope_scaling`, `rope_theta`, `torch_dtype`) are both read and
written.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reprise.models.config import (
    Architecture,
    Layer,
    Llama3RopeScaling,
    ModelConfig,
    Params,
    param_specs,
)
from reprise.models.formats import hf_files
from reprise.models.formats.hf_entries import end_ids, is_one_name, read_entry, refuse_misspelt
from reprise.models.formats.hf_files import MAX_NAMED, Entry, Stored, escaped, shown

if TYPE_CHECKING:
    from jax.sharding import Mesh

# Names in config.json of the fields of `ModelConfig`, and of `Llama3RopeScaling` in order.
_SIZES = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}
_ROPE_SCALING = "factor low_freq_factor high_freq_factor original_max_position_embeddings".split()
# The implemented value of each option, which is also its default.
_FIXED_OPTIONS: dict[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "hidden_act": "silu",
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
}
# Every entry that is read; a misspelt entry would silently get its default.
_NAMES = {
    *("architectures", "model_type", "layer_types", "rms_norm_eps", "tie_word_embeddings"),
    *("max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
    *(*_SIZES.values(), *_FIXED_OPTIONS),
}


@dataclasses.dataclass(frozen=True)
class Family:
    """The values that a Hugging Face class implies if config.json leaves them out."""

    model_class: str
    architecture: Architecture
    qkv_bias: bool
    qk_norm: bool
    max_positions: int
    head_dim: int | None  # None: hidden_size / num_attention_heads


FAMILIES = {
    family.model_class: family
    for family in (
        Family("LlamaForCausalLM", "llama", False, False, 2048, None),
        Family("Qwen2ForCausalLM", "qwen2", True, False, 32768, None),
        Family("Qwen3ForCausalLM", "qwen3", False, True, 32768, 128),
    )
}

MAX_SHARD_BYTES = 2_000_000_000  # per file of weights
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
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

    `dtype` None keeps the type of each tensor, float32 for a GGUF file. Host memory holds one
    tensor at a time. Raises as `check` does, and ValueError for tied embeddings with another
    lm_head.
    """
    config, policy_entries, stored = _checked(Path(directory))
    if config.tied_embeddings and _HEAD in stored:
        embedding, head = (hf_files.read_tensor(stored[name]) for name in (_EMBEDDING, _HEAD))
        if not np.array_equal(embedding, head):
            raise hf_files.WeightsError(
                f"{stored[_HEAD].path}: config.json says tie_word_embeddings, but lm_head.weight "
                "differs from the embedding; set tie_word_embeddings=false to use it"
            )
    import jax

    tensors = hf_files.read_tensors(policy_entries, stored, mesh, dtype)
    return config, jax.tree.structure(param_specs(config)).unflatten(tensors)


def check(directory: str | os.PathLike[str]) -> ModelConfig:
    """Return the config of a policy after checking the names, shapes and types of all tensors.

    Reads only config.json and the headers of the weights. Raises FileNotFoundError, or ValueError
    for anything unknown, unsupported, missing or surplus.
    """
    return _checked(Path(directory))[0]


def shape(directory: str | os.PathLike[str]) -> ModelConfig:
    """Return the config of a folder without reading weights, or of a GGUF file as `check`."""
    folder = Path(directory)
    if hf_files.is_gguf(folder):
        return check(folder)
    config = hf_files.read_config(folder)
    generation = hf_files.optional_json(folder / hf_files.GENERATION)
    return parse_config(config, generation, str(folder))


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

    Weights are rounded once to `dtype`; None keeps their type. `generation` has more settings of
    `generate`. Raises ValueError if the parameters do not fit the config.
    """
    import jax

    policy_entries = entries(config)
    tree = jax.tree.structure(param_specs(config))
    leaves = hf_files.fitting_leaves(params, policy_entries, tree)
    name = np.dtype(leaves[0].dtype if dtype is None else jax.numpy.dtype(dtype)).name
    content, tokens = render_config(config, name)
    hf_files.write_tensors(folder, policy_entries, leaves, max_shard_bytes, dtype)
    hf_files.write_json(folder / hf_files.CONFIG, content)
    hf_files.write_json(folder / hf_files.GENERATION, {**tokens, **(generation or {})})


def entries(config: ModelConfig) -> list[Entry]:
    """Return the entry of each tensor of a policy, in the order of the leaves of `Params`."""
    specs = param_specs(config)
    names = Params(
        embedding_VD=_EMBEDDING,
        layers=tuple(layer_names(y, f"model.layers.{i}.") for i, y in enumerate(specs.layers)),
        final_norm_D="model.norm.weight",
        head_VD=None if specs.head_VD is None else _HEAD,
    )
    return hf_files.entries_of(names, specs)


def stored_name(field: str) -> str:
    """Return the stored name of the head, or of a `Layer` field, without the layer prefix."""
    return _HEAD if field == "head_VD" else _LAYER_NAMES[field]


def layer_names(layer: Layer, prefix: str) -> Layer:
    """Return the stored names of the weights of a layer, None for absent weights."""
    names = {f: None if getattr(layer, f) is None else prefix + n for f, n in _LAYER_NAMES.items()}
    return Layer(**names)


def _checked(folder: Path) -> tuple[ModelConfig, list[Entry], dict[str, Stored]]:
    if hf_files.is_gguf(folder):
        from reprise.models.formats import gguf, gguf_header

        header = gguf_header.read(folder)
        config = gguf.config_of(header)
        stored = gguf.stored_of(header, config)
        rename = gguf.renamed
    else:
        config = shape(folder)
        stored = hf_files.headers(folder)
        rename = None
    fix = "the config and the weights must come from one export"
    if config.num_layers > len(stored):  # before allocating anything for each layer
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
        # a head of tied embeddings is tolerated; loading compares the values
        expected = [*policy_entries, dataclasses.replace(policy_entries[0], name=_HEAD)]
    hf_files.refuse_mismatch(folder, expected, stored, fix)
    return config, policy_entries, stored


# --- config.json ---


def parse_config(hf: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """Return the `ModelConfig` of a config.json and a generation_config.json (may be empty).

    End tokens come from generation_config.json if it has any, as in `generate`. `where` names the
    folder in errors. Raises ValueError for anything unknown, unsupported, missing or malformed.
    """

    def read(name: str, kind: str, default: Any = None) -> Any:
        return read_entry(hf, name, kind, where, default)

    refuse_misspelt(hf, where, _NAMES)
    refuse_misspelt(generation, where, _NAMES)
    family = _family(hf, where)
    # Qwen2 always has these biases, whether or not its config says so.
    refuse_options(
        {k: v for k, v in hf.items() if (k, v) != ("attention_bias", family.qkv_bias)}, where
    )
    heads, width = (read(name, "size") for name in ("num_attention_heads", "hidden_size"))
    if hf.get("head_dim") is None and family.head_dim is None and width % heads:
        raise ValueError(
            f"{where}: hidden_size={width} is not a multiple of {heads} heads: give head_dim"
        )
    # Qwen's default of 32 key/value heads is never intended, so only Llama may omit the number.
    has_as_many = family.architecture == "llama" or hf.get("num_key_value_heads", 0) is None
    defaults = {
        "head_dim": family.head_dim or width // heads,
        "num_key_value_heads": heads if has_as_many else None,
    }
    sizes = {field: read(name, "size", defaults.get(name)) for field, name in _SIZES.items()}
    theta, scaling = _rope(hf, where)
    has_ends = generation.get("eos_token_id") is not None
    pad, bos = (
        read(name, "id", default)
        for name, default in (
            ("pad_token_id", generation.get("pad_token_id")),
            ("bos_token_id", None),
        )
    )
    try:
        return ModelConfig(
            family.architecture,
            **sizes,
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=float(read("rms_norm_eps", "number", 1e-6)),
            tied_embeddings=read("tie_word_embeddings", "flag", False),
            max_positions=read("max_position_embeddings", "size", family.max_positions),
            eos_token_ids=end_ids(generation if has_ends else hf, where),
            pad_token_id=None if pad == -1 else pad,
            bos_token_id=None if bos == -1 else bos,
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def render_config(config: ModelConfig, dtype: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config.json and generation_config.json; ValueError if no supported class fits."""
    family = next(f for f in FAMILIES.values() if f.architecture == config.architecture)
    if (config.qkv_bias, config.qk_norm) != (family.qkv_bias, family.qk_norm):
        raise ValueError(
            f"{family.model_class} has qkv_bias={family.qkv_bias} and qk_norm={family.qk_norm}, "
            f"got {config.qkv_bias} and {config.qk_norm}: choose another architecture"
        )
    scaling: dict[str, Any] | None = None
    if config.rope_scaling is not None:
        values = dataclasses.astuple(config.rope_scaling)
        scaling = {"rope_type": "llama3", **dict(zip(_ROPE_SCALING, values, strict=True))}
    eos = list(config.eos_token_ids)
    tokens = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": (eos[0] if len(eos) == 1 else eos) if eos else None,
        "pad_token_id": config.pad_token_id,
    }
    options = {} if config.architecture == "qwen2" else {"attention_bias": False}
    options["mlp_bias" if config.architecture == "llama" else "use_sliding_window"] = False
    rope = {**(scaling or {"rope_type": "default"}), "rope_theta": config.rope_theta}
    content = {
        "architectures": [family.model_class],
        "model_type": config.architecture,
        **{name: getattr(config, field) for field, name in _SIZES.items()},
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "max_position_embeddings": config.max_positions,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": rope,
        **options,
        **tokens,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    return content, {name: value for name, value in tokens.items() if value is not None}


def _family(hf: Mapping[str, Any], where: str) -> Family:
    names = hf.get("architectures")
    if names in (None, []):  # old exports give only the model type
        names = [f.model_class for f in FAMILIES.values() if f.architecture == hf.get("model_type")]
    family = FAMILIES.get(names[0]) if is_one_name(names) else None
    if family is None:
        got = shown(hf.get("architectures") or hf.get("model_type"))
        raise ValueError(
            f"{where}: unknown architecture: expected one of {sorted(FAMILIES)}, got {got}; other "
            "models are not supported"
        )
    return family


def refuse_options(
    hf: Mapping[str, Any], where: str, fixed: Mapping[str, Any] = _FIXED_OPTIONS
) -> None:
    """Raise ValueError for options with a value that is not implemented."""
    wrong = [
        f"{escaped(name)}={shown(hf[name])} (expected {value!r})"
        for name, value in fixed.items()
        if hf.get(name, value) not in (value, None)
    ]
    layer_types = hf.get("layer_types")
    layer_types = [] if layer_types is None else layer_types
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        wrong.append(f"layer_types={shown(layer_types, 200)} (expected 'full_attention' for all)")
    if wrong:
        more = f" and {len(wrong) - MAX_NAMED} more" if len(wrong) > MAX_NAMED else ""
        raise ValueError(
            f"{where}: these options are not implemented: {'; '.join(wrong[:MAX_NAMED])}{more}; "
            "use a model without them"
        )


def _rope(hf: Mapping[str, Any], where: str) -> tuple[float, Llama3RopeScaling | None]:
    """Return base and scaling; `rope_scaling` overrides `rope_parameters`, as in transformers."""
    given = [hf.get("rope_scaling"), hf.get("rope_parameters")]
    for rope in given:
        if not isinstance(rope, Mapping | None):
            raise ValueError(
                f"{where}: expected the rope parameters as an object, got {shown(rope)}"
            )
    rope = given[0] or given[1] or {}
    if nested := sorted(name for name, value in rope.items() if isinstance(value, Mapping)):
        raise ValueError(f"{where}: rope parameters by layer type ({nested}) are not supported")
    theta = read_entry({**hf, **rope}, "rope_theta", "number", where, 10_000.0)
    refuse_options({k: v for k, v in rope.items() if k == "partial_rotary_factor"}, where)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(
            f"{where}: unknown rope type: expected 'default' or 'llama3', got {shown(kind)}; other "
            "scalings are not implemented"
        )
    known = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
    known.update(_ROPE_SCALING if kind == "llama3" else ())
    if unread := sorted(name for name in rope if name not in known and rope[name] is not None):
        raise ValueError(
            f"{where}: expected rope parameters of type {kind}, {sorted(known)}, got "
            f"{shown(unread)} as well: correct the names, or leave them out"
        )
    if kind == "default":
        return float(theta), None
    *factors, length = _ROPE_SCALING
    where = f"{where}: rope scaling"
    factor, low, high = (float(read_entry(rope, name, "number", where)) for name in factors)
    if low >= high:
        raise ValueError(f"{where}: low_freq_factor is not below high_freq_factor: {low}, {high}")
    original = read_entry(rope, length, "size", where)
    return float(theta), Llama3RopeScaling(factor, low, high, original)
