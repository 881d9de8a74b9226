"""Speculative against plain rollouts: `python -m benchmarks.speculation --json`.

The shipped base policy on its tasks, with siblings and own text alone (a first epoch)
and with history; the same with a policy after `--late_steps` GRPO steps, whose history
is from ten steps before; replayed drafts of set acceptance (synthetic). Plain and
speculative phases take turns; ratios are medians of pairs. Seconds are measured here;
figures with `projected_` in front price the recorded rounds of phases whose budget
decided by an accelerator's roofline (`roofline.py`): they are not measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import environment, near_ties, roofline, workloads
from benchmarks.workloads import Workload
from rl.engine.config import EngineConfig
from rl.engine.engine import Engine
from rl.engine.rollout_spec import RolloutSpec, draft_with
from rl.engine.stats import RoundRecord, host_seconds, speculation_metrics
from rl.trajectory import Trajectory
from rl.warm_up import compile_buckets, round_times
from rl.warm_up.rollout_programs import Reach, round_buckets
from sched.simulator.roofline import Instance
from spec.buckets import widest_tree
from spec.budget.budget import Budget, DraftDecision
from spec.budget.goodput import Goodput
from spec.drafter import Drafts, LiveSlots
from spec.round_times import RoundTimes
from spec.sampling import step_key

PACKAGES = ("jax", "jaxlib", "numpy", "numba")
PROJECTIONS = [
    Instance(device, shape, efficiency=roofline.PRICED)
    for device in (roofline.H100, roofline.TPU_V5E)
    for shape in (roofline.QWEN3_1_7B, roofline.QWEN3_8B)
]
KEY = step_key(0, 1)
HEADLINE = Instance(roofline.H100, roofline.QWEN3_8B, efficiency=roofline.PRICED)


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
        spec = RolloutSpec(w.params, w.sampling, KEY, w.stop_token_ids, drafts=drafts)
        return self.engine.run(spec, w.requests)

    @property
    def records(self) -> list[RoundRecord]:
        return self.engine.stats.timeline


def open_bench(workload: Workload, config: EngineConfig) -> Bench:
    # a process may hold only so many memory mappings, and an executable takes hundreds
    jax.clear_caches()
    engine = Engine(workload.model, config, dtype=workload.params.final_norm_D.dtype)
    longest = max(len(r.prompt_ids) for r in workload.requests)
    reach = Reach(len(workload.requests), longest, speculative=True)
    compile_buckets.warm_up(engine, workload.params, workload.sampling, reach)
    buckets = list(round_buckets(engine, workload.sampling, reach))
    times = round_times.measure(engine, workload.params, workload.sampling, buckets)
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


def beaten(drafts: Drafts, score_AN: np.ndarray, taken_A: np.ndarray, room: int) -> int:
    """How many of each request's first `taken_A` draft tokens are not among the best `room`."""
    nodes_N = np.arange(drafts.max_nodes)
    scores = np.sort(score_AN[nodes_N < drafts.count_A[:, None]])[::-1][:room]
    if not len(scores):
        return 0
    return int((score_AN[nodes_N < taken_A[:, None]] < scores[-1]).sum())


class Audited(Goodput):
    """Counts draft tokens that were verified though others that were not had better scores.

    `beaten` by those that the round's trees had room for, `beaten_by_any` by any that were drafted.
    """

    def __init__(self, times: RoundTimes) -> None:
        super().__init__(times)
        self.verified = self.beaten = self.beaten_by_any = 0

    def choose(
        self,
        live: LiveSlots,
        drafts: Drafts,
        sizes: Sequence[int],
        num_slots: int,
        num_positions: int,
    ) -> DraftDecision:
        scaled_AN = drafts.prob_AN * self.scale(live)[:, None]
        tokens_AN = np.cumsum(np.insert(scaled_AN, 0, 1.0, axis=1), axis=1)
        score_AN = (scaled_AN / tokens_AN[:, :-1]).astype(np.float32)
        found = super().choose(live, drafts, sizes, num_slots, num_positions)
        if found.taken_A is not None:
            room = found.num_nodes - num_slots
            widest = widest_tree(num_slots, found.num_nodes, drafts.max_nodes + 1) - 1
            narrow = drafts._replace(count_A=np.minimum(drafts.count_A, widest))
            self.verified += int(found.taken_A.sum())
            self.beaten += beaten(narrow, score_AN, found.taken_A, room)
            self.beaten_by_any += beaten(drafts, score_AN, found.taken_A, room)
        return found


