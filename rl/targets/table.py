"""Targets that a configuration can be compiled for, by name: `v5p:2x2x4`, `h100:1x1x8`, `cpu:8`.

A name is a kind of device and a topology: the chips of a TPU slice along its axes, (slices, hosts,
devices) of GPUs, a number of virtual devices of the CPU.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re

from sched.simulator.roofline import ACCELERATORS, Accelerator

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


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of device: who compiles for it, how many axes its topology has, and its figures.

    `slice_name` and `cores` of a chip make the name of a TPU slice's type; `properties` describe a
    GPU. `most_devices` bounds what is asked of the compiler.
    """

    platform: str
    axes: int
    figures: Accelerator | None = None
    slice_name: str = ""
    cores: int = 1
    properties: str = ""
    most_devices: int = 8192


KINDS = {
    "v5e": Kind("tpu", 2, ACCELERATORS["TPU v5e"], "v5litepod"),
    "v5p": Kind("tpu", 3, ACCELERATORS["TPU v5p"], "v5p", cores=2),
    "v6e": Kind("tpu", 2, ACCELERATORS["TPU v6e"], "v6e"),
    "h100": Kind("cuda", 3, ACCELERATORS["H100"], properties=H100_PROPERTIES),
    "cpu": Kind("cpu", 1, most_devices=256),
}


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices of one kind in a topology."""

    name: str
    kind: Kind
    topology: str
    known_bytes: int | None = None  # a device's memory, where it is there to be asked

    @property
    def count(self) -> int:
        """The devices, a chip each."""
        return math.prod(map(int, self.topology.split("x")))

    @property
    def is_cpu(self) -> bool:
        return self.kind.platform == "cpu"

    @property
    def device_bytes(self) -> int:
        """The memory of one device that a run may use; of a CPU an equal part of the host's.

        On a GPU JAX takes three quarters of it, unless XLA_PYTHON_CLIENT_MEM_FRACTION says else.
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
    """Return the target of this name. Raises ValueError where there is none."""
    kind_name, _, topology = name.partition(":")
    kind = KINDS.get(kind_name)
    examples = "v5p:2x2x4, v5e:4x4, v6e:4x4, h100:1x1x8 or cpu:8"
    if kind is None:
        raise ValueError(
            f"--target: expected {', '.join(KINDS)} and a topology, got {name!r}: write {examples}"
        )
    sizes = topology.split("x")
    if len(sizes) != kind.axes or not all(re.fullmatch(r"[1-9]\d{0,3}", size) for size in sizes):
        raise ValueError(
            f"--target: expected a topology of {kind.axes} positive number(s) behind "
            f"{kind_name + ':'!r}, got {topology!r}: write {examples}"
        )
    target = Target(name, kind, topology)
    if target.count > kind.most_devices:
        raise ValueError(
            f"--target: expected at most {kind.most_devices} devices of {kind_name}, got "
            f"{target.count}: name a smaller topology"
        )
    return target
