"""The policy in a GGUF file, under Hugging Face's names: its config and its tensors.

llama.cpp stores the numbers of a Hugging Face folder under other names. In files of Llama it also
interleaves the two halves of every head's query and key rows, which is undone here. Weights are
dequantized to float32, tensor by tensor, by the `gguf` package.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from models import gguf_header, hf_config
from models.gguf_header import Header, TensorEntry, printed
from models.hf_config import MOST, escaped
from models.hf_files import Stored

# GGUF's names, without the layer, beside Hugging Face's.
_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"
_INTERLEAVED = ("llama",)  # architectures whose query and key rows llama.cpp permutes

_ARCHITECTURES: dict[str, str] = {
    f.architecture: f.model_class for f in hf_config.FAMILIES.values()
}
# Keys of an architecture that are read, and those whose one implemented value is known.
_READ = {
    *("vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length"),
    *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"),
    *("attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base"),
    "rope.scaling.original_context_length",
}
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
# Ends of a turn or of a text, as llama.cpp knows them: by their names, where they are control
# tokens. A file names only one of Qwen's two, and of SmolLM's.
_END_NAMES = {
    *("<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"),
    *("<|end|>", "<end_of_turn>", "<EOT>", "</s>"),
}
_CONTROL = 3  # among the types of tokens


@dataclasses.dataclass(frozen=True)
class StoredGguf(Stored):
    """A tensor in a GGUF file; `heads` are those whose rows are interleaved, 0 where none are."""

    entry: TensorEntry
    heads: int

    @contextlib.contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        with self.path.open("rb") as file:
            yield file

    def reader(self, file: BinaryIO) -> Callable[[tuple[slice, ...]], np.ndarray]:
        """Return a function that gives a part of it; blocks are dequantized whole."""
        whole = self.read(file)
        return lambda index: whole[index]

    def read(self, file: BinaryIO) -> np.ndarray:
        """Read, dequantize to float32, and put rows in Hugging Face's order."""
        file.seek(self.entry.offset)
        content = file.read(self.entry.num_bytes)
        if len(content) != self.entry.num_bytes:
            raise ValueError(f"{self.path} became shorter while it was read: copy it again")
        rows = math.prod(self.shape[:-1])
        blocks = np.frombuffer(content, np.uint8).reshape(rows, -1)
        values = gguf_header.package().dequantize(blocks, self.entry.kind).reshape(self.shape)
        return _unpermuted(values, self.heads) if self.heads else values


