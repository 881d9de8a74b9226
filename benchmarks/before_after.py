"""Rollouts and updates against another checkout: `python -m benchmarks.before_after`.

One process a checkout, kept alive, with the code that lies in its folder; both run this script's
commands on the same questions, noise and policy and take turns, so that only one computes at a
time. A ratio is that checkout's seconds over ours in one turn; the median of the turns counts.
Each budget decides by the seconds that its own checkout's rounds take. Tokens are compared with
the other's plain ones: where they differ the work does too. A change of the noise changes all
tokens, so pick it onto the other checkout first (`git cherry-pick`).

Reuse verifies what weights a little older have drawn: with lenience e^0.5, with the same noise
(`coupled`), and begun ahead of the step. Its tokens are compared with the other's plain ones of the
same noise, those of lenience with the other's. Workers are two, with plain rollouts.

Updates are those of `python -m rl.train` with its default configuration, one run of each checkout
in a turn: the median of its steps but the first, by its own metrics.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from benchmarks.child import Child

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("jax", "jaxlib", "numpy", "numba")
WAYS = ("plain", "history", "lenient", "coupled", "ahead", "workers")
LIKE = {"lenient": "lenient", "coupled": "plain_gumbel", "ahead": "plain_gumbel"}  # else plain
CHANGE = 0.06  # of weights that have drawn what is reused, relative to them
EXPECTED = 0.98  # what a change may cost


class Rollouts:
    """What a child does: phases of the shipped policy, with the code that it imports."""

    def prepare(self, prompts: int, group_size: int, slots: int) -> dict:
        """A warm engine that has measured the seconds of its rounds."""
        from benchmarks import speculation, workloads
        from rl.engine.config import EngineConfig

        config = EngineConfig(
            slots=slots,
            min_slots=max(1, slots // 8),
            min_positions=384,
            prefill_rows=8,
            prefill_chunk_tokens=32,
            max_nodes=16,
        )
        base = workloads.BASE_POLICY
        workload = workloads.tiny("base", base, base, prompts, group_size)
        self.bench = speculation.open_bench(workload, config)
        self._measure_chunks()
        self._older()
        self._start_workers()
        for way in {*WAYS, *LIKE.values()}:
            self.run(way)
        return {}

    def _measure_chunks(self) -> None:
        """Have the seconds of rounds that draw in chunks, if this checkout has such rounds."""
        from rl.warm_up import round_times

        bench, measure = self.bench, round_times.measure
        if "draws" in inspect.signature(measure).parameters:
            work = bench.workload
            given = bench.engine, work.params, work.sampling, bench.buckets
            bench.times = measure(*given, draws=True)

    def _older(self) -> None:
        """What older weights have drawn, by each scheme."""
        import jax

        from benchmarks.speculation import KEY
        from rl.engine.rollout_spec import RolloutSpec
        from spec.reuse.rollout_cache import CachedResponse, Scores

        work = self.bench.workload
        leaves, tree = jax.tree.flatten(work.params)
        keys = jax.random.split(jax.random.key(0), len(leaves))
        noise = (CHANGE * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True))
        older = tree.unflatten(
            [x * (1 + n) if x.ndim > 1 else x for x, n in zip(leaves, noise, strict=True)]
        )
        self.requests = {"plain": work.requests, "plain_gumbel": work.requests}
        for way in LIKE:
            sampling = self._sampling(way)
            spec = RolloutSpec(older, sampling, KEY, work.stop_token_ids)
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

    def _start_workers(self) -> None:
        from rl.workers.config import SchedConfig
        from rl.workers.multi_engine import MultiEngine, make_engines

        engine, sched = self.bench.engine, SchedConfig(workers=2, chunk_tokens=64, policy="seer")
        engines = make_engines(engine.model, engine.config, sched, dtype=engine.dtype)
        self.workers = MultiEngine(engines, sched, seed=0)

    def run(self, way: str) -> dict:
        """Seconds of one phase."""
        from benchmarks.speculation import KEY
        from rl.engine.rollout_spec import RolloutSpec, draft_with
        from spec.budget.goodput import Goodput
        from spec.reuse.lenience import log
        from spec.reuse.prefix_rule import PrefixRule, parse_mode

        bench, work, options = self.bench, self.bench.workload, dict[str, Any]()
        if way == "history":
            options["drafts"] = draft_with(work.drafters["all"]({}), Goodput(bench.times))
        if way in ("lenient", "coupled"):
            mode = parse_mode("lenient:e^0.5" if way == "lenient" else way)
            options["rule"] = PrefixRule(mode, log(mode.lenience), 0, 1)
        if way in LIKE:  # as a run does whose budget goes by the seconds of rounds
            options["drafts"] = draft_with(None, Goodput(bench.times))
            options["begun"] = way == "ahead"
            if any(field.name == "times" for field in dataclasses.fields(RolloutSpec)):
                options["times"] = bench.times
        spec = RolloutSpec(work.params, self._sampling(way), KEY, work.stop_token_ids, **options)
        engine = self.workers if way == "workers" else bench.engine
        requests = self.requests.get(way, work.requests)
        began_s = time.perf_counter()
        self.done = engine.run(spec, requests)
        return {"seconds": time.perf_counter() - began_s}

    def tokens(self) -> dict:
        """The responses of the last phase."""
        return {"tokens": [t.response_ids.tolist() for t in self.done]}

    def serve(self) -> None:
        answers, sys.stdout = sys.stdout, sys.stderr  # what others print is no answer
        for line in sys.stdin:
            command = json.loads(line)
            answer = getattr(self, command.pop("do"))(**command)
            print(json.dumps(answer), file=answers, flush=True)


def start(checkout: Path) -> Child:
    """Start this file in a process of a checkout; only the newer checkout has `Child`."""
    from benchmarks.child import Child

    command = [sys.executable, "-P", __file__, "--serve"]
    return Child(checkout.name, command, checkout)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """A row for each way to roll out, and the named figures."""
    size = {
        "prompts": arguments.prompts,
        "group_size": arguments.group_size,
        "slots": arguments.slots,
    }
    children = [start(arguments.before.resolve()), start(ROOT)]
    before = children[0]
    try:
        for child in children:
            child.ask(do="prepare", **size)
        rows = []
        for way in WAYS:
            before.ask(do="run", way=LIKE.get(way, "plain"))
            wanted = before.ask(do="tokens")["tokens"]
            turns = in_turns(
                children,
                arguments.repeats,
                lambda child, way=way: child.ask(do="run", way=way)["seconds"],  # type: ignore[misc]
            )
            got = [child.ask(do="tokens")["tokens"] for child in children]
            rows.append(row(way, turns, wanted, got))
            print(rows[-1], file=sys.stderr, flush=True)
    finally:
        for child in children:
            child.close()
    ratios = {r["way"]: r["ratio"] for r in rows}
    trained = dict[str, Any]()
    if arguments.runs:
        trained = updates([arguments.before.resolve(), ROOT], arguments.runs, arguments.steps)
        ratios["update"] = trained["ratio"]
    return {f"{way}_ratio": ratio for way, ratio in ratios.items()} | {
        "reached": all(ratio >= EXPECTED for ratio in ratios.values()),
        "updates": trained,
        "differing_responses": sum(sum(r["differing_responses"]) for r in rows),
        "rows": rows,
    }


def row(
    way: str,
    turns: list[tuple[float, float]],
    wanted: list[list[int]],
    got: list[list[list[int]]],
) -> dict[str, Any]:
    """Of seconds (before, after) in each turn, and the responses of both."""
    tokens = sum(map(len, wanted))
    ratios = [before_s / after_s for before_s, after_s in turns]
    return {
        "way": way,
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(r, 3) for r in ratios],
        "before_tokens_per_s": round(tokens / statistics.median(b for b, _ in turns), 1),
        "after_tokens_per_s": round(tokens / statistics.median(a for _, a in turns), 1),
        "tokens": tokens,
        "responses": len(wanted),
        "differing_responses": [
            sum(a != b for a, b in zip(wanted, responses, strict=True)) for responses in got
        ],
    }


def in_turns(
    both: Sequence[T], repeats: int, seconds: Callable[[T], float]
) -> list[tuple[float, float]]:
    """Return the seconds of (before, after) in each turn; the first to run alternates."""
    turns = []
    for turn in range(repeats):
        taken = [seconds(one) for one in (both if turn % 2 == 0 else both[::-1])]
        before_s, after_s = taken if turn % 2 == 0 else taken[::-1]
        turns.append((before_s, after_s))
    return turns


def updates(checkouts: list[Path], repeats: int, steps: int) -> dict[str, Any]:
    """The ratio of the seconds of updates, of runs in turns."""
    turns = in_turns(checkouts, repeats, lambda checkout: update_s(checkout, steps))
    ratios = [before_s / after_s for before_s, after_s in turns]
    found = {
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(r, 3) for r in ratios],
        "after_s": round(statistics.median(after_s for _, after_s in turns), 3),
    }
    print(found, file=sys.stderr, flush=True)
    return found


def update_s(checkout: Path, steps: int) -> float:
    """Median seconds of a run's updates, the first left out."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        flags = f"--gin.Run.directory={run}", f"--gin.Run.steps={steps}", "--gin.Eval.num_prompts=0"
        subprocess.run(
            [sys.executable, "-P", "-m", "rl.train", *flags],
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": str(checkout)},
            capture_output=True,
            check=True,
        )
        rows = map(json.loads, (run / "metrics.jsonl").read_text("utf-8").splitlines())
        found = [row["time/update"] for row in rows if "time/update" in row]
    assert len(found) == steps
    return statistics.median(found[1:])


def last_commits(checkout: Path) -> list[str]:
    """Hash and subject of the newest two commits: a change may be picked onto an old one."""
    command = ["git", "log", "-2", "--format=%h %s"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--before", type=Path, help="the folder of the other checkout")
    parser.add_argument("--repeats", type=int, default=15, help="turns; the medians count")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group_size", type=int, default=8)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5, help="of rl.train by each; 0: none")
    parser.add_argument("--steps", type=int, default=8, help="of such a run")
    if sys.argv[1:] == ["--serve"]:
        Rollouts().serve()
        return 0
    from benchmarks import environment

    environment.add_output_flags(parser)
    arguments = parser.parse_args()
    if arguments.before is None or not (arguments.before / "rl" / "engine" / "engine.py").is_file():
        parser.error(f"expected --before a folder with a checkout, got {arguments.before}")
    figures = measure(arguments)
    result = {
        "benchmark": "before_after",
        **figures,
        "before_commits": last_commits(arguments.before),
        **environment.record("benchmarks.before_after", PACKAGES, hidden=("--before",)),
    }
    environment.show(result, arguments, {k: v for k, v in figures.items() if k != "rows"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
