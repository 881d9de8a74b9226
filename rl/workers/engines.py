"""The engines of workers, made in one place for every program, and their devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from reprise.models.config import ModelConfig
from reprise.models.sharding import rollout_mesh
from reprise.rl.engine.engine import Engine
from reprise.rl.slots.config import EngineConfig
from reprise.rl.slots.lockstep import Lockstep
from reprise.rl.workers.config import SchedConfig


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """The settings that the engines of a run share; other programs can receive them.

    `dtype` is a name. Hidden states are kept as in `ModelRunner.feature_layers`. Without `may_cut`,
    programs have no top-k and top-p, and requests with either are refused.
    """

    model: ModelConfig
    config: EngineConfig
    dtype: str
    feature_layers: tuple[int, ...] | None = None
    may_cut: bool = True


def make_engine(
    settings: EngineSettings,
    place: Mesh | jax.Device | None = None,
    *,
    number: int = 0,
    lockstep: Lockstep | None = None,
    kind: type[Engine] = Engine,
) -> Engine:
    """Return the engine of a worker on a mesh, a device, or the default device of the process.

    `number` is the number of the worker; `lockstep` is of a mesh that spans several processes.
    """
    mesh = place if isinstance(place, Mesh) else None
    return kind(
        settings.model,
        settings.config,
        dtype=np.dtype(settings.dtype),
        mesh=mesh,
        device=place if mesh is None else None,
        feature_layers=settings.feature_layers,
        may_cut=settings.may_cut,
        number=number,
        lockstep=lockstep,
    )


def make_engines(settings: EngineSettings, config: SchedConfig) -> list[Engine]:
    """Return an engine for each worker, on separate devices as long as there are enough.

    Raises ValueError if multi-device workers need more devices than this process has.
    """
    size = config.devices_per_worker
    _, devices = split_devices(config, jax.local_devices())
    needed = config.workers * size
    if size > 1 and needed > len(devices):
        raise ValueError(
            f"expected {needed} devices for Sched.workers={config.workers} of "
            f"Sched.devices_per_worker={size}, got {len(devices)}; fix: fewer of either, or on a "
            f"CPU XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
        )
    engines = []
    for i in range(config.workers):
        mine = [devices[(i * size + j) % len(devices)] for j in range(size)]
        engines.append(make_engine(settings, place_on(mine, settings.model), number=i))
    return engines


def place_on(devices: Sequence[jax.Device], model: ModelConfig) -> Mesh | jax.Device | None:
    """Return the place of an engine on these devices: a mesh, or one device.

    None is the default device, which reuses the programs of the process; in one of several
    processes, weights come from a mesh and are bound to a device.
    """
    if len(devices) > 1:
        return rollout_mesh(devices, model.num_kv_heads)
    is_default = jax.process_count() == 1 and devices[0] == jax.local_devices()[0]
    return None if is_default else devices[0]


def split_devices(
    config: SchedConfig, devices: Sequence[jax.Device]
) -> tuple[Sequence[jax.Device], Sequence[jax.Device]]:
    """Return the devices of the trainer and the devices of the workers, in one process.

    The devices are separate if workers run during training and there are enough.
    """
    needed = config.workers * config.devices_per_worker
    if not config.beside_training or needed >= len(devices):
        return devices, devices
    return devices[:-needed], devices[-needed:]
