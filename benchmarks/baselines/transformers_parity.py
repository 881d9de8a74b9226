"""Logits, greedy tokens and chat ids of transformers, for `benchmarks.real_policy`.

Runs in an interpreter that has torch: `python -m benchmarks.baselines.transformers_parity POLICY
WORK`. Reads WORK/chats.json, {"chats": [messages or text, ...], "new_tokens": n}, and writes
WORK/theirs.json (ids of each chat, greedy tokens up to the end token) and WORK/logits/I.npy,
the logits at all positions of chat I. Attention is its default.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

BATCH = 16


def ids_of(tokenizer: Any, chat: Any) -> list[int]:
    if isinstance(chat, str):
        return list(tokenizer.encode(chat, add_special_tokens=False))
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])


def greedy(model: Any, prompts: list[list[int]], new_tokens: int, pad: int) -> list[list[int]]:
    """Return the greedy tokens behind each prompt; prompts of a batch are padded to the left."""
    longest = max(map(len, prompts))
    ids_BT = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts])
    mask_BT = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=new_tokens,
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=pad,
    )
    out_BT = model.generate(ids_BT, attention_mask=mask_BT, generation_config=settings)
    return out_BT[:, longest:].tolist()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("policy")
    parser.add_argument("work", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # on a busy machine threads wait for each other at every operation
    asked = json.loads((arguments.work / "chats.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(arguments.policy)
    model = AutoModelForCausalLM.from_pretrained(arguments.policy, dtype=torch.float32).eval()
    ids = [ids_of(tokenizer, chat) for chat in asked["chats"]]
    (arguments.work / "logits").mkdir(exist_ok=True)
    responses: list[list[int]] = []
    with torch.inference_mode():
        for i, tokens in enumerate(ids):
            logits_TV = model(torch.tensor([tokens])).logits[0]
            np.save(arguments.work / "logits" / f"{i}.npy", logits_TV.numpy())
        for first in range(0, len(ids), BATCH):
            batch = ids[first : first + BATCH]
            responses += greedy(model, batch, asked["new_tokens"], tokenizer.pad_token_id)
    versions = {"torch": torch.__version__.partition("+")[0]}
    found = {"ids": ids, "responses": responses, "versions": versions}
    (arguments.work / "theirs.json").write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
