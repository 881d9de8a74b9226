"""Every way to roll out over plain decoding, at this commit: `python -m benchmarks.ways --json`.

    history       drafts from last epoch's responses, siblings and own text, under `goodput`
    siblings      drafts from siblings and own text, under `goodput`: a first epoch
    coupled       last epoch's responses, drawn by older weights, with their noise again
    lenient       the same with lenience e^0.5: other responses
    ahead         tokens that older weights have prefetched, on a device of their own: no seconds
    two_workers   plain, two workers of half the slots each, on the same cores

`coupled`, `lenient` and `ahead` draft from the response that they reuse, history, siblings and own
text. A way over plain is plain decoding's seconds for a response token over the way's, both in one
turn; the median of the turns counts. `coupled` and `ahead` have a plain run with their noise
(`LIKE`). Budgets decide by the seconds that were measured at the start, as in a run's first step. A
guarded way that loses more than 2% is in `lost`. Every size is a process of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TINY = "policies/tiny"
CHANGES = (0.02, 0.03, 0.045, 0.065, 0.09, 0.13, 0.2)  # of weights, relative to them
# by policy: the configuration that it ships with, the changes to try that make its weights older,
# and the share of tokens that the first of these keeps at most, about as in training
POLICIES = {
    TINY: ("configs/epochs_tiny.gin", (0.06,), 1.0),
    "downloads/countdown": ("configs/countdown_cpu.gin", CHANGES, 0.4),
    "downloads/smollm2": ("configs/smollm2_epochs_cpu.gin", CHANGES, 0.6),
}
MADE_BY = {"downloads/countdown": "make countdown", "downloads/smollm2": "make smollm2"}
PLAINS = ("plain", "plain_coupled")
WAYS = (*PLAINS, "history", "siblings", "lenient", "coupled", "ahead", "two_workers")
LIKE = {"coupled": "plain_coupled", "ahead": "plain_coupled"}  # a way's plain; else "plain"
INEXACT = ("lenient",)
GUARDED = ("history", "siblings", "coupled", "ahead")
EXPECTED = 0.98  # of plain decoding's speed


class Ways:
    """The commands of a child: rollouts of a policy in every way, with the code of its checkout."""

    def prepare(
        self, prompts: int = 0, group_size: int = 0, slots: int = 64, policy: str = TINY
    ) -> dict[str, Any]:
        """Warm up an engine, measure its rounds, draw what is reused; 0: the policy's sizes."""
        from benchmarks import speculation
        from reprise.rl.sessions.multi_engine import MultiEngine
        from reprise.rl.workers.config import SchedConfig
        from reprise.rl.workers.engines import EngineSettings, make_engines

        workload, config = work_of(policy, prompts, group_size, slots)
        self.bench = bench = speculation.open_bench(workload, config, reuse=True)
        older, kept = self._draw_older(*POLICIES[policy][1:])
        bench.workload = self._with_history(workload, older)
        engine = bench.engine
        sched = SchedConfig(workers=2, chunk_tokens=64, policy="seer")
        half = max(1, slots // 2)
        halves = dataclasses.replace(config, slots=half, min_slots=min(config.min_slots, half))
        engines = make_engines(EngineSettings(engine.model, halves, engine.dtype.name), sched)
        self.workers = MultiEngine(engines, sched, seed=0)
        for way in WAYS:
            self.run(way)
        return {"requests": len(workload.requests), **kept}

    def _with_history(self, work: Any, older: Any) -> Any:
        """Return the workload with drafters, whose history older weights have drawn."""
        from benchmarks import workloads
        from reprise.spec.verification.sampling import step_key

        spec = dataclasses.replace(self._spec("plain", key=step_key(0, 1000)), params=older)
        past = self.bench.engine.run(spec, work.requests)
        rows = [
            {"id": str(r.group_id), "prompt_ids": r.prompt_ids}
            for r in work.requests
            if r.sample_index == 0
        ]
        drafters = workloads.retrieving(rows, past, [0.0] * len(past))
        return dataclasses.replace(work, drafters=drafters)

    def _draw_older(
        self, changes: Sequence[float], max_kept: float
    ) -> tuple[Any, dict[str, float]]:
        """Draw with older weights, by each way's noise, what it reuses.

        Returns these weights, their change, and the share of their tokens that is kept.
        """
        work = self.bench.workload
        self.requests = dict.fromkeys(WAYS, work.requests)
        now = self.bench.engine.run(self._spec("plain_coupled"), work.requests)
        for change in changes:
            older = changed(work.params, change)
            spec = dataclasses.replace(self._spec("plain_coupled"), params=older)
            drawn = self.bench.engine.run(spec, work.requests)
            kept = share_kept([t.response_ids for t in now], [t.response_ids for t in drawn])
            if kept <= max_kept:
                break
        for way in ("coupled", "ahead"):
            self._reuse(way, drawn)
        spec = dataclasses.replace(self._spec("plain"), params=older)
        self._reuse("lenient", self.bench.engine.run(spec, work.requests))
        return older, {"change": change, "kept": round(kept, 3)}

    def _reuse(self, way: str, drawn: Sequence[Any]) -> None:
        pairs = zip(self.bench.workload.requests, drawn, strict=True)
        self.requests[way] = tuple(reusing(way, request, t) for request, t in pairs)

    def _spec(self, way: str, **options: Any) -> Any:
        from reprise.rl.engine.rollout_spec import RolloutSpec
        from reprise.spec.verification.sampling import step_key

        work = self.bench.workload
        is_coupled = LIKE.get(way, way) == "plain_coupled"
        options = {"key": step_key(0, 1), **options}
        return RolloutSpec(
            work.params,
            work.sampling.with_scheme(verified=is_coupled),
            stop_token_ids=work.stop_token_ids,
            **options,
        )

    def _options(self, way: str) -> dict[str, Any]:
        """Return drafters, budget and rule of a way, as a run's settings make them."""
        import math

        from reprise.rl.engine.rollout_spec import draft_with
        from reprise.spec.budget.goodput import Goodput
        from reprise.spec.reuse.prefix_rule import PrefixRule, parse_mode

        if way in PLAINS or way == "two_workers":
            return {}
        bench, times = self.bench, self.bench.times
        if way in ("history", "siblings"):
            source = "all" if way == "history" else "first_epoch"
            return {"drafts": draft_with(bench.workload.drafters[source]({}), Goodput(times))}
        options: dict[str, Any] = {"times": times, "begun": way == "ahead"}
        if way in ("lenient", "coupled"):
            mode = parse_mode("lenient:e^0.5" if way == "lenient" else way)
            log_lenience = math.log(mode.lenience) if mode.lenience else -math.inf
            options["rule"] = PrefixRule(mode, log_lenience, 0, 1)
        last = {r.request_id: text_of(r) for r in self.requests[way]}
        drafter = bench.workload.drafters["all_and_last"](last)
        return {**options, "drafts": draft_with(drafter, Goodput(times))}

    def run(self, way: str) -> dict[str, Any]:
        """Return the seconds of one rollout."""
        spec = self._spec(way, **self._options(way))
        engine = self.workers if way == "two_workers" else self.bench.engine
        began_s = time.perf_counter()
        self.done = engine.run(spec, self.requests[way])
        return {"seconds": time.perf_counter() - began_s}

    def tokens(self) -> dict[str, Any]:
        """Return the responses of the last rollout."""
        return {"tokens": [t.response_ids.tolist() for t in self.done]}

    def serve(self) -> None:
        answers, sys.stdout = sys.stdout, sys.stderr  # libraries print no answers
        for line in sys.stdin:
            command = json.loads(line)
            answer = getattr(self, command.pop("do"))(**command)
            print(json.dumps(answer), file=answers, flush=True)


def changed(params: Any, change: float) -> Any:
    """Return weights with normal noise on matrices, relative to each number."""
    import jax

    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    noise = (change * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True))
    return tree.unflatten(
        [x * (1 + n) if x.ndim > 1 else x for x, n in zip(leaves, noise, strict=True)]
    )


