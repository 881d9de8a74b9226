"""Hugging Face's config.json to a `ModelConfig` and back.

Options that would change the mathematics and are not implemented are refused by name; others
(initializer_range, dropout, use_cache, …) are ignored. `transformers` 5 keeps the rotary numbers
in `rope_parameters` and the type in `dtype`, older versions in `rope_scaling`, `rope_theta` and
`torch_dtype`: both are read, both are written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeGuard

from models.config import Architecture, Llama3RopeScaling, ModelConfig

MOST = 2**31 - 1  # of any size in config.json: positions and ids are int32 on devices
_FLOAT32 = (1.2e-38, 3.4e38)  # the range of normal float32 numbers


@dataclasses.dataclass(frozen=True)
class Family:
    """The values that a Hugging Face class implies where its config.json has none."""

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

# The value that is implemented of each option, which is also its default.
_FIXED_OPTIONS: dict[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "hidden_act": "silu",
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
}


def parse(hf: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """Return the `ModelConfig` of a config.json and a generation_config.json (may be empty).

    End tokens are generation_config's where it has them, as in `generate`. `where`
    names the folder in errors. Raises ValueError for an unknown architecture or
    rope type, an unsupported option, or a missing or malformed entry.
    """
    family = _family(hf, where)
    # Qwen2 always has these biases, whether or not its config says so.
    refuse_options(
        {k: v for k, v in hf.items() if (k, v) != ("attention_bias", family.qkv_bias)}, where
    )
    heads = _size(hf, "num_attention_heads", where)
    width = _size(hf, "hidden_size", where)
    # Qwen's default of 32 heads is never meant, so only Llama may leave it out.
    kv_heads = heads if family.architecture == "llama" else None
    kv_heads = heads if hf.get("num_key_value_heads", 0) is None else kv_heads
    head_dim = family.head_dim if hf.get("head_dim") is None else hf["head_dim"]
    if head_dim is None and width % heads:
        raise ValueError(
            f"{where}: hidden_size={width} is not a multiple of {heads} heads: give head_dim"
        )
    theta, scaling = _rope(hf, where)
    eos = generation.get("eos_token_id", None)
    eos = hf.get("eos_token_id") if eos is None else eos
    pad = hf.get("pad_token_id")
    pad = generation.get("pad_token_id") if pad is None else pad
    try:
        return ModelConfig(
            architecture=family.architecture,
            vocab_size=_size(hf, "vocab_size", where),
            d_model=width,
            num_layers=_size(hf, "num_hidden_layers", where),
            num_heads=heads,
            num_kv_heads=_size(hf, "num_key_value_heads", where, kv_heads),
            head_dim=_size({"head_dim": head_dim}, "head_dim", where, width // heads),
            d_ff=_size(hf, "intermediate_size", where),
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=_number(hf.get("rms_norm_eps", 1e-6), "rms_norm_eps", where),
            tied_embeddings=yes_or_no(hf, "tie_word_embeddings", False, where),
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            max_positions=_size(hf, "max_position_embeddings", where, family.max_positions),
            bos_token_id=_id(hf.get("bos_token_id"), "bos_token_id", where),
            eos_token_ids=ids_of(eos, where),
            pad_token_id=_id(pad, "pad_token_id", where),
        )
    except ValueError as error:
        message = str(error)
        raise ValueError(message if message.startswith(where) else f"{where}: {message}") from error


def render(config: ModelConfig, dtype: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contents of config.json and generation_config.json; `dtype` names the weights'.

    Raises ValueError for a config that no supported Hugging Face class can hold.
    """
    family = next(f for f in FAMILIES.values() if f.architecture == config.architecture)
    if (config.qkv_bias, config.qk_norm) != (family.qkv_bias, family.qk_norm):
        raise ValueError(
            f"{family.model_class} has qkv_bias={family.qkv_bias} and qk_norm={family.qk_norm}, "
            f"got {config.qkv_bias} and {config.qk_norm}: choose another architecture"
        )
    scaling = None
    if config.rope_scaling is not None:
        scaling = {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_freq_factor,
            "high_freq_factor": config.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling.original_max_positions,
        }
    eos = list(config.eos_token_ids)
    tokens = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": (eos[0] if len(eos) == 1 else eos) if eos else None,
        "pad_token_id": config.pad_token_id,
    }
    own = {"attention_bias": False} if config.architecture != "qwen2" else {}
    own |= {"mlp_bias": False} if config.architecture == "llama" else {"use_sliding_window": False}
    hf = {
        "architectures": [family.model_class],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "max_position_embeddings": config.max_positions,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {
            **(scaling or {"rope_type": "default"}),
            "rope_theta": config.rope_theta,
        },
        **own,
        **tokens,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    return hf, {name: value for name, value in tokens.items() if value is not None}


def _family(hf: Mapping[str, Any], where: str) -> Family:
    names = hf.get("architectures") or []
    if not names:  # old exports give the model type alone
        names = [f.model_class for f in FAMILIES.values() if f.architecture == hf.get("model_type")]
    family = FAMILIES.get(names[0]) if is_one_name(names) else None
    if family is None:
        got = hf.get("architectures") or f"model_type={shown(hf.get('model_type'))}"
        raise ValueError(
            f"{where}: unknown architecture: expected one of {sorted(FAMILIES)}, got "
            f"{got if isinstance(got, str) else shown(got)}; other models are not supported"
        )
    return family


def is_one_name(names: Any) -> TypeGuard[list[str]]:
    """Return whether `architectures` is as in every folder: a list of one string."""
    return isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)


