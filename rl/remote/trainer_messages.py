"""The messages between a launcher and the programs of the trainer processes, and their checks.

    launcher → program    Where, Start, Listen, Stop
    program → launcher    Address, Said, Done, Failed: one answer to each

`Start` goes on to the process itself, on its standard input.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import IO

from rl.remote.messages import Done, Failed
from rl.remote.wire import Codec

MOST_TEXT = 2**22  # characters of a configuration
MOST_CHARACTERS = 4000  # of a line
MOST_LINES = 10_000  # that are kept until somebody listens
_LENGTH = struct.Struct("<I")


@dataclasses.dataclass(frozen=True)
class Where:
    """Asks at which address of its host process 0 of a job can listen; `loopback` alone, or all."""

    loopback: bool


@dataclasses.dataclass(frozen=True)
class Address:
    """HOST:PORT, which is free now; and what the host calls itself."""

    address: str
    host: str


@dataclasses.dataclass(frozen=True)
class Start:
    """Has a trainer process started, in a folder of its host.

    `config` is the run's configuration as `rl.config.loader.dump` writes it; the process is
    number `process_id`, meets the others at `coordinator`, and finds Ray at `ray_address`.
    """

    config: str
    resume: bool
    directory: str
    coordinator: str
    process_id: int
    ray_address: str


@dataclasses.dataclass(frozen=True)
class Listen:
    """Asks for what the process says, as soon as there is something, or after a second."""


@dataclasses.dataclass(frozen=True)
class Line:
    """A line that the process has written, on stderr or on stdout."""

    is_error: bool
    text: str


@dataclasses.dataclass(frozen=True)
class Said:
    """The lines since the last time; the exit status, or less the signal, once it has ended."""

    lines: tuple[Line, ...]
    status: int | None


@dataclasses.dataclass(frozen=True)
class Stop:
    """Asks the process to save and stop (SIGTERM); `at_once`: ends it."""

    at_once: bool


def _check_start(start: Start) -> None:
    if len(start.config) > MOST_TEXT or start.process_id < 0:
        raise ValueError("expected a configuration and the number of a process")


def _check_said(said: Said) -> None:
    if len(said.lines) > MOST_LINES + 1:
        raise ValueError(f"expected at most {MOST_LINES} lines at once, got {len(said.lines)}")


CODEC = Codec(
    (Where, Address, Start, Listen, Said, Stop, Done, Failed),
    checks={Start: _check_start, Said: _check_said},
)


def write_start(start: Start, stream: IO[bytes]) -> None:
    """Hand `start` to a process that has just begun."""
    message = CODEC.encode(start)
    stream.write(_LENGTH.pack(len(message)) + message)
    stream.flush()


def read_start(stream: IO[bytes]) -> Start:
    """Read what `write_start` wrote. Raises WireError or EOFError for anything else."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError("nobody said what to do")
    start = CODEC.decode(stream.read(_LENGTH.unpack(head)[0]))
    if not isinstance(start, Start):
        raise EOFError(f"expected Start, got {type(start).__name__}")
    return start
