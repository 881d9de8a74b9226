"""Speculative rollouts against plain ones. The acceptance is synthetic.

Drafts are the tokens of the plain run, of which each is replaced by a wrong one with probability
1 − acceptance. Both kinds are asked for the same responses; every token is compared.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks import workloads
from benchmarks.gpu.sizes import Rows, Size, in_turns, random_weights, summary
from rl.engine.config import EngineConfig
from rl.engine.engine import Engine
from rl.engine.rollout_spec import RolloutSpec, draft_with
from rl.trajectory import Trajectory
from rl.warm_up import compile_buckets, round_times
from rl.warm_up.rollout_programs import Reach, round_buckets
from spec.budget.goodput import Goodput
from spec.sampling import step_key

ACCEPTANCE = 0.75  # of a draft token
KEY = step_key(0, 1)


def tokens_that_differ(plain: Mapping[int, np.ndarray], other: Sequence[Trajectory]) -> int:
    """Return the tokens of responses that are not those of the plain run."""
    differ = 0
    for t in other:
        a, b = plain[t.request_id], t.response_ids
        n = min(len(a), len(b))
        differ += int((a[:n] != b[:n]).sum()) + abs(len(a) - len(b))
    return differ


def rows(size: Size) -> Rows:
    params = random_weights(size.model, size.dtype)
    shape = size.slots, size.new_tokens, ACCEPTANCE, size.prompt_tokens
    work = workloads.replay("synthetic", size.model, params, *shape)
    config = EngineConfig(
        slots=size.slots,
        min_slots=size.slots,
        max_nodes=size.node_count,
        min_positions=size.prompt_tokens,
        cache="pages",
        page_tokens=size.page_tokens,
    )
    engine = Engine(size.model, config, dtype=size.dtype)
    reach = Reach(size.slots, size.prompt_tokens, speculative=True)
    compile_buckets.warm_up(engine, params, work.sampling, reach)
    buckets = list(round_buckets(engine, work.sampling, reach))
    times = round_times.measure(engine, params, work.sampling, buckets)
    plain: dict[int, np.ndarray] = {}
    done: list[Trajectory] = []

    def phase(speculative: bool) -> float:
        drafts = draft_with(None)
        if speculative:
            drafts = draft_with(work.drafters["replay"](plain), Goodput(times))
        spec = RolloutSpec(params, work.sampling, KEY, (), drafts=drafts)
        began_s = time.perf_counter()
        done[:] = engine.run(spec, work.requests)
        return time.perf_counter() - began_s

    phase(False)
    plain |= {t.request_id: t.response_ids for t in done}
    tokens = sum(map(len, plain.values()))
    differ = {"plain": 0, "speculative": 0}

    def counted(name: str) -> float:
        seconds = phase(name == "speculative")
        differ[name] = max(differ[name], tokens_that_differ(plain, done))
        return seconds

    seconds = in_turns({name: lambda n=name: counted(n) for name in differ}, size.repeats)
    for name, taken_T in seconds.items():
        row = {"rollout": name, "requests": len(plain), "tokens": tokens}
        row |= summary(taken_T)
        row["tokens_per_s"] = round(tokens / float(np.median(taken_T)), 1)
        row["tokens_that_differ"] = differ[name]
        if name == "speculative":
            row |= {"acceptance": ACCEPTANCE, "synthetic": True}
            row["ratio"] = round(float(np.median(seconds["plain"] / taken_T)), 3)
        yield row