def compare(bench: Bench, name: str, repeats: int) -> dict[str, Any]:
    """Plain and speculative phases in turns: ratios, and whether their tokens are equal."""
    make = bench.workload.drafters[name]
    plain = {t.request_id: t.response_ids for t in bench.phase()}
    tail = last_tenth(bench.records)
    bench.phase(make(plain), audited := Audited(bench.times))
    pairs, ends, differences, metrics, records = [], [], [], {}, []
    for turn in range(repeats):
        seconds, end_s = [0.0, 0.0], [(0.0, 0.0)] * 2
        for speculative in (False, True) if turn % 2 == 0 else (True, False):
            drafter = make(plain) if speculative else None
            budget = Goodput(bench.times) if speculative else None
            began_s = time.perf_counter()
            done = bench.phase(drafter, budget)
            seconds[speculative] = time.perf_counter() - began_s
            end_s[speculative] = end_seconds(bench.records, tail)
            got = {t.request_id: t.response_ids for t in done}
            found = [near_ties.compare(bench.workload, KEY, i, plain[i], got[i]) for i in plain]
            differences += [d for d in found if d]
            if speculative:
                metrics, records = speculation_metrics(bench.engine.stats), bench.records
        pairs.append((seconds[0], seconds[1]))
        ends.append(end_s)
    tokens = sum(len(t) for t in plain.values())
    whole_s = records[-1].ended_s - records[0].began_s
    rounds = [r for r in records if r.drafted]
    return {
        "drafter": name,
        "ratio": round(statistics.median(p / s for p, s in pairs), 3),
        "ratio_quartiles": np.quantile([p / s for p, s in pairs], [0.25, 0.75]).round(3).tolist(),
        "ratios": [round(p / s, 3) for p, s in pairs],
        "plain_tokens_per_s": round(tokens / statistics.median(p for p, _ in pairs), 1),
        "speculative_tokens_per_s": round(tokens / statistics.median(s for _, s in pairs), 1),
        **tail_figures(ends),
        "drafting_share": round(drafting_seconds(records) / whole_s, 4),
        "nodes_verified": audited.verified,
        "nodes_beaten": audited.beaten,
        "nodes_beaten_by_any": audited.beaten_by_any,
        "rounds_with_guesses": len(rounds),
        "rounds": len(records),
        "tokens": tokens,
        "tokens_compared": 2 * repeats * tokens,
        "differing_tokens": sum(d.tokens for d in differences),
        "unexplained_tokens": sum(d.tokens for d in differences if not d.explained),
        "differences": [dataclasses.asdict(d) for d in differences],
        **{k: round(v, 4) for k, v in metrics.items()},
    }


def tail_figures(ends: Sequence[Sequence[tuple[float, float]]]) -> dict[str, Any]:
    """Medians of what `end_seconds` found in pairs of plain and speculative runs."""
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


def project(bench: Bench, name: str) -> list[dict[str, Any]]:
    """Ratios of roofline seconds, the budget's table being the roofline's.

    `ratio_with_host` adds the seconds that this machine's host took beside its rounds.
    """
    plain = {t.request_id: t.response_ids for t in bench.phase()}
    plain_rounds, plain_host_s = bench.records, host_seconds(bench.records)
    rows = []
    for instance in PROJECTIONS:
        times = roofline.round_times(instance, bench.buckets)
        bench.phase(bench.workload.drafters[name](plain), Goodput(times))
        plain_s = roofline.rounds_seconds(instance, plain_rounds)
        tree_s = roofline.rounds_seconds(instance, bench.records)
        host_s = host_seconds(bench.records)
        row = {
            "device": instance.device.name,
            "policy": instance.model.name,
            "ratio": round(plain_s / tree_s, 3),
            "ratio_with_host": round((plain_s + plain_host_s) / (tree_s + host_s), 3),
            "host_share": round(host_s / (tree_s + host_s), 4),
            "drafting_share": round(drafting_seconds(bench.records) / (tree_s + host_s), 4),
        }
        metrics = speculation_metrics(bench.engine.stats)
        rows.append(row | {"tokens_per_round": round(metrics.get("spec/tokens_per_round", 1.0), 3)})
    return rows


def drafting_seconds(rounds: Sequence[RoundRecord]) -> float:
    """The seconds in which drafts were made and chosen while the device waited.

    No way of drafting ahead of the device's answer could save more.
    """
    return sum(r.drafted_s - r.ready_s for r in rounds)


