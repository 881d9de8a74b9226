"""Runs that are told to stop in every part of a step: seconds to the exit, and what stands.

    python -m benchmarks.stops --json --output benchmarks/results/stops.json

A tiny run gets SIGTERM in its warm-up, and in the rollout, scoring, update and save of its second
step; another gets Ctrl-C while it compiles with an empty cache. So that the signal comes in the
midst of it, the part of that step is made seconds long (its fetches, scores, passes or writing
sleep). Each is resumed to its end, or begun again where nothing was saved, and compared bit by
bit with a run that nobody stopped. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import environment, resume, tiny_run

STEP = 2  # in which the parts are met
PARTS = ("rollout", "reward", "update", "checkpoint")
TIMEOUT_S = 300.0
SLOW_S = "BENCHMARK_SLOW_S"  # in the environment: how long one answer's scoring sleeps
REWARD = """
import os, time

def digits(completions, **kwargs):
    time.sleep(float(os.environ.get("BENCHMARK_SLOW_S", "0")))
    return [float(sum(c.isdigit() for c in x)) for x in completions]
"""


def play(part: str, told: Path, argv: list[str]) -> int:
    """`rl.train` in this process, which sends itself SIGTERM in `part` and notes when."""
    from rl import train
    from rl.checkpoint import checkpointer
    from rl.engine.engine import Engine
    from rl.learner import logprobs
    from rl.loop import train_loop

    begins, reached = train_loop._begins, threading.Event()

    def signalled() -> None:
        told.write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGTERM)

    def noted(show: Any, watch: Any, step: int, name: str) -> None:
        begins(show, watch, step, name)
        if (step, name) == (STEP, part):
            reached.set()
            # a save goes on behind the steps that follow, which take no time
            threading.Timer(0.0 if part == "checkpoint" else 0.3, signalled).start()

    def slow(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def slowed(*args: Any, **options: Any) -> Any:
            if reached.is_set():
                time.sleep(seconds)
            return function(*args, **options)

        return slowed

    train_loop._begins = noted
    if part == "rollout":
        Engine._round = slow(Engine._round, 0.4)  # type: ignore[method-assign]
    elif part == "update":
        logprobs.keep_pace = slow(logprobs.keep_pace, 1.0)
    elif part == "checkpoint":
        commit = slow(checkpointer.Checkpointer._commit, 2.0)
        checkpointer.Checkpointer._commit = commit  # type: ignore[method-assign]
    return train.main(argv)


def stopped(
    command: list[str], env: dict[str, str], log: Path, told: Path, number: signal.Signals | None
) -> tuple[float, int]:
    """Seconds from the signal to the exit, and the status; `number` is sent while it compiles."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=tiny_run.ROOT, env=env, stdout=output, stderr=output
        )
        try:
            limit_s = time.monotonic() + TIMEOUT_S
            while number is not None and b"compiling" not in log.read_bytes():
                if process.poll() is not None or time.monotonic() > limit_s:
                    raise resume.RunFailed(log.read_text(errors="replace"))
                time.sleep(0.01)
            if number is not None:
                time.sleep(0.3)
                told.write_text(repr(time.time()))
                process.send_signal(number)
            status = process.wait(TIMEOUT_S)
            ended_s = time.time()
        finally:
            process.kill()
            process.wait()
    if not told.exists():
        raise resume.RunFailed(f"it ended by itself:\n{log.read_text(errors='replace')}")
    return ended_s - float(told.read_text()), status


def measure(folder: Path) -> list[dict[str, Any]]:
    """A row for each part."""
    config = tiny_run.make_inputs(folder)
    (folder / "reward.py").write_text(REWARD)
    config.write_text(config.read_text() + "Checkpoint.every_steps = 0\nRun.steps = 4\n")
    env = tiny_run.environment(folder / "compiled")
    reference = folder / "never_stopped"
    resume.run_until(config, reference, env, None)
    rows = []
    for part in ("compiling", "warm-up", *PARTS):
        run = folder / part
        told, log, mine = folder / f"{part}.told", folder / f"{part}.log", dict(env)
        command, number = tiny_run.command(config, run), None
        if part in PARTS:
            play_it = ["-m", "benchmarks.stops", "--play", part, str(told), "--"]
            command = [command[0], *play_it, *command[3:]]
            if part == "checkpoint":
                command.append("--gin.Checkpoint.every_steps=2")
            if part == "reward":
                mine[SLOW_S] = "1"
        else:
            number = signal.SIGINT if part == "compiling" else signal.SIGTERM
            mine["JAX_COMPILATION_CACHE_DIR"] = str(folder / f"empty_{part}")
        seconds, status = stopped(command, mine, log, told, number)
        said = log.read_text(errors="replace").splitlines()
        resume.run_until(config, run, env, None)
        rows.append(
            {
                "part": part,
                "signal": (number or signal.SIGTERM).name,
                "seconds_to_exit": seconds,
                "exit_status": status,
                "last_words": said[-1].replace(str(folder), "FOLDER"),
                "traceback": any("Traceback" in line for line in said),
                **resume.compare(run, reference),
            }
        )
        print(f"{part}: {seconds:.2f} s, status {status}, {said[-1]}", file=sys.stderr)
    return rows


def main() -> int:
    if sys.argv[1:2] == ["--play"]:
        from rl.runtime.signals import leave

        part, told = sys.argv[2:4]
        leave(play(part, Path(told), sys.argv[5:]))
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stops", description=__doc__)
    environment.add_output_flags(parser)
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder))
    packages = ("jax", "jaxlib", "orbax-checkpoint", "numpy")
    result = environment.record("benchmarks.stops", packages) | {"rows": rows}
    figures = {row["part"]: f"{row['seconds_to_exit']:.2f} s" for row in rows}
    environment.show(result, args, figures)
    late = any(r["seconds_to_exit"] > (3 if r["part"] == "compiling" else 10) for r in rows)
    differs = any(not v for r in rows for k, v in r.items() if k.endswith("_equal"))
    return int(late or differs or any(r["traceback"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
