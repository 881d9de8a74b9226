"""The messages between verifying workers, drafting programs and a run's program.

    run's program → drafting program     Meet, Prepare, Look
    rollout worker → drafting program    Exchange
    drafting program →                   Met, Prepared, Seen, Brought, Failed: one answer to each

Commits and blocks are columns of few arrays. C = commits, B = blocks, T, K, N = tokens of all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from models.config import ModelConfig
from rl.drafting.config import MOST_WINDOW, DraftingConfig
from rl.engine.config import EngineConfig
from rl.remote import service
from rl.remote.records import expect
from rl.remote.wire import Codec
from rl.speculation.config import DraftModelConfig
from spec.config import SamplingConfig
from spec.decoupled.messages import Block, Commit, DraftPlan

MOST_COMMITS = 2**14  # of an exchange
MOST_BLOCKS = 2**14
MOST_NODES = 2**16  # draft tokens of a block
MOST_ID = 2**62
MOST_TOKENS = 2**31  # of a request
# Columns of integers, a commit's and a block's.
COMMIT = "request_id", "round", "first", "tokens", "prompt", "remaining", "chain", "window", "ahead"
BLOCK = "request_id", "round", "base", "nodes"


@dataclasses.dataclass(frozen=True)
class Meet:
    """The first words: what is drafted with, for which rollouts. A program hears them once.

    The program ends itself when nobody has spoken to it for `silence_s`. Each of its `devices`
    holds `rows` requests of up to `longest_tokens`; a thread that hangs for `hang_limit_s` is
    replaced.
    """

    identity: Mapping[str, str]
    silence_s: float
    policy: ModelConfig
    engine: EngineConfig
    dtype: str
    devices: int
    model: DraftModelConfig
    drafting: DraftingConfig
    most_window: int
    rows: int
    longest_tokens: int
    sampling: SamplingConfig
    hang_limit_s: float


@dataclasses.dataclass(frozen=True)
class Prepare:
    """Starts to compile, once; answered when that is done, or after `wait_s`."""

    wait_s: float


@dataclasses.dataclass(frozen=True)
class Prepared:
    """With `done` it drafts, a draft token for all of a device's requests in `draft_s`."""

    done: bool
    draft_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Look:
    """Asks for a sign of life."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """Steps and busy seconds of all threads so far, and remarks for the user since the last one."""

    steps: int
    busy_s: float
    remarks: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Commits:
    """Commits as columns `COMMIT`, their processing, and the tokens of all one after the other."""

    numbers_CX: np.ndarray
    processing_C3: np.ndarray
    tokens_T: np.ndarray
    chains_K: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks as columns `BLOCK`, and the draft tokens of all one after the other."""

    numbers_BX: np.ndarray
    tokens_N: np.ndarray
    parents_N: np.ndarray
    prob_N: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Exchange:
    """The words of a `link` about its rollout's requests, and the question for blocks.

    A rollout is known by the key of its noise and its sampling. It is answered as soon as there are
    blocks or nothing is left to draft, or after `wait_s`.
    """

    link: str
    key: np.ndarray
    sampling: SamplingConfig
    commits: Commits
    closed: tuple[int, ...]
    wait_s: float


@dataclasses.dataclass(frozen=True, eq=False)
class Brought:
    """The blocks that are there. More are being made where `more` is True.

    Another `program` or `generation` than before has forgotten all requests, or some of them.
    """

    program: str
    generation: int
    blocks: Blocks
    more: bool


def of_commits(commits: Sequence[Commit]) -> Commits:
    """Return commits as a message."""
    rows = [
        (
            *(c.request_id, c.round, c.first, len(c.tokens), c.prompt_tokens, c.remaining_tokens),
            *(len(c.chain), c.plan.window, int(c.plan.decoupled)),
        )
        for c in commits
    ]
    return Commits(
        np.array(rows, np.int64).reshape(-1, len(COMMIT)),
        np.array([c.processing for c in commits], np.float64).reshape(-1, 3),
        _joined([c.tokens for c in commits], np.int32),
        _joined([c.chain for c in commits], np.int32),
    )


def commits_of(told: Commits) -> list[Commit]:
    """Return the commits that a message has."""
    tokens = _parts(told.tokens_T, told.numbers_CX[:, COMMIT.index("tokens")])
    chains = _parts(told.chains_K, told.numbers_CX[:, COMMIT.index("chain")])
    found = []
    rows = zip(told.numbers_CX.tolist(), told.processing_C3.tolist(), strict=True)
    for (r, number, first, _, prompt, remaining, _, window, ahead), processing in rows:
        of_request = r, number, first, next(tokens), prompt, remaining, next(chains)
        found.append(Commit(*of_request, DraftPlan(window, bool(ahead)), tuple(processing)))
    return found


def of_blocks(blocks: Sequence[Block]) -> Blocks:
    """Return blocks as a message; their probabilities without errors of rounding."""
    rows = [(b.request_id, b.round, b.base_tokens, len(b.tokens_N)) for b in blocks]
    falling = [np.minimum.accumulate(np.clip(b.prob_N, 0.0, 1.0)) for b in blocks]
    return Blocks(
        np.array(rows, np.int64).reshape(-1, len(BLOCK)),
        _joined([b.tokens_N for b in blocks], np.int32),
        _joined([b.parents_N for b in blocks], np.int32),
        _joined(falling, np.float32),
    )


def blocks_of(told: Blocks) -> list[Block]:
    """Return the blocks that a message has."""
    sizes_B = told.numbers_BX[:, BLOCK.index("nodes")]
    columns = [_parts(x, sizes_B) for x in (told.tokens_N, told.parents_N, told.prob_N)]
    return [
        Block(request_id, number, base, *(next(column) for column in columns))
        for request_id, number, base, _ in told.numbers_BX.tolist()
    ]


