"""Checks of what a configuration says of trainer processes on Ray, before any is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl.cluster.config import AUTO

if TYPE_CHECKING:
    from rl.loop.experiment import TrainConfig


def check_trainers(config: TrainConfig) -> None:
    """Raise ValueError for what trainer processes on Ray cannot do, or are told by others."""
    cluster = config.cluster
    if (count := cluster.num_processes) is not None and count < 1:
        raise ValueError(f"expected Cluster.num_processes of 1 or more, got {count}")
    if cluster.coordinator != AUTO or cluster.process_id is not None:
        raise ValueError(
            'with Cluster.kind="ray" one command starts all trainer processes, which find one '
            f"another by themselves, got Cluster.coordinator={cluster.coordinator!r} and "
            f"Cluster.process_id={cluster.process_id}: leave both out"
        )
    if cluster.num_trainers == 1:
        return
    trainer_devices(config)
    on_device = [s for s in config.speculation.sources if s in ("learned", "model")]
    if config.speculation.enabled and on_device:
        raise ValueError(
            f"with Cluster.num_processes={count} trainers on Ray workers draft from text, got "
            f"{', '.join(on_device)} in Speculation.sources: leave it out, or set "
            "Cluster.num_processes = 1"
        )
    if config.sched.mode == "pipeline":
        raise ValueError(
            f"Cluster.num_processes={count} trainers on Ray answer a step with the policy that "
            'learns from it, got Sched.mode="pipeline": set Sched.mode = "sync", or '
            "Cluster.num_processes = 1"
        )


def trainer_devices(config: TrainConfig) -> int:
    """Return how many devices each trainer process on Ray has. Raises ValueError."""
    mesh, count = config.mesh, config.cluster.num_trainers
    total = mesh.data * mesh.fsdp * mesh.tensor
    if mesh.data == -1 or total % count:
        got = "Mesh.data = -1" if mesh.data == -1 else f"{total} devices"
        raise ValueError(
            f"expected Mesh to name as many devices for each of Cluster.num_processes={count} "
            f"trainer processes, which Ray reserves, got {got}: set Mesh.data, fsdp and tensor to "
            f"a multiple of {count} in all"
        )
    return total // count
