"""What `benchmarks.speculation` rolls out: policies, requests, and drafters for them.

Needs the engine's packages only: questions come from `data/tiny_prompts.json`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.environment import ROOT
from reprise.models.config import ModelConfig
from reprise.models.decoder import transformer
from reprise.models.formats import hf
from reprise.rl.python.generate import generate
from reprise.rl.records.trajectory import Request, Trajectory
from reprise.spec.budget.union import DrafterUnion
from reprise.spec.config import SamplingConfig
from reprise.spec.drafter import Drafter, Drafts, LiveSlots, no_drafts
from reprise.spec.retrieval.group import GroupDrafter
from reprise.spec.retrieval.history import RULE, HistoryDrafter, LastResponseDrafter, build_index
from reprise.spec.retrieval.suffix_drafter import NgramDrafter
from reprise.spec.reuse.rollout_cache import RolloutCache, of_group
from reprise.spec.verification.sampling import step_key

PROMPTS = ROOT / "benchmarks" / "data" / "tiny_prompts.json"
BASE_POLICY = ROOT / "policies" / "tiny"


@dataclasses.dataclass(frozen=True, eq=False)
class Workload:
    """One phase to be generated: a policy, its requests, and drafters by name.

    A drafter is made anew for each phase, given the tokens that plain decoding gave
    (which only the synthetic one looks at).
    """

    name: str
    model: ModelConfig
    params: transformer.Params
    requests: tuple[Request, ...]
    sampling: SamplingConfig
    stop_token_ids: tuple[int, ...]
    drafters: Mapping[str, Callable[[Mapping[int, np.ndarray]], Drafter]]


def policy(folder: Path) -> tuple[ModelConfig, transformer.Params]:
    model, params = hf.load_pretrained(folder)
    return model, jax.block_until_ready(params)


def questions(num: int) -> list[dict[str, Any]]:
    """The first `num` questions: id, prompt_ids, answer_ids."""
    return json.loads(PROMPTS.read_text(encoding="utf-8"))[:num]


def group_requests(rows: Sequence[Mapping[str, Any]], size: int) -> tuple[Request, ...]:
    """`size` requests a question, all first samples first: siblings then start apart."""
    return tuple(
        Request(g * size + i, tuple(row["prompt_ids"]), g, i)
        for i in range(size)
        for g, row in enumerate(rows)
    )


def tiny(
    name: str,
    now: Path,
    before: Path,
    num_prompts: int,
    group_size: int,
    max_new_tokens: int = 256,
) -> Workload:
    """The shipped tasks under the policy `now`, with the responses of `before` as history."""
    model, params = policy(now)
    rows = questions(num_prompts)
    requests = group_requests(rows, group_size)
    sampling = SamplingConfig(max_new_tokens=max_new_tokens)
    _, old = policy(before)
    past = generate(model, old, requests, sampling, key=step_key(0, 1000))
    rewards = [float(_accepted(t, rows[t.group_id]["answer_ids"])) for t in past]
    drafters = retrieving(rows, past, rewards)
    return Workload(name, model, params, requests, sampling, model.eos_token_ids, drafters)


def retrieving(
    rows: Sequence[Mapping[str, Any]], past: Sequence[Trajectory], rewards: Sequence[float]
) -> dict[str, Callable[[Mapping[int, np.ndarray]], Drafter]]:
    """Return drafters from text, alone and together, with `past` responses as history.

    "all_and_last" is called with each request's own last response.
    """
    store = RolloutCache()
    for g, row in enumerate(rows):
        group = [i for i, t in enumerate(past) if t.group_id == g]
        tokens = [past[i].response_ids for i in group]
        store.replace(row["id"], of_group(tokens, [rewards[i] for i in group]))
    prompts = {row["id"]: np.asarray(row["prompt_ids"], np.int32) for row in rows}
    index = build_index(store, prompts, RULE)
    keys = dict(enumerate(prompts))
    parts: dict[str, Callable[[], Drafter]] = {
        "own": NgramDrafter,
        "group": GroupDrafter,
        "history": lambda: HistoryDrafter(index, keys),
    }

    def union(*names: str) -> Callable[[Mapping[int, np.ndarray]], Drafter]:
        return lambda _: DrafterUnion([parts[n]() for n in names])

    drafters = {n: union(n) for n in parts}
    return drafters | {
        "first_epoch": union("group", "own"),
        "all": union("history", "group", "own"),
        "all_and_last": lambda last: DrafterUnion(
            [LastResponseDrafter(last), *(make() for make in parts.values())]
        ),
    }


def _accepted(trajectory: Trajectory, answer_ids: Sequence[int]) -> bool:
    """Whether the response, its end token aside, ends with the answer."""
    text = trajectory.response_ids.tolist()[:-1]
    return text[-len(answer_ids) :] == list(answer_ids)


def random_policy(
    vocab: int, layers: int, d_model: int, d_ff: int, max_positions: int
) -> tuple[ModelConfig, transformer.Params]:
    """A Qwen3-like decoder with random weights and heads of 32."""
    model = ModelConfig(
        architecture="qwen3",
        vocab_size=vocab,
        d_model=d_model,
        num_layers=layers,
        num_heads=d_model // 32,
        num_kv_heads=max(1, d_model // 64),
        head_dim=32,
        d_ff=d_ff,
        tied_embeddings=True,
        qk_norm=True,
        max_positions=max_positions,
    )
    return model, transformer.init(model, jax.random.key(0))


def long_tail(num: int, longest: int, seed: int = 0) -> list[int]:
    """Response lengths of which most are short: log-normal (sigma 1), scaled to the longest."""
    draws = np.sort(np.random.default_rng(seed).lognormal(0.0, 1.0, num))
    return np.maximum(4, (draws / draws[-1] * longest)).astype(int).tolist()


def replay(
    name: str,
    model: ModelConfig,
    params: transformer.Params,
    num_requests: int,
    longest: int,
    acceptance: float,
    prompt_tokens: int = 32,
) -> Workload:
    """Random tokens; drafts are right with `acceptance` a token: synthetic."""
    rng = np.random.default_rng(1)
    lengths = long_tail(num_requests, longest)
    requests = tuple(
        Request(i, tuple(rng.integers(0, model.vocab_size, prompt_tokens).tolist()), i, 0, n)
        for i, n in enumerate(lengths)
    )
    sampling = SamplingConfig(max_new_tokens=longest)

    drafters = {"replay": lambda known: replaying(known, acceptance, model.vocab_size)}
    return Workload(name, model, params, requests, sampling, (), drafters)


def replaying(known: Mapping[int, np.ndarray], *given: Any, **options: Any) -> Drafter:
    """Return a drafter that replays known tokens."""
    return DrafterUnion([Replay(known, *given, **options)])


class Replay(Drafter):
    """Chains that follow the known tokens; each draft token is right with `acceptance`.

    It says that they are right with `promised`, if that is given.
    """

    def __init__(
        self,
        tokens: Mapping[int, np.ndarray],
        acceptance: float,
        vocab: int,
        promised: float | None = None,
    ) -> None:
        self._promised = acceptance if promised is None else promised
        self.drafts: dict[int, np.ndarray] = {}
        for r, known in tokens.items():
            right = np.random.default_rng(r).random(len(known)) < acceptance
            self.drafts[r] = np.where(right, known, (known + 1) % vocab)

    def propose(self, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int) -> Drafts:
        out = no_drafts(len(live), max_nodes)
        out.prob_AN[:] = self._promised ** np.arange(1, max_nodes + 1)
        out.parents_AN[:] = np.arange(-1, max_nodes - 1)
        done = (live.total_tokens_A - live.prompt_tokens_A).tolist()
        for a, request_id in enumerate(live.request_ids_A.tolist()):
            drafts = self.drafts[request_id][done[a] : done[a] + int(max_nodes_A[a])]
            out.tokens_AN[a, : len(drafts)] = drafts
            out.count_A[a] = len(drafts)
        return out

    def finished(self, live: LiveSlots) -> None:
        pass
