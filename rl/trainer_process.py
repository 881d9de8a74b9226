"""`python -m rl.trainer_process`: one trainer process of a run on Ray.

Its standard input has a `rl.ray_trainers.Start`, and is open while its actor lives: at its end
the process stops as if it were signalled.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import BinaryIO

from rl import run_process
from rl.config import TrainConfig
from rl.gin.loader import load
from rl.inputs import open_inputs
from rl.ray_trainers import Start
from rl.runtime import host_memory
from rl.runtime.exit_codes import EXIT_USAGE
from rl.runtime.progress import say
from rl.runtime.run_files import CONFIG_FILE
from rl.runtime.signals import leave
from rl.train import train


def main(orders: BinaryIO) -> int:
    """Do what is read from `orders`; returns the exit status."""
    host_memory.bound_arenas()
    start = Start(**json.loads(orders.readline()))
    threading.Thread(target=_stop_at_end, args=(orders,), name="launcher", daemon=True).start()
    try:
        config = _config(start)
        folder = Path(config.run.directory or "").absolute()
        before = load(TrainConfig, [folder / CONFIG_FILE]) if start.resume else None
        inputs = open_inputs(config)
    except (ValueError, OSError, ImportError) as error:
        say(f"error: {error}", sys.stderr)
        return EXIT_USAGE
    place = run_process.Place(start.coordinator, start.process_id, start.ray_address)
    return run_process.run(config, inputs, folder, before, train, place)


def _config(start: Start) -> TrainConfig:
    """The configuration that `rl.gin.loader.dump` wrote; it has a line for each field."""
    lines = start.config.splitlines()
    return load(TrainConfig, [], [line for line in lines if line and not line.startswith("#")])


def _stop_at_end(orders: BinaryIO) -> None:
    """A thread: wait until the launcher's program has closed what it wrote to."""
    orders.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    leave(main(sys.stdin.buffer))
