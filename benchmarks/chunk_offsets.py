"""Responses in chunks against plain ones: `python -m benchmarks.chunk_offsets --json`.

For every chunk length of 1 to 130 tokens requests of the shipped policy are answered by one, two
and four workers, on every kind of round: plain, trees of history drafts, looked up on the device,
a learned drafter's beside history, and last epoch's responses reused (coupled). One prompt is as
long as makes its first chunk end where a bucket of cache positions does; limits differ, so that
rows rest while others go on. All must be what one engine gives without chunks, token for token;
where one differs, `near_ties.py` says how near the draw was.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import environment, near_ties, workloads
from benchmarks.workloads import Workload
from models import transformer
from models.config import ModelConfig
from rl.engine.config import EngineConfig
from rl.engine.engine import Engine
from rl.engine.rollout_spec import DrafterContext, DrafterFactory, RolloutSpec, no_drafts
from rl.speculation.learned_drafter import LearnedDrafter
from rl.trajectory import Request, Trajectory
from rl.workers.config import SchedConfig
from rl.workers.multi_engine import MultiEngine
from spec.budget.budget import Budget, FixedBudget
from spec.budget.union import DrafterUnion
from spec.config import SamplingConfig
from spec.drafter import Drafter
from spec.eagle import model as eagle
from spec.eagle.config import TreeConfig
from spec.retrieval.history import RULE, HistoryDrafter, HistoryIndex, build_index
from spec.reuse.prefix_rule import PrefixRule, parse_mode
from spec.reuse.rollout_cache import CachedResponse, RolloutCache, of_group
from spec.sampling import step_key

PACKAGES = ("jax", "jaxlib", "numpy", "numba")
ROUNDS = ("plain", "tree", "learned", "reuse")
KEY = step_key(0, 1)
BUCKETS = (64, 128, 256)
BEYOND = 16  # tokens that the longest response has behind its first chunk
PROMPTS, SAMPLES = 4, 4
CONFIG = EngineConfig(slots=4, min_slots=4, min_positions=BUCKETS[0], max_nodes=4)
LONGEST_TOKENS = 280


@dataclasses.dataclass(frozen=True, eq=False)
class Policy:
    """What is rolled out, and a drafter of its states with random weights."""

    model: ModelConfig
    params: transformer.Params
    learned: LearnedDrafter

    @staticmethod
    def load() -> Policy:
        model, params = workloads.policy(workloads.BASE_POLICY)
        config = eagle.config_for(model, "eagle")
        drafter = eagle.EagleWeights(config, eagle.init(config, jax.random.key(0)), None)
        return Policy(model, params, LearnedDrafter(drafter, TreeConfig(max_depth=3, top_k=2)))

    def engines(self, count: int, *, keeping: bool = False) -> list[Engine]:
        layers = self.learned.config.feature_layers if keeping else None
        options: dict[str, Any] = {"feature_layers": layers, "longest_tokens": LONGEST_TOKENS}
        return [Engine(self.model, CONFIG, number=i, **options) for i in range(count)]


def requests_of(offset: int) -> list[Request]:
    """Requests for chunks of `offset` tokens: the first prompt's first chunk ends at a bucket."""
    rng = np.random.default_rng(offset)
    full = next(s for s in BUCKETS if s >= offset + (24 if offset < 104 else 0))
    text = np.concatenate([row["prompt_ids"] for row in workloads.questions(8)])
    lengths = (full + 1 - offset, *rng.integers(1, 25, PROMPTS - 1).tolist())
    starts = rng.integers(0, len(text) - full, PROMPTS).tolist()
    prompts = [tuple(text[s : s + n].tolist()) for s, n in zip(starts, lengths, strict=True)]
    limits = rng.integers(1, offset + BEYOND, (SAMPLES, PROMPTS))
    limits[:, 0] = offset + BEYOND - np.arange(SAMPLES)
    first, group = 1000 * offset, PROMPTS * offset
    return [
        Request(first + i * PROMPTS + g, prompts[g], group + g, i, int(limits[i, g]))
        for i in range(SAMPLES)
        for g in range(PROMPTS)
    ]


def changed(tokens: np.ndarray, seed: int, vocab_size: int) -> np.ndarray:
    """A response with a token changed: what last epoch's might have been."""
    tokens = np.array(tokens, np.int32)
    at = np.random.default_rng(seed).integers(0, len(tokens))
    tokens[at] = (tokens[at] + 1) % vocab_size
    return tokens


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """The requests of one chunk length, what each must give, and what drafts come from."""

    offset: int
    requests: list[Request]
    plain: Mapping[int, Trajectory]
    past: Mapping[int, np.ndarray]
    index: HistoryIndex
    texts: Mapping[int, list[np.ndarray]]

    @staticmethod
    def of(offset: int, plain: Mapping[int, Trajectory], vocab_size: int) -> Case:
        requests = requests_of(offset)
        past = {
            r.request_id: changed(plain[r.request_id].response_ids, r.request_id, vocab_size)
            for r in requests
        }
        texts: dict[int, list[np.ndarray]] = {}
        for r in requests:
            texts.setdefault(r.group_id, []).append(past[r.request_id])
        store = RolloutCache()
        prompts = {str(r.group_id): np.asarray(r.prompt_ids, np.int32) for r in requests}
        for group, responses in texts.items():
            store.replace(str(group), of_group(responses, [0.0] * len(responses)))
        return Case(offset, requests, plain, past, build_index(store, prompts, RULE), texts)

    @property
    def with_cached(self) -> list[Request]:
        def one(r: Request) -> Request:
            cached = CachedResponse(r.sample_index, self.past[r.request_id], 0.0)
            return dataclasses.replace(r, cached=cached)

        return [one(r) for r in self.requests]

    def drafts(self, rounds: str, learned: LearnedDrafter) -> DrafterFactory:
        """What each worker drafts with."""
        if rounds in ("plain", "reuse"):
            return no_drafts

        def at(context: DrafterContext) -> tuple[Drafter, Budget]:
            keys = {r.group_id: str(r.group_id) for r in self.requests}
            history: Drafter = HistoryDrafter(self.index, keys)
            if rounds == "learned":
                return DrafterUnion([history, learned.drafter_for(context)]), FixedBudget()
            return history, FixedBudget()

        return at


