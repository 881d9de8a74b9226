"""The path of a prompt through the source tree: which module calls which in one training step.

    python -m benchmarks.prompt_path --json --output benchmarks/results/prompt_path.json

One step of a small run with every text drafter is traced in the main thread. A hop is a call
from one of our modules into another, or the return from it; each pair of modules counts once, so
that loops do not. A crossing is a hop between two of the top folders models, spec, sched and rl.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks import environment
from rl import train
from rl.loop import train_loop

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("models", "spec", "sched", "rl")
TRACED_STEP = 4  # the second epoch: there is history to draft from
RUN = (
    "--gin_file=configs/epochs_tiny.gin",
    f"--gin.Run.steps={TRACED_STEP}",
    "--gin.Task.size=4",
    "--gin.Rollout.prompts_per_step=8",
    "--gin.Sampling.max_new_tokens=64",
    "--gin.Engine.slots=8",
    "--gin.Engine.max_nodes=4",
)


class Tracer:
    """Collects (caller, callee) pairs of our modules, as paths below the checkout."""

    def __init__(self) -> None:
        self.calls: set[tuple[str, str]] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        callee = module_of(frame) if event == "call" else None
        if callee is None:
            return
        outer = frame.f_back
        while outer is not None and module_of(outer) is None:
            outer = outer.f_back
        caller = None if outer is None else module_of(outer)
        if caller is not None and caller != callee:
            self.calls.add((caller, callee))


def module_of(frame: FrameType) -> str | None:
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(ROOT):
        return None
    below = path.relative_to(ROOT)
    return below.as_posix() if below.parts[0] in FOLDERS else None


def trace() -> set[tuple[str, str]]:
    tracer, train_step, steps = Tracer(), train_loop.train_step, iter(range(1, TRACED_STEP + 1))

    def traced_step(*args: Any, **kwargs: Any) -> Any:
        if next(steps) < TRACED_STEP:
            return train_step(*args, **kwargs)
        sys.setprofile(tracer)
        try:
            return train_step(*args, **kwargs)
        finally:
            sys.setprofile(None)

    train_loop.train_step = traced_step
    try:
        with tempfile.TemporaryDirectory() as folder:
            if train.main([*RUN, f"--gin.Run.directory={folder}/run"]):
                raise SystemExit("expected the traced run to end well, got an error (above)")
    finally:
        train_loop.train_step = train_step
    return tracer.calls


def summary(calls: set[tuple[str, str]]) -> dict[str, int]:
    tops = [(a.split("/")[0], b.split("/")[0]) for a, b in calls]
    return {
        "modules": len({module for call in calls for module in call}),
        "hops": 2 * len(calls),
        "crossings": 2 * sum(a != b for a, b in tops),
    }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prompt_path", description=__doc__)
    environment.add_output_flags(parser)
    args = parser.parse_args(argv)
    figures = summary(trace())
    environment.show(
        environment.record("benchmarks.prompt_path", ("jax",)) | figures, args, figures
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
