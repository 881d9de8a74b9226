"""The teacher of a run: its shape, after a comparison of its vocabulary with the policy's."""

from __future__ import annotations

import dataclasses

from reprise.models.config import ModelConfig
from reprise.models.formats import hf
from reprise.models.text import tokenizer as tokenizers
from reprise.models.text.tokenizer import Tokenizer
from reprise.rl.runtime.run_files import resolve_path

_SHOWN = 3  # words that differ


def open_teacher(
    directory: str, policy: ModelConfig, words: Tokenizer, longest_tokens: int
) -> ModelConfig:
    """Return the shape of a teacher, with the ids that the policy draws; reads no weights.

    `words` is the tokenizer of the policy. The embedding of the teacher may be padded to another
    size. Raises ValueError or FileNotFoundError.
    """
    folder = resolve_path(directory)
    model = hf.check(folder)
    own = tokenizers.load(folder).vocabulary
    if own != words.vocabulary:
        differ = dict(own.items() ^ words.vocabulary.items())
        shown = ", ".join(repr(word) for word in sorted(differ)[:_SHOWN])
        raise ValueError(
            f"Distill.teacher={directory!r}: expected the vocabulary of the policy, got one that "
            f"differs in {len(differ)} words, such as {shown}: log-probs of tokens of two "
            "vocabularies cannot be compared; take a teacher of the same family"
        )
    if max(policy.eos_token_ids) >= model.vocab_size:
        raise ValueError(
            f"Distill.teacher={directory!r}: expected an embedding of all tokens that the policy "
            f"draws, up to {max(policy.eos_token_ids)}, got {model.vocab_size} rows: take a "
            "teacher of the same family"
        )
    if model.max_positions < longest_tokens:
        raise ValueError(
            f"Distill.teacher={directory!r} has {model.max_positions} positions, and "
            "Rollout.max_prompt_tokens and Sampling.max_new_tokens make "
            f"{longest_tokens}: lower one of them"
        )
    return tokenizers.fitted(dataclasses.replace(model, eos_token_ids=policy.eos_token_ids), words)
