"""The device of this process and the versions of its packages."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path

PACKAGES = ("jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "transformers")


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of the interpreter and the installed packages."""
    installed = {"python": platform.python_version()}
    for name in packages:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def device() -> str:
    """Return the accelerator of jax, or the processor and the cores this process may use."""
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