def worst_batch(batches: Sequence[int], repeats: int) -> dict[str, Any]:
    """The slowest ratio to plain over batch sizes; draft tokens are hardly ever right."""
    model, params = workloads.random_policy(512, 4, 128, 512, 512)
    rows = []
    for batch in batches:
        w = workloads.replay("worst", model, params, batch, 256, 0.02, prompt_tokens=8)
        # promises far more than it keeps: what a budget has to see through
        hopeful = {"replay": workloads.promising(0.02, 0.6, 512)}
        all_long = tuple(dataclasses.replace(r, max_new_tokens=256) for r in w.requests)
        w = dataclasses.replace(w, requests=all_long, drafters=hopeful)
        config = EngineConfig(slots=batch, min_slots=batch, min_positions=96, max_nodes=8)
        # short phases need more turns: the least of noisy medians would say too little
        row = compare(open_bench(w, config), "replay", max(repeats, 320 // batch))
        kept = ("ratio", "ratio_quartiles", "ratios", "tokens_compared", "differing_tokens")
        kept += ("unexplained_tokens", "differences")
        rows.append({"batch": batch} | {k: row[k] for k in kept})
    return {"worst_batch_ratio": min(r["ratio"] for r in rows), "worst_batch_rows": rows}


def late_policies(steps: int, folder: Path) -> tuple[Path, Path]:
    """(after `steps` GRPO steps of the default run, ten steps before that)."""
    run = folder / "late"
    for i, count in enumerate((steps - 10, steps)):
        command = [sys.executable, "-m", "rl.train", f"--gin.Run.directory={run}"]
        command += [f"--gin.Run.steps={count}"] + (["--resume"] if i else [])
        subprocess.run(command, check=True, stdout=sys.stderr)
        (run / "policy").rename(folder / f"policy_{i}")
    return folder / "policy_1", folder / "policy_0"


def measure(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """All rows, and the named figures."""
    config = EngineConfig(
        slots=arguments.slots,
        min_slots=2,
        min_positions=192,
        prefill_rows=8,
        prefill_chunk_tokens=32,
        max_nodes=16,
    )
    base = workloads.BASE_POLICY
    size = (arguments.prompts, arguments.group_size)
    rows: dict[str, dict[str, Any]] = {}
    worst = worst_batch(arguments.batches, arguments.repeats)
    print("worst batch", worst["worst_batch_rows"], file=sys.stderr, flush=True)

    def add(key: str, bench: Bench, drafter: str) -> None:
        rows[key] = compare(bench, drafter, arguments.repeats)
        rows[key]["projected"] = project(bench, drafter)
        print(key, rows[key]["ratio"], rows[key]["projected"], file=sys.stderr, flush=True)

    bench = open_bench(workloads.tiny("base", base, base, *size), config)
    for drafter in ("own", "group", "history"):
        add(f"base_{drafter}", bench, drafter)
    add("first_epoch", bench, "first_epoch")
    add("history", bench, "all")
    if arguments.late_steps:
        late, before = late_policies(arguments.late_steps, scratch)
        bench = open_bench(workloads.tiny("late", late, before, *size), config)
        add("late_first_epoch", bench, "first_epoch")
        add("late_history", bench, "all")
    model, params = workloads.random_policy(4096, 4, 256, 704, 1024)
    replay = dataclasses.replace(
        config, slots=32, min_slots=1, prefill_chunk_tokens=32, min_positions=256
    )
    w = workloads.replay("replay75", model, params, 32, 400, 0.75)
    add("replay75", open_bench(w, replay), "replay")
    model, params = workloads.random_policy(16384, 12, 512, 1536, 512)
    w = workloads.replay("replay75_large", model, params, 4, 200, 0.75)
    add("replay75_large", open_bench(w, dataclasses.replace(replay, slots=4)), "replay")
    all_rows = [*rows.values(), *worst["worst_batch_rows"]]
    named = [k for k in rows if not k.startswith("base_")]
    return {
        **{f"{k}_ratio": rows[k]["ratio"] for k in named},
        **{f"projected_{k}_ratio": _headline(rows[k], "ratio") for k in named},
        "history_end_s": [rows["history"]["plain_end_s"], rows["history"]["speculative_end_s"]],
        "tail_reduction": rows["history"]["tail_reduction"],
        "worst_batch_ratio": worst["worst_batch_ratio"],
        "host_share": max(rows[k].get("spec/host_share", 0.0) for k in named),
        "projected_host_share": max(_headline(rows[k], "host_share") for k in named),
        "drafting_share": max(rows[k]["drafting_share"] for k in named),
        "projected_drafting_share": max(_headline(rows[k], "drafting_share") for k in named),
        "nodes_beaten": sum(r["nodes_beaten"] for r in rows.values()),
        "nodes_beaten_by_any": sum(r["nodes_beaten_by_any"] for r in rows.values()),
        "differing_tokens": sum(r["differing_tokens"] for r in all_rows),
        "unexplained_tokens": sum(r["unexplained_tokens"] for r in all_rows),
        "tokens_compared": sum(r["tokens_compared"] for r in all_rows),
        "rows": rows,
        "worst_batch_rows": worst["worst_batch_rows"],
    }


def _headline(row: dict[str, Any], figure: str) -> float:
    device, shape = HEADLINE.device.name, HEADLINE.model.name
    return next(
        r[figure] for r in row["projected"] if (r["device"], r["policy"]) == (device, shape)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=11, help="turns; the median counts")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group_size", type=int, default=8)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--late_steps", type=int, default=40, help="0 leaves the late policy out")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    environment.add_output_flags(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        figures = measure(arguments, Path(scratch))
    result = {
        "benchmark": "speculation",
        **figures,
        **environment.record("benchmarks.speculation", PACKAGES),
    }
    environment.show(
        result, arguments, {k: v for k, v in figures.items() if not k.endswith("rows")}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
