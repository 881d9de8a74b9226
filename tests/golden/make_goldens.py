"""Makes the golden folders: tiny random models of `transformers` and the logits it computes.

Needs torch and transformers, which the project does not: run it in an environment
of its own (made with torch 2.13.0 and transformers 5.23.0, on CPU):

    python tests/golden/make_goldens.py

    python tests/golden/make_goldens.py adapters    the adapters alone, with peft 0.21.2

Each case is a Hugging Face folder `<name>/` as `save_pretrained` writes it and
`<name>.npz` with `tokens` int32 [2, 40] and `logits` float32 [2, 40, V]. Weights
are random everywhere (norms and biases too), so that none of them can be left out.
`adapters/<name>/` is an adapter of `qwen3_untied` as peft saves it, with its own `golden.npz`.
"""

from __future__ import annotations

import pathlib
import shutil
import sys

import numpy as np

HERE = pathlib.Path(__file__).parent
TOKENS = (2, 40)

# 40 positions reach well past the 16 that these frequencies were "trained" for.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1_000_000.0}

# name: (family, overrides, dtype stored, largest file in bytes or None)
CASES: dict[str, tuple[str, dict, str, int | None]] = {
    "llama3_untied": (
        "llama",
        {"rope_parameters": LLAMA3_ROPE, "rms_norm_eps": 1e-5, "eos_token_id": [2, 3]},
        "float32",
        None,
    ),
    "llama3_tied": (
        "llama",
        {
            "rope_parameters": LLAMA3_ROPE,
            "head_dim": 12,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
        },
        "float32",
        None,
    ),
    "qwen2_untied": (
        "qwen2",
        {"rope_parameters": PLAIN_ROPE, "num_key_value_heads": 1, "eos_token_id": 2},
        "float32",
        30_000,
    ),
    "qwen2_tied": (
        "qwen2",
        {
            "rope_parameters": PLAIN_ROPE,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
        },
        "bfloat16",
        None,
    ),
    "qwen3_untied": (
        "qwen3",
        {"rope_parameters": PLAIN_ROPE, "head_dim": 12, "eos_token_id": 2},
        "float32",
        None,
    ),
    "qwen3_tied": (
        "qwen3",
        {
            "rope_parameters": PLAIN_ROPE,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
        },
        "float32",
        None,
    ),
}

ADAPTED = "qwen3_untied"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict] = {  # settings of peft.LoraConfig
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": [*ATTENTION, *MLP], "lora_dropout": 0.05},
    "rslora": {"r": 4, "lora_alpha": 6, "target_modules": ATTENTION, "use_rslora": True},
}


def build(name: str, seed: int):
    """The random model of a case, in float32 with weights that its stored type holds exactly."""
    import torch
    import transformers

    family, overrides, dtype, _ = CASES[name]
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[family]
    config = config_class(**{**COMMON, **overrides}, attn_implementation="eager")
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in key:
                value = 1 + 0.3 * noise
            elif key.endswith("bias"):
                value = 0.5 * noise
            else:
                value = noise * weight.shape[1] ** -0.5
            weight.copy_(value.to(getattr(torch, dtype)))
    return model


def logits_of(model, tokens: np.ndarray) -> np.ndarray:
    """What `transformers` computes, float32 [B, T, V]."""
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(tokens.astype(np.int64))).logits.float().numpy()


def tokens_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, COMMON["vocab_size"], TOKENS).astype(np.int32)


def save_adapters() -> None:
    """Save random adapters by peft, and the logits of the model with each."""
    import peft
    import torch
    import transformers

    shutil.rmtree(HERE / "adapters", ignore_errors=True)
    for seed, (name, settings) in enumerate(ADAPTERS.items(), start=100):
        base = transformers.AutoModelForCausalLM.from_pretrained(
            HERE / ADAPTED, attn_implementation="eager"
        )
        config = peft.LoraConfig(task_type="CAUSAL_LM", **settings)
        model = peft.get_peft_model(base, config).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for key, weight in model.named_parameters():
                if "lora_" in key:
                    noise = torch.randn(weight.shape, generator=generator)
                    weight.copy_(noise * weight.shape[1] ** -0.5)
        model.peft_config["default"].base_model_name_or_path = ADAPTED
        folder = HERE / "adapters" / name
        model.save_pretrained(folder)
        (folder / "README.md").unlink()
        tokens = tokens_of(seed)
        logits = logits_of(model, tokens)
        np.savez(folder / "golden.npz", tokens=tokens, logits=logits)
        print(f"adapters/{name}: logits up to {np.abs(logits).max():.2f}")


def main() -> None:
    import torch

    torch.set_num_threads(1)
    if sys.argv[1:] == ["adapters"]:
        save_adapters()
        return
    for seed, (name, (_, _, dtype, max_bytes)) in enumerate(CASES.items()):
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        model = build(name, seed)
        tokens = tokens_of(seed)
        logits = logits_of(model, tokens)
        extra = {} if max_bytes is None else {"max_shard_size": max_bytes}
        model.to(getattr(torch, dtype)).save_pretrained(folder, **extra)
        np.savez(HERE / f"{name}.npz", tokens=tokens, logits=logits)
        size_bytes = sum(p.stat().st_size for p in folder.iterdir())
        print(f"{name}: {size_bytes} bytes, logits up to {np.abs(logits).max():.2f}")
    save_adapters()


if __name__ == "__main__":
    main()