def share_kept(now: Sequence[Any], older: Sequence[Any]) -> float:
    """Return the share of tokens before a response's first difference from the older one."""
    same = 0
    for tokens, before in zip(now, older, strict=True):
        n = min(len(tokens), len(before))
        differs = tokens[:n] != before[:n]
        same += int(differs.argmax()) if differs.any() else n
    return same / sum(map(len, now))


def reusing(way: str, request: Any, older: Any) -> Any:
    """Return a request that a way answers from a response that older weights have drawn."""
    from reprise.spec.reuse.rollout_cache import CachedResponse, Scores

    if way == "ahead":
        return dataclasses.replace(request, begun=tuple(older.response_ids.tolist()))
    scores = Scores(older.logprobs, older.emission_logprobs, older.policy_versions)
    cached = CachedResponse(request.sample_index, older.response_ids, 0.0, scores)
    return dataclasses.replace(request, cached=cached)


def text_of(request: Any) -> Any:
    """Return the tokens that a request drafts from."""
    import numpy as np

    return np.array(request.begun, np.int32) if request.begun else request.cached.tokens


def work_of(policy: str, prompts: int, group_size: int, slots: int) -> tuple[Any, Any]:
    """Return a policy's workload and its engine's configuration with so many slots.

    That of policies/tiny has been the same since the first checkout that `before_after` measures.
    """
    from benchmarks import workloads
    from reprise.rl.data.prompts import encode_prompt
    from reprise.rl.data.tasks import open_tasks
    from reprise.rl.gin.loader import load
    from reprise.rl.settings.config import TrainConfig
    from reprise.rl.settings.inputs import open_policy
    from reprise.rl.slots.config import EngineConfig

    if policy == TINY:
        prefill = {"prefill_rows": 8, "prefill_chunk_tokens": 32}
        sizes = {"slots": slots, "min_slots": max(1, slots // 8)}
        base = workloads.BASE_POLICY
        work = workloads.tiny("base", base, base, prompts or 16, group_size or 8)
        return work, EngineConfig(**sizes, **prefill, max_nodes=16)
    config = load(TrainConfig, [ROOT / POLICIES[policy][0]])
    group_size = group_size or config.rollout.group_size
    prompts = prompts or max(config.rollout.prompts_per_step, -(-slots // group_size))
    folder, model, tokenizer = open_policy(str(ROOT / policy), config.task)
    examples = open_tasks(config.task, config.run.seed)
    rows = [
        {"prompt_ids": encode_prompt(tokenizer, examples[i], config.task)} for i in range(prompts)
    ]
    requests = workloads.group_requests(rows, group_size)
    _, params = workloads.policy(folder)
    work = workloads.Workload(
        policy, model, params, requests, config.sampling, model.eos_token_ids, {}
    )
    engine = config.engine
    sizes = {"slots": slots, "min_slots": min(slots, max(engine.min_slots, slots // 8))}
    return work, dataclasses.replace(engine, **sizes)


@dataclasses.dataclass(frozen=True)
class Checkout:
    """A checkout's folder, its module of ways, their names, each one's plain, and its policies."""

    name: str
    folder: Path
    module: str
    ways: tuple[str, ...]
    plains: Mapping[str, str]
    policies: tuple[str, ...]

    def start(self, **sizes: Any) -> tuple[Any, dict[str, Any]]:
        """Return a child that answers this checkout's commands, and its answer to the first."""
        from benchmarks.child import Child

        script = self.folder / "benchmarks" / f"{self.module}.py"
        child = Child(self.name, [sys.executable, "-P", str(script), "--serve"], self.folder)
        return child, child.ask(do="prepare", **sizes)


def open_checkout(name: str, folder: Path) -> Checkout:
    """Return a checkout's ways by its own code, which may be older."""
    own = (folder / "benchmarks" / "ways.py").is_file()
    module = "ways" if own else "before_after"
    text = f"""
import json
from benchmarks import {module} as m
like = getattr(m, "LIKE", {{}})
ways = dict.fromkeys([*m.WAYS, *like.values()])
print(json.dumps([list(ways), like, list(getattr(m, "POLICIES", ["{TINY}"]))]))
"""
    command, env = [sys.executable, "-P", "-c", text], os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise SystemExit(f"{folder}: expected a checkout with benchmarks/{module}.py, got {last}")
    ways, like, policies = json.loads(done.stdout)
    plains = {way: like.get(way, "plain") for way in ways}
    plains = {way: "plain" if plain == way else plain for way, plain in plains.items()}
    return Checkout(name, folder, module, tuple(ways), plains, tuple(policies))


@dataclasses.dataclass(frozen=True)
class Turns:
    """The seconds of each (checkout, way) turn by turn, and its responses."""

    seconds: Mapping[tuple[str, str], Sequence[float]]
    responses: Mapping[tuple[str, str], Sequence[Sequence[int]]]

    def per_token(self, key: tuple[str, str]) -> list[float]:
        """Return the seconds of a response token, turn by turn."""
        tokens = sum(map(len, self.responses[key]))
        return [float(s) / tokens for s in self.seconds[key]]

    def ratios(self, key: tuple[str, str], over: tuple[str, str]) -> list[float]:
        """Return the seconds of a token of `over` to those of `key`, turn by turn."""
        pairs = zip(self.per_token(over), self.per_token(key), strict=True)
        return [o / s for o, s in pairs]

    def over_plain(self, checkout: Checkout) -> dict[str, dict[str, Any]]:
        """Return the figures of a checkout's ways over its own plain rollouts."""
        found = {}
        for way in checkout.ways:
            key, plain = (checkout.name, way), (checkout.name, checkout.plains[way])
            if way.startswith("plain") or key not in self.seconds or plain not in self.seconds:
                continue
            ratios = self.ratios(key, over=plain)
            found[way] = {
                "over_plain": round(statistics.median(ratios), 4),
                "ratios": [round(r, 3) for r in ratios],
                "s": round(statistics.median(self.seconds[key]), 4),
                "plain_s": round(statistics.median(self.seconds[plain]), 4),
                "tokens": sum(map(len, self.responses[key])),
            }
            if way not in INEXACT:
                pairs = zip(self.responses[plain], self.responses[key], strict=True)
                found[way]["differing_responses"] = sum(a != b for a, b in pairs)
        return found


def take_turns(children: Mapping[str, Any], ways: Mapping[str, Sequence[str]], turns: int) -> Turns:
    """Run every way of every child in turns, after their warm-up; only one computes at a time."""
    from benchmarks.turns import in_turns

    responses = dict[tuple[str, str], Any]()

    def seconds(key: tuple[str, str]) -> float:
        child = children[key[0]]
        taken_s = float(child.ask(do="run", way=key[1])["seconds"])
        if key not in responses:
            responses[key] = child.ask(do="tokens")["tokens"]
        return taken_s

    keys = [(name, way) for name, of_child in ways.items() for way in of_child]
    kinds = {" ".join(key): partial(seconds, key) for key in keys}
    found = in_turns(kinds, turns, warm=0)
    return Turns({key: found[" ".join(key)].tolist() for key in keys}, responses)


def lost(ways: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the guarded ways that lose more than they may."""
    return [way for way in GUARDED if way in ways and ways[way]["over_plain"] < EXPECTED]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each policy and number of slots."""
    from benchmarks.environment import progress

    here, rows = open_checkout("after", ROOT), list[dict[str, Any]]()
    sizes = {name: getattr(arguments, name) for name in ("prompts", "group_size")}
    for policy in arguments.policies:
        if not (ROOT / policy / "config.json").is_file():
            hint = MADE_BY.get(policy, "give --policies with those that are there")
            progress(f"{policy} is left out: expected a policy in that folder; fix: {hint}")
            continue
        for slots in arguments.slots:
            child, prepared = here.start(policy=policy, slots=slots, **sizes)
            try:
                turns = take_turns({here.name: child}, {here.name: WAYS}, arguments.turns)
            finally:
                child.close()
            ways = turns.over_plain(here)
            name = f"{Path(policy).name}_{slots}"
            rows.append({"name": name, **prepared, "lost": lost(ways), "ways": ways})
            progress(name, {way: row["over_plain"] for way, row in ways.items()})
    every = [row["ways"][way] for row in rows for way in row["ways"]]
    guarded = [row["ways"][way]["over_plain"] for row in rows for way in GUARDED]
    return {
        "worst_guarded": min(guarded, default=None),
        "reached": not any(row["lost"] for row in rows),
        "differing_responses": sum(row.get("differing_responses", 0) for row in every),
        "rows": rows,
    }


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        Ways().serve()
    else:
        from benchmarks import environment

        environment.run(
            __doc__, measure, environment.TRAINING, policies=tuple(POLICIES), slots=(4, 16, 64),
            turns=7, prompts=0, group_size=0,
        )  # fmt: skip
