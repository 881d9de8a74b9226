"""A byte-level BPE tokenizer with a ChatML template, and seeded conversations for it.

Shared by tests/models/text/test_tokenizer.py and benchmarks/hf_parity.py, which load
it with `runpy`. Nothing is downloaded.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"  # ids 0, 1, 2

WORDS = (
    "What is the gcd of 12 and 18 ? It is 6 . don't x=y a,b; naïve Ünïcode 漢字 🙂🙃 "
    "1234567 (3+4)*5 def f(x): <tag> \\frac{1}{2} \u200b é e\u0301"
).split(" ") + ["  two  ", "\n", "\n\n", "\t", " "]


def save_chatml_tokenizer(folder: Path) -> None:
    """Write a tokenizer of about 320 ids with Qwen-like special tokens, trained on `WORDS`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[END_OF_TEXT, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "chat_template": CHATML,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))


def conversation(rng: random.Random) -> list[dict[str, str]]:
    """One to five turns of random words, half of them after a system message."""
    messages = [{"role": "system", "content": "Be brief."}] if rng.random() < 0.5 else []
    for turn in range(rng.randint(1, 5)):
        content = " ".join(rng.choices(WORDS, k=rng.randint(0, 12)))
        messages.append({"role": "user" if turn % 2 == 0 else "assistant", "content": content})
    return messages
