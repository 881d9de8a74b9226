"""Steps that are begun ahead of their weights: `python -m benchmarks.ahead --json`

The default run (configs/tiny_cpu.gin), with two workers in `Sched.mode = "ahead"`:

- `same`: against `sync` with one engine, seed by seed: responses, rewards and final weights that
  differ. Policies learn from the trainer's own log-probabilities, since those of rounds of
  several sizes differ in the last bit.
- `kept`: what stands of the tokens that were begun, up to a response's first difference, by scheme
  of draws and learning rate. How much is begun depends on who has time on this machine; what
  stands of it does not.
- `projected`: steps on a virtual clock, priced by the roofline, with the scheduler of real runs.
  A response's begun tokens stand whole as often as in `kept`, and else up to a point that is drawn
  evenly, so that the mean is that of `kept`. That responses of thousands of tokens stand as those
  of this policy do is assumed. Behind its first difference a response drafts `DRAFTS` tokens a
  round from what was begun of it, of which as many are accepted as in `kept`.

The shares of `projected` are of the time of all rollout workers, updates included, between the ends
of the first update and of the last but one, where each step has one after it:

- `*_idle`: a worker runs nothing.
- `ahead_begun`: it runs what is begun of the next step.
- `ahead_dropped`: the part of this that was for tokens that did not stand, where requests that run
  together share a second evenly. Such tokens are drafts later, which is not counted here.
- `*_idle_with_ends`: `*_idle` from the first rollout to the end of the last update, in which no
  mode has anything to do. The step times are of this span.

`--project FILE` projects again from the `kept` of a result, and leaves its other figures alone.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import environment
from benchmarks.simulator.steps import AheadSimulation, BegunDrafts, StepSimulation
from reprise.rl.metrics.writer import read_metrics, read_samples, step_rows
from reprise.sched.policies.divided import make_scheduler
from reprise.sched.policies.steps import Ahead, StepOrder
from reprise.sched.request import RequestSpec
from reprise.sched.simulator.cluster import Cluster, WorkerSample
from reprise.sched.simulator.roofline import ACCELERATORS, MODELS, Efficiency, Instance
from reprise.sched.simulator.workloads import Workload, draw_epochs

CONFIG = environment.ROOT / "configs" / "tiny_cpu.gin"
ALL = (
    *("Eval.num_prompts=0", "Metrics.samples_per_step=-1", "Metrics.tensorboard=False"),
    *("Algorithm.old_logprobs='recomputed'", "Checkpoint.every_steps=0"),
    "Speculation.sources=('last', 'group', 'own')",
)
AHEAD = ("Sched.mode='ahead'", "Sched.workers=2", "Sched.chunk_tokens=32")
RATE = 1.2e-4  # of configs/tiny_cpu.gin
FIRST_STEP = 5  # from which on what stands is counted: the rate warms up before

# a worker of the projection, and steps whose lengths have a long tail
INSTANCE = Instance(ACCELERATORS["H100"], MODELS["Qwen3-8B"], 1, Efficiency())
WORKERS, SLOTS, CHUNK_TOKENS, STEPS, DRAFTS = 12, 64, 512, 6, 4
LENGTHS = Workload(64, 8, mean_tokens=4000, limit_tokens=16384, sigma=0.9)
MODES = ("sync", "one_step_off", "ahead")
UPDATE_PERCENTS = (25, 50, 100)  # of a synchronous rollout's seconds


def train(folder: Path, steps: int, *settings: str) -> Path:
    """Train in a folder of its own; return it."""
    overrides = (*ALL, f"Run.steps={steps}", f"Run.directory={str(folder)!r}", *settings)
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled")}
    gin = [f"--gin.{o}" for o in overrides]
    environment.call("rl.train", f"--gin_file={CONFIG}", *gin, env=cache)
    return folder


def differences(sync: Path, ahead: Path) -> dict[str, Any]:
    """Return what differs between two runs, and of how much."""
    ours, theirs = read_samples(ahead), read_samples(sync)
    names = [[(s["step"], s["example_id"], s["sample_index"]) for s in x] for x in (ours, theirs)]
    assert names[0] == names[1], "the same was asked"
    pairs = list(zip(ours, theirs, strict=True))
    other = [a for a, b in pairs if a["completion"] != b["completion"]]
    weights = [
        {path.name: path.read_bytes() for path in sorted((x / "policy").glob("*.safetensors"))}
        for x in (sync, ahead)
    ]
    assert weights[0], "a run leaves its policy"
    return {
        "responses": len(pairs),
        "tokens": sum(s["num_tokens"] for s in ours),
        "responses_that_differ": len(other),
        "first_step_that_differs": min((s["step"] for s in other), default=None),
        "rewards_that_differ": sum(a["reward"] != b["reward"] for a, b in pairs),
        "weights_equal": weights[0] == weights[1],
    }


def kept(folder: Path) -> dict[str, float]:
    """Return what stood of the begun tokens over a run's steps."""
    rows = [row for row in step_rows(read_metrics(folder)) if row["step"] >= FIRST_STEP]
    names = ("begun_requests", "begun_tokens", "kept_tokens", "kept_whole")
    total = {name: sum(row[f"ahead/{name}"] for row in rows) for name in names}
    rate = "spec/last/accept_rate"  # of draft tokens behind a response's first difference
    accepted = statistics.fmean(row[rate] for row in rows if rate in row)
    begun = statistics.fmean(row["ahead/begun_fraction"] for row in rows)
    return {
        "kept_fraction": round(total["kept_tokens"] / total["begun_tokens"], 4),
        "whole_fraction": round(total["kept_whole"] / total["begun_requests"], 4),
        "begun_tokens": total["begun_tokens"],
        "accepted": round(accepted, 4),
        "begun_fraction": round(begun, 4),
        "off_policyness_max": max(row["rollout/off_policyness/max"] for row in rows),
    }


