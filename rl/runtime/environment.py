"""The device of this process and the versions of its packages."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path

PACKAGES = ("jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "transformers")


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """The interpreter's version and those of the packages that are installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def device() -> str:
    """The accelerator jax runs on, or the processor and the cores this process may use."""
    import jax

    first = jax.devices()[0]
    if first.platform != "cpu":
        return f"{jax.device_count()} × {first.device_kind}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"CPU: {_processor()}, {cores} cores"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
