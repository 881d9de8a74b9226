"""Seconds of rollouts with drafts and reuse against plain ones, in turns, for one epoch.

The policy after one update answers the questions again: plainly, with drafts (last epoch's
responses under other noise, siblings, own text), with coupled reuse of the responses under the
same noise, and with lenient reuse of those under other noise; and plainly and coupled by the
`gumbel` draw, under which close policies agree more often. All ways share one warm engine.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

import numpy as np

from benchmarks.real_policy.ground import Ground
from rl.engine.engine import Engine
from rl.engine.rollout_spec import RolloutSpec, draft_with
from rl.engine.stats import speculation_metrics
from rl.speculation.reuse import COUPLED_STEP
from rl.trajectory import Request, Trajectory
from rl.warm_up import compile_buckets, round_times
from rl.warm_up.rollout_programs import Reach, round_buckets
from spec.budget.goodput import Goodput
from spec.budget.union import DrafterUnion
from spec.config import Draw
from spec.drafter import Drafter
from spec.retrieval.group import GroupDrafter
from spec.retrieval.history import RULE, HistoryDrafter, build_index
from spec.retrieval.last_response import LastResponseDrafter
from spec.retrieval.ngram import NgramDrafter
from spec.reuse.lenience import log
from spec.reuse.prefix_rule import PrefixRule, parse_mode
from spec.reuse.rollout_cache import RolloutCache, of_group

RATE = 1e-5
LENIENT = "lenient:e^0.5"
DRAWS = get_args(Draw)
GUMBEL = "_gumbel"
# ways that give the tokens of plain rollouts, of the same draw
EXACT = ("history", "coupled", "coupled" + GUMBEL)

Phase = Callable[[], tuple[RolloutSpec, Sequence[Request]]]


def measure(ground: Ground, repeats: int) -> dict[str, Any]:
    """Return ratios against plain rollouts, and what each way generated."""
    phases, engine = _phases(ground)
    seconds: dict[str, list[float]] = {name: [] for name in phases}
    rows: dict[str, dict[str, Any]] = {name: {} for name in phases}
    tokens: dict[str, list[list[int]]] = {}
    for turn in range(-1, repeats):  # the first one warms up what is compiled on the way
        names = list(phases) if turn % 2 else list(phases)[::-1]
        for name in names:
            spec, requests = phases[name]()
            began_s = time.perf_counter()
            done = engine.run(spec, requests)
            taken_s = time.perf_counter() - began_s
            if turn >= 0:
                seconds[name].append(taken_s)
            rows[name] = _row(engine, done)
            tokens[name] = [t.response_ids.tolist() for t in done]
            print(f"{name}: {taken_s:.1f} s, {rows[name]}", file=sys.stderr, flush=True)
    for name, row in rows.items():
        base = "plain" + GUMBEL if name.endswith(GUMBEL) else "plain"
        if name in EXACT:
            pairs = zip(tokens[base], tokens[name], strict=True)
            row["responses_that_differ"] = sum(a != b for a, b in pairs)
        ratios = [p / s for p, s in zip(seconds[base], seconds[name], strict=True)]
        row["ratio"] = round(statistics.median(ratios), 3)
        row["ratios"] = [round(r, 3) for r in ratios]
        row["tokens_per_s"] = round(row["tokens"] / statistics.median(seconds[name]), 1)
    return {"update_rate": RATE, "lenience": LENIENT, "turns": repeats, "rows": rows}


def _row(engine: Engine, done: Sequence[Trajectory]) -> dict[str, Any]:
    stats = engine.stats
    metrics = speculation_metrics(stats)
    return {
        "tokens": sum(t.num_tokens for t in done),
        "kept_tokens": stats.cached.kept_tokens,
        "tokens_per_round": round(metrics.get("spec/tokens_per_round", 1.0), 3),
        "rounds_with_drafts": sum(r.drafted for r in stats.timeline),
        "rounds": len(stats.timeline),
    }


def _phases(ground: Ground) -> tuple[dict[str, Phase], Engine]:
    """Return the ways to roll out, and an engine that has compiled and timed what they need."""
    params = ground.updated(RATE)
    same, other = {draw: ground.responses(draw) for draw in DRAWS}, ground.past()
    config = ground.engine_config(max_nodes=8)
    engine = Engine(ground.model, config)
    longest = max(len(q.prompt_ids) for q in ground.questions)
    plain_requests = ground.requests()
    reach = Reach(len(plain_requests), longest, speculative=True, reuse=True)
    for draw in DRAWS:
        compile_buckets.warm_up(engine, params, ground.sampling(draw), reach)
    buckets = list(round_buckets(engine, ground.sampling(), reach))
    times = round_times.measure(engine, params, ground.sampling(), buckets)
    store = RolloutCache()
    keys = {g: str(g) for g in range(len(ground.questions))}
    for g, done in enumerate(ground.by_question(other)):
        store.replace(keys[g], of_group([t.response_ids for t in done], [1.0] * len(done)))
    prompts = {keys[g]: np.asarray(q.prompt_ids) for g, q in enumerate(ground.questions)}
    index = build_index(store, prompts, RULE)

    def drafting(*more: Drafter) -> Any:
        parts = [*more, GroupDrafter(), NgramDrafter()]
        return draft_with(DrafterUnion(parts), Goodput(times))

    def history() -> Drafter:
        return HistoryDrafter(index, keys)

    def last(done: Sequence[Trajectory]) -> Drafter:
        return LastResponseDrafter({t.request_id: t.response_ids for t in done})

    def plain(draw: Draw = "cdf") -> tuple[RolloutSpec, Sequence[Request]]:
        return ground.rollout_spec(params, draw), plain_requests

    def with_history() -> tuple[RolloutSpec, Sequence[Request]]:
        return ground.rollout_spec(params, drafts=drafting(history())), plain_requests

    def coupled(draw: Draw = "cdf") -> tuple[RolloutSpec, Sequence[Request]]:
        rule, past = PrefixRule(parse_mode("coupled"), 0.0, 0, COUPLED_STEP), same[draw]
        options = {"rule": rule, "drafts": drafting(last(past))}
        return ground.rollout_spec(params, draw, **options), ground.requests(past)

    def lenient() -> tuple[RolloutSpec, Sequence[Request]]:
        mode = parse_mode(LENIENT)
        rule = PrefixRule(mode, log(mode.lenience), 0, 1)
        options = {"rule": rule, "drafts": drafting(last(other), history())}
        return ground.rollout_spec(params, **options), ground.requests(other)

    phases: dict[str, Phase] = {
        "plain": plain,
        "history": with_history,
        "coupled": coupled,
        "lenient": lenient,
        "plain" + GUMBEL: partial(plain, "gumbel"),
        "coupled" + GUMBEL: partial(coupled, "gumbel"),
    }
    return phases, engine
