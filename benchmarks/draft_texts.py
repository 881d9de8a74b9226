"""Texts that `benchmarks.drafts` replays, and how a draft is judged. Needs numpy only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Texts that share a prompt of `prompt_tokens`; each holds the prompt, then its response."""

    texts: list[np.ndarray]
    prompt_tokens: int


def synthetic(
    num_texts: int = 16, num_tokens: int = 8_000, vocab: int = 32_000, seed: int = 0
) -> Group:
    """Texts of phrases (3 to 40 tokens, drawn by Zipf's law from 600) and single random tokens."""
    rng = np.random.default_rng(seed)
    phrases = [rng.integers(0, vocab, n) for n in rng.integers(3, 41, 600)]
    weights = 1.0 / np.arange(1, len(phrases) + 1)
    weights /= weights.sum()

    def text() -> np.ndarray:
        parts: list[np.ndarray] = []
        length = 0
        while length < num_tokens:
            phrase = phrases[rng.choice(len(phrases), p=weights)]
            part = phrase if rng.random() < 0.6 else rng.integers(0, vocab, 4)
            parts.append(part)
            length += len(part)
        return np.concatenate(parts)[:num_tokens].astype(np.int32)

    prompt = rng.integers(0, vocab, 32).astype(np.int32)
    return Group([np.concatenate([prompt, text()]) for _ in range(num_texts)], len(prompt))


def accepted_by_walk(tokens: Sequence[int], parents: Sequence[int], coming: np.ndarray) -> int:
    """How many draft tokens of a tree (parents −1 at its root) are what comes."""
    at, right = -1, 0
    for token in coming.tolist():
        found = next(
            (i for i, t in enumerate(tokens) if parents[i] == at and t == token and i > at), None
        )
        if found is None:
            break
        at, right = found, right + 1
    return right


def save_groups(path: Path, groups: Sequence[Group]) -> None:
    """Groups as one file of arrays, for a process of another interpreter."""
    arrays = {f"{g}_{i}": t for g, group in enumerate(groups) for i, t in enumerate(group.texts)}
    np.savez(path, prompt_tokens=[g.prompt_tokens for g in groups], **arrays)


def load_groups(path: Path) -> list[Group]:
    with np.load(path, allow_pickle=False) as held:
        prompts = held["prompt_tokens"].tolist()
        names = [name for name in held.files if name != "prompt_tokens"]
        groups: list[Group] = [Group([], n) for n in prompts]
        for name in sorted(names, key=lambda n: tuple(map(int, n.split("_")))):
            groups[int(name.split("_")[0])].texts.append(held[name])
    return groups