def projected_steps(seed: int) -> tuple[list[list[RequestSpec]], dict[int, int]]:
    """Return the requests of each step, first samples first, and all lengths by number."""
    drawn = draw_epochs(LENGTHS, [LENGTHS.mean_tokens] * STEPS, seed=seed)
    groups, size = LENGTHS.num_groups, LENGTHS.group_size
    tokens, steps, by_number = (LENGTHS.prompt_tokens, LENGTHS.limit_tokens), [], {}
    for step in range(STEPS):
        steps.append([])
        for i, g in itertools.product(range(size), range(groups)):
            group = step * groups + g
            by_number[group * size + i] = int(drawn[step, g, i])
            steps[-1].append(RequestSpec(group * size + i, group, *tokens, step=step))
    return steps, by_number


def idle_share(
    samples: Sequence[WorkerSample], num_workers: int, begin_s: float, end_s: float
) -> float:
    """Return the share of the workers' time from `begin_s` to `end_s` in which nothing runs."""
    changes: dict[int, list[tuple[float, int]]] = {i: [] for i in range(num_workers)}
    for sample in samples:
        changes[sample.worker_id].append((sample.begin_s, sample.num_running))
    busy_s = 0.0
    for of_worker in changes.values():
        for (since_s, running), (until_s, _) in itertools.pairwise([*of_worker, (end_s, 0)]):
            if running:
                busy_s += max(0.0, min(until_s, end_s) - max(since_s, begin_s))
    return 1 - busy_s / (num_workers * (end_s - begin_s))


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The mean seconds of a step, those of the first rollouts, and shares of the workers' time."""

    step_s: float
    first_rollout_s: float
    shares: Mapping[str, float]


def play(
    mode: str, train_s: float, seed: int, *, whole: float, mean: float, accepted: float
) -> Timeline:
    """Play all steps in a mode."""
    steps, lengths = projected_steps(seed)
    cluster = Cluster(INSTANCE, WORKERS, SLOTS)
    scheduler = make_scheduler("seer", seed=seed, chunk_tokens=CHUNK_TOKENS)
    updates = [train_s] * STEPS
    if mode == "ahead":
        rng = np.random.default_rng(seed)
        # of those that do not stand whole: even shares with the mean that is left for them
        most = min(1.0, 2 * max(0.0, mean - whole) / max(1 - whole, 1e-9))
        shares = np.where(rng.random(len(lengths)) < whole, 1.0, most * rng.random(len(lengths)))
        rounds = BegunDrafts(INSTANCE, DRAFTS, accepted)
        begins = Ahead(scheduler, chunk_tokens=CHUNK_TOKENS)
        simulation = AheadSimulation(
            begins, cluster, lengths, round_model=rounds, keep_samples=True
        )
        record = simulation.run_ahead(steps, updates, lambda r, n: int(shares[r] * n))
        seconds = {"begun": simulation.begun_s, "dropped": simulation.dropped_s}
    else:
        order = StepOrder(scheduler, mode)
        simulated = StepSimulation(order, cluster, lengths, keep_samples=True)
        record, seconds = simulated.run_steps(steps, updates), {}
    first_s, until_s, end_s = (record.trained_s[i] for i in (0, -2, -1))
    shares = {
        "idle": idle_share(record.samples, WORKERS, first_s, until_s),
        "idle_with_ends": idle_share(record.samples, WORKERS, 0.0, end_s),
        # steps 0 and 1 are begun before the first update ends
        **{name: sum(s[2:]) / (WORKERS * (until_s - first_s)) for name, s in seconds.items()},
    }
    return Timeline(end_s / STEPS, first_s - train_s, shares)


