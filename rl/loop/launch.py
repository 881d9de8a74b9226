"""A run whose trainer processes are actors of Ray, as the user's program sees it.

    this program → Ray: one actor a trainer process → a child of it: rl/loop/trainer_process.py

Process 0 has the rollout workers, their schedulers and the coordinator, and writes the run folder.
"""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TextIO

from rl.config.loader import dump
from rl.loop import ray_workers, run_folder
from rl.loop.config_checks import trainer_devices
from rl.loop.experiment import TrainConfig
from rl.remote.link import Link
from rl.remote.trainer_group import Shared, StoppedAtOnce, TrainerGroup
from rl.remote.trainer_messages import CODEC, Line
from rl.runtime.exit_codes import EXIT_FAILED, EXIT_STOPPED
from rl.runtime.progress import say
from rl.runtime.waits import ProgramLost

LAST_LINES = 40  # of a process that fails without an error of its own


def launch(config: TrainConfig, folder: Path, *, resume: bool) -> int:
    """Start the trainer processes and show what they say; returns the run's exit status.

    SIGTERM and Ctrl-C stop them as they would stop one process, at the last whole step.
    """
    from rl.ray_roles.session import open_ray
    from rl.ray_roles.trainers import open_trainers

    cluster, limit_s = config.cluster, config.cluster.deadline_s
    count, start_s = cluster.num_trainers, 2 * limit_s
    cpus = count + ray_workers.num_cpus(config)
    screen = Screen(sys.stdout, sys.stderr)
    try:
        with (
            open_ray(cluster.address, cpus, limit_s) as address,
            open_trainers(count, trainer_devices(config), start_s) as channels,
        ):
            links = [
                Link(f"program {i}", channel, limit_s, CODEC) for i, channel in enumerate(channels)
            ]
            with StopSignals() as signals, TrainerGroup(links, limit_s, screen.show) as group:
                shared = Shared(dump(config), resume, os.getcwd(), address)
                group.start(shared, loopback=cluster.address is None, start_s=start_s)
                status = group.follow(lambda: signals.count)
                if status == EXIT_FAILED and group.first_to_fail is not None:
                    screen.explain(group.first_to_fail)
    except StoppedAtOnce:
        step, standing = run_folder.standing(folder)
        say(f"stopped at once; {standing}", sys.stderr)
        return EXIT_STOPPED if step else 128 + signals.last
    except ProgramLost as error:
        say(f"error: {error}; {run_folder.standing(folder)[1]}", sys.stderr)
        return EXIT_FAILED
    if status == 128 + signal.SIGTERM and signals.count:  # which is what they are told to stop by
        return 128 + signals.last
    return status


class StopSignals:
    """Counts SIGTERM and Ctrl-C while it is entered as a context manager."""

    def __init__(self) -> None:
        self.count, self.last = 0, signal.SIGTERM
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._exits.callback(signal.signal, number, signal.signal(number, self._note))
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def _note(self, number: int, frame: object) -> None:
        self.count, self.last = self.count + 1, signal.Signals(number)


class Screen:
    """Shows the user all that process 0 says, and errors of the others with their number.

    Where several say the same error, it is shown once.
    """

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out, self._err = out, err
        self._errors: set[str] = set()
        self._explained: set[int] = set()  # processes that have named an error
        self._hidden: dict[int, collections.deque[str]] = {}

    def show(self, index: int, line: Line) -> None:
        """Show a line of a process, or not."""
        text = line.text.removeprefix(f"process {index}: ")
        if text.startswith("error"):
            self._explained.add(index)
            if text in self._errors:
                return
            self._errors.add(text)
        elif index and not text.startswith("warning"):
            hidden = self._hidden.setdefault(index, collections.deque(maxlen=LAST_LINES))
            hidden.append(text)
            return
        self._print(index, text, self._err if line.is_error else self._out)

    def explain(self, index: int) -> None:
        """Show the last that a process said which has failed without naming an error."""
        if index not in self._explained:
            for text in self._hidden.pop(index, ()):
                self._print(index, text, self._err)

    def _print(self, index: int, text: str, stream: TextIO) -> None:
        say(f"process {index}: {text}" if index else text, stream)
