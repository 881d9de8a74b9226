"""The policy in a GGUF file: its config, its tensors, and the tokens that it names."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from reprise.models.config import Llama3RopeScaling, ModelConfig
from reprise.models.formats import hf
from reprise.models.formats.gguf_header import Header, StoredGguf, package
from reprise.models.formats.hf_entries import refuse_misspelt
from reprise.models.formats.hf_files import Entry, Stored, shown

# Keys of an architecture: `_CONFIG` has their names in config.json, `_FIXED` the known options with
# their only implemented value.
_CONFIG = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_MAY_LACK = ("vocab_size", "attention.head_count_kv", "attention.key_length", "rope.freq_base")
_HEAD_SIZES = ("attention.value_length", "rope.dimension_count")
_FIXED: dict[str, Any] = {
    "rope.scaling.type": "none",
    "rope.scaling.factor": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.finetuned": False,
    "rope.scale_linear": 1.0,
    "attention.sliding_window": 0,
    "attention.causal": True,
    "expert_count": 0,
    "expert_used_count": 0,
    "tensor_data_layout": "Meta AI original pth",
}
_WORDS = "tokenizer.ggml."
_IGNORED = ("rope.scaling.original_context_length",)
_ROPE_FACTORS = "rope_freqs.weight"
# llama.cpp knows the tokens that end a turn or a text by name, if they are control tokens. A file
# names only one of the two end tokens of Qwen and of SmolLM.
_END_NAMES = {
    *("<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"),
    *("<|end|>", "<end_of_turn>", "<EOT>", "</s>"),
}
_CONTROL = 3  # a token type


def config_of(header: Header) -> ModelConfig:
    """Return the config of the policy in a file; ValueError for anything unknown or missing."""
    classes = {f.architecture: f.model_class for f in hf.FAMILIES.values()}
    name = header.architecture
    metadata = header.metadata
    if name not in list(classes):
        header.fail(
            f"unknown architecture: expected general.architecture as one of {sorted(classes)}, got "
            f"{shown(name)}",
            "other models are not supported",
        )
    _refuse_options(header)
    values = {key: metadata.get(f"{name}.{key}") for key in _CONFIG}
    if missing := [k for k, value in values.items() if value is None and k not in _MAY_LACK]:
        header.fail(f"expected {', '.join(f'{name}.{key}' for key in missing)}, got none")
    embedding = header.tensors.get("token_embd.weight")
    if values["vocab_size"] is None and embedding is not None:
        values["vocab_size"] = embedding.shape[0]
    content = {
        "architectures": [classes[name]],
        **{entry: values[key] for key, entry in _CONFIG.items()},
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": token_id(header, "bos"),
        "pad_token_id": token_id(header, "padding"),
        "eos_token_id": list(end_tokens(header)),
    }
    config = hf.parse_config(content, {}, str(header.path))
    for key in _HEAD_SIZES:
        if (got := metadata.get(f"{name}.{key}", config.head_dim)) != config.head_dim:
            header.fail(
                f"expected {name}.{key} as the size of a head, {config.head_dim}, got {shown(got)}",
                "other models are not supported",
            )
    return dataclasses.replace(config, rope_scaling=_rope_scaling(header, config))


def _refuse_options(header: Header) -> None:
    """Raise ValueError for options that change the mathematics, and for unknown options."""
    metadata = header.metadata
    prefix = f"{header.architecture}."
    if (num_files := metadata.get("split.count", 0)) not in (0, 1):
        header.fail(
            f"expected a model in one file, got one of {shown(num_files)} files",
            "merge them with llama-gguf-split --merge",
        )
    words = [x for x in vars(package().Keys.Tokenizer).values() if isinstance(x, str)]
    names = {*words, *(x.removeprefix(_WORDS) for x in words)}
    names |= {prefix + key for key in (*_CONFIG, *_FIXED)}
    given = dict.fromkeys(key.removeprefix(_WORDS) for key in metadata)
    refuse_misspelt(given, str(header.path), names)
    read_keys = {*_CONFIG, *_HEAD_SIZES, *_IGNORED}
    options = {
        key: value
        for key, value in metadata.items()
        if key.startswith(prefix) and key.removeprefix(prefix) not in read_keys
    }
    fixed = {key: _FIXED.get(key.removeprefix(prefix)) for key in options}
    kind = {"general.type": metadata.get("general.type")}
    hf.refuse_options(options | kind, str(header.path), {**fixed, "general.type": "model"})


def _rope_scaling(header: Header, config: ModelConfig) -> Llama3RopeScaling | None:
    """Return the scaling of Llama 3 if the file has its factors, one for each pair of a head.

    Every published model has 1 and 4 as low and high factor, so only original lengths are tried;
    all lengths that fit give the same frequencies.
    """
    stored = header.tensors.get(_ROPE_FACTORS)
    if stored is None:
        return None
    num_pairs = config.head_dim // 2
    if stored.shape != (num_pairs,):
        header.fail(
            f"{_ROPE_FACTORS}: expected one factor for each of {num_pairs} pairs of a head, got "
            f"shape {list(stored.shape)}"
        )
    _refuse_unreadable(header, stored)
    with stored.opened() as file:
        got = stored.read(file).astype(np.float64)
    if np.all(got == 1):
        return None
    wavelengths = 2 * np.pi * config.rope_theta ** (np.arange(num_pairs) / num_pairs)
    factor = float(str(np.float32(got[-1])))
    originals = (8192, *(2**i for i in range(4, 21))) if 1 < factor < np.inf else ()
    for original in originals:
        smooth = np.clip((original / wavelengths - 1) / (4 - 1), 0, 1)
        if np.allclose(got, 1 / ((1 - smooth) / factor + smooth), rtol=1e-5, atol=0):
            return Llama3RopeScaling(factor, 1.0, 4.0, original)
    header.fail(
        f"{_ROPE_FACTORS}: expected the frequency factors of Llama 3 (low 1, high 4), got "
        f"{shown(got.tolist())}",
        "other scalings are not implemented",
    )


def stored_of(header: Header, config: ModelConfig) -> dict[str, Stored]:
    """Return the tensors of a file by their names in the file; ValueError for an unreadable type.

    For Llama, llama.cpp interleaves the two halves of the query and key rows of every head.
    """
    for tensor in {tensor.kind: tensor for tensor in header.tensors.values()}.values():
        _refuse_unreadable(header, tensor)
    heads = {"attn_q.weight": config.num_heads, "attn_k.weight": config.num_kv_heads}
    if config.architecture != "llama":
        heads = {}
    return {
        name: dataclasses.replace(tensor, interleaved_heads=heads.get(name.split(".", 2)[-1], 0))
        for name, tensor in header.tensors.items()
        if name != _ROPE_FACTORS
    }


def renamed(entries: Sequence[Entry], config: ModelConfig) -> list[Entry]:
    """Return the entries of a policy under the names of llama.cpp."""
    architectures = {name: kind for kind, name in package().MODEL_ARCH_NAMES.items()}
    names = package().get_tensor_name_map(architectures[config.architecture], n_blocks=1)

    def rename(name: str) -> str:
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer is None:
            return names.get_name(name, (".weight", ".bias"))
        of_first = names.get_name(f"model.layers.0.{name[layer.end() :]}", (".weight", ".bias"))
        return of_first.replace("blk.0.", f"blk.{layer[1]}.", 1)

    return [dataclasses.replace(entry, name=rename(entry.name)) for entry in entries]


def _refuse_unreadable(header: Header, tensor: StoredGguf) -> None:
    _, block_bytes = package().GGML_QUANT_SIZES[tensor.kind]
    try:
        package().dequantize(np.zeros((1, block_bytes), np.uint8), tensor.kind)
    except NotImplementedError:
        header.fail(
            f"{tensor.name!r} is of type {tensor.kind.name}, which the installed gguf package "
            "cannot dequantize",
            "use a file of F16, BF16, Q8_0, Q4_0, …",
        )


def tokens_of(header: Header) -> tuple[list[str], list[int]]:
    """Return the vocabulary and the type of each token; ValueError if they do not match."""
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not (isinstance(tokens, list) and tokens and isinstance(tokens[0], str)):
        header.fail(f"expected the vocabulary in tokenizer.ggml.tokens, got {shown(tokens)}")
    types = header.metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not (isinstance(types, list) and len(types) == len(tokens) and type(types[0]) is int):
        header.fail(
            f"expected tokenizer.ggml.token_type as {len(tokens)} whole numbers, one for each "
            f"token, got {shown(types)}"
        )
    return tokens, types


def token_id(header: Header, name: str) -> int | None:
    """Return tokenizer.ggml.NAME_token_id, None if absent; ValueError if no token has this id."""
    key = f"tokenizer.ggml.{name}_token_id"
    value = header.metadata.get(key)
    if value is None:
        return None
    num_tokens = len(tokens_of(header)[0])
    if type(value) is not int or not 0 <= value < num_tokens:
        header.fail(
            f"expected {key} below the {num_tokens} tokens of the vocabulary, got {shown(value)}"
        )
    return value


def end_tokens(header: Header) -> tuple[int, ...]:
    """Return the tokens that end a response, named by the metadata or known by their text."""
    named = [token_id(header, name) for name in ("eos", "eot", "eom")]
    tokens, types = tokens_of(header)
    known = [
        i
        for i, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == _CONTROL and text in _END_NAMES
    ]
    return tuple(dict.fromkeys([*(i for i in named if i is not None), *known]))
