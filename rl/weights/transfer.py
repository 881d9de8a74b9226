"""Payloads from program to program by jax's transfer server, in host memory.

Facts that this rests on (jax 0.10 and 0.12): an offer is used up by the first pull of its number
and its bytes are kept until then, or until its timeout has passed and another offer is made. A pull
waits for ever for a number that nobody offers, or for an address where nobody is; its own timeout
is looked at only when the other end makes an offer. So every pull is watched from here, and what is
given up has its connection cut, which ends the pull. Numbers are never used twice.
"""

from __future__ import annotations

import datetime
import ipaddress
import itertools
import secrets
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from rl.runtime.waits import Hang, Patience, result_of
from rl.weights.errors import CarrierError, DamagedWeights
from rl.weights.interface import Payload
from rl.weights.parts import Slice, cut, joined, slices_of

LOOPBACK = "127.0.0.1:0"
_TRANSFER_BYTES = 64 * 2**20  # of one copy inside the server
_AHEAD = 4  # parts that are pulled at once


class TransferCarrier:
    """Carries payloads by a transfer server on this process's CPU backend.

    One per process. `address` is the host and port that others can reach; port 0 takes a free one.
    """

    def __init__(
        self,
        address: str = LOOPBACK,
        *,
        connections: int = 2,
        transfer_bytes: int = _TRANSFER_BYTES,
        ahead: int = _AHEAD,
    ) -> None:
        address = _numeric(address)
        try:
            from jax.experimental import transfer

            device = jax.local_devices(backend="cpu")[0]
        except (ImportError, AttributeError) as error:
            raise ValueError(
                "Weights.transport = 'transfer' needs jax's transfer server, which jaxlib has not "
                "got on this system: set it to 'object_store'"
            ) from error
        except RuntimeError as error:
            raise ValueError(
                "expected jax to have its CPU backend for transfers of weights, got none: add cpu "
                "to JAX_PLATFORMS"
            ) from error
        self._sharding = SingleDeviceSharding(device)
        others = [address.rpartition(":")[0] + ":0"] * connections
        try:
            self._server = transfer.start_transfer_server(
                device.client, address, others, transfer_size=transfer_bytes
            )
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(
                f"expected a free port and an address of this host for weights, got {address}: "
                f"{str(error)[:200]}"
            ) from error
        self._ahead = ahead
        self._numbers = itertools.count(secrets.randbits(30) << 32)
        self._connections: dict[str, Any] = {}

    @property
    def address(self) -> str:
        return self._server.address()

    def hold(self, payload: Payload, part_bytes: int) -> list[list[jax.Array]]:
        parts = cut([b.size for b in payload], part_bytes)
        return [jax.device_put(slices_of(payload, part), self._sharding) for part in parts]

    def offer(self, held: list[list[jax.Array]], lease_s: float) -> Any:
        until = datetime.datetime.now() + datetime.timedelta(seconds=lease_s)
        numbers = [next(self._numbers) for _ in held]
        for number, arrays in zip(numbers, held, strict=True):
            self._server.await_pull(number, arrays, timeout=until)
        return {"address": self.address, "numbers": numbers}

    def drop(self, held: list[list[jax.Array]]) -> None:
        """Nothing to do: the server has what is still offered, until it is pulled or its lease."""

    def receive(
        self, where: Any, sizes: Sequence[int], part_bytes: int, deadline_s: float
    ) -> list[np.ndarray]:
        parts = cut(sizes, part_bytes)
        address, numbers = _checked(where, len(parts))
        if not parts:
            return joined(sizes, ())
        done: list[int] = []
        pull = _in_thread(
            lambda connection: joined(sizes, self._parts(connection, parts, numbers, done)),
            self._connection(address),
        )
        what = f"weights from {address}"
        try:
            return result_of(pull, what, Patience(deadline_s), lambda: len(done))
        except (Hang, jax.errors.JaxRuntimeError) as error:
            self._cut(address)
            raise CarrierError(
                f"expected {what}, {len(parts)} parts, got {len(done)} within {deadline_s:g} s of "
                f"each other ({str(error)[:200]}): ask for another offer"
            ) from error

    def _parts(
        self, connection: Any, parts: list[list[Slice]], numbers: list[int], done: list[int]
    ) -> Iterator[tuple[list[Slice], list[np.ndarray]]]:
        """Pull parts, a few ahead of the one that is waited for."""
        pulled: deque[list[jax.Array]] = deque()
        for at, part in enumerate(parts):
            while len(pulled) < self._ahead and at + len(pulled) < len(parts):
                n = at + len(pulled)
                specs = [
                    jax.ShapeDtypeStruct((s.num_bytes,), np.uint8, sharding=self._sharding)
                    for s in parts[n]
                ]
                pulled.append(connection.pull(numbers[n], specs))
            arrays = jax.block_until_ready(pulled.popleft())
            done.append(at)
            yield part, [np.asarray(array) for array in arrays]

    def _connection(self, address: str) -> Any:
        if address not in self._connections:
            try:
                self._connections[address] = self._server.connect(address)
            except jax.errors.JaxRuntimeError as error:
                raise DamagedWeights(
                    f"expected the address HOST:PORT of a transfer server, got {address!r:.80}"
                ) from error
        return self._connections[address]

    def _cut(self, address: str) -> None:
        """End what still waits on a connection, so that no thread hangs when the process ends."""
        connection = self._connections.pop(address, None)
        poison = getattr(connection, "_poison_connection", None)
        if poison is not None:
            poison()


def _numeric(address: str) -> str:
    """Return HOST:PORT with the host in numbers: jax takes any name for all addresses of a host."""
    host, _, port = address.rpartition(":")
    try:
        numbers = socket.gethostbyname(host) if host[:1].isalpha() else host.strip("[]")
        ip = ipaddress.ip_address(numbers)
        right = 0 <= int(port) < 2**16 and not ip.is_unspecified
    except (ValueError, OSError):
        right = False
    if not right:
        raise ValueError(
            f"expected HOST:PORT by which other programs reach this one, got {address!r:.80}"
        )
    return f"[{ip}]:{port}" if ip.version == 6 else f"{ip}:{port}"


def _checked(where: Any, parts: int) -> tuple[str, list[int]]:
    fields = where if type(where) is dict else {}
    address, numbers = fields.get("address"), fields.get("numbers")
    if type(address) is not str or len(address) > 300:
        raise DamagedWeights(f"expected the address of a transfer server, got {address!r:.80}")
    if type(numbers) is not list or len(numbers) != parts:
        raise DamagedWeights(f"expected the numbers of {parts} parts, got {numbers!r:.200}")
    if not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
        raise DamagedWeights(f"expected numbers from 0 to 2**63 - 1, got {numbers!r:.200}")
    return address, numbers


def _in_thread(work: Any, argument: Any) -> Future[list[np.ndarray]]:
    """Run in a daemon thread, as a pull that hangs cannot be ended in every version of jax."""
    future: Future[list[np.ndarray]] = Future()

    def run() -> None:
        try:
            future.set_result(work(argument))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return future
