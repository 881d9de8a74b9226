"""The training loop, the rollout engine and the commands, built on `models`, `spec` and `sched`."""

import os
import re
import signal
import sys
from types import FrameType


def _stop(number: int, frame: FrameType | None) -> None:
    """Exit a command with one line; libraries swallow a KeyboardInterrupt in their callbacks."""
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"stopped\n")
    os._exit(128 + number)


def _is_command() -> bool:
    """Return whether Python imports this package in order to start `python -m rl.COMMAND`."""
    command = r"(reprise\.)?rl\.\w+"
    return sys.argv[:1] == ["-m"] and any(re.fullmatch(command, x) for x in sys.orig_argv)


if _is_command():
    signal.signal(signal.SIGINT, _stop)
