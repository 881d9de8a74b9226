"""The corpus of hostile inputs: cases by class, a seeded draw of each, and their counts."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import jax

from reprise.models.config import Llama3RopeScaling
from reprise.spec.eagle import files as eagle_files
from reprise.spec.eagle import model as eagle
from tests.hostile import config_cases, file_cases, folder_cases
from tests.hostile.watch import Case
from tests.support import gguf_by_hand, tiny_run

CLASSES = ("configs", "policies", "drafters")
FILE_CLASSES = ("rows", "parquet", "arrow", "ggufs", "tokenizers", "runs", "checkpoints")
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def make_inputs(folder: Path) -> Path:
    """The smallest run, and a drafter of its policy beside it; returns the configuration."""
    # no defaults: an entry that is lost would show
    scaling = Llama3RopeScaling(8.0, 1.0, 4.0, 16)
    model = dataclasses.replace(
        tiny_run.MODEL, norm_eps=1e-5, rope_theta=5e5, rope_scaling=scaling, bos_token_id=2
    )
    tiny = tiny_run.make_inputs(folder, model=model)
    shape = eagle.config_for(model)
    start = eagle.EagleWeights(shape, eagle.init(shape, jax.random.key(0)))
    eagle_files.save(folder / "drafter", start, model, None)
    return tiny


def cases(kind: str, tiny: Path, budget: int, seed: int = 0) -> Iterator[Case]:
    """Those by hand first (a draw of them, where the budget is smaller), then random ones."""
    draw = random.Random(f"{seed} {kind}")
    by_hand = list(_by_hand(kind, tiny))
    if len(by_hand) > budget:
        by_hand = draw.sample(by_hand, budget)
    yield from by_hand
    streams = itertools.cycle(_drawn(kind, tiny, draw))
    for stream in itertools.islice(streams, budget - len(by_hand)):
        yield next(stream)


def _by_hand(kind: str, tiny: Path) -> Iterator[Case]:
    if kind == "configs":
        yield from config_cases.by_hand(tiny)
    elif kind == "policies":
        for given in itertools.chain(folder_cases.by_hand(), folder_cases.tokenizers()):
            yield folder_cases.policy_case(*given, tiny)
    elif kind == "drafters":
        for name, edit, refused in folder_cases.by_hand():
            if not name.startswith(("generation_config", "auto_map")):  # drafters have none
                yield folder_cases.drafter_case(name, edit, refused, tiny, tiny.parent / "drafter")


def _drawn(kind: str, tiny: Path, draw: random.Random) -> list[Iterator[Case]]:
    if kind == "configs":
        return [config_cases.fields(tiny, draw), config_cases.damaged(tiny, draw)]
    if kind == "policies":
        keys = folder_cases.CONFIG_KEYS
        given = [
            folder_cases.entries("config.json", keys, draw),
            folder_cases.entries("generation_config.json", keys[-9:], draw),
            folder_cases.damage(FILES, draw),
        ]
        return [(folder_cases.policy_case(*g, tiny) for g in stream) for stream in given]
    if kind in FILE_CLASSES:
        return [_of_files(kind, tiny, draw)]
    drafter = tiny.parent / "drafter"
    given = [
        folder_cases.entries("config.json", folder_cases.CONFIG_KEYS[:24], draw),
        folder_cases.entries("config.json", folder_cases.DRAFTER_KEYS, draw),
        folder_cases.damage(FILES[:2], draw),
    ]
    return [(folder_cases.drafter_case(*g, tiny, drafter) for g in stream) for stream in given]


def _of_files(kind: str, tiny: Path, draw: random.Random) -> Iterator[Case]:
    forms = {"rows": ("json", "jsonl"), "parquet": ("parquet",), "arrow": ("datasets",)}
    if kind in forms:
        return file_cases.data(draw, forms[kind])
    if kind == "ggufs":
        model, path = tiny_run.MODEL, tiny.parent / "good.gguf"
        words = gguf_by_hand.character_vocabulary(tiny_run.CHARACTERS, model.vocab_size)
        gguf_by_hand.write(path, model, gguf_by_hand.random_weights(model), metadata=words)
        return file_cases.ggufs(draw, path.read_bytes())
    if kind == "tokenizers":
        return file_cases.tokenizers(draw, tiny.parent / "policy")
    run = file_cases.finished_run(tiny.parent, tiny)
    return {"runs": file_cases.records, "checkpoints": file_cases.checkpoints}[kind](draw, run)
