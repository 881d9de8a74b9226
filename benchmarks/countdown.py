"""The miniature: drafts and reuse in real training on Countdown, and the best in hindsight.

    python -m rl.ablate --gin_file=configs/ablations/countdown.gin
    python -m benchmarks.countdown training --folder runs/countdown --json

training   Reads the finished runs of a grid: seconds of rollouts, steps and tails of each variant
           against the plain run with the same noise, and responses that differ.
hindsight  Rolls out one step's requests with drafts, in turns with plain rollouts, and compares
           with a budget that knows which draft tokens turn out right, and needs no host.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import environment, workloads
from benchmarks.speculation import Bench, end_seconds, last_tenth, open_bench, tail_figures
from benchmarks.turns import WARM_TURNS, in_turns
from reprise.models.text import tokenizer
from reprise.rl.gin.loader import load
from reprise.rl.metrics.writer import Row, read_metrics, read_samples, step_rows
from reprise.rl.python.generate import generate
from reprise.rl.records.stats import RoundRecord, host_seconds
from reprise.rl.runtime.run_files import CONFIG_FILE, METRICS_FILE, ROUNDS_FILE
from reprise.rl.settings.config import TrainConfig
from reprise.rl.warm_up.measured_run import read_rounds
from reprise.spec.budget.budget import Budget, DraftDecision, Sizes
from reprise.spec.budget.goodput import Goodput
from reprise.spec.drafter import Acceptance, Drafts, LiveSlots
from reprise.spec.round_times import CHUNKS, RoundTimes
from reprise.spec.verification.sampling import step_key

PLAIN = "plain"
CONFIG = environment.ROOT / "configs" / "countdown_cpu.gin"
QUESTIONS = environment.ROOT / "policies" / "countdown" / "few.jsonl"
SECONDS = {
    "rollouts": "time/rollout",
    "steps": "step_time",
    "tail": "rollout/tail_s",
    "updates": "time/update",  # of equal responses the same work: they show the machine's drift
}
LATER = (  # means over the steps after the first epoch
    *("spec/tokens_per_round", "spec/accept_rate", "spec/speculated_fraction"),
    *("spec/reused_fraction", "ahead/kept_fraction"),
)


# --- training -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """A finished run of a grid; `responses` by step, question and sample."""

    variant: str
    config: TrainConfig
    rows: list[Row]
    responses: dict[tuple[Any, ...], str]
    times: RoundTimes | None = None  # of rounds, if the run measured any

    @property
    def is_plain(self) -> bool:
        sched, is_alone = self.config.sched, self.config.sched.workers == 1
        saves = self.config.speculation.enabled or self.config.reuse.enabled
        return is_alone and sched.mode == "sync" and not saves

    @property
    def is_exact(self) -> bool:
        """True if its responses must be its baseline's."""
        reuse = self.config.reuse
        return self.config.sched.mode != "pipeline" and (reuse.couples_noise or not reuse.enabled)

    @property
    def draws(self) -> tuple[Any, ...]:
        """The settings of its noise and of the distribution, which its baseline shares."""
        config = self.config
        reuse = config.reuse
        noise = (reuse.fresh_share, reuse.renew_groups) if reuse.couples_noise else None
        return config.run.seed, config.sampling, noise

    @property
    def epoch_steps(self) -> int:
        return len({key[1] for key in self.responses}) // self.config.rollout.prompts_per_step


