"""Speculative against plain rollouts: `python -m benchmarks.speculation --json`.

The shipped base policy on its tasks, with siblings and own text alone (a first epoch)
and with history; the same with a policy after `--late_steps` GRPO steps, whose history
is from ten steps before; replayed drafts of set acceptance (synthetic). Plain and
speculative phases take turns; ratios are medians of pairs. Seconds are measured here;
figures with `projected_` in front price the recorded rounds of phases whose budget
decided by an accelerator's roofline (`roofline.py`): they are not measured. `--part worst`
has the batches alone whose drafts are hardly ever right.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import environment, roofline, workloads
from benchmarks.turns import in_turns
from benchmarks.workloads import Workload
from reprise.rl.engine.engine import Engine
from reprise.rl.engine.rollout_spec import RolloutSpec, draft_with
from reprise.rl.records.stats import RoundRecord, host_seconds, speculation_metrics
from reprise.rl.records.trajectory import Trajectory
from reprise.rl.slots.config import EngineConfig
from reprise.rl.warm_up import compile_buckets, round_times
from reprise.rl.warm_up.rollout_programs import Reach, round_buckets
from reprise.spec.budget.budget import Budget
from reprise.spec.budget.goodput import Goodput
from reprise.spec.round_times import RoundTimes
from reprise.spec.verification.sampling import step_key


@dataclasses.dataclass(eq=False)
class Bench:
    """A workload on a warm engine, with the seconds of its rounds."""

    workload: Workload
    engine: Engine
    times: RoundTimes
    buckets: list[tuple[int, int, int]]

    def phase(self, drafter: Any = None, budget: Budget | None = None) -> list[Trajectory]:
        w = self.workload
        drafts = draft_with(drafter, budget)
        spec = RolloutSpec(w.params, w.sampling, step_key(0, 1), w.stop_token_ids, drafts=drafts)
        return self.engine.run(spec, w.requests)

    @property
    def records(self) -> list[RoundRecord]:
        return self.engine.stats.timeline


def open_bench(workload: Workload, config: EngineConfig, *, reuse: bool = False) -> Bench:
    """Compile what the workload's rollouts reach, with `reuse` chunks of it too; time rounds."""
    # a process may hold only so many memory mappings, and an executable takes hundreds
    jax.clear_caches()
    engine = Engine(workload.model, config, dtype=workload.params.final_norm_D.dtype)
    longest = max(len(r.prompt_ids) for r in workload.requests)
    reach = Reach(len(workload.requests), longest, speculative=True, reuse=reuse)
    compile_buckets.warm_up(engine, workload.params, workload.sampling, reach)
    buckets = list(round_buckets(engine, workload.sampling, reach))
    times, _ = round_times.measure(engine, workload.params, workload.sampling, buckets, draws=reuse)
    return Bench(workload, engine, times, buckets)


def last_tenth(records: Sequence[RoundRecord]) -> frozenset[int]:
    """The tenth of the requests that ended last, at least one.

    Of those that one fetch brought to their end the ones that took part in more of its rounds, and
    then those with the higher id, count as later.
    """
    ends: dict[int, tuple[float, int, int]] = {}
    for r in records:
        for i, rounds in zip(r.request_ids_A.tolist(), r.rounds_A.tolist(), strict=True):
            ends[i] = r.ended_s, rounds, i
    return frozenset(sorted(ends, key=ends.__getitem__)[-math.ceil(0.1 * len(ends)) :])


def end_seconds(records: Sequence[RoundRecord], tail: frozenset[int]) -> tuple[float, float]:
    """Seconds until the last request ends, and how many of them only requests of `tail` ran.

    The same `tail`, that of plain decoding, cuts every run that is compared.
    """
    ends = {i: r.ended_s for r in records for i in r.request_ids_A.tolist()}
    last_s, began_s = max(ends.values()), records[0].began_s
    others_s = max((s for i, s in ends.items() if i not in tail), default=began_s)
    return last_s - began_s, last_s - others_s