class Tally:
    """What one kind of rounds with one number of workers gave."""

    def __init__(self, rounds: str, workers: int) -> None:
        self.rounds, self.workers = rounds, workers
        self.responses = self.differ = self.tokens = self.accepted = self.chunks = 0
        self.tree_rounds = self.reused_tokens = 0
        self.gap, self.seconds = 0.0, 0.0
        self.differences: list[dict[str, Any]] = []

    def add(self, policy: Policy, sampling: SamplingConfig, case: Case, team: MultiEngine) -> None:
        reuse = self.rounds == "reuse"
        requests = case.with_cached if reuse else case.requests
        mode = parse_mode("coupled")
        began_s = time.perf_counter()
        spec = RolloutSpec(
            policy.params,
            sampling,
            KEY,
            policy.model.eos_token_ids,
            drafts=case.drafts(self.rounds, policy.learned),
            rule=PrefixRule(mode, 0.0, 0, 0) if reuse else None,
        )
        done = team.run(spec, requests)
        self.seconds += time.perf_counter() - began_s
        workload = Workload(
            *("chunks", policy.model, policy.params, tuple(case.requests), sampling),
            policy.model.eos_token_ids,
            {},
        )
        for got in done:
            want = case.plain[got.request_id]
            pair = want.response_ids, got.response_ids
            found = near_ties.compare(workload, KEY, got.request_id, *pair)
            if found is None:
                self.gap = max(self.gap, float(np.abs(want.logprobs - got.logprobs).max()))
            else:
                offset = {"chunk_tokens": case.offset, "explained": found.explained}
                self.differences.append(dataclasses.asdict(found) | offset)
        stats = team.stats
        self.responses += len(done)
        self.differ = len(self.differences)
        self.tokens += sum(t.num_tokens for t in done)
        self.accepted += stats.accepted_tokens
        self.reused_tokens += stats.cached.kept_tokens
        self.tree_rounds += sum(n for (B, M, _), n in stats.rounds.items() if M > B)
        self.chunks += sum(len(d.actions) for d in team.decisions)

    def row(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "workers": self.workers,
            "responses": self.responses,
            "differ": self.differ,
            "unexplained": sum(not d["explained"] for d in self.differences),
            "max_logprob_gap": self.gap,
            "tokens": self.tokens,
            "accepted_tokens": self.accepted,
            "reused_tokens": self.reused_tokens,
            "rounds_of_trees": self.tree_rounds,
            "starts_of_chunks": self.chunks,
            "seconds": round(self.seconds, 1),
            "differences": self.differences,
        }


def plain_responses(
    policy: Policy, sampling: SamplingConfig, offsets: Sequence[int]
) -> dict[int, Trajectory]:
    """Of one engine, in whole responses, by request id."""
    config = dataclasses.replace(CONFIG, slots=64, min_slots=64, min_positions=BUCKETS[-1])
    engine = Engine(policy.model, config)
    requests = [r for offset in offsets for r in requests_of(offset)]
    done = engine.run(
        RolloutSpec(policy.params, sampling, KEY, policy.model.eos_token_ids), requests
    )
    return {t.request_id: t for t in done}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """A row for each kind of rounds and number of workers."""
    offsets = range(1, arguments.offsets + 1, arguments.step)
    policy, sampling = Policy.load(), SamplingConfig(max_new_tokens=arguments.offsets + BEYOND)
    plain = plain_responses(policy, sampling, offsets)
    cases = [Case.of(offset, plain, policy.model.vocab_size) for offset in offsets]
    most, rows = max(arguments.workers), []
    engines, keeping = policy.engines(most), policy.engines(most, keeping=True)
    for rounds in arguments.rounds:
        for count in arguments.workers:
            tally = Tally(rounds, count)
            mine = (keeping if rounds == "learned" else engines)[:count]
            for case in cases:
                config = SchedConfig(workers=count, chunk_tokens=case.offset)
                tally.add(policy, sampling, case, MultiEngine(mine, config, keeps_decisions=True))
            rows.append(tally.row())
            print({k: v for k, v in rows[-1].items() if k != "differences"}, file=sys.stderr)
    return {
        "chunk_lengths": len(offsets),
        "responses": sum(r["responses"] for r in rows),
        "responses_that_differ": sum(r["differ"] for r in rows),
        "unexplained": sum(r["unexplained"] for r in rows),
        "max_logprob_gap": max(r["max_logprob_gap"] for r in rows),
        "rows": rows,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--offsets", type=int, default=130, help="chunks of 1 to so many tokens")
    parser.add_argument("--step", type=int, default=1, help="2: every second of them, for trials")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", nargs="+", choices=ROUNDS, default=list(ROUNDS))
    environment.add_output_flags(parser)
    arguments = parser.parse_args()
    figures = measure(arguments)
    result = {
        "benchmark": "chunk_offsets",
        **figures,
        **environment.record("benchmarks.chunk_offsets", PACKAGES),
    }
    environment.show(result, arguments, {k: v for k, v in figures.items() if k != "rows"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
