"""Rollouts and updates against another checkout: `python -m benchmarks.before_after`.

One process a checkout, kept alive, with the code in its folder; both run this script's commands on
the same questions, noise and policy and take turns. A ratio is that checkout's seconds over ours in
one turn; the median of the turns counts. Each budget decides by the seconds that its own checkout's
rounds take. Tokens are compared with the other's plain ones: if they differ, the work does too. A
change of the noise changes all tokens: pick it onto the other checkout first (`git cherry-pick`).

Reuse verifies what slightly older weights have drawn: with lenience e^0.5, with the same noise
(`coupled`), and as tokens begun ahead of the step. Its tokens are compared with the other's plain
ones of the same noise, those of lenience with the other's. Workers are two, with plain rollouts.

Updates are those of `python -m rl.train` with its default configuration, one run of each checkout
in a turn: the median of its steps but the first, by its own metrics. `--repeats 0` measures them
alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WAYS = ("plain", "history", "lenient", "coupled", "ahead", "workers")
LIKE = {"lenient": "lenient", "coupled": "plain_gumbel", "ahead": "plain_gumbel"}  # else plain
CHANGE = 0.06  # of weights that have drawn what is reused, relative to them
EXPECTED = 0.98  # of the seconds before
CHECKOUTS = ("before", "after")


class Rollouts:
    """The commands of a child: phases of the shipped policy, with the code of its checkout."""

    def prepare(self, prompts: int, group_size: int, slots: int) -> dict:
        """Warm up an engine and measure the seconds of its rounds."""
        from benchmarks import speculation, workloads
        from rl.engine.config import EngineConfig
        from rl.warm_up import round_times
        from rl.workers.config import SchedConfig
        from rl.workers.multi_engine import MultiEngine, make_engines

        prefill = {"prefill_rows": 8, "prefill_chunk_tokens": 32}
        sizes = {"slots": slots, "min_slots": max(1, slots // 8), "min_positions": 384}
        config = EngineConfig(**sizes, **prefill, max_nodes=16)
        base = workloads.BASE_POLICY
        workload = workloads.tiny("base", base, base, prompts, group_size)
        self.bench = bench = speculation.open_bench(workload, config)
        given = bench.engine, workload.params, workload.sampling, bench.buckets
        bench.times = round_times.measure(*given, draws=True)
        self._draw_older()
        engine, sched = bench.engine, SchedConfig(workers=2, chunk_tokens=64, policy="seer")
        engines = make_engines(engine.model, engine.config, sched, dtype=engine.dtype)
        self.workers = MultiEngine(engines, sched, seed=0)
        for way in {*WAYS, *LIKE.values()}:
            self.run(way)
        return {}

    def _draw_older(self) -> None:
        """Draw with older weights, by each scheme, what is reused."""
        import jax

        from rl.engine.rollout_spec import RolloutSpec
        from spec.reuse.rollout_cache import CachedResponse, Scores
        from spec.sampling import step_key

        work = self.bench.workload
        leaves, tree = jax.tree.flatten(work.params)
        keys = jax.random.split(jax.random.key(0), len(leaves))
        noise = (CHANGE * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True))
        older = tree.unflatten(
            [x * (1 + n) if x.ndim > 1 else x for x, n in zip(leaves, noise, strict=True)]
        )
        self.requests = {"plain": work.requests, "plain_gumbel": work.requests}
        for way in LIKE:
            spec = RolloutSpec(older, self._sampling(way), step_key(0, 1), work.stop_token_ids)
            made = []
            for r, t in zip(work.requests, self.bench.engine.run(spec, work.requests), strict=True):
                scores = Scores(t.logprobs, t.emission_logprobs, t.policy_versions)
                cached = CachedResponse(r.sample_index, t.response_ids, 0.0, scores)
                begun = tuple(t.response_ids.tolist())
                more = {"begun": begun} if way == "ahead" else {"cached": cached}
                made.append(dataclasses.replace(r, **more))
            self.requests[way] = tuple(made)

    def _sampling(self, way: str) -> Any:
        draw: Any = "gumbel" if LIKE.get(way, way) == "plain_gumbel" else "cdf"
        return dataclasses.replace(self.bench.workload.sampling, draw=draw)

    def run(self, way: str) -> dict:
        """Return the seconds of one phase."""
        from rl.engine.rollout_spec import RolloutSpec, draft_with
        from spec.budget.goodput import Goodput
        from spec.reuse.prefix_rule import PrefixRule, parse_mode
        from spec.sampling import step_key

        bench, work, options = self.bench, self.bench.workload, dict[str, Any]()
        if way == "history":
            options["drafts"] = draft_with(work.drafters["all"]({}), Goodput(bench.times))
        if way in ("lenient", "coupled"):
            mode = parse_mode("lenient:e^0.5" if way == "lenient" else way)
            log_lenience = math.log(mode.lenience) if mode.lenience else -math.inf
            options["rule"] = PrefixRule(mode, log_lenience, 0, 1)
        if way in LIKE:  # as a run whose budget goes by the seconds of rounds
            options["drafts"] = draft_with(None, Goodput(bench.times))
            options |= {"begun": way == "ahead", "times": bench.times}
        spec = RolloutSpec(
            work.params, self._sampling(way), step_key(0, 1), work.stop_token_ids, **options
        )
        engine = self.workers if way == "workers" else bench.engine
        requests = self.requests.get(way, work.requests)
        began_s = time.perf_counter()
        self.done = engine.run(spec, requests)
        return {"seconds": time.perf_counter() - began_s}

    def tokens(self) -> dict:
        """Return the responses of the last phase."""
        return {"tokens": [t.response_ids.tolist() for t in self.done]}

    def serve(self) -> None:
        answers, sys.stdout = sys.stdout, sys.stderr  # libraries print no answers
        for line in sys.stdin:
            command = json.loads(line)
            answer = getattr(self, command.pop("do"))(**command)
            print(json.dumps(answer), file=answers, flush=True)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each way to roll out and for updates, and the named figures."""
    from benchmarks.turns import in_turns

    before = arguments.before and arguments.before.resolve()
    if before is None or not (before / "rl" / "engine" / "engine.py").is_file():
        raise SystemExit(f"expected --before a folder with a checkout, got {arguments.before}")
    checkouts = dict(zip(CHECKOUTS, (before, ROOT), strict=True))
    rows = rollouts(arguments, checkouts) if arguments.repeats else []
    found = {f"{r['way']}_ratio": r["ratio"] for r in rows}
    if arguments.runs:
        updates = {name: partial(update_s, c, arguments.steps) for name, c in checkouts.items()}
        trained = row("update", in_turns(updates, arguments.runs, warm=0), [], [])
        found["update_ratio"] = trained["ratio"]
        rows.append(trained)
    return {
        **found,
        "reached": all(ratio >= EXPECTED for ratio in found.values()),
        "differing_responses": sum(sum(r["differing_responses"]) for r in rows),
        "before_commits": last_commits(before),
        "rows": rows,
    }


