"""Steps that are begun ahead of their weights: `python -m benchmarks.ahead --json`

The default run (configs/tiny_cpu.gin), with two workers in `Sched.mode = "ahead"`:

- `same`: against `sync` with one engine, seed by seed: responses, rewards and final weights that
  differ. Policies learn from the trainer's own log-probabilities, since those of rounds of
  several sizes differ in the last bit.
- `kept`: what stands of the tokens that were begun, up to a response's first difference, by scheme
  of draws and learning rate. How much is begun depends on who has time on this machine; what
  stands of it does not.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import environment
from rl.metrics.writer import read_metrics, read_samples, step_rows

CONFIG = environment.ROOT / "configs" / "tiny_cpu.gin"
ALL = (
    *("Eval.num_prompts=0", "Metrics.samples_per_step=-1", "Metrics.tensorboard=False"),
    *("Algorithm.old_logprobs='recomputed'", "Checkpoint.every_steps=0"),
    "Speculation.sources=('last', 'group', 'own')",
)
AHEAD = ("Sched.mode='ahead'", "Sched.workers=2", "Sched.chunk_tokens=32")
RATE = 1.2e-4  # of configs/tiny_cpu.gin
FIRST_STEP = 5  # from which on what stands is counted: the rate warms up before


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


def measure(folder: Path, seeds: Sequence[int], steps: int) -> dict[str, Any]:
    """Train all runs."""
    gumbel, slower = "Sampling.draw='gumbel'", f"Optimizer.learning_rate={RATE / 10}"
    same, stands = [], dict[str, dict[str, float]]()
    for seed in seeds:
        settings = gumbel, f"Run.seed={seed}"
        sync = train(folder / f"sync-{seed}", steps, *settings)
        ahead = train(folder / f"ahead-{seed}", steps, *settings, *AHEAD)
        same.append({"seed": seed, **differences(sync, ahead)})
        stands.setdefault("gumbel", kept(ahead))
    others = {
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
    }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        return measure(Path(scratch), range(arguments.seeds), arguments.steps)


if __name__ == "__main__":
    environment.run(__doc__, run, (*environment.JAX, "optax"), seeds=3, steps=40)
