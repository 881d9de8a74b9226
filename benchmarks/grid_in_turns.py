"""The runs of a grid step by step, in turns, so that all of them see the same machine.

    python -m benchmarks.grid_in_turns configs/ablations/countdown.gin --variants plain drafts
    python -m benchmarks.countdown training --folder runs/turns --json

They are `rl.ablate`'s runs and have its folders. Each is a process group, frozen between its steps:
threads that would work ahead get no time then. All of them stay in memory: 3 GB a run of Countdown.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT, progress
from reprise.rl.ablation.grid import Cell, cells
from reprise.rl.gin.loader import dump

TRAIN = "--train"  # a run on command: for this program's children


class Run:
    """A run that takes a step on command; it is frozen at its next step, or has ended."""

    def __init__(self, cell: Cell, folder: Path) -> None:
        self.cell, config = cell, folder / "configs" / f"{cell.folder.name}.gin"
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(dump(cell.config), encoding="utf-8")
        command = [sys.executable, "-m", "benchmarks.grid_in_turns", TRAIN, str(config)]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with (folder / "configs" / f"{cell.folder.name}.log").open("w") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stderr=log, start_new_session=True, bufsize=1, **pipes
            )
        self._freeze()

    def _freeze(self) -> None:
        """Wait for the next step, and freeze."""
        if self._process.stdout.readline():
            os.killpg(self._process.pid, signal.SIGSTOP)
        elif status := self._process.wait():
            progress(f"{self.cell.name} ended with {status}: see its log")

    @property
    def status(self) -> int | None:
        """The exit status; None before the run has ended."""
        return self._process.returncode

    def step(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # it was killed
            self._process.stdin.write("\n")
        self._freeze()

    def close(self) -> None:
        """End the run, unless it has ended."""
        if self.status is None:
            os.killpg(self._process.pid, signal.SIGKILL)


def train(config: str) -> int:
    """Train; every step waits for a line, after one that announces it."""
    from reprise.rl.commands import train as command
    from reprise.rl.run import loop
    from reprise.rl.runtime.signals import Stopped

    answers, train_step = os.fdopen(os.dup(1), "w", buffering=1), loop.train_step
    os.dup2(2, 1)

    def commanded(*arguments: Any) -> Any:
        print("waits", file=answers)
        if not sys.stdin.readline():
            raise Stopped
        return train_step(*arguments)

    loop.train_step = commanded
    # it waits while the others compute
    return command.main([f"--gin_file={config}", "--gin.Run.hang_limit_s=1000000"])


def main(argv: Sequence[str]) -> int:
    if argv[:1] == [TRAIN]:
        return train(argv[1])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("grid", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("runs/turns"))
    parser.add_argument("--variants", nargs="*", default=())
    arguments = parser.parse_args(argv)
    folder = arguments.folder.absolute()
    grid = cells([arguments.grid], [], folder)
    chosen = [cell for cell in grid if not arguments.variants or cell.name in arguments.variants]
    if missing := set(arguments.variants) - {cell.name for cell in chosen}:
        parser.error(f"the grid has no variants {sorted(missing)}")
    runs = list[Run]()
    try:
        for cell in chosen:
            progress(f"{cell.name}: compiling")
            runs.append(Run(cell, folder))
        for step in range(chosen[0].config.run.steps):
            for run in runs[:: -1 if step % 2 else 1]:
                if run.status is None:  # the others go on if one fails
                    progress(f"step {step + 1}: {run.cell.name}")
                    run.step()
        return int(any(run.status for run in runs))
    finally:
        for run in runs:
            run.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
