"""The devices of this process, a warning about unintended devices, and versions."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from reprise import models
from reprise.models.hints import install_hint

if TYPE_CHECKING:
    import jax

T = TypeVar("T")
PACKAGES = ("jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "transformers")
FAMILIES = {"cuda": "gpu", "rocm": "gpu"}  # JAX device names by platform
NODES = ("nvidia[0-9]*", "kfd", "accel[0-9]*")  # in /dev: devices of NVIDIA, AMD and Google
INSTALL = f"install JAX for it ({install_hint('cuda')} or {install_hint('tpu')})"
# NVIDIA drivers for jax[cuda13] and jax[cuda12], by the versions that nvidia-smi shows
DRIVERS = (
    "CUDA 13 needs a driver of 580 or newer; with one of 525 or newer run "
    f"pip uninstall jax-cuda13-plugin jax-cuda13-pjrt and {install_hint('cuda12')}"
)
HOW_MANY = (
    "a run of several processes joins them by its section Cluster: set Cluster.kind = "
    "'\"spmd\"' (docs/pods.md), or start it once, without a launcher of several"
)


def refuse_several_processes(environ: Mapping[str, str] = os.environ) -> None:
    """Raise ValueError if a launcher has started this process as one of several."""
    counts = ("JAX_NUM_PROCESSES", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
    several = [f"{name}={environ[name]}" for name in counts if environ.get(name, "1") != "1"]
    several += ["JAX_COORDINATOR_ADDRESS"] if environ.get("JAX_COORDINATOR_ADDRESS") else []
    several += ["TPU_WORKER_HOSTNAMES"] if "," in environ.get("TPU_WORKER_HOSTNAMES", "") else []
    if several:
        raise ValueError(f"expected one process, got {several[0]} in the environment: {HOW_MANY}")


def found() -> Sequence[jax.Device]:
    """Return the devices of all processes. Raises ValueError if the platform is missing."""
    import jax

    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # a failed `cuda` is a bare AssertionError
        requested = jax.config.jax_platforms
        plugins = _plugins()
        why = str(error).partition("\n")[0] or _error_of(plugins)
        raise ValueError(
            f"expected the devices of JAX_PLATFORMS={requested!r}, got none: {why}; "
            f"{_fix(plugins)}, or set JAX_PLATFORMS=cpu"
        ) from error


def keep_order(same_bits: bool | str) -> None:
    """Fix the order of sums on accelerators if all passes need the same bits (`NumericsConfig`).

    Call this before the first device is opened, since XLA reads its flags once. Raises ValueError
    if an accelerator is already open.
    """
    if same_bits is not True or models.sums_in_order_on_accelerators():
        return
    import jax
    from jax._src import xla_bridge  # no public name for it

    if xla_bridge.backends_are_initialized() and jax.default_backend() != "cpu":
        raise ValueError(
            "Numerics.same_bits=True: expected to open the devices, got ones that this program has "
            "opened before with other flags of XLA; fix: open the policy before other calls of jax"
        )
    models.sum_in_order_on_accelerators()


def in_turn(results: T) -> T:
    """Return the results of a program over all devices; with several CPU processes, wait first.

    XLA runs CPU programs concurrently, and gloo mixes up their messages. If two programs overlap,
    a program may receive messages of the other, or wait forever.
    """
    import jax

    return jax.block_until_ready(results) if _overlaps() else results


@functools.cache
def _overlaps() -> bool:
    import jax

    return jax.process_count() > 1 and jax.default_backend() == "cpu"


def warning() -> str | None:
    """Return why this process may not run on the intended devices, else None."""
    import jax

    nodes = sorted(str(path) for pattern in NODES for path in Path("/dev").glob(pattern))
    return fallback(jax.default_backend(), jax.config.jax_platforms, nodes, _plugins())


def has_cpus_alone() -> bool:
    """Return whether only CPUs are available to this process, without opening a device."""
    import jax

    platforms = jax.config.jax_platforms
    return platforms == "cpu" or not (platforms or _plugins())


def _plugins() -> list[str]:
    return [plugin.name for plugin in importlib.metadata.entry_points(group="jax_plugins")]


def _error_of(plugins: Sequence[str]) -> str:
    """Return why JAX plug-ins have no devices; JAX logs most reasons earlier, as tracebacks."""
    if not plugins:
        return "it is not installed"
    from jax._src import xla_bridge

    errors: Mapping[str, str] = getattr(xla_bridge, "_backend_errors", {})
    known = [errors[name].partition("\n")[0] for name in FAMILIES if errors.get(name)]
    return f"JAX's plug-in {plugins[0]!r} did not start: " + "; ".join(
        known or ["JAX has printed why above, or does with JAX_LOGGING_LEVEL=DEBUG"]
    )


def _fix(plugins: Sequence[str]) -> str:
    if any("cuda" in name for name in plugins):
        return DRIVERS
    return "look at its driver" if plugins else INSTALL


def fallback(
    backend: str, requested: str | None, nodes: Sequence[str], plugins: Sequence[str]
) -> str | None:
    """Return the warning for a process on `backend` next to an accelerator, or None."""
    first = (requested or "").partition(",")[0]
    if first:
        if FAMILIES.get(first, first) == backend:
            return None
        return (
            f"this runs on the {backend.upper()}, not on {first}, which "
            f"JAX_PLATFORMS={requested!r} names first: {INSTALL}"
        )
    if backend != "cpu" or not (nodes or plugins):
        return None
    though = f", though {nodes[0]} is there" if nodes else ""
    why = f"{_error_of(plugins)}; {_fix(plugins)}" if plugins else INSTALL
    return f"this runs on the CPU{though}: {why}, or set JAX_PLATFORMS=cpu if the CPU is meant"


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
    """Describe the accelerators, or the processor and the cores that this process may use."""
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