def compare(bench: Bench, name: str, repeats: int) -> dict[str, Any]:
    """Return ratios of plain and speculative phases in turns, and tokens that differ."""
    make = bench.workload.drafters[name]
    plain = {t.request_id: t.response_ids for t in bench.phase()}
    tail = last_tenth(bench.records)
    bench.phase(make(plain), Goodput(bench.times))
    ends: dict[str, list[tuple[float, float]]] = {"plain": [], "speculative": []}
    differing, metrics, records = 0, dict[str, float](), list[RoundRecord]()

    def phase(kind: str) -> float:
        nonlocal differing, metrics, records
        drafts = (make(plain), Goodput(bench.times)) if kind == "speculative" else ()
        began_s = time.perf_counter()
        done = bench.phase(*drafts)
        seconds = time.perf_counter() - began_s
        ends[kind].append(end_seconds(bench.records, tail))
        for t in done:
            pairs = itertools.zip_longest(plain[t.request_id].tolist(), t.response_ids.tolist())
            differing += sum(a != b for a, b in pairs)
        if kind == "speculative":
            metrics, records = speculation_metrics(bench.engine.stats), bench.records
        return seconds

    seconds = in_turns({kind: partial(phase, kind) for kind in ends}, repeats, warm=0)
    tokens = sum(len(t) for t in plain.values())
    ratios_T = seconds["plain"] / seconds["speculative"]
    speeds = {f"{k}_tokens_per_s": round(tokens / np.median(x), 1) for k, x in seconds.items()}
    return {
        "drafter": name,
        "ratio": round(float(np.median(ratios_T)), 3),
        "ratio_quartiles": np.quantile(ratios_T, [0.25, 0.75]).round(3).tolist(),
        "ratios": ratios_T.round(3).tolist(),
        **speeds,
        **tail_figures(list(zip(ends["plain"], ends["speculative"], strict=True))),
        "drafting_share": round(
            drafting_seconds(records) / (records[-1].ended_s - records[0].began_s), 4
        ),
        "rounds_with_guesses": sum(bool(r.drafted) for r in records),
        "rounds": len(records),
        "tokens": tokens,
        "tokens_compared": 2 * repeats * tokens,
        "differing_tokens": differing,
        **{k: round(v, 4) for k, v in metrics.items()},
    }


def tail_figures(ends: Sequence[Sequence[tuple[float, float]]]) -> dict[str, Any]:
    """Return medians of `end_seconds` of pairs of plain and speculative runs."""
    (plain_end, plain_tail), (end, tail) = np.median(ends, axis=0).tolist()
    # all may end in one call
    cuts = [1 - after[1] / before[1] if before[1] else 0.0 for before, after in ends]
    return {
        "plain_end_s": round(plain_end, 4),
        "speculative_end_s": round(end, 4),
        "plain_tail_s": round(plain_tail, 4),
        "speculative_tail_s": round(tail, 4),
        "tail_reduction": round(statistics.median(cuts), 3),
        "tail_reduction_quartiles": np.quantile(cuts, [0.25, 0.75]).round(3).tolist(),
    }


def project(bench: Bench, name: str) -> dict[str, float]:
    """Return the ratio of roofline seconds, the budget's table being the roofline's.

    `ratio_with_host` adds the seconds of this machine's host beside its rounds.
    """
    instance = roofline.PRICED_8B
    plain = {t.request_id: t.response_ids for t in bench.phase()}
    plain_s = roofline.rounds_seconds(instance, bench.records)
    plain_host_s = host_seconds(bench.records)
    times = roofline.round_times(instance, bench.buckets)
    bench.phase(bench.workload.drafters[name](plain), Goodput(times))
    tree_s = roofline.rounds_seconds(instance, bench.records)
    host_s = host_seconds(bench.records)
    tokens = speculation_metrics(bench.engine.stats).get("spec/tokens_per_round", 1.0)
    return {
        "ratio": round(plain_s / tree_s, 3),
        "ratio_with_host": round((plain_s + plain_host_s) / (tree_s + host_s), 3),
        "host_share": round(host_s / (tree_s + host_s), 4),
        "drafting_share": round(drafting_seconds(bench.records) / (tree_s + host_s), 4),
        "tokens_per_round": round(tokens, 3),
    }


def drafting_seconds(rounds: Sequence[RoundRecord]) -> float:
    """Return the seconds in which the device waited for drafts."""
    return sum(r.drafted_s - r.ready_s for r in rounds)


