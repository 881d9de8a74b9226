"""The peak of a run's memory on a target, from its programs as they are compiled for it.

    peak = what lies there between programs + max over programs of what one needs beyond that

of one device. Where rollouts have devices of their own, each of the two kinds has its own peak.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, Literal

from models.config import ModelConfig
from models.layout import layers_kept_apart
from models.params import num_params
from rl.loop.experiment import TrainConfig
from rl.targets.measure import Figures, Measured, compiled_figures, extrapolated, roofline_s
from rl.targets.run_shapes import ROLLOUTS, TRAINING, RunProgram, RunShapes
from rl.targets.table import Target

Wanted = Literal["largest", "all"]
Told = Callable[[str, int, int], None]  # (program, how many are compiled, of how many)
DEPTHS = (2, 4)  # layers of the models that are compiled in place of a deep one
DEPTHS_OF_THREE = (8, 10)  # where a drafter reads three layers
BOTH = f"{TRAINING} and {ROLLOUTS}"


@dataclasses.dataclass(frozen=True, eq=False)
class Fit:
    """The memory that a configuration needs of one device of a target.

    `held` are bytes by part and name, `depths` those that were compiled, None for the whole model.
    """

    target: Target
    held: dict[str, dict[str, int]]
    measured: tuple[Measured, ...]
    num_programs: int
    num_whole_model: int
    apart: bool
    depths: tuple[int, int] | None

    @cached_property
    def groups(self) -> dict[str, tuple[int, Measured]]:
        """By who shares devices: the bytes that stay, and the program that needs most beside."""
        parts = {TRAINING: [TRAINING], ROLLOUTS: [ROLLOUTS]} if self.apart else None
        found = {}
        for name, members in (parts or {BOTH: [TRAINING, ROLLOUTS]}).items():
            stays = sum(sum(self.held[part].values()) for part in members)
            own = [one for one in self.measured if one.program.part in members]
            found[name] = stays, max(own, key=lambda one: one.beyond_held_bytes)
        return found

    @property
    def peak(self) -> tuple[str, int, Measured]:
        """The devices that need most: whose they are, the bytes, and the program at the peak."""
        peaks = [
            (name, stays + max(0, one.beyond_held_bytes), one)
            for name, (stays, one) in self.groups.items()
        ]
        return max(peaks, key=lambda found: found[1])

    @property
    def peak_bytes(self) -> int:
        return self.peak[1]

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.target.device_bytes


class Fitting:
    """Compiles the programs of a configuration for a target's devices.

    `wanted`: the largest of each kind, or all. `whole`: deep models are compiled as they are,
    not at two smaller depths. Raises ValueError where the mesh does not cover the devices, or the
    training state alone is too large for all of them.
    """

    def __init__(
        self,
        target: Target,
        devices: Sequence[Any],
        *,
        wanted: Wanted = "largest",
        whole: bool = False,
        told: Told = lambda name, done, total: None,
    ) -> None:
        self.target, self._devices = target, devices
        self._wanted, self._whole, self._told = wanted, whole, told

    def fit(self, config: TrainConfig, model: ModelConfig) -> Fit:
        """Compile, and return what the run needs. No size may be left open."""
        run = self.shapes(config, model)
        self._check_state(run)
        programs = run.programs()
        every = list(range(len(programs)))
        chosen = every if self._wanted == "all" else largest_of_kinds(programs)
        depths = self._depths(run)
        return Fit(
            self.target,
            run.held(),
            tuple(self._measured(config, model, programs, chosen, depths)),
            len(programs),
            sum(one.tokens > 0 for one in programs),
            run.apart,
            depths,
        )

    def again(
        self, before: Fit, config: TrainConfig, model: ModelConfig, *, compiles: bool = True
    ) -> Fit:
        """Return the fit of a changed configuration: only the program at the peak is compiled.

        Others count as before, and so does that one unless it `compiles`. Raises ValueError where
        the configuration cannot run.
        """
        run, peak = self.shapes(config, model), before.peak[2]
        if not compiles:
            return dataclasses.replace(before, held=run.held())
        kind = peak.program.part, peak.program.kind
        programs = run.programs()
        chosen = [
            i for i in largest_of_kinds(programs) if (programs[i].part, programs[i].kind) == kind
        ]
        rest = [one for one in before.measured if (one.program.part, one.program.kind) != kind]
        new = self._measured(config, model, programs, chosen, before.depths)
        return dataclasses.replace(before, held=run.held(), measured=(*new, *rest))

    def shapes(self, config: TrainConfig, model: ModelConfig) -> RunShapes:
        """Return the run on the target's devices, of which nothing is compiled yet."""
        return RunShapes(config, model, self._devices, is_cpu=self.target.is_cpu)

    def _check_state(self, run: RunShapes) -> None:
        """Raise ValueError for a model that no settings could fit into the target."""
        copies = 3 if run.state.critic is None else 6  # float32 weights and AdamW's two moments
        least = 4 * copies * num_params(run.model) // self.target.count
        if least > self.target.device_bytes:
            raise ValueError(
                f"expected a policy whose weights and optimizer's state fit {self.target.name}, "
                f"got {least / 1e9:.1f} GB for each of {self.target.count} devices of "
                f"{self.target.device_bytes / 1e9:.1f} GB, however they are split: name a larger "
                "target, or take a smaller policy"
            )

    def _depths(self, run: RunShapes) -> tuple[int, int] | None:
        layers = run.engine.feature_layers
        depths = DEPTHS_OF_THREE if layers is not None and len(layers) > 1 else DEPTHS
        return None if self._whole or run.model.num_layers <= depths[1] else depths

    def _measured(
        self,
        config: TrainConfig,
        model: ModelConfig,
        programs: Sequence[RunProgram],
        chosen: Sequence[int],
        depths: tuple[int, int] | None,
    ) -> Iterator[Measured]:
        """Yield the chosen programs with their figures; several are compiled at a time."""
        compiled = [programs[i] for i in chosen]
        apart = layers_kept_apart(config.trainer.remat_on(self.target.is_cpu))
        depths_of = [_depths_of(one, depths, apart, model.num_layers) for one in compiled]
        shallow: dict[int, list[RunProgram]] = {model.num_layers: list(programs)}
        for layers in {layers for some in depths_of for layers in some} - shallow.keys():
            run = self.shapes(config, dataclasses.replace(model, num_layers=layers))
            shallow[layers] = run.programs()
            assert [x.name for x in shallow[layers]] == [x.name for x in programs], "layers alone"
        asked = [
            [shallow[layers][i] for layers in some]
            for i, some in zip(chosen, depths_of, strict=True)
        ]
        found = [
            extrapolated(figures[0], figures[1], some, model.num_layers)
            if len(some) > 1
            else figures[0]
            for figures, some in zip(self._compiled(asked), depths_of, strict=True)
        ]
        params = num_params(model) - model.vocab_size * model.d_model  # an embedding is looked up
        if model.tied_embeddings:
            params += model.vocab_size * model.d_model
        for program, figures in zip(compiled, found, strict=True):
            yield Measured(program, figures, roofline_s(program, figures, self.target, params))

    def _compiled(self, asked: Sequence[Sequence[RunProgram]]) -> list[list[Figures]]:
        """Return the figures of each program at its depths; those of most tokens come first."""
        jobs = [(i, d) for i, depths in enumerate(asked) for d in range(len(depths))]
        jobs.sort(key=lambda job: (-asked[job[0]][0].tokens * asked[job[0]][0].passes, -job[1]))
        found = [[Figures()] * len(depths) for depths in asked]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            futures = [pool.submit(compiled_figures, asked[i][d], self.target) for i, d in jobs]
            for done, ((i, d), future) in enumerate(zip(jobs, futures, strict=True), start=1):
                found[i][d] = future.result()
                self._told(asked[i][d].name, done, len(jobs))
        return found


def _depths_of(
    program: RunProgram, depths: tuple[int, int] | None, layers_apart: int, num_layers: int
) -> tuple[int, ...]:
    """Return the layers that a program is compiled with: one or two depths.

    A gradient that keeps every N-th layer's input is linear in N layers.
    """
    if depths is None or not program.is_deep:
        return (num_layers,)
    if program.kind.startswith("accumulate") and layers_apart > 1:
        depths = layers_apart, 2 * layers_apart
    return (num_layers,) if num_layers <= depths[1] else depths


def largest_of_kinds(programs: Sequence[RunProgram]) -> list[int]:
    """Return the place of the largest program of each kind, in the order of the kinds."""
    largest: dict[tuple[str, str], int] = {}
    for i, one in enumerate(programs):
        held = programs[largest.setdefault((one.part, one.kind), i)]
        if (one.order, one.tokens) > (held.order, held.tokens):
            largest[one.part, one.kind] = i
    return list(largest.values())
