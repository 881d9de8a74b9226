"""Devices that a configuration can be compiled for, by name: `v5p:2x2x4`, `h100:1x1x8`, `cpu:8`.

A topology gives the chips along each axis of a TPU slice, (slices, hosts, devices) of GPUs, or the
number of virtual CPU devices. Call `prepare` before jax opens its backends.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import sys
from collections.abc import MutableMapping, Sequence
from typing import Any

from reprise.models.hints import install_hint
from reprise.sched.simulator.roofline import ACCELERATORS, Accelerator

# Properties of an H100 SXM and versions of its libraries, as a GpuTargetConfigProto in text form.
H100_PROPERTIES = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536 runtime_version: "12.8.0" driver_version: "13.0.0"
  compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
"""
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
INSTALL = {
    "tpu": f"install libtpu ({install_hint('tpu')}; no device is needed)",
    "cuda": f"install the CUDA plug-in ({install_hint('cuda')}; no device is needed)",
}
EXAMPLES = "v5p:2x2x4, v5e:4x4, v6e:4x4, h100:1x1x8 or cpu:8"


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of device: its compiler, the number of axes of its topology, and its data sheet.

    `slice_name` and `cores` per chip form the type name of a TPU slice; `properties` describe a
    GPU.
    """

    platform: str
    axes: int
    figures: Accelerator | None = None
    slice_name: str = ""
    cores: int = 1
    properties: str = ""
    max_devices: int = 8192

    @property
    def compiler_options(self) -> dict[str, str] | None:
        """XLA options, without autotuning since kernels cannot be timed without a GPU."""
        return {"xla_gpu_autotune_level": "0"} if self.platform == "cuda" else None


KINDS = {
    "v5e": Kind("tpu", 2, ACCELERATORS["TPU v5e"], "v5litepod"),
    "v5p": Kind("tpu", 3, ACCELERATORS["TPU v5p"], "v5p", cores=2),
    "v6e": Kind("tpu", 2, ACCELERATORS["TPU v6e"], "v6e"),
    "h100": Kind("cuda", 3, ACCELERATORS["H100"], properties=H100_PROPERTIES),
    "cpu": Kind("cpu", 1, max_devices=256),
}


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices of one kind in a topology."""

    name: str
    kind: Kind
    topology: str
    known_bytes: int | None = None  # memory of a device, if attached

    @property
    def count(self) -> int:
        """The number of devices, one for each chip."""
        return math.prod(map(int, self.topology.split("x")))

    @property
    def is_cpu(self) -> bool:
        return self.kind.platform == "cpu"

    @property
    def device_bytes(self) -> int:
        """The memory of one device that a run may use; for a CPU, an equal share of host memory.

        JAX allocates 3/4 of GPU memory unless XLA_PYTHON_CLIENT_MEM_FRACTION is set.
        """
        if self.known_bytes is not None:
            return self.known_bytes
        if self.kind.figures is None:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // self.count
        share = 1.0
        if self.kind.platform == "cuda":
            share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75"))
        return int(self.kind.figures.memory_bytes * share)


def parse_target(name: str) -> Target:
    """Return the target of this name. Raises ValueError for an unknown target."""
    kind_name, _, topology = name.partition(":")
    kind = KINDS.get(kind_name)
    if kind is None:
        raise ValueError(
            f"--target: expected {', '.join(KINDS)} and a topology, got {name!r}: write {EXAMPLES}"
        )
    sizes = topology.split("x")
    if len(sizes) != kind.axes or not all(re.fullmatch(r"[1-9]\d{0,3}", size) for size in sizes):
        raise ValueError(
            f"--target: expected a topology of {kind.axes} positive number(s) after "
            f"{kind_name + ':'!r}, got {topology!r}: write {EXAMPLES}"
        )
    target = Target(name, kind, topology)
    if target.count > kind.max_devices:
        raise ValueError(
            f"--target: expected at most {kind.max_devices} devices of {kind_name}, got "
            f"{target.count}: name a smaller topology"
        )
    return target


def attached(devices: Sequence[Any], device_bytes: int) -> Target:
    """Return the devices of this process as a target, each with `device_bytes` of memory."""
    platform = devices[0].platform
    kind = Kind("cuda" if platform == "gpu" else platform, axes=1)
    return Target(f"{platform}:{len(devices)}", kind, str(len(devices)), device_bytes)


def prepare(target: Target, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the environment variables that the target compiler reads; programs run on the CPU."""
    environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:  # jax has already read the variable
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
        environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # nothing runs on a device


def devices_of(target: Target) -> Sequence[Any]:
    """Return the devices of the target. Raises ValueError if the compiler is missing."""
    import jax

    if target.is_cpu:
        devices = jax.devices("cpu")
        if len(devices) < target.count:
            raise ValueError(
                f"--target={target.name}: expected {target.count} devices of the CPU, got "
                f"{len(devices)}: leave {DEVICE_COUNT_FLAG} out of XLA_FLAGS"
            )
        return devices[: target.count]
    from jax.experimental import topologies

    platform = target.kind.platform
    options = dict[str, str]()
    name = target.name
    if target.kind.properties:
        name = target.name.partition(":")[0]
        options = {"target_config": target.kind.properties, "topology": target.topology}
    try:
        return list(topologies.get_topology_desc(name, platform, **options).devices)
    except (RuntimeError, NotImplementedError, AssertionError, ValueError, TypeError) as error:
        reason = str(error).partition("\n")[0][:300] or "no plug-in of that platform"
        raise ValueError(
            f"--target={target.name}: expected the compiler of {platform} to know it, got: "
            f"{reason}; {INSTALL[platform]}, or name a topology that exists"
        ) from error