def training(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the conditions of plain rollouts, and a row for each variant and seed."""
    found = [read(path.parent) for path in sorted(arguments.folder.glob(f"*/{METRICS_FILE}"))]
    runs = [run for run in found if len(step_rows(run.rows)) == run.config.run.steps]
    plain = {run.draws: run for run in runs if run.is_plain}
    rows = [compared(run, plain[run.draws]) for run in runs if run.draws in plain]
    return {"conditions": conditions([r.rows for r in runs if r.variant == PLAIN]), "rows": rows}


def read(folder: Path) -> Run:
    """Return the run in a folder; a result's keys have no dots, hence a variant's name has none."""
    variant = folder.name.rpartition("-")[0].replace(".", "_")
    config = load(TrainConfig, [folder / CONFIG_FILE])
    times = read_rounds(folder / ROUNDS_FILE)
    return Run(variant, config, read_metrics(folder), responses(folder), times)


def responses(folder: Path) -> dict[tuple[Any, ...], str]:
    """Return a run's responses by step, question and sample."""
    rows = read_samples(folder)
    return {(r["step"], r["example_id"], r["sample_index"]): r["completion"] for r in rows}


def compared(run: Run, base: Run) -> dict[str, Any]:
    """Return the figures of a run, and ratios to the plain run with its noise."""
    found = {
        "variant": run.variant,
        "seed": run.config.run.seed,
        "baseline": base.variant,
        "is_exact": run.is_exact,
        **against(step_rows(run.rows), step_rows(base.rows), base.epoch_steps),
        "responses": len(base.responses),
        "responses_that_differ": sum(run.responses.get(k) != x for k, x in base.responses.items()),
    }
    if run.config.reuse.enabled and run.times is not None:
        found |= reuse_limit(run.times)
        limit = found.get("reuse_limit")
        found["later/of_reuse_limit"] = limit and round(found["later/rollouts"] / limit, 3)
    return found


def reuse_limit(times: RoundTimes) -> dict[str, float]:
    """Return how many times faster rollouts are if every token is kept, and its two prices.

    (seconds of a plain round / slots) / (seconds of the largest pass / its tokens)
    """
    passes = [row[1:] for row in times.rows() if row[0] == CHUNKS]
    if not passes:
        return {}
    slots, tokens, positions, pass_s = max(passes)
    generated_ms = 1e3 * times(slots, slots, positions) / slots
    verified_ms = 1e3 * pass_s / tokens
    return {
        "generated_token_ms": round(generated_ms, 3),
        "verified_token_ms": round(verified_ms, 3),
        "reuse_limit": round(generated_ms / verified_ms, 3),
    }


def against(rows: Sequence[Row], base: Sequence[Row], epoch_steps: int) -> dict[str, Any]:
    """Return how many times faster a run's steps are than plain ones, by epoch.

        (plain seconds / plain response tokens) / (seconds / response tokens)

    `tail` is the share of its seconds that is gone. A pipeline's rollouts have no seconds apart.
    `steps_limit` is the ratio of steps if rollouts took no time. `seconds` are of all steps.
    """
    found: dict[str, Any] = {}
    epochs = {"first": slice(0, epoch_steps), "later": slice(epoch_steps, None)}
    for epoch, steps in epochs.items():
        plain, own = base[steps], rows[steps]
        plain_tokens, tokens = (
            sum(row["completions/mean_length"] * row["completions/count"] for row in some)
            for some in (plain, own)
        )
        for name, metric in SECONDS.items():
            found[f"{epoch}/{name}"] = None
            if name in ("steps", "updates") or "time/rollout" in own[0]:
                ratio = _total(plain, metric) / plain_tokens / (_total(own, metric) / tokens)
                found[f"{epoch}/{name}"] = round(1 - 1 / ratio if name == "tail" else ratio, 3)
        steps_s = _total(plain, SECONDS["steps"])
        limit = steps_s / (steps_s - _total(plain, SECONDS["rollouts"]))
        found[f"{epoch}/steps_limit"] = round(limit, 3)
        found[f"{epoch}/steps_of_limit"] = round(found[f"{epoch}/steps"] / limit, 3)
    for metric in LATER:
        values = [row[metric] for row in rows[epoch_steps:] if metric in row]
        found[metric] = round(float(np.mean(values)), 3) if values else None
    evals = [row["eval/mean_reward"] for row in rows if "eval/mean_reward" in row]
    found["eval_reward"] = evals[-1] if evals else None
    found["seconds"] = round(_total(rows, "step_time"), 1)
    return found


def _total(rows: Sequence[Row], metric: str) -> float:
    return float(sum(row[metric] for row in rows))


def conditions(runs: Sequence[Sequence[Row]]) -> dict[str, float]:
    """Return tail, lengths and rewards of plain runs, and how entropy changes; means over seeds."""
    rows = [row for run in runs for row in step_rows(run)]
    longest = [row["completions/max_length"] / row["completions/mean_length"] for row in rows]
    tails = [row["rollout/tail_s"] / row["time/rollout"] for row in rows]
    figures = {
        "longest_to_mean": np.median(longest),
        "last_tenth_share": np.median(tails),
        "mean_tokens": np.mean([row["completions/mean_length"] for row in rows]),
        "entropy_first": np.mean([step_rows(run)[0]["entropy"] for run in runs]),
        "entropy_last": np.mean([run[-1]["entropy"] for run in runs]),
        "eval_before": np.mean([run[0]["eval/mean_reward"] for run in runs]),
    }
    return {name: round(float(value), 4) for name, value in figures.items()}


# --- hindsight ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """A round that a budget decided on, with the drafts that it saw."""

    request_ids_A: np.ndarray
    emitted_A: np.ndarray  # tokens before the round
    drafts: Drafts
    decision: DraftDecision
    sizes: Sizes
    bucket: tuple[int, int]  # slots, positions

    def right(self, responses: Mapping[int, np.ndarray], count_A: np.ndarray) -> int:
        """Return how many of each request's first draft tokens turned out right, in all.

        The last token of a response comes from a round itself.
        """
        total = 0
        for a, (i, begin) in enumerate(zip(self.request_ids_A, self.emitted_A, strict=True)):
            next_N = responses[int(i)][begin:]
            total += min(right_tokens(self.drafts, a, next_N, int(count_A[a])), len(next_N) - 1)
        return total


class Recorded(Budget):
    """A budget whose choices are kept."""

    def __init__(self, budget: Goodput) -> None:
        self._budget, self.choices = budget, list[Choice]()

    def skips(self, live: LiveSlots, num_slots: int, num_positions: int) -> frozenset[str]:
        return self._budget.skips(live, num_slots, num_positions)

    def limits(self, live: LiveSlots, num_slots: int) -> np.ndarray:
        return self._budget.limits(live, num_slots)

    def choose(
        self, live: LiveSlots, drafts: Drafts, sizes: Sizes, num_slots: int, num_positions: int
    ) -> DraftDecision:
        decision = self._budget.choose(live, drafts, sizes, num_slots, num_positions)
        emitted_A = live.total_tokens_A - live.prompt_tokens_A
        own = Drafts(*(x.copy() for x in drafts))
        bucket = num_slots, num_positions
        ids_A = live.request_ids_A.copy()
        self.choices.append(Choice(ids_A, emitted_A, own, decision, tuple(sizes), bucket))
        return decision

    def observe(self, live: LiveSlots, drafts: Drafts, acceptance: Acceptance) -> None:
        self._budget.observe(live, drafts, acceptance)


def right_tokens(drafts: Drafts, a: int, next_N: np.ndarray, count: int) -> int:
    """Return how many of a request's first `count` draft tokens its next tokens follow."""
    depth_N = np.zeros(count, int)  # of a draft token on the path; 0 beside it
    for n in range(count):
        parent = int(drafts.parents_AN[a, n])
        depth = 1 if parent < 0 else int(depth_N[parent]) + 1
        on_path = (parent < 0 or depth_N[parent] > 0) and depth <= len(next_N)
        if on_path and drafts.tokens_AN[a, n] == next_N[depth - 1]:
            depth_N[n] = depth
    return int(depth_N.max(initial=0))


def in_hindsight(
    choices: Sequence[Choice],
    rounds: Sequence[RoundRecord],
    responses: Mapping[int, np.ndarray],
    times: RoundTimes,
) -> dict[str, float]:
    """Split the device seconds of a rollout, by measured round times.

    A round of A requests emits A + accepted tokens. `best_s` prices each round that was decided on
    at the size that brings the most tokens a second if right draft tokens alone are verified:

        best_s = Σ (A + accepted) · min_M seconds(M) / (A + min(right, M − B))

    Of plain rounds that follow such a decision only the first could have had these draft tokens.
    `unpadded_s` is of rounds without padding, `right_nodes_s` without wrong draft tokens either.
    """
    plain = [
        int(r.rounds_A.max()) * (times(r.num_slots, r.num_slots, r.num_positions) or 0.0)
        for r in rounds
        if not r.drafted
    ]
    names = ("device_s", "best_s", "unpadded_s", "right_nodes_s")
    found = dict.fromkeys(names, float(sum(plain)))
    for c in choices:
        slots, positions = c.bucket
        seconds = {m: times(slots, m, positions) for m in (slots, *c.sizes)}
        known = {m: s for m, s in seconds.items() if s is not None}
        taken_A, live = c.decision.taken_A, len(c.request_ids_A)
        right = c.right(responses, c.drafts.count_A)
        best_rate = max((live + min(right, m - slots)) / s for m, s in known.items())
        if taken_A is None:
            found["best_s"] += live / best_rate - known[slots]
            continue
        accepted = c.right(responses, taken_A)
        nodes, values = np.array(list(known)), np.array(list(known.values()))
        found["device_s"] += known[c.decision.num_nodes]
        found["best_s"] += (live + accepted) / best_rate
        found["unpadded_s"] += float(np.interp(slots + taken_A.sum(), nodes, values))
        found["right_nodes_s"] += float(np.interp(slots + accepted, nodes, values))
    return found


def countdown_bench(folder: Path) -> Bench:
    """Return a step's requests on the policy in `folder`, with an earlier epoch's responses."""
    config = load(TrainConfig, [CONFIG])
    model, params = workloads.policy(folder)
    tok = tokenizer.load(folder)
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()
    rows = [
        {"id": str(i), "prompt_ids": tok.encode(json.loads(line)["prompt"])}
        for i, line in enumerate(lines[: config.rollout.prompts_per_step])
    ]
    requests = workloads.group_requests(rows, config.rollout.group_size)
    past = generate(model, params, requests, config.sampling, key=step_key(0, 1000))
    drafters = workloads.retrieving(rows, past, [0.0] * len(past))
    given = (model, params, requests, config.sampling, model.eos_token_ids)
    return open_bench(workloads.Workload("countdown", *given, drafters), config.engine)


def hindsight(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return seconds of plain rollouts and of drafted ones, and their parts in hindsight."""
    bench = countdown_bench(arguments.policy)
    plain = {t.request_id: t.response_ids for t in bench.phase()}
    tail = last_tenth(bench.records)
    ends: dict[str, list[tuple[float, float]]] = {"plain": [], "drafts": []}
    parts, differing = list[dict[str, float]](), 0

    def run(kind: str) -> float:
        nonlocal differing
        budget = Recorded(Goodput(bench.times))
        drafts = (bench.workload.drafters["all"](plain), budget) if kind == "drafts" else ()
        done = bench.phase(*drafts)
        differing += sum(not np.array_equal(plain[t.request_id], t.response_ids) for t in done)
        ends[kind].append(end_seconds(bench.records, tail))
        seconds = ends[kind][-1][0]
        if kind == "drafts":
            found = in_hindsight(budget.choices, bench.records, plain, bench.times)
            host_s = host_seconds(bench.records)
            # rounds were timed on full rows, and take less on others
            pace = (seconds - host_s) / found["device_s"]
            found = {name: pace * value for name, value in found.items()}
            parts.append(found | {"seconds": seconds, "host_s": host_s})
        return seconds

    seconds = in_turns({kind: partial(run, kind) for kind in ends}, arguments.turns)
    median = {name: float(np.median([p[name] for p in parts[WARM_TURNS:]])) for name in parts[0]}
    return {
        "requests": len(plain),
        "tokens": sum(map(len, plain.values())),
        "responses_that_differ": differing,
        "ratio": round(float(np.median(seconds["plain"] / seconds["drafts"])), 3),
        **tail_figures(list(zip(ends["plain"], ends["drafts"], strict=True))[WARM_TURNS:]),
        "of_best": round(median["best_s"] / median["seconds"], 3),
        "round_ms": {str(k): round(1e3 * s, 3) for k, s in sorted(bench.times.rounds.items())},
        "seconds": {name: round(value, 4) for name, value in median.items()},
    }


if __name__ == "__main__":
    environment.run(
        __doc__,
        {"training": training, "hindsight": hindsight},
        environment.TRAINING,
        folder=Path("runs/countdown"),
        policy=Path("downloads/countdown"),
        turns=5,
    )
