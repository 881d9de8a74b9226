"""Resume, counted: kill −9 at random points of a tiny run, resume, compare every bit.

    python -m benchmarks.resume --kills 20 --json
    python -m benchmarks.resume --kills 20 --ahead --json
    python -m benchmarks.resume --kills 20 --ahead --drafting --json

One run is never stopped. Another, of the same configuration, is killed at random moments (in
start-up, in a rollout, in an update, while a checkpoint is written) and resumed until it is done.
Equal means bitwise: parameters, optimizer state, metrics.jsonl without wall-clock columns,
samples.jsonl and the exported policy. With `--ahead` two workers begin each step ahead of its
weights; with `--drafting` a fourth one drafts for three, which help one another. Which rounds a
request shares is a matter of time there: counts of rounds and of drafts are left out, and so are
the log-probabilities of samples, whose last bits follow the shapes of rounds; the policy learns
from the trainer's own. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import environment, tiny_run
from models import transformer
from rl.checkpoint import reader
from rl.learner.config import OptimizerConfig
from rl.learner.optimizer import init_state, make_optimizer
from rl.metrics.writer import Row, deterministic_view, read_metrics, read_samples, step_rows

AHEAD = """
Sched.mode = "ahead"
Sched.workers = 2
Sched.chunk_tokens = 3
Sampling.draw = "gumbel"
Engine.slots = 4
Engine.min_slots = 4
Algorithm.old_logprobs = "recomputed"
"""
# beside `AHEAD`: a worker that drafts for three others, which help one another
DRAFTING = """
Drafting.workers = 1
Drafting.window = 3
Drafting.requests_per_helper = 4
Drafting.methods = ("own",)
Speculation.budget = "fixed:3"
Speculation.sources = ("model", "own")
DraftModel.proposal = "shared_noise"
DraftModel.directory = {directory!r}
"""
OF_ROUNDS = ("spec/", "rollout/", "emission_kl/", "sampling/", "mismatch_kl")  # by shapes of rounds
_POLL_S = 0.002
_TIMEOUT_S = 600.0


class RunFailed(RuntimeError):
    """A run ended otherwise than by the kill or its last step."""


@dataclasses.dataclass(frozen=True)
class KillPoint:
    """Kill `delay_s` after the attempt has written `steps` steps (None: after its launch)."""

    steps: int | None
    delay_s: float


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One life of the run: the steps it wrote, and whether the kill met it alive."""

    steps: int
    killed: bool


def draw_points(count: int, rng: random.Random, startup_s: float) -> list[KillPoint]:
    """Every fourth in start-up; the others within half a second after 0 to 2 steps."""
    return [
        KillPoint(None, rng.uniform(0, startup_s))
        if i % 4 == 3
        else KillPoint(rng.randrange(3), rng.uniform(0, 0.5))
        for i in range(count)
    ]


def run_until(
    config: Path, run: Path, env: Mapping[str, str], point: KillPoint | None, number: int = 9
) -> Attempt:
    """Start or resume the run; send signal `number` at `point`, or let it end.

    Raises RunFailed with its output where it ends otherwise.
    """
    resume = ["--resume"] if (run / "config.gin").exists() else []
    log = run.with_name(f"{run.name}.log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            tiny_run.command(config, run, *resume),
            cwd=tiny_run.ROOT,
            env=dict(env),
            stdout=output,
            stderr=output,
        )
        try:
            if point is not None:
                _wait_for(point, process, log)
                process.send_signal(number)
            code = process.wait(_TIMEOUT_S)
        finally:
            process.kill()
            process.wait()
    if code not in (0, -signal.SIGKILL if number == 9 else 75) or (point is None and code):
        raise RunFailed(f"exit status {code}:\n{log.read_text(errors='replace')}")
    return Attempt(_steps_in(log), code != 0)


