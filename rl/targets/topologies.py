"""Devices of a target: those that only a topology describes, or virtual ones of the CPU.

Call `prepare` before jax opens its backends: what it sets is read once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping, Sequence
from typing import Any

from rl.targets.table import Kind, Target

DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
INSTALL = {
    "tpu": "install libtpu (pip install -e '.[tpu]'; no device is needed)",
    "cuda": "install the CUDA plug-in (pip install -e '.[cuda]'; no device is needed)",
}
# of jax's compiler for GPUs without one: kernels are not timed
COMPILER_OPTIONS: dict[str, dict[str, str]] = {"cuda": {"xla_gpu_autotune_level": "0"}}


def prepare(target: Target, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what the target's compiler reads of the environment; programs run on the CPU alone."""
    environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:  # which has read it
        sys.modules["jax"].config.update("jax_platforms", "cpu")
    environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # no driver is needed
    environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
    if target.is_cpu:
        flags = environ.get("XLA_FLAGS", "").split()
        flags = [flag for flag in flags if not flag.startswith(f"{DEVICE_COUNT_FLAG}=")]
        environ["XLA_FLAGS"] = " ".join([*flags, f"{DEVICE_COUNT_FLAG}={target.count}"])
    if target.kind.platform == "tpu":
        cores = target.count * target.kind.cores
        environ["TPU_SKIP_MDS_QUERY"] = "1"
        environ["TPU_ACCELERATOR_TYPE"] = f"{target.kind.slice_name}-{cores}"
        environ["TPU_WORKER_HOSTNAMES"] = "localhost"
        environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # nothing is run on a device


def attached(devices: Sequence[Any], device_bytes: int) -> Target:
    """Return the target that these devices of the process are, each with so much memory."""
    family = devices[0].platform
    kind = Kind("cuda" if family == "gpu" else family, axes=1)
    return Target(f"{family}:{len(devices)}", kind, str(len(devices)), device_bytes)


def devices_of(target: Target) -> Sequence[Any]:
    """Return the target's devices. Raises ValueError where its compiler is missing."""
    import jax

    if target.is_cpu:
        found = jax.devices("cpu")
        if len(found) < target.count:
            raise ValueError(
                f"--target={target.name}: expected {target.count} devices of the CPU, got "
                f"{len(found)}: leave {DEVICE_COUNT_FLAG} out of XLA_FLAGS"
            )
        return found[: target.count]
    from jax.experimental import topologies

    platform, options = target.kind.platform, dict[str, str]()
    name = target.name
    if target.kind.properties:
        name = target.name.partition(":")[0]
        options = {"target_config": target.kind.properties, "topology": target.topology}
    try:
        found = topologies.get_topology_desc(platform=platform, topology_name=name, **options)
        return list(found.devices)
    except (RuntimeError, NotImplementedError, AssertionError, ValueError, TypeError) as error:
        why = str(error).partition("\n")[0][:300] or "no plug-in of that platform"
        raise ValueError(
            f"--target={target.name}: expected the compiler of {platform} to know it, got: {why}; "
            f"{INSTALL[platform]}, or name a topology that exists"
        ) from error
