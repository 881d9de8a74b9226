"""Prompts and responses in .jsonl files, for offline training of drafters.

A line is an object of one of two kinds:

    {"prompt_ids": [...], "response_ids": [...]}      tokens, with the end token
    {"prompt": "...", "completion": "..."}            texts, as in samples.jsonl of a run

Texts are tokenized again, prompt and completion separately. A completion with `finish_reason`
"stop" gets the first end token of the policy, unless it has `num_tokens` tokens without the end
token, which means that it stopped at a stop string. Other columns are ignored.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from reprise.models.config import ModelConfig
from reprise.models.text.tokenizer import Tokenizer
from reprise.rl.records.packing import Response
from reprise.rl.runtime.run_files import SAMPLES_FILE

IDS = "prompt_ids", "response_ids"
MAX_LINE_BYTES = 2**26
MIN_TOKENS = 3  # an entry of training spans three tokens


@dataclasses.dataclass(frozen=True)
class DrafterTraces:
    """Usable sequences, the numbers of sequences left out, and the number of texts."""

    responses: tuple[Response, ...]
    too_long: int
    too_short: int
    num_texts: int


def num_tokens(response: Response) -> int:
    """Return the number of tokens of prompt and response together."""
    return len(response.prompt_ids) + len(response.tokens)


def read(paths: Sequence[Path], model: ModelConfig, words: Tokenizer) -> DrafterTraces:
    """Read the sequences of .jsonl files, and of samples.jsonl in run folders, in their order.

    Sequences longer than the positions of the policy, shorter than three tokens, and without prompt
    or response are left out; a torn last line is ignored. Raises FileNotFoundError for a missing
    file, and ValueError for damaged lines, for tokens that the policy does not have, and if nothing
    is left.
    """
    groups = dict[tuple[int, ...], int]()
    responses = list[Response]()
    too_long = too_short = num_texts = 0
    for path in map(_file, paths):
        for where, row in _rows(path):
            if IDS[1] not in row and "completion" in row:
                prompt, response = _of_texts(row, words, model, where)
                num_texts += 1
            else:
                prompt, response = (_ids(row, k, model, where) for k in IDS)
            length = len(prompt) + len(response)
            if not prompt or not response or length < MIN_TOKENS:
                too_short += 1
            elif length > model.max_positions:
                too_long += 1
            else:
                group = groups.setdefault(tuple(prompt), len(groups))
                arrays = (np.asarray(ids, np.int32) for ids in (prompt, response))
                responses.append(Response(where, group, *arrays))
    if not responses:
        raise ValueError(
            f"nothing to learn from in {', '.join(map(str, paths))}: {too_short} sequences are too "
            f"short, {too_long} longer than the policy's {model.max_positions} positions"
        )
    return DrafterTraces(tuple(responses), too_long, too_short, num_texts)


def hold_out(
    responses: Sequence[Response], share: float, seed: int
) -> tuple[list[Response], list[Response]]:
    """Split into (training, held-out) sequences.

    Whole prompts are held out until they have `share` of the tokens, but at least one prompt is
    left for training; with a single prompt, responses are held out. Raises ValueError for fewer
    than two sequences.
    """
    if not share:
        return list(responses), []
    if len(responses) < 2:
        raise ValueError(
            f"expected two sequences or more to hold a share of {share} out, got "
            f"{len(responses)}: give more, or --eval_share=0"
        )
    groups = [r.group_id for r in responses]
    parts = groups if len(set(groups)) > 1 else list(range(len(responses)))
    sizes: dict[int, int] = {}
    for part, response in zip(parts, responses, strict=True):
        sizes[part] = sizes.get(part, 0) + num_tokens(response)
    left = share * sum(sizes.values())
    held = set[int]()
    for part in np.random.default_rng(seed).permutation(sorted(sizes)).tolist()[:-1]:
        if left <= 0:
            break
        held.add(part)
        left -= sizes[part]
    pairs = list(zip(parts, responses, strict=True))
    return [r for part, r in pairs if part not in held], [r for part, r in pairs if part in held]


# --- lines ------------------------------------------------------------------------------


def _file(path: Path) -> Path:
    if path.is_file():
        return path
    if (path / SAMPLES_FILE).is_file():
        return path / SAMPLES_FILE
    what = f"a run folder with a {SAMPLES_FILE}" if path.is_dir() else "a file or a run folder"
    raise FileNotFoundError(f"expected {what}, found none at {path}")


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file and line, object) of each line, except for blank lines and a torn last line."""
    with open(path, "rb") as file:
        lines = iter(partial(file.readline, MAX_LINE_BYTES), b"")
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                if not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
                    return
                raise ValueError(f"{path}:{number}: not JSON ({error}); fix the line") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: expected an object, got {line[:60]!r}")
            yield f"{path}:{number}", row


def _ids(row: dict[str, Any], key: str, model: ModelConfig, where: str) -> list[int]:
    ids = row.get(key)
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ValueError(
            f"{where}: expected {key} as a list of tokens (prompt_ids with response_ids, or the "
            f"texts prompt with completion), got {key}={str(ids)[:60]} among {sorted(row)}"
        )
    if wrong := [i for i in ids if not 0 <= i < model.vocab_size]:
        raise ValueError(
            f"{where}: expected tokens of the policy, 0 … {model.vocab_size - 1}, got {wrong[0]} "
            f"in {key}: give the policy that the trace is of"
        )
    return ids


def _of_texts(
    row: dict[str, Any], words: Tokenizer, model: ModelConfig, where: str
) -> tuple[list[int], list[int]]:
    prompt = row.get("prompt")
    completion = row["completion"]
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise ValueError(
            f"{where}: expected prompt and completion as texts, got {type(prompt).__name__} and "
            f"{type(completion).__name__}"
        )
    ids = words.encode(completion)
    end = list[int]()
    if row.get("finish_reason") == "stop" and row.get("num_tokens") != len(ids):
        end = list(model.eos_token_ids[:1])
    return words.encode(prompt), [*ids, *end]
