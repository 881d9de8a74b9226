"""Tiny runs that are killed or stopped, then resumed, and compared bit by bit.

With several workers, time decides which requests share a round: metrics of rounds and drafts are
not compared then, nor are log-probs of samples, whose last bits depend on the shapes of rounds. The
trainer recomputes its log-probs, hence the weights are compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from reprise.models.decoder import transformer
from reprise.rl.checkpoint import reader
from reprise.rl.learner.config import OptimizerConfig
from reprise.rl.learner.optimizer import init_state, make_optimizer
from reprise.rl.metrics.writer import Row, deterministic_view, read_metrics, read_samples, step_rows
from tests.support import tiny_run

AHEAD = """
Sched.mode = "ahead"
Sched.workers = 2
Sched.chunk_tokens = 3
Sampling.draw = "gumbel_blocks"
Engine.slots = 4
Engine.min_slots = 4
Algorithm.old_logprobs = "recomputed"
"""
# `AHEAD` with a worker that drafts for three others, which help one another.
DRAFTING = f"""{AHEAD}
Sched.workers = 4
Engine.max_nodes = 6
Drafting.workers = 1
Drafting.window = 3
Drafting.requests_per_helper = 4
Drafting.methods = ("own",)
Speculation.budget = "fixed:3"
Speculation.sources = ("model", "own")
DraftModel.proposal = "shared_noise"
DraftModel.directory = {{policy!r}}
"""
OF_ROUNDS = ("spec/", "rollout/", "emission_kl/", "sampling/", "mismatch_kl")
POLL_S = 0.002
TIMEOUT_S = 600.0
STOP_S = 60.0
STOPPED = 75  # exit status of a run that stopped and saved


class RunFailed(RuntimeError):
    """A run ended other than by the fault or its last step."""


@contextlib.contextmanager
def started(
    command: Sequence[str], env: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does not outlive the block; its output goes to `log`."""
    with log.open("wb") as output:
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        process = subprocess.Popen(command, cwd=tiny_run.ROOT, env=dict(env), **streams)
        try:
            yield process
        finally:
            if process.poll() is None:  # a run on Ray ends its actors
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_S)
            process.kill()
            process.wait()


def output_of(log: Path) -> str:
    return log.read_text(errors="replace")


# --- comparison ---------------------------------------------------------------------------


def final_state(run: Path) -> tuple[int, dict[str, bytes]]:
    """Return (step, arrays of the newest whole checkpoint as bytes, by path)."""
    # The template gives the structure only; the optimizer's settings do not matter.
    params = transformer.init(tiny_run.MODEL, jax.random.key(0), jnp.float32)
    template = init_state(params, make_optimizer(OptimizerConfig(), 1))
    restored = reader.restore(run / "checkpoints", template, subset=True)
    leaves = jax.tree_util.tree_leaves_with_path(restored.arrays)
    arrays = {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}
    return restored.step, arrays


def compare(run: Path, reference: Path, *, has_workers: bool = False) -> dict[str, bool]:
    """Return whether two finished runs are equal, bit for bit."""
    (step, ours), (expected_step, expected) = final_state(run), final_state(reference)
    params = {path for path in expected if path.startswith(".params")}
    left_out = OF_ROUNDS if has_workers else ()

    def metrics(folder: Path) -> list[Row]:
        views = map(deterministic_view, read_metrics(folder))
        return [{k: x for k, x in view.items() if not k.startswith(left_out)} for view in views]

    def samples(folder: Path) -> Any:
        if not has_workers:
            return (folder / "samples.jsonl").read_bytes()
        return [{k: x for k, x in s.items() if k != "logprob"} for s in read_samples(folder)]

    policies = [(folder / "policy/model.safetensors").read_bytes() for folder in (run, reference)]
    differs = {path for path in expected if ours[path] != expected[path]}
    return {
        "parameters_equal": not differs & params,
        "optimizer_equal": step == expected_step and not differs - params,
        "metrics_equal": metrics(run) == metrics(reference),
        "samples_equal": samples(run) == samples(reference),
        "policy_equal": policies[0] == policies[1],
    }


