"""A run with trainer processes that are children of Ray actors: the launcher and a child.

    `launch` in the user's program → an actor for each trainer → its child, this module

Process 0 has the rollout workers and their scheduler, and writes the run folder.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import BinaryIO, TextIO

from reprise.rl.assembly import ray_run
from reprise.rl.cluster.actors import Actor, ActorSettings
from reprise.rl.gin.loader import dump, load
from reprise.rl.run import run_process
from reprise.rl.run.ray_trainers import COMMAND, Start, StoppedAtOnce, Trainer, run_trainers
from reprise.rl.runtime import host_memory
from reprise.rl.runtime.devices import keep_order
from reprise.rl.runtime.exit_codes import EXIT_FAILED, EXIT_STOPPED, EXIT_USAGE
from reprise.rl.runtime.progress import say
from reprise.rl.runtime.run_files import CONFIG_FILE
from reprise.rl.runtime.signals import leave, stop_signals
from reprise.rl.runtime.waits import ProgramLost
from reprise.rl.settings import run_folder
from reprise.rl.settings.checks import trainer_devices
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import open_inputs

LAST_LINES = 40  # of a process that fails without an error message


def launch(config: TrainConfig, folder: Path, *, resume: bool) -> int:
    """Start the trainer processes and show their output; return the exit status of the run.

    SIGTERM and Ctrl-C stop the processes like a single process, at the last whole step.
    """
    from reprise.rl.cluster.ray_session import open_ray, reserve

    cluster = config.cluster
    limit_s = config.cluster.deadline_s
    count = cluster.num_trainers
    screen = Screen(sys.stdout, sys.stderr)
    settings = ActorSettings({}, limit_s, 2 * limit_s)
    target = f"{Trainer.__module__}:{Trainer.__name__}"
    setting = f"Cluster.num_processes={count}"
    devices = trainer_devices(config)
    try:
        with (
            open_ray(cluster.address, count + ray_run.num_cpus(config), limit_s) as address,
            reserve(count, setting, 2 * limit_s, devices=devices) as room,
            StopSignals() as signals,
        ):
            names = [f"trainer process {i} of {count}" for i in range(count)]
            actors = [
                Actor(name, target, (COMMAND,), settings, room, i, restarts=False)
                for i, name in enumerate(names)
            ]
            start = Start(dump(config), resume, os.getcwd(), "", 0, address)
            host = "127.0.0.1" if cluster.address is None else None
            statuses = run_trainers(
                actors, start, host, limit_s, screen.show, lambda: signals.count
            )
    except StoppedAtOnce:
        step, last_saved = run_folder.standing(folder)
        say(f"stopped at once; {last_saved}", sys.stderr)
        return EXIT_STOPPED if step else 128 + signals.last
    except ProgramLost as error:
        say(f"error: {error}; {run_folder.standing(folder)[1]}", sys.stderr)
        return EXIT_FAILED
    failed, status = next(((i, s) for i, s in statuses.items() if s), (0, 0))
    if status == EXIT_FAILED:
        screen.explain(failed)
    if status == 128 + signal.SIGTERM and signals.count:  # the signal that stops processes
        return 128 + signals.last
    return status


class StopSignals:
    """A context manager that counts `stop_signals`."""

    def __init__(self) -> None:
        self.count = 0
        self.last = signal.SIGTERM
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> StopSignals:
        for number in stop_signals():
            self._exits.callback(signal.signal, number, signal.signal(number, self._note))
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def _note(self, number: int, frame: object) -> None:
        self.count = self.count + 1
        self.last = signal.Signals(number)


class Screen:
    """Shows the output of process 0, and errors of other processes with their number.

    An error that several processes report is shown once.
    """

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out = out
        self._err = err
        self._errors: set[str] = set()
        self._explained: set[int] = set()  # processes that have reported an error
        self._hidden: dict[int, collections.deque[str]] = {}

    def show(self, index: int, is_error: bool, text: str) -> None:
        """Show a line of a process, unless it is routine output or a repeated error."""
        text = text.removeprefix(f"process {index}: ")
        if text.startswith("error"):
            self._explained.add(index)
            if text in self._errors:
                return
            self._errors.add(text)
        elif index and not text.startswith("warning"):
            hidden = self._hidden.setdefault(index, collections.deque(maxlen=LAST_LINES))
            hidden.append(text)
            return
        self._print(index, text, self._err if is_error else self._out)

    def explain(self, index: int) -> None:
        """Show the last lines of a process that failed without an error message."""
        if index not in self._explained:
            for text in self._hidden.pop(index, ()):
                self._print(index, text, self._err)

    def _print(self, index: int, text: str, stream: TextIO) -> None:
        say(f"process {index}: {text}" if index else text, stream)


def main(orders: BinaryIO) -> int:
    """Run a trainer process with the `Start` read from `orders`; return the exit status.

    `orders` stays open while the actor of the process lives. Once it is closed, the process stops
    as if signaled.
    """
    host_memory.bound_arenas()
    start = Start(**json.loads(orders.readline()))
    threading.Thread(target=_stop_at_end, args=(orders,), name="launcher", daemon=True).start()
    try:
        config = _config(start)
        keep_order(config.numerics.same_bits)
        folder = Path(config.run.directory or "").absolute()
        before = load(TrainConfig, [folder / CONFIG_FILE]) if start.resume else None
        inputs = open_inputs(config)
    except (ValueError, OSError, ImportError) as error:
        say(f"error: {error}", sys.stderr)
        return EXIT_USAGE
    place = run_process.Place(start.coordinator, start.process_id, start.ray_address)
    return run_process.run(config, inputs, folder, before, place)


def _config(start: Start) -> TrainConfig:
    """Return the configuration that `dump` wrote, with one line per field."""
    lines = start.config.splitlines()
    return load(TrainConfig, [], [line for line in lines if line and not line.startswith("#")])


def _stop_at_end(orders: BinaryIO) -> None:
    """Wait in a thread until the actor program closes `orders`, then stop this process."""
    orders.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    leave(main(sys.stdin.buffer))