def refuse_options(
    hf: Mapping[str, Any], where: str, fixed: Mapping[str, Any] = _FIXED_OPTIONS
) -> None:
    """Raise ValueError for options with another value than the one that is implemented."""
    wrong = [
        f"{name}={shown(hf[name])} (expected {value!r})"
        for name, value in fixed.items()
        if hf.get(name, value) not in (value, None)
    ]
    layer_types = hf.get("layer_types") or []
    if not isinstance(layer_types, list):
        wrong.append(f"layer_types={shown(layer_types)} (expected a list of 'full_attention')")
        layer_types = []
    wrong += [
        f"layer_types has {kind} (expected 'full_attention')"
        for kind in sorted({shown(kind) for kind in layer_types if kind != "full_attention"})[:6]
    ]
    if wrong:
        raise ValueError(
            f"{where}: config.json asks for what is not implemented: {'; '.join(wrong)}; "
            "use a model without it"
        )


def _rope(hf: Mapping[str, Any], where: str) -> tuple[float, Llama3RopeScaling | None]:
    """Return base and scaling; `rope_scaling` wins over `rope_parameters`, as in transformers."""
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"{where}: expected the rope parameters as an object, got {shown(rope)}")
    nested = sorted(name for name, value in rope.items() if isinstance(value, Mapping))
    if nested:
        raise ValueError(f"{where}: rope parameters by layer type ({nested}) are not supported")
    theta = rope.get("rope_theta", hf.get("rope_theta"))
    theta = _number(10_000.0 if theta is None else theta, "rope_theta", where)
    refuse_options({k: v for k, v in rope.items() if k == "partial_rotary_factor"}, where)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(
            f"{where}: unknown rope type: expected 'default' or 'llama3', got "
            f"{shown(kind)}; other scalings are not implemented"
        )
    low = _number(rope.get("low_freq_factor"), "rope low_freq_factor", where)
    high = _number(rope.get("high_freq_factor"), "rope high_freq_factor", where)
    if low >= high:
        raise ValueError(
            f"{where}: expected rope low_freq_factor below high_freq_factor, got {low} and {high}"
        )
    return theta, Llama3RopeScaling(
        factor=_number(rope.get("factor"), "rope factor", where),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=_size(rope, "original_max_position_embeddings", where),
    )


def shown(value: Any, most: int = 80) -> str:
    """Return a value of a file as errors print it: escaped, and cut where it is long."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply; more digits than Python prints
        return f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def escaped(text: str, most: int = 80) -> str:
    """Return text of a file, or of a library that quotes one, as errors print it: unquoted."""
    return repr(text[:most])[1:-1] + (f"… ({len(text)} characters)" if len(text) > most else "")


def yes_or_no(content: Mapping[str, Any], name: str, default: bool, where: str) -> bool:
    """Read an entry that is true or false, by default `default`; ValueError for other values."""
    value = content.get(name)
    if not isinstance(value, bool | None):
        raise ValueError(
            f"{where}: expected {name} as true or false, got {shown(value)}: write it without "
            "quotes"
        )
    return default if value is None else value


def whole(value: Any, name: str, where: str) -> int:
    """Check for a positive whole number that int32 holds; ValueError for anything else."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{where}: expected {name} as a positive whole number, got {shown(value)}")
    if value > MOST:
        raise ValueError(f"{where}: expected {name} of at most {MOST}, got {shown(value)}")
    return value


def ids_of(value: Any, where: str) -> tuple[int, ...]:
    """Read the token ids of `eos_token_id`: none, one or a list; ValueError for anything else."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(i) is int for i in ids):
        raise ValueError(
            f"{where}: expected eos_token_id as a number or a list, got {shown(value)}"
        )
    return tuple(ids)


def _size(hf: Mapping[str, Any], name: str, where: str, default: int | None = None) -> int:
    value = hf.get(name)
    return whole(default if value is None else value, name, where)


def _number(value: Any, name: str, where: str) -> float:
    least, most = _FLOAT32
    if type(value) not in (int, float) or not least <= value <= most:
        raise ValueError(
            f"{where}: expected {name} as a positive number that float32 holds, got {shown(value)}"
        )
    return float(value)


def _id(value: Any, name: str, where: str) -> int | None:
    """Read a token id; old exports write −1 where there is none."""
    if value is not None and (type(value) is not int or not -1 <= value <= MOST):
        raise ValueError(f"{where}: expected {name} as a token id or null, got {shown(value)}")
    return None if value == -1 else value