def projected(kept: Mapping[str, float], seeds: Sequence[int]) -> list[dict[str, float]]:
    """Return ratios of step times and shares, medians over seeds, by the length of an update."""
    rows = []
    names = {"whole": "whole_fraction", "mean": "kept_fraction", "accepted": "accepted"}
    stands = {name: kept[figure] for name, figure in names.items()}
    for percent in UPDATE_PERCENTS:
        found: dict[str, list[float]] = collections.defaultdict(list)
        for seed in seeds:
            update_s = percent / 100 * play("sync", 1.0, seed, **stands).first_rollout_s
            played = {mode: play(mode, update_s, seed, **stands) for mode in MODES}
            for mode in ("sync", "one_step_off"):
                found[f"{mode}_over_ahead"].append(played[mode].step_s / played["ahead"].step_s)
            for mode, timeline in played.items():
                for name, share in timeline.shares.items():
                    found[f"{mode}_{name}"].append(share)
        medians = {
            name: round(statistics.median(values), 3 if name.endswith("_over_ahead") else 4)
            for name, values in found.items()
        }
        rows.append({"update_percent": percent, **medians})
    return rows


def projection(kept: Mapping[str, float]) -> dict[str, Any]:
    """Return the projected rows, and what they are of."""
    return {
        "projected": projected(kept, range(5)),
        "projection": {
            "instance": dataclasses.asdict(INSTANCE.model)["name"] + " on one H100 a worker",
            "workers": WORKERS,
            "lengths": dataclasses.asdict(LENGTHS),
        },
    }


def measure(folder: Path, seeds: Sequence[int], steps: int) -> dict[str, Any]:
    """Train all runs, and project."""
    gumbel, slower = "Sampling.draw='gumbel'", f"Optimizer.learning_rate={RATE / 10}"
    same, stands = [], dict[str, dict[str, float]]()
    for seed in seeds:
        settings = gumbel, f"Run.seed={seed}"
        sync = train(folder / f"sync-{seed}", steps, *settings)
        ahead = train(folder / f"ahead-{seed}", steps, *settings, *AHEAD)
        same.append({"seed": seed, **differences(sync, ahead)})
        stands.setdefault("gumbel", kept(ahead))
    others = {
        "gumbel_blocks": ("Sampling.draw='gumbel_blocks'",),
        "cdf": ("Sampling.draw='cdf'",),
        "gumbel_tenth_rate": (gumbel, slower),
        "cdf_tenth_rate": ("Sampling.draw='cdf'", slower),
    }
    for name, settings in others.items():
        stands[name] = kept(train(folder / name, steps, *settings, *AHEAD))
    return {
        "responses_that_differ": sum(row["responses_that_differ"] for row in same),
        "tokens_compared": sum(row["tokens"] for row in same),
        "rewards_that_differ": sum(row["rewards_that_differ"] for row in same),
        "runs_with_other_weights": sum(not row["weights_equal"] for row in same),
        "runs": len(same),
        **{f"kept_{name}": found["kept_fraction"] for name, found in stands.items()},
        "same": same,
        "kept": stands,
        **projection(stands["gumbel"]),
    }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    if file := arguments.project:
        result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        arguments.record, record = dict, arguments.record
        return projected_again(result, record())
    with tempfile.TemporaryDirectory() as scratch:
        return measure(Path(scratch), range(arguments.seeds), arguments.steps)


def projected_again(result: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result with new projected rows, whose `projection` has a record of its own."""
    again = projection(result["kept"]["gumbel"])
    return {**result, **again, "projection": {**again["projection"], **record}}


if __name__ == "__main__":
    environment.run(__doc__, run, (*environment.JAX, "optax"), seeds=3, steps=40, project=Path)