def worst_batch(batches: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Return a row for each batch size; draft tokens are hardly ever right."""
    model, params = workloads.random_policy(512, 4, 128, 512, 512)
    rows = []
    for batch in batches:
        w = workloads.replay("worst", model, params, batch, 256, 0.02, prompt_tokens=8)
        # promises far more than it keeps: what a budget has to see through
        hopeful = {"replay": lambda known: workloads.replaying(known, 0.02, 512, promised=0.6)}
        all_long = tuple(dataclasses.replace(r, max_new_tokens=256) for r in w.requests)
        w = dataclasses.replace(w, requests=all_long, drafters=hopeful)
        config = EngineConfig(slots=batch, min_slots=batch, max_nodes=8)
        # short phases need more turns: the least of noisy medians would say too little
        row = compare(open_bench(w, config), "replay", repeats * max(1, 32 // batch))
        kept = ("ratio", "ratio_quartiles", "ratios", "tokens_compared", "differing_tokens")
        kept += ("rounds", "rounds_with_guesses", "drafting_share")
        rows.append({"batch": batch} | {k: row[k] for k in kept})
    return rows


def late_policies(steps: int, folder: Path) -> tuple[Path, Path]:
    """(after `steps` GRPO steps of the default run, ten steps before that)."""
    run = folder / "late"
    for i, count in enumerate((steps - 10, steps)):
        flags = [f"--gin.Run.directory={run}", f"--gin.Run.steps={count}"]
        environment.call("rl.train", *flags, *(["--resume"] if i else []))
        (run / "policy").rename(folder / f"policy_{i}")
    return folder / "policy_1", folder / "policy_0"


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return all rows, and the named figures."""
    prefill = {"prefill_rows": 8, "prefill_chunk_tokens": 32}
    sizes = {"slots": arguments.slots, "min_slots": 2}
    config = EngineConfig(**sizes, **prefill, max_nodes=16)
    base = workloads.BASE_POLICY
    size = (arguments.prompts, arguments.group_size)
    rows: dict[str, dict[str, Any]] = {}
    worst = worst_batch(arguments.batches, arguments.repeats)
    environment.progress("worst batch", worst)
    if arguments.part == "worst":
        ratio = min(row["ratio"] for row in worst)
        return {"worst_batch_ratio": ratio, "worst_batch_rows": worst}

    def add(key: str, bench: Bench, drafter: str) -> None:
        rows[key] = compare(bench, drafter, arguments.repeats)
        rows[key]["projected"] = project(bench, drafter)
        environment.progress(key, rows[key]["ratio"], rows[key]["projected"])

    bench = open_bench(workloads.tiny("base", base, base, *size), config)
    for drafter in ("own", "group", "history"):
        add(f"base_{drafter}", bench, drafter)
    add("first_epoch", bench, "first_epoch")
    add("history", bench, "all")
    if arguments.late_steps:
        with tempfile.TemporaryDirectory() as scratch:
            late, before = late_policies(arguments.late_steps, Path(scratch))
            bench = open_bench(workloads.tiny("late", late, before, *size), config)
        add("late_first_epoch", bench, "first_epoch")
        add("late_history", bench, "all")
    model, params = workloads.random_policy(4096, 4, 256, 704, 1024)
    replay = dataclasses.replace(config, slots=32, min_slots=1)
    w = workloads.replay("replay75", model, params, 32, 400, 0.75)
    add("replay75", open_bench(w, replay), "replay")
    model, params = workloads.random_policy(16384, 12, 512, 1536, 512)
    w = workloads.replay("replay75_large", model, params, 4, 200, 0.75)
    add("replay75_large", open_bench(w, dataclasses.replace(replay, slots=4)), "replay")
    all_rows = [*rows.values(), *worst]
    named = [k for k in rows if not k.startswith("base_")]
    sums = ("differing_tokens", "tokens_compared")
    return {
        **{f"{k}_ratio": rows[k]["ratio"] for k in named},
        **{f"projected_{k}_ratio": rows[k]["projected"]["ratio"] for k in named},
        "worst_batch_ratio": min(r["ratio"] for r in worst),
        "host_share": max(rows[k].get("spec/host_share", 0.0) for k in named),
        "projected_host_share": max(rows[k]["projected"]["host_share"] for k in named),
        "drafting_share": max(rows[k]["drafting_share"] for k in named),
        "projected_drafting_share": max(rows[k]["projected"]["drafting_share"] for k in named),
        **{name: sum(r[name] for r in all_rows) for name in sums},
        "rows": rows,
        "worst_batch_rows": worst,
    }


if __name__ == "__main__":
    sizes = {"repeats": 11, "prompts": 16, "group_size": 8, "slots": 64, "late_steps": 40}
    environment.run(
        __doc__,
        measure,
        (*environment.JAX, "numba"),
        choices={"part": ("all", "worst")},
        part="all",
        batches=(1, 4, 16, 64, 256),
        **sizes,
    )
