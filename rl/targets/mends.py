"""Settings that would make a run fit: each is tried, and those that save most are named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from models.config import MeshConfig, ModelConfig
from rl.config.values import found_size
from rl.loop.experiment import TrainConfig
from rl.targets.fitting import Fit, Fitting
from rl.targets.run_shapes import ROLLOUTS, TRAINING

MOST = 3
MOST_COMPILED = 5  # of settings that change the program at the peak
# Sections that change programs of one part alone.
OF_ONE_PART = {"engine": (ROLLOUTS,), "sched": (ROLLOUTS,), "trainer": (TRAINING,)}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A setting as a flag, the configuration with it, and the parts whose programs it changes."""

    flag: str
    config: TrainConfig
    parts: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Mend:
    """A changed setting as a flag, and the bytes of a device's peak that it saves."""

    flag: str
    saved_bytes: int
    peak_bytes: int


def candidates(config: TrainConfig, mesh: dict[str, int]) -> Iterator[Candidate]:
    """Yield settings that need less memory; `mesh` are the devices along its axes."""

    def changed(section: str, **values: int | str) -> Candidate:
        part = dataclasses.replace(getattr(config, section), **values)
        names = [f"--gin.{section.capitalize()}.{field}={x}" for field, x in values.items()]
        parts = OF_ONE_PART.get(section, (TRAINING, ROLLOUTS))
        return Candidate(" ".join(names), dataclasses.replace(config, **{section: part}), parts)

    slots, tokens = config.engine.max_slots, config.trainer.positions_of_micro_batch
    if slots // 2 >= config.engine.min_slots:
        yield changed("engine", slots=slots // 2)
    if tokens > config.longest_tokens:
        yield changed("trainer", micro_batch_tokens=tokens // 2)
    remat = config.trainer.remat_on(is_cpu=False)
    yield changed("trainer", remat="layer" if remat in ("none", "dots") else "layer:4")
    if config.engine.pages:
        yield changed("engine", pages=found_size("Engine.pages", config.engine.pages) // 2)
    if config.trainer.logprob_chunk_tokens > 256:
        yield changed("trainer", logprob_chunk_tokens=config.trainer.logprob_chunk_tokens // 2)
    if config.speculation.enabled and config.engine.max_round_nodes > 2 * slots:
        yield changed("engine", max_round_nodes=config.engine.max_round_nodes // 2)
    data, fsdp, tensor = mesh["data"], mesh["fsdp"], mesh["tensor"]
    if data % 2 == 0:
        yield changed("mesh", data=data // 2, fsdp=2 * fsdp)
    if fsdp % 2 == 0:
        yield changed("mesh", data=data, fsdp=fsdp // 2, tensor=2 * tensor)
    elif data % 2 == 0:
        yield changed("mesh", data=data // 2, tensor=2 * tensor)
    if config.mesh.rollout_tensor != "auto" and config.sched.workers == 1:
        yield changed("mesh", rollout_tensor=2 * config.mesh.rollout_tensor)
    if config.sched.workers > 1 and config.sched.workers % 2 == 0:
        each = config.sched.devices_per_worker
        yield changed("sched", workers=config.sched.workers // 2, devices_per_worker=2 * each)
    yield changed("sampling", max_new_tokens=max(1, config.sampling.max_new_tokens // 2))


def tried(
    fitting: Fitting,
    before: Fit,
    config: TrainConfig,
    model: ModelConfig,
    told: Callable[[str], None] = lambda flag: None,
) -> list[Mend]:
    """Return the settings that save most, the best first; settings that cannot run are left out."""
    found = []
    compiled = 0
    for one in candidates(config, _sizes(config.mesh, fitting.target.count)):
        compiles = before.peak[2].program.part in one.parts
        if compiles and compiled == MOST_COMPILED:
            continue
        compiled += compiles
        told(one.flag)
        try:
            after = fitting.again(before, one.config, model, compiles=compiles)
        except ValueError:
            continue  # heads that do not divide, say
        saved = before.peak_bytes - after.peak_bytes
        if saved > 0:
            found.append(Mend(one.flag, saved, after.peak_bytes))
    return best(found)


def best(found: Sequence[Mend]) -> list[Mend]:
    """Return those that save most."""
    return sorted(found, key=lambda one: -one.saved_bytes)[:MOST]


def _sizes(mesh: MeshConfig, num_devices: int) -> dict[str, int]:
    inner = mesh.fsdp * mesh.tensor
    data = max(1, num_devices // inner) if mesh.data == -1 else mesh.data
    return {"data": data, "fsdp": mesh.fsdp, "tensor": mesh.tensor}
