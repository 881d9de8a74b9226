"""Processes of a run find one another at process 0's address, before jax does.

    process 0 listens → each other one says who it is and what it runs → all hear "go", or why not

Jax ends the process, with pages of its library's stack, where one is missing or starts twice. Here
that is a sentence, within the deadline. What comes in is JSON of a known form, or not listened to.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from rl.cluster.config import ClusterConfig

FORM = "reprise processes 1"
MOST_BYTES = 2**18  # of one message: a configuration is ten thousand
RETRY_S = 0.2
Identity = Mapping[str, str]
Mismatch = Callable[[list[Mapping[str, str]]], str | None]


def meet(config: ClusterConfig, identity: Identity, mismatch: Mismatch) -> None:
    """Return once all processes have met; their identities are alike, as `mismatch` sees it.

    Raises ValueError, in all of them if it can be told, with what is wrong and how to mend it.
    """
    assert config.num_processes is not None and config.process_id is not None
    until_s = time.monotonic() + config.deadline_s
    if config.process_id == 0:
        _lead(config, identity, mismatch, until_s)
    else:
        _follow(config, identity, until_s)


def _lead(config: ClusterConfig, identity: Identity, mismatch: Mismatch, until_s: float) -> None:
    """Wait for the others and tell all of them how it went."""
    assert config.num_processes is not None
    identities: dict[int, dict[str, str]] = {0: dict(identity)}
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listen(config))
        present: list[socket.socket] = []
        wrong = None
        while wrong is None and len(identities) < config.num_processes:
            try:
                guest = stack.enter_context(_accept(listener, until_s))
                hello = _checked(_receive(guest, min(until_s, time.monotonic() + 2)))
            except TimeoutError:
                wrong = _missing(config, set(identities)) if time.monotonic() > until_s else None
                continue
            except (OSError, ValueError):
                continue  # not one of ours
            present.append(guest)
            index, count = hello["process_id"], hello["num_processes"]
            if count != config.num_processes:
                wrong = (
                    f"expected the same Cluster.num_processes in all processes, got {count} in "
                    f"process {index} and {config.num_processes} in process 0"
                )
            elif index in identities or not 0 < index < count:
                wrong = (
                    f"expected one process of each Cluster.process_id from 0 to {count - 1}, got "
                    f"two with {index}: give each its own"
                )
            identities[index] = hello["identity"]
        wrong = wrong or mismatch([identities[i] for i in sorted(identities)])
        for guest in present:
            with contextlib.suppress(OSError):
                _send(guest, {"form": FORM, "error": wrong})
    if wrong is not None:
        raise ValueError(wrong)


def _follow(config: ClusterConfig, identity: Identity, until_s: float) -> None:
    """Say who this is, and hear how it went."""
    where, limit = f"Cluster.coordinator={config.coordinator!r}", f"{config.deadline_s:g} s"
    why = "no time to try"
    while True:
        try:
            host = socket.create_connection((config.host, config.port), _left_s(until_s))
            break
        except OSError as error:
            why = str(error.strerror or error)
        if time.monotonic() > until_s:
            raise ValueError(
                f"{where} did not answer within Cluster.deadline_s={limit}: {why}; is process 0 "
                "running there?"
            )
        time.sleep(RETRY_S)
    hello = {
        "form": FORM,
        "process_id": config.process_id,
        "num_processes": config.num_processes,
        "identity": dict(identity),
    }
    with host:
        try:
            _send(host, hello)
            # process 0 may have begun later, and waits as long as this one
            told = _receive(host, until_s + config.deadline_s)
            if told.get("form") != FORM or not isinstance(told.get("error"), str | None):
                raise ValueError("another form")
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{where} is no process 0 of this run: it did not say within "
                f"Cluster.deadline_s={limit} that all are there ({error}); is the port another "
                "program's?"
            ) from error
    if told["error"] is not None:
        raise ValueError(told["error"])


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
        family, *_, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[
            0
        ]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(config.num_processes or 1)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ValueError(
            f"Cluster.coordinator={config.coordinator!r}: process 0 cannot listen there: "
            f"{error.strerror or error}; is the port taken, or the host another one?"
        ) from error
    return listener


def _accept(listener: socket.socket, until_s: float) -> socket.socket:
    listener.settimeout(_left_s(until_s))
    return listener.accept()[0]


def _send(peer: socket.socket, message: Mapping[str, Any]) -> None:
    peer.sendall(json.dumps(message).encode() + b"\n")


def _receive(peer: socket.socket, until_s: float) -> dict[str, Any]:
    """Return one message. Raises TimeoutError, OSError, or ValueError where it is none."""
    found = b""
    while not found.endswith(b"\n"):
        peer.settimeout(_left_s(until_s))
        some = peer.recv(2**16)
        if not some:
            raise ValueError("it hung up")
        found += some
        if len(found) > MOST_BYTES:
            raise ValueError("it says too much")
    message = json.loads(found)
    if not isinstance(message, dict):
        raise ValueError("another form")
    return message


def _checked(hello: dict[str, Any]) -> dict[str, Any]:
    """Return what a process says of itself. Raises ValueError where it is of another form."""
    known = {"form", "process_id", "num_processes", "identity"}
    whole = all(type(hello.get(name)) is int for name in ("process_id", "num_processes"))
    identity = hello.get("identity")
    if hello.keys() != known or hello["form"] != FORM or not whole:
        raise ValueError("another form")
    if not isinstance(identity, dict) or not all(isinstance(x, str) for x in identity.values()):
        raise ValueError("another form")
    return hello


def _left_s(until_s: float) -> float:
    return max(0.01, until_s - time.monotonic())