def _joined(arrays: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)


def _parts(whole: np.ndarray, sizes: np.ndarray) -> Iterator[np.ndarray]:
    return iter(np.split(whole, np.cumsum(sizes)[:-1]) if len(sizes) else ())


def _within(column: np.ndarray, least: int, most: int, what: str) -> None:
    expect(bool(((column >= least) & (column <= most)).all()), f"{what} of {least} … {most}")


def _check_meet(record: Meet) -> None:
    sizes = record.devices, record.rows, record.longest_tokens
    expect(min(sizes) > 0, "at least one device, row and token")
    expect(1 <= record.most_window <= MOST_WINDOW, f"windows of 1 … {MOST_WINDOW}")


def _check_prepared(record: Prepared) -> None:
    expect(0 <= record.draft_s < np.inf, "seconds of 0 or more")


def _check_seen(record: Seen) -> None:
    expect(record.steps >= 0 and record.busy_s >= 0, "counts of 0 or more")


def _check_commits(record: Commits) -> None:
    count = len(record.numbers_CX)
    expect(count <= MOST_COMMITS, f"at most {MOST_COMMITS} commits")
    expect(record.numbers_CX.shape == (count, len(COMMIT)), f"columns {', '.join(COMMIT)}")
    expect(record.processing_C3.shape == (count, 3), "the processing of each commit")
    columns = dict(zip(COMMIT, record.numbers_CX.T, strict=True))
    _within(columns["request_id"], 0, MOST_ID, "requests")
    _within(columns["round"], 1, MOST_TOKENS, "rounds")
    for name, least in (("first", 0), ("tokens", 1), ("prompt", 1), ("remaining", 0)):
        _within(columns[name], least, MOST_TOKENS, f"{name} tokens")
    _within(columns["chain"], 0, MOST_WINDOW, "chains")
    _within(columns["window"], 0, MOST_WINDOW, "windows")
    _within(columns["ahead"], 0, 1, "0 or 1, plans")
    total_C = columns["first"] + columns["tokens"]
    expect(bool((columns["prompt"] <= total_C).all()), "prompts within the tokens")
    whole = int(columns["tokens"].sum()), int(columns["chain"].sum())
    expect(whole == (len(record.tokens_T), len(record.chains_K)), "the tokens of each commit")
    least = min(record.tokens_T.min(initial=0), record.chains_K.min(initial=0))
    expect(least >= 0, "token ids of 0 or more")
    temperature_C, top_k_C, top_p_C = record.processing_C3.T
    expect(bool(np.isfinite(record.processing_C3).all()), "finite processing")
    inside = (temperature_C >= 0) & (top_k_C >= 0) & (top_p_C > 0) & (top_p_C <= 1)
    expect(bool(inside.all()), "a temperature, top-k and top-p")


def _check_blocks(record: Blocks) -> None:
    count, nodes = len(record.numbers_BX), len(record.tokens_N)
    expect(count <= MOST_BLOCKS, f"at most {MOST_BLOCKS} blocks")
    expect(record.numbers_BX.shape == (count, len(BLOCK)), f"columns {', '.join(BLOCK)}")
    columns = dict(zip(BLOCK, record.numbers_BX.T, strict=True))
    _within(columns["request_id"], 0, MOST_ID, "requests")
    _within(columns["round"], 1, MOST_TOKENS, "rounds")
    _within(columns["base"], 1, MOST_TOKENS, "base tokens")
    sizes_B = columns["nodes"]
    _within(sizes_B, 1, MOST_NODES, "draft tokens")
    sizes = {int(sizes_B.sum()), nodes, len(record.parents_N), len(record.prob_N)}
    expect(len(sizes) == 1, "a token, a parent and a probability of each draft token")
    expect(record.tokens_N.min(initial=0) >= 0, "token ids of 0 or more")
    first_N = np.repeat(np.cumsum(sizes_B) - sizes_B, sizes_B)
    place_N = np.arange(nodes) - first_N
    earlier = (record.parents_N >= -1) & (record.parents_N < place_N)
    expect(bool(earlier.all()), "parents before their children")
    expect(bool(((record.prob_N >= 0) & (record.prob_N <= 1)).all()), "probabilities of 0 … 1")
    rises_N = np.diff(record.prob_N, prepend=np.float32(2.0)) > 0
    expect(not (rises_N & (place_N > 0)).any(), "draft tokens with the likeliest first")


def _check_exchange(record: Exchange) -> None:
    expect(0 < len(record.link) <= 100, "the name of a link")
    expect(len(record.key) <= 16, "the key of a rollout's noise")


CHECKS: dict[type, Callable[[Any], None]] = {
    Meet: _check_meet,
    Prepared: _check_prepared,
    Seen: _check_seen,
    Commits: _check_commits,
    Blocks: _check_blocks,
    Exchange: _check_exchange,
}
CODEC = Codec(
    (Meet, Prepare, Prepared, Look, Seen, Exchange, Brought, *service.ANSWERS),
    {
        Commits: {
            "numbers_CX": ("int64", 2),
            "processing_C3": ("float64", 2),
            "tokens_T": ("int32", 1),
            "chains_K": ("int32", 1),
        },
        Blocks: {
            "numbers_BX": ("int64", 2),
            "tokens_N": ("int32", 1),
            "parents_N": ("int32", 1),
            "prob_N": ("float32", 1),
        },
        Exchange: {"key": ("uint32", 1)},
    },
    CHECKS,
)