# --- kill ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class KillPoint:
    """`delay_s` after the attempt has written `steps` steps (None: after its launch)."""

    steps: int | None
    delay_s: float


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One launch of a run: the steps it wrote, and whether the signal met it alive."""

    steps: int
    killed: bool


def run_until(
    config: Path, run: Path, env: Mapping[str, str], point: KillPoint | None, number: int = 9
) -> Attempt:
    """Start or resume the run; send signal `number` at `point`, or let it end.

    Raises RunFailed with its output if it ends otherwise.
    """
    resume = ["--resume"] if (run / "config.gin").exists() else []
    log = run.with_name(f"{run.name}.log")
    with started(tiny_run.command(config, run, *resume), env, log) as process:
        if point is not None:
            _wait_for(point, process, log)
            process.send_signal(number)
        code = process.wait(TIMEOUT_S if point else 10 * TIMEOUT_S)
    if code not in (0, -signal.SIGKILL if number == 9 else STOPPED) or (point is None and code):
        raise RunFailed(f"exit status {code}:\n{output_of(log)}")
    return Attempt(_num_steps(log), code != 0)


def _wait_for(point: KillPoint, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while point.steps is not None and process.poll() is None:
        # "compiling": the attempt is past its imports
        if b"compiling" in log.read_bytes() and _num_steps(log) >= point.steps:
            break
        if time.monotonic() > deadline_s:
            raise RunFailed(f"no step in {TIMEOUT_S} s:\n{output_of(log)}")
        time.sleep(POLL_S)
    due_s = time.monotonic() + point.delay_s
    while process.poll() is None and (left_s := due_s - time.monotonic()) > 0:
        time.sleep(min(left_s, POLL_S))


def _num_steps(log: Path) -> int:
    return sum(line.startswith(b"step ") for line in log.read_bytes().splitlines())


def draw_points(count: int, rng: random.Random, startup_s: float) -> list[KillPoint]:
    """Every fourth point is in start-up; others are within 0.5 s after 0 to 2 steps."""
    startup, running = (None, startup_s), (3, 0.5)
    ends = [startup if i % 4 == 3 else running for i in range(count)]
    return [KillPoint(n and rng.randrange(n), rng.uniform(0, s)) for n, s in ends]


def kill(folder: Path, count: int = 20, settings: str = "") -> dict[str, Any]:
    """Kill a run at `count` points, resuming it each time, then compare."""
    steps = 2 * count  # an attempt writes one step on average, and some are lost
    settings = settings.format(policy=str(folder / "policy"))
    config = tiny_run.make_inputs(folder)
    config.write_text(f"{config.read_text()}Run.steps = {steps}\n{settings}")
    env = tiny_run.environment(folder / "compiled")
    reference, run = folder / "never_killed", folder / "killed"
    run_until(config, reference, env, None)
    start_s = time.monotonic()
    run_until(config, folder / "warm", env, KillPoint(0, 0.0))
    points = draw_points(count, random.Random(0), time.monotonic() - start_s)
    attempts = [run_until(config, run, env, point) for point in points]
    num_kept = len(read_metrics(run)) if (run / "metrics.jsonl").exists() else 0
    run_until(config, run, env, None)
    figures = {
        "kills": sum(a.killed for a in attempts),
        "kills_in_startup": sum(a.killed and not a.steps for a in attempts),
        "steps": steps,
        "steps_computed_by_killed_attempts": sum(a.steps for a in attempts),
        "steps_kept_at_the_last_kill": num_kept,
    }
    if settings:
        rows = step_rows(read_metrics(run))
        figures["tokens_begun_ahead"] = sum(row["ahead/begun_tokens"] for row in rows)
    return figures | compare(run, reference, has_workers=bool(settings))


# --- stop ---------------------------------------------------------------------------------

STEP = 2  # that is stopped
PARTS = ("rollout", "reward", "update", "checkpoint")
SLOW_S = "BENCHMARK_SLOW_S"  # environment variable: how long one answer's scoring sleeps
REWARD = f"""
import os, time