def _wait_for(point: KillPoint, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the moment has come, or the run has ended."""
    limit_s = time.monotonic() + _TIMEOUT_S
    while point.steps is not None and process.poll() is None:
        if _is_stepping(log) and _steps_in(log) >= point.steps:
            break
        if time.monotonic() > limit_s:
            raise RunFailed(f"no step in {_TIMEOUT_S} s:\n{log.read_text(errors='replace')}")
        time.sleep(_POLL_S)
    due_s = time.monotonic() + point.delay_s
    while process.poll() is None and (left_s := due_s - time.monotonic()) > 0:
        time.sleep(min(left_s, _POLL_S))


def _is_stepping(log: Path) -> bool:
    """Whether the attempt is past its imports: it compiles, or resumes."""
    return b"compiling" in log.read_bytes()


def _steps_in(log: Path) -> int:
    return sum(line.startswith(b"step ") for line in log.read_bytes().splitlines())


def final_state(run: Path) -> tuple[int, dict[str, bytes]]:
    """(step, the policy's arrays in the newest whole checkpoint as bytes, by path)."""
    # the structure alone matters here, not the values of the optimizer's section
    params = transformer.init(tiny_run.MODEL, jax.random.key(0), jnp.float32)
    template = init_state(params, make_optimizer(OptimizerConfig(), 1))
    restored = reader.restore(run / "checkpoints", template, subset=True)
    arrays = {
        jax.tree_util.keystr(path): np.asarray(leaf).tobytes()
        for path, leaf in jax.tree_util.tree_leaves_with_path(restored.arrays)
    }
    return restored.step, arrays


def compare(run: Path, reference: Path, *, ahead: bool = False) -> dict[str, bool]:
    """Whether two finished runs are equal, bit for bit; `ahead` of it what time does not decide."""
    (step, ours), (wanted_step, wanted) = final_state(run), final_state(reference)
    params = {path for path in wanted if path.startswith(".params")}
    left_out = OF_ROUNDS if ahead else ()

    def learnt(row: Row) -> Row:
        view = deterministic_view(row)
        return {name: x for name, x in view.items() if not name.startswith(left_out)}

    rows = [[learnt(row) for row in read_metrics(folder)] for folder in (run, reference)]

    def same_file(name: str) -> bool:
        return (run / name).read_bytes() == (reference / name).read_bytes()

    def samples(folder: Path) -> list[Row]:
        return [{k: x for k, x in s.items() if k != "logprob"} for s in read_samples(folder)]

    same_samples = samples(run) == samples(reference) if ahead else same_file("samples.jsonl")
    return {
        "parameters_equal": all(ours[path] == wanted[path] for path in params),
        "optimizer_equal": step == wanted_step
        and all(ours[path] == wanted[path] for path in wanted.keys() - params),
        "metrics_equal": rows[0] == rows[1],
        "samples_equal": same_samples,
        "policy_equal": same_file("policy/model.safetensors"),
    }


def measure(
    kills: int, seed: int, folder: Path, *, ahead: bool = False, drafting: bool = False
) -> dict[str, Any]:
    """Kill and resume until `kills` have met a living run, then compare."""
    steps = 2 * kills  # an attempt writes one step on average, and some are lost
    config = tiny_run.make_inputs(folder)
    text = config.read_text().replace("Run.steps = 3", f"Run.steps = {steps}")
    if ahead:
        text += AHEAD
    if drafting:
        text = text.replace("Sched.workers = 2", "Sched.workers = 4")
        text = text.replace("Engine.max_nodes = 2", "Engine.max_nodes = 6")
        text += DRAFTING.format(directory=str(folder / "policy"))
    config.write_text(text)
    env = tiny_run.environment(folder / "compiled")
    reference, run = folder / "never_killed", folder / "killed"
    run_until(config, reference, env, None)
    rng, attempts = random.Random(seed), []
    started_s = time.monotonic()
    run_until(config, folder / "warm", env, KillPoint(0, 0.0))
    startup_s = time.monotonic() - started_s
    for point in draw_points(kills, rng, startup_s):
        attempts.append(run_until(config, run, env, point))
    done_after_kills = len(read_metrics(run)) if (run / "metrics.jsonl").exists() else 0
    run_until(config, run, env, None)
    return {
        "kills": sum(a.killed for a in attempts),
        "kills_in_startup": sum(a.killed and not a.steps for a in attempts),
        "steps": steps,
        "steps_computed_by_killed_attempts": sum(a.steps for a in attempts),
        "steps_kept_at_the_last_kill": done_after_kills,
        **({"tokens_begun_ahead": _begun(run)} if ahead else {}),
        **compare(run, reference, ahead=ahead),
    }


def _begun(run: Path) -> float:
    return sum(row["ahead/begun_tokens"] for row in step_rows(read_metrics(run)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resume", description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ahead", action="store_true", help="begin steps ahead of their weights")
    parser.add_argument("--drafting", action="store_true", help="with --ahead: workers that draft")
    parser.add_argument("--json", action="store_true", help="one line (the default as well)")
    args = parser.parse_args()
    if args.drafting and not args.ahead:
        parser.error("--drafting is of runs with --ahead: give both")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        modes = {"ahead": args.ahead, "drafting": args.drafting}
        figures = measure(args.kills, args.seed, Path(folder), **modes)
    packages = ("jax", "jaxlib", "orbax-checkpoint", "optax", "numpy")
    print(json.dumps(environment.record("benchmarks.resume", packages) | figures))
    return 0 if all(v for k, v in figures.items() if k.endswith("_equal")) else 1


if __name__ == "__main__":
    sys.exit(main())