def config_of(header: Header) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and generation_config.json of a Hugging Face folder would say.

    Raises ValueError for another architecture, and for what is not implemented or missing.
    """
    values = _Values(header)
    values.refuse_others()
    heads, width = values.size("attention.head_count"), values.size("embedding_length")
    head_dim = values.size("attention.key_length", max(width // heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        values.refuse_other_size(name, head_dim)
    theta = values.number("rope.freq_base", 10_000.0)
    embedding = header.tensors.get("token_embd.weight")
    rows = 0 if embedding is None else embedding.shape[0]
    config = {
        "architectures": [_ARCHITECTURES[values.architecture]],
        "vocab_size": values.size("vocab_size", max(rows, 1)),
        "hidden_size": width,
        "intermediate_size": values.size("feed_forward_length"),
        "num_hidden_layers": values.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": values.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "max_position_embeddings": values.size("context_length"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(header, theta, head_dim),
        "bos_token_id": token_id(header, "bos"),
        "pad_token_id": token_id(header, "padding"),
    }
    return config, {"eos_token_id": list(end_tokens(header))}


def stored_of(header: Header) -> dict[str, Stored]:
    """Return every tensor by Hugging Face's name, or by its own where it has none there.

    Raises ValueError for a type that the `gguf` package cannot dequantize.
    """
    values = _Values(header)
    heads = {"attn_q": values.size("attention.head_count")}
    heads["attn_k"] = values.size("attention.head_count_kv", heads["attn_q"])
    is_interleaved = values.architecture in _INTERLEAVED
    for entry in {entry.kind: entry for entry in header.tensors.values()}.values():
        _refuse_unreadable(header, entry)
    found: dict[str, Stored] = {}
    for entry in header.tensors.values():
        if entry.name == _ROPE_FACTORS:
            continue  # part of the config
        name, part = _hf_name(entry.name), entry.name.split(".")[-2:][0]
        if name in found:
            raise ValueError(
                f"{header.path}: expected every tensor once, got {escaped(entry.name)} under two "
                "names: convert the model again"
            )
        permuted = heads.get(part, 0) if is_interleaved else 0
        if permuted and entry.shape[0] % (2 * permuted):
            raise ValueError(
                f"{header.path}: expected {escaped(entry.name)} with rows for {permuted} heads of "
                f"an even size, got {entry.shape[0]} rows: convert the model again"
            )
        found[name] = StoredGguf(header.path, name, entry.shape, "F32", entry, permuted)
    return found


def end_tokens(header: Header) -> tuple[int, ...]:
    """Return the tokens that end a response: those that the metadata names, and known names."""
    named = [token_id(header, name) for name in ("eos", "eot", "eom")]
    tokens, types = tokens_of(header)
    by_name = [
        i
        for i, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == _CONTROL and text in _END_NAMES
    ]
    return tuple(dict.fromkeys([*(i for i in named if i is not None), *by_name]))


def tokens_of(header: Header) -> tuple[list[str], np.ndarray]:
    """Return the vocabulary and the type of each token; ValueError where they do not fit."""
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ValueError(
            f"{header.path}: expected the vocabulary in tokenizer.ggml.tokens, got "
            f"{printed(tokens)}: convert the model again, with its tokenizer"
        )
    types = header.metadata.get("tokenizer.ggml.token_type", np.ones(len(tokens), np.int32))
    if not isinstance(types, np.ndarray) or types.dtype.kind not in "iu" or types.ndim != 1:
        raise ValueError(
            f"{header.path}: expected tokenizer.ggml.token_type as whole numbers, got "
            f"{printed(types)}: convert the model again"
        )
    if len(types) != len(tokens):
        raise ValueError(
            f"{header.path}: expected a type for each of {len(tokens)} tokens, got {len(types)} "
            "in tokenizer.ggml.token_type: convert the model again"
        )
    return tokens, types


def token_id(header: Header, name: str) -> int | None:
    """Read tokenizer.ggml.NAME_token_id, None where there is none; ValueError for no token's."""
    key = f"tokenizer.ggml.{name}_token_id"
    value = header.metadata.get(key)
    if value is None:
        return None
    num_tokens = len(tokens_of(header)[0])
    if type(value) is not int or not 0 <= value < num_tokens:
        raise ValueError(
            f"{header.path}: expected {key} below the {num_tokens} tokens of the vocabulary, got "
            f"{printed(value)}: convert the model again"
        )
    return value


