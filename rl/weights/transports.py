"""Transports between programs, by name."""

from __future__ import annotations

from rl.weights.config import WeightsConfig
from rl.weights.interface import Carrier
from rl.weights.object_store import ObjectStoreCarrier, Store
from rl.weights.transfer import LOOPBACK, TransferCarrier


def make_carrier(
    config: WeightsConfig, *, address: str = LOOPBACK, store: Store | None = None
) -> Carrier:
    """Return one process's end of the transport that the configuration names.

    `address` is where its transfer server listens, `store` what `object_store` puts payloads in.
    """
    if config.transport == "transfer":
        return TransferCarrier(address)
    if config.transport == "object_store":
        if store is None:
            raise ValueError("Weights.transport = 'object_store' needs a store, got none")
        return ObjectStoreCarrier(store)
    raise ValueError(
        "Weights.transport: expected 'transfer' or 'object_store' between programs, got 'jit', "
        "which is for one program that has the devices of both (rl.weights.in_program)"
    )
