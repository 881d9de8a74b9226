"""Processes of a run find one another at process 0's address, before jax does.

Jax aborts the process, with pages of stack, if one is missing or starts twice; here that is a
sentence of process 0 to all.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any

from rl.cluster.config import ClusterConfig

NAME = "reprise"
MAX_BYTES = 2**16  # of a message
HELLO_S = 2.0  # for the message of a program that connects
RETRY_S = 0.2


def meet(config: ClusterConfig) -> None:
    """Return once all processes have met. Raises ValueError, in all of them if possible."""
    until_s = time.monotonic() + config.deadline_s
    if config.process_id == 0:
        _lead(config, until_s)
    else:
        _follow(config, until_s)


def _lead(config: ClusterConfig, until_s: float) -> None:
    """Wait for the others and send them how it went."""
    assert config.num_processes is not None
    num, numbers, wrong = config.num_processes, {0}, None
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listen(config))
        peers: list[socket.socket] = []
        while wrong is None and len(numbers) < num:
            try:
                listener.settimeout(_left_s(until_s))
                peer = stack.enter_context(listener.accept()[0])
            except TimeoutError:
                wrong = _missing(config, numbers)
                continue
            try:
                name, index, count = _receive(peer, HELLO_S)
                if name != NAME:
                    continue
            except (OSError, ValueError, TypeError):
                continue  # another program
            peers.append(peer)
            if count != num:
                wrong = (
                    f"expected the same Cluster.num_processes in all processes, got {count} in "
                    f"process {index} and {num} in process 0"
                )
            elif index in numbers or not 0 < index < num:
                wrong = (
                    f"expected one process of each Cluster.process_id from 0 to {num - 1}, got "
                    f"two with {index}: give each its own"
                )
            numbers.add(index)
        for peer in peers:
            with contextlib.suppress(OSError):
                _send(peer, [NAME, wrong])
    if wrong is not None:
        raise ValueError(wrong)


def _follow(config: ClusterConfig, until_s: float) -> None:
    """Send this process's number, and receive how it went."""
    where, limit = f"Cluster.coordinator={config.coordinator!r}", f"{config.deadline_s:g} s"
    while True:
        try:
            address = config.host, config.port
            lead = socket.create_connection(address, _left_s(until_s))
            break
        except OSError as error:
            if time.monotonic() > until_s:
                raise ValueError(
                    f"{where} did not answer within Cluster.deadline_s={limit}: "
                    f"{error.strerror or error}; is process 0 running there?"
                ) from error
        time.sleep(RETRY_S)
    with lead:
        try:
            _send(lead, [NAME, config.process_id, config.num_processes])
            # process 0 may have started later, and waits as long as this one
            name, wrong = _receive(lead, _left_s(until_s) + config.deadline_s)
            if name != NAME:
                raise ValueError("another name")
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(
                f"{where} is no process 0 of this run: it did not answer within "
                f"Cluster.deadline_s={limit} ({error}); is the port another program's?"
            ) from error
    if wrong is not None:
        raise ValueError(wrong)


def _missing(config: ClusterConfig, present: set[int]) -> str:
    assert config.num_processes is not None
    absent = [i for i in range(config.num_processes) if i not in present]
    shown = ", ".join(map(str, absent[:8])) + (" …" if len(absent) > 8 else "")
    return (
        f"expected {config.num_processes} processes at Cluster.coordinator="
        f"{config.coordinator!r}, got {len(present)} within Cluster.deadline_s="
        f"{config.deadline_s:g} s: process {shown} did not come; is it running, and can it reach "
        "this address?"
    )


def _listen(config: ClusterConfig) -> socket.socket:
    """Listen at process 0's address, and nowhere else."""
    try:
        family, *_, address = socket.getaddrinfo(config.host, config.port)[0]
        return socket.create_server(address[:2], family=family, backlog=config.num_processes)
    except OSError as error:
        raise ValueError(
            f"Cluster.coordinator={config.coordinator!r}: process 0 cannot listen there: "
            f"{error.strerror or error}; is the port taken, or the host another one?"
        ) from error


def _send(peer: socket.socket, message: list[Any]) -> None:
    peer.sendall(json.dumps(message).encode() + b"\n")


def _receive(peer: socket.socket, limit_s: float) -> list[Any]:
    """Return one message. Raises OSError, or ValueError if it is none."""
    peer.settimeout(limit_s)
    with peer.makefile("rb") as stream:
        return list(json.loads(stream.readline(MAX_BYTES)))


def _left_s(until_s: float) -> float:
    return max(0.01, until_s - time.monotonic())