class _Values:
    """The metadata of one architecture, by names without its prefix."""

    def __init__(self, header: Header) -> None:
        self.header, self.path = header, header.path
        name = header.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in _ARCHITECTURES:
            raise ValueError(
                f"{self.path}: unknown architecture: expected general.architecture as one of "
                f"{sorted(_ARCHITECTURES)}, got {printed(name)}; other models are not supported"
            )
        self.architecture: str = name

    def refuse_others(self) -> None:
        """Raise ValueError for options that would change the mathematics, and for unknown ones."""
        metadata, prefix = self.header.metadata, f"{self.architecture}."
        wrong = [
            f"{key}={printed(metadata[key])} (expected {fine[0]!r})"
            for key, fine in (("general.type", ("model",)), ("split.count", (1, 0)))
            if not isinstance(metadata.get(key, fine[0]), str | int)
            or metadata.get(key, fine[0]) not in fine
        ]
        for key, value in metadata.items():
            name = key.removeprefix(prefix)
            if not key.startswith(prefix) or name in _READ:
                continue
            if name not in _FIXED:
                wrong.append(f"{escaped(key)} (unknown)")
            elif not isinstance(value, bool | int | float | str) or value != _FIXED[name]:
                wrong.append(f"{key}={printed(value)} (expected {_FIXED[name]!r})")
        if wrong:
            more = f" and {len(wrong) - 6} more" if len(wrong) > 6 else ""
            raise ValueError(
                f"{self.path}: the file asks for what is not implemented: "
                f"{'; '.join(wrong[:6])}{more}; use a model without it (one in several files: "
                "merge them with llama-gguf-split --merge)"
            )

    def size(self, name: str, default: int | None = None) -> int:
        """Read a positive whole number."""
        key = f"{self.architecture}.{name}"
        value = self.header.metadata.get(key, default)
        if type(value) is not int or not 1 <= value <= MOST:
            raise ValueError(
                f"{self.path}: expected {key} as a whole number from 1 to {MOST}, got "
                f"{printed(value)}: convert the model again"
            )
        return value

    def refuse_other_size(self, name: str, expected: int) -> None:
        if (got := self.size(name, expected)) != expected:
            raise ValueError(
                f"{self.path}: expected {self.architecture}.{name} as the size of a head, "
                f"{expected}, got {got}: other models are not supported"
            )

    def number(self, name: str, default: float | None = None) -> float:
        """Read a positive number, as the shortest decimal that gives its float32."""
        key = f"{self.architecture}.{name}"
        value: Any = self.header.metadata.get(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ValueError(
                f"{self.path}: expected {key} as a positive number, got {printed(value)}: convert "
                "the model again"
            )
        return float(str(np.float32(value)))


def _hf_name(name: str) -> str:
    parts = name.split(".", 2)
    if len(parts) == 3 and parts[0] == "blk" and parts[1].isdecimal() and parts[1].isascii():
        if parts[2] in _LAYER_TENSORS and str(int(parts[1][:9])) == parts[1]:
            return f"model.layers.{parts[1]}.{_LAYER_TENSORS[parts[2]]}"
    return _TENSORS.get(name, name)


def _refuse_unreadable(header: Header, entry: TensorEntry) -> None:
    gguf = gguf_header.package()
    _, block_bytes = gguf.GGML_QUANT_SIZES[entry.kind]
    try:
        gguf.dequantize(np.zeros((1, block_bytes), np.uint8), entry.kind)
    except NotImplementedError as error:
        raise ValueError(
            f"{header.path}: {escaped(entry.name)} is of type {entry.kind.name}, which the "
            "installed gguf package cannot dequantize: use a file of F16, BF16, Q8_0, Q4_0, …"
        ) from error


def _unpermuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order of rows: a head's pairs side by side; ours: first halves, then second.

    Rotary positions turn rows i and i + h/2 of a head together in Hugging Face's order, 2i and
    2i + 1 in llama.cpp's.
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _rope_scaling(header: Header, theta: float, head_dim: int) -> Mapping[str, Any] | None:
    """Return Llama 3's scaling where the file has its factors, one for each pair of a head.

    The file has only what comes out of it. Every published model has 1 and 4 as low and high
    factor, so that original lengths are tried; what fits gives the same frequencies.
    """
    entry = header.tensors.get(_ROPE_FACTORS)
    if entry is None:
        return None
    where = f"{header.path}: {_ROPE_FACTORS}"
    if entry.shape != (head_dim // 2,):
        raise ValueError(
            f"{where}: expected one factor for each of {head_dim // 2} pairs of a head, got shape "
            f"{list(entry.shape)}: convert the model again"
        )
    _refuse_unreadable(header, entry)
    stored = StoredGguf(header.path, _ROPE_FACTORS, entry.shape, "F32", entry, 0)
    with stored.opened() as file:
        got = stored.read(file).astype(np.float64)
    if np.all(got == 1):
        return None
    factor = float(str(np.float32(got[-1])))
    for original in (8192, *(2**i for i in range(4, 21))):
        if factor > 1 and np.allclose(
            got, _llama3_factors(theta, head_dim, factor, original), rtol=1e-5, atol=0
        ):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    raise ValueError(
        f"{where}: expected the frequency factors of Llama 3 (low 1, high 4), got "
        f"{printed(got.tolist())}; other scalings are not implemented"
    )


def _llama3_factors(theta: float, head_dim: int, factor: float, original: int) -> np.ndarray:
    """Return what Llama 3 divides the rotary frequencies by."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelengths - 1) / (4 - 1), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def load(path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Stored]]:
    """Return the config, the generation config and the tensors of a file; no weights are read."""
    header = gguf_header.read(path)
    return *config_of(header), stored_of(header)