def digits(completions, **kwargs):
    time.sleep(float(os.environ.get("{SLOW_S}", "0")))
    return [float(sum(c.isdigit() for c in x)) for x in completions]
"""


def stop(folder: Path) -> dict[str, Any]:
    """Send SIGTERM in each part of a step, and Ctrl-C during compilation; resume and compare."""
    config = tiny_run.make_inputs(folder)
    (folder / "reward.py").write_text(REWARD)
    config.write_text(config.read_text() + "Checkpoint.every_steps = 0\nRun.steps = 4\n")
    env = tiny_run.environment(folder / "compiled")
    reference = folder / "never_stopped"
    run_until(config, reference, env, None)
    rows = []
    for part in ("compiling", "warm-up", *PARTS):
        run, log, own_env, number = folder / part, folder / f"{part}.log", dict(env), None
        command, sent = tiny_run.command(config, run), folder / f"{part}.sent"
        if part in PARTS:
            command = [command[0], "-m", "benchmarks.soak.runs", part, str(sent), *command[3:]]
            if part == "checkpoint":
                command.append("--gin.Checkpoint.every_steps=2")
            if part == "reward":
                own_env[SLOW_S] = "1"
        else:
            number = signal.SIGINT if part == "compiling" else signal.SIGTERM
            own_env["JAX_COMPILATION_CACHE_DIR"] = str(folder / f"empty_{part}")
        with started(command, own_env, log) as process:
            if number is not None:
                _wait_for(KillPoint(0, 0.3), process, log)
                sent.write_text(repr(time.time()))
                process.send_signal(number)
            status, end_s = process.wait(TIMEOUT_S), time.time()
        if not sent.exists():
            raise RunFailed(f"it ended by itself:\n{output_of(log)}")
        lines = output_of(log).splitlines()
        run_until(config, run, env, None)
        row = {"part": part, "signal": (number or signal.SIGTERM).name, "exit_status": status}
        row["seconds_to_exit"] = end_s - float(sent.read_text())
        row["last_words"] = lines[-1].replace(str(folder), "FOLDER")
        row["traceback"] = any("Traceback" in line for line in lines)
        rows.append(row | compare(run, reference))
    return {"longest_s": max(row["seconds_to_exit"] for row in rows), "rows": rows}


def train_and_stop(part: str, sent: Path, argv: list[str]) -> int:
    """Run `rl.train` in this process, which sends itself SIGTERM in `part` and notes the time."""
    from reprise.rl.checkpoint import checkpointer
    from reprise.rl.commands import train
    from reprise.rl.engine.engine import Engine
    from reprise.rl.learner import logprobs
    from reprise.rl.run import loop

    begins, is_reached = loop._begins, threading.Event()

    def send() -> None:
        sent.write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGTERM)

    def watched(show: Any, watch: Any, step: int, name: str) -> None:
        begins(show, watch, step, name)
        if (step, name) == (STEP, part):
            is_reached.set()
            # A save continues during the following steps, which take no time.
            threading.Timer(0.0 if part == "checkpoint" else 0.3, send).start()

    owner, name, seconds = {
        "rollout": (Engine, "_round", 0.4),
        "update": (logprobs, "keep_pace", 1.0),
        "checkpoint": (checkpointer.Checkpointer, "_commit", 2.0),
    }.get(part, (None, "", 0.0))
    if owner is not None:  # a reward is slow by itself
        function: Callable[..., Any] = getattr(owner, name)

        def slowed(*args: Any, **options: Any) -> Any:
            if is_reached.is_set():
                time.sleep(seconds)
            return function(*args, **options)

        setattr(owner, name, slowed)
    loop._begins = watched
    return train.main(argv)


if __name__ == "__main__":
    from reprise.rl.runtime.signals import leave

    leave(train_and_stop(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
