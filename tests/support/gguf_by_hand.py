"""Small GGUF files, written by the `gguf` package as llama.cpp's converter writes them."""

import math

import gguf
import numpy as np

from reprise.models.config import leaves, param_specs
from reprise.models.formats import hf

KINDS = gguf.GGMLQuantizationType
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Hugging Face's names beside GGUF's, written out again: a slip in the table must not hide itself.
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    stem, _, end = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{end}"
    return f"{NAMES[stem]}.{end}"


def permute(weights, heads):
    """What convert_hf_to_gguf.py does to the query and key rows of Llama."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def llama3_factors(config):
    """convert_hf_to_gguf.py's rope_freqs.weight, in its own steps."""
    scaling, factors = config.rope_scaling, []
    for i in range(0, config.head_dim, 2):
        wavelength = 2 * math.pi * config.rope_theta ** (i / config.head_dim)
        original = scaling.original_max_positions
        if wavelength < original / scaling.high_freq_factor:
            factors.append(1.0)
        elif wavelength > original / scaling.low_freq_factor:
            factors.append(scaling.factor)
        else:
            smooth = (original / wavelength - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            factors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return np.array(factors, np.float32)


def random_weights(config, seed=0):
    """Random tensors of a policy by Hugging Face's names, in the layout of its files."""
    rng = np.random.default_rng(seed)
    return {
        entry.name: rng.standard_normal(entry.shape, np.float32) * 0.2
        for entry in hf.entries(config)
    }


def byte_vocabulary(num_tokens):
    """Byte-level tokens and merges: controls first, then bytes, then pairs; then unused rows."""
    from tokenizers import pre_tokenizers

    controls = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*controls, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = ["Ġ t", "h e", "Ġt he", "1 2", "a b", "ab ab", "Ċ Ċ", "Ġ Ġ"]
    tokens += [merge.replace(" ", "") for merge in merges]
    types = [CONTROL] * len(controls) + [1] * (len(tokens) - len(controls))
    for i in range(len(tokens), num_tokens):
        tokens.append(f"[PAD{i}]")
        types.append(UNUSED)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }


def character_vocabulary(characters, num_tokens):
    """The ids of `save_character_tokenizer`, for characters that are their own bytes' names.

    And one pair, since the writer leaves out lists of nothing.
    """
    tokens = ["<pad>", "<eos>", "<unk>", *characters, characters[:2]]
    types = [CONTROL] * 3 + [1] * (len(characters) + 1) + [UNUSED] * (num_tokens - len(tokens))
    tokens += [f"[PAD{i}]" for i in range(len(tokens), num_tokens)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(characters[:2])],
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 0,
    }


def plain_vocabulary(num_tokens):
    """As many tokens as asked, for policies whose tokenizer nobody uses."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(num_tokens)],
        "tokenizer.ggml.token_type": [1] * num_tokens,
    }


def metadata_of(config):
    """The keys of a policy without its tokenizer, as llama.cpp names them."""
    arch = config.architecture
    return {
        f"{arch}.block_count": config.num_layers,
        f"{arch}.context_length": config.max_positions,
        f"{arch}.embedding_length": config.d_model,
        f"{arch}.feed_forward_length": config.d_ff,
        f"{arch}.attention.head_count": config.num_heads,
        f"{arch}.attention.head_count_kv": config.num_kv_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.rope.freq_base": config.rope_theta,
        f"{arch}.attention.layer_norm_rms_epsilon": config.norm_eps,
    }


def write(path, config, weights, kind=KINDS.F32, metadata=None, tensors=None):
    """Write `weights` (Hugging Face's names) in a type; vectors, and rows that do not fit, in F32.

    `metadata` and `tensors` (GGUF's names, or None to leave one out) change what is written.
    Returns the weights as they were stored, by Hugging Face's names.
    """
    writer = gguf.GGUFWriter(path, config.architecture)
    values = metadata_of(config) | (metadata or plain_vocabulary(config.vocab_size))
    for key, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    stored, written = {}, {}
    for name, value in weights.items():
        block = gguf.GGML_QUANT_SIZES[kind][0]
        used = kind if value.ndim == 2 and value.shape[1] % block == 0 else KINDS.F32
        stored[name] = gguf.dequantize(gguf.quantize(value, used), used)
        part = name.split(".")[-2]
        if config.architecture == "llama" and part in heads:
            value = permute(value, heads[part])
        written[gguf_name(name)] = (gguf.quantize(value, used), used)
    if config.rope_scaling is not None:
        written["rope_freqs.weight"] = (llama3_factors(config), KINDS.F32)
    for name, value in (written | (tensors or {})).items():
        if value is not None:
            writer.add_tensor(name, value[0], raw_dtype=value[1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def by_name(config, params):
    """Our parameters by Hugging Face's names, in the layout of its files."""
    found = {}
    for entry, leaf in zip(hf.entries(config), leaves(params), strict=True):
        found[entry.name] = np.asarray(leaf)
    assert len(found) == len(leaves(param_specs(config)))
    return found