def rollouts(arguments: argparse.Namespace, checkouts: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Return a row for each way to roll out."""
    from benchmarks.child import Child
    from benchmarks.environment import progress
    from benchmarks.turns import in_turns

    command = [sys.executable, "-P", __file__, "--serve"]
    children = {name: Child(name, command, path) for name, path in checkouts.items()}
    rows = []
    try:
        for child in children.values():
            sizes = {name: getattr(arguments, name) for name in ("prompts", "group_size", "slots")}
            child.ask(do="prepare", **sizes)
        for way in WAYS:
            children["before"].ask(do="run", way=LIKE.get(way, "plain"))
            wanted = children["before"].ask(do="tokens")["tokens"]
            kinds = {
                name: lambda child=child, way=way: float(child.ask(do="run", way=way)["seconds"])
                for name, child in children.items()
            }
            seconds = in_turns(kinds, arguments.repeats, warm=0)
            got = [child.ask(do="tokens")["tokens"] for child in children.values()]
            rows.append(row(way, seconds, wanted, got))
            progress(rows[-1])
    finally:
        for child in children.values():
            child.close()
    return rows


def row(
    way: str,
    seconds: Mapping[str, Any],
    wanted: Sequence[Sequence[int]],
    got: Sequence[Sequence[Sequence[int]]],
) -> dict[str, Any]:
    """Return the figures of the seconds of both checkouts, turn by turn, and their responses."""
    ratios = [b / a for b, a in zip(seconds["before"], seconds["after"], strict=True)]
    return {
        "way": way,
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(r, 3) for r in ratios],
        **{f"{name}_s": round(statistics.median(seconds[name]), 4) for name in CHECKOUTS},
        "tokens": sum(map(len, wanted)),
        "responses": len(wanted),
        "differing_responses": [
            sum(a != b for a, b in zip(wanted, responses, strict=True)) for responses in got
        ],
    }


def update_s(checkout: Path, steps: int) -> float:
    """Return the median seconds of a run's updates, the first left out."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        flags = f"--gin.Run.directory={run}", f"--gin.Run.steps={steps}", "--gin.Eval.num_prompts=0"
        command = [sys.executable, "-P", "-m", "rl.train", *flags]
        env = os.environ | {"PYTHONPATH": str(checkout)}
        subprocess.run(command, cwd=checkout, env=env, capture_output=True, check=True)
        rows = map(json.loads, (run / "metrics.jsonl").read_text("utf-8").splitlines())
        found = [float(row["time/update"]) for row in rows if "time/update" in row]
    assert len(found) == steps
    return statistics.median(found[1:])


def last_commits(checkout: Path) -> list[str]:
    """Return the newest two commits: a change may be picked onto an old one."""
    command = ["git", "log", "-2", "--format=%h %s"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:  # in a checkout that may be older than what is imported below
        Rollouts().serve()
    else:
        from benchmarks import environment

        sizes = {"prompts": 16, "group_size": 8, "slots": 64}
        environment.run(
            __doc__, measure, before=Path, repeats=15, runs=5, steps=8, **sizes,
            packages=(*environment.JAX, "numba"),
        )  # fmt: skip
