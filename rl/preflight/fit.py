"""The memory that a run needs per device, from its programs compiled for the target.

    program = arguments + outputs − aliases + temporaries
    peak    = resident arrays + max over programs of (program − its resident arguments)

An evaluation on training devices, while workers generate, alternates with training programs.

A deep model may be compiled at two depths a < b instead, since figures are linear in the number of
layers L (except that XLA may reorder a program if memory is short):

    figure(L) = figure(a) + (figure(b) − figure(a)) · (L − a) / (b − a)
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cached_property
from typing import Any

from reprise.models.config import ModelConfig, num_params
from reprise.models.layout import layers_per_input
from reprise.rl.preflight.memory import ROLLOUTS, TRAINING, Parts
from reprise.rl.preflight.programs import RunProgram, RunPrograms
from reprise.rl.preflight.targets import Target
from reprise.rl.settings.config import TrainConfig

OnCompiled = Callable[[str, int, int], None]  # (programs, number compiled, number to compile)
SAY_S = 60.0  # between calls of `OnCompiled` without progress
DEPTHS = (2, 4)  # layers of the models that are compiled in place of a deep model
DEPTHS_OF_THREE = (8, 10)  # if a drafter reads three layers
BOTH = f"{TRAINING} and {ROLLOUTS}"
_NEEDED = re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Figures:
    """The compiler figures for one program on one device.

    If `refused`, the program needs more memory than a device has, and only `needed_bytes` is known.
    """

    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0
    temporary_bytes: int = 0
    compiler_s: float | None = None
    refused: str = ""

    @property
    def needed_bytes(self) -> int:
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes


def compiled_figures(program: RunProgram, target: Target) -> Figures:
    """Compile a program for the target; if it is too large, use the size in the error."""
    try:
        compiled = program.lower().compile(compiler_options=target.kind.compiler_options)
    except Exception as error:
        used = _NEEDED.search(text := str(error))
        if used is None or not ("RESOURCE_EXHAUSTED" in text or "hbm" in text):
            raise
        needed_bytes = int(float(used[1]) * _UNITS[used[2]])
        return Figures(temporary_bytes=needed_bytes, refused=text.partition("\n")[0][:300])
    memory = compiled.memory_analysis()
    costs = dict[str, float]()
    with contextlib.suppress(NotImplementedError, RuntimeError):  # for GPUs
        costs = compiled.cost_analysis() or {}
    seconds = costs.get("optimal_seconds", 0.0)
    return Figures(
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        seconds if seconds > 0 else None,  # XLA's model may return a negative number
    )


def extrapolated(few: Figures, more: Figures, depths: Sequence[int], layers: int) -> Figures:
    """Return the figures of a program with `layers` layers, from two smaller depths."""
    ratio = (layers - depths[0]) / (depths[1] - depths[0])
    sizes = {
        name: max(0, round(size + (getattr(more, name) - size) * ratio))
        for name, size in vars(few).items()
        if name.endswith("_bytes")
    }
    seconds = None
    if few.compiler_s is not None and more.compiler_s is not None:
        seconds = few.compiler_s + (more.compiler_s - few.compiler_s) * ratio
    return Figures(**sizes, compiler_s=seconds, refused=few.refused or more.refused)


@dataclasses.dataclass(frozen=True)
class Measured:
    """A program and its figures."""

    program: RunProgram
    figures: Figures

    @property
    def extra_bytes(self) -> int:
        """The bytes per device that the program needs in addition to resident arrays."""
        return self.figures.needed_bytes - self.program.held_bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Fit:
    """The memory that a configuration needs on one device of a target.

    `depths` are the compiled numbers of layers, None for the whole model.
    """

    target: Target
    held: Parts
    measured: tuple[Measured, ...]
    num_programs: int
    num_whole_model: int
    is_disjoint: bool
    depths: tuple[int, int] | None
    evaluation_bytes: int = 0

    @cached_property
    def groups(self) -> dict[str, tuple[int, Measured]]:
        """For parts that share devices: resident bytes, and the program with most extra bytes."""
        parts = {TRAINING: [TRAINING], ROLLOUTS: [ROLLOUTS]} if self.is_disjoint else None
        groups = {}
        for name, members in (parts or {BOTH: [TRAINING, ROLLOUTS]}).items():
            held_bytes = sum(sum(self.held[part].values()) for part in members)
            programs = [one for one in self.measured if one.program.part in members]
            groups[name] = held_bytes, max(programs, key=lambda one: one.extra_bytes)
        return groups

    @property
    def peak(self) -> tuple[str, int, Measured]:
        """The parts with the highest need per device, the bytes, and the program at the peak."""
        peaks = [
            (name, held_bytes + max(0, one.extra_bytes, self._evaluation_bytes(name)), one)
            for name, (held_bytes, one) in self.groups.items()
        ]
        return max(peaks, key=lambda peak: peak[1])

    def _evaluation_bytes(self, name: str) -> int:
        return 0 if name == ROLLOUTS else self.evaluation_bytes

    @property
    def peak_bytes(self) -> int:
        return self.peak[1]

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.target.device_bytes


class Fitting:
    """Compilation of the programs of a configuration for the devices of a target.

    It covers `all_programs` or the largest program of each kind, with `all_layers` or at two
    smaller depths. Raises ValueError if the mesh does not cover the devices, or no settings could
    make the model fit.
    """

    def __init__(
        self,
        target: Target,
        devices: Sequence[Any],
        *,
        all_programs: bool = False,
        all_layers: bool = False,
        on_compiled: OnCompiled = lambda name, done, total: None,
    ) -> None:
        self.target = target
        self._devices = devices
        self._all_programs = all_programs
        self._all_layers = all_layers
        self._on_compiled = on_compiled

    def fit(self, config: TrainConfig, model: ModelConfig) -> Fit:
        """Compile the programs, and return the memory that the run needs. No size may be "auto"."""
        run = self.programs(config, model)
        self._check_state(run)
        programs = run.all()
        chosen = list(range(len(programs))) if self._all_programs else largest_of_kinds(programs)
        layers = run.engine.feature_layers
        depths = DEPTHS_OF_THREE if layers is not None and len(layers) > 1 else DEPTHS
        compiled = None if self._all_layers or model.num_layers <= depths[1] else depths
        return Fit(
            self.target,
            run.held,
            tuple(self._measured(config, model, programs, chosen, compiled)),
            len(programs),
            sum(one.num_tokens > 0 for one in programs),
            run.layout.is_disjoint,
            compiled,
            run.evaluation_bytes,
        )

    def refit(self, before: Fit, config: TrainConfig, model: ModelConfig) -> Fit:
        """Return the fit for smaller sizes, recompiling only the kind of program at the peak."""
        run = self.programs(config, model)
        peak = before.peak[2].program
        programs = run.all()
        chosen = [i for i in largest_of_kinds(programs) if _kind(programs[i]) == _kind(peak)]
        rest = [one for one in before.measured if _kind(one.program) != _kind(peak)]
        new = self._measured(config, model, programs, chosen, before.depths)
        measured = (*new, *rest)
        evaluation_bytes = run.evaluation_bytes
        return dataclasses.replace(
            before, held=run.held, measured=measured, evaluation_bytes=evaluation_bytes
        )

    def programs(self, config: TrainConfig, model: ModelConfig) -> RunPrograms:
        """Return the programs of the run on the target devices, without compiling them."""
        return RunPrograms(config, model, self._devices, is_cpu=self.target.is_cpu)

    def _check_state(self, run: RunPrograms) -> None:
        """Raise ValueError for a model that no settings could fit into the target."""
        copies = 3 if run.state.critic is None else 6  # float32 weights and two AdamW moments
        min_bytes = 4 * copies * num_params(run.model) // self.target.count
        if min_bytes > self.target.device_bytes:
            raise ValueError(
                f"expected a policy whose weights and optimizer's state fit {self.target.name}, "
                f"got {min_bytes / 1e9:.1f} GB for each of {self.target.count} devices of "
                f"{self.target.device_bytes / 1e9:.1f} GB, however they are split: name a larger "
                "target, or take a smaller policy"
            )

    def _measured(
        self,
        config: TrainConfig,
        model: ModelConfig,
        programs: Sequence[RunProgram],
        chosen: Sequence[int],
        depths: tuple[int, int] | None,
    ) -> Iterator[Measured]:
        """Yield the chosen programs with their figures, extrapolated for deep programs."""
        layers_each = layers_per_input(config.trainer.remat_on(self.target.is_cpu))
        by_depth: dict[int, Sequence[RunProgram]] = {model.num_layers: programs}
        depths_of = {}
        jobs = []
        for i in chosen:
            depths_of[i] = _depths_of(programs[i], depths, layers_each, model.num_layers)
            for depth in depths_of[i]:
                if depth not in by_depth:
                    shallow = dataclasses.replace(model, num_layers=depth)
                    by_depth[depth] = self.programs(config, shallow).all()
                    names = [[one.name for one in some] for some in (by_depth[depth], programs)]
                    assert names[0] == names[1], "only the layers differ"
                jobs.append((i, depth, by_depth[depth][i]))
        figures = self._compiled(jobs)
        for i, layers in depths_of.items():
            few = figures[i, layers[0]]
            more = figures[i, layers[-1]]
            if few is not more:
                few = extrapolated(few, more, layers, model.num_layers)
            yield Measured(programs[i], few)

    def _compiled(
        self, jobs: Sequence[tuple[int, int, RunProgram]]
    ) -> dict[tuple[int, int], Figures]:
        """Return figures by (index, depth); the longest compilations start first."""
        jobs = sorted(jobs, key=lambda job: (-job[2].num_tokens, -job[1]))
        figures = {}
        self._on_compiled(f"none yet; first {_names(jobs[: os.cpu_count()])}", 0, len(jobs))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            running = {
                pool.submit(compiled_figures, program, self.target): (i, depth, program)
                for i, depth, program in jobs
            }
            began_s = time.monotonic()
            left = set[Future[Figures]](running)
            while left:
                done, left = wait(left, SAY_S, FIRST_COMPLETED)
                for one in done:
                    i, depth, _ = running[one]
                    figures[i, depth] = one.result()
                    self._on_compiled(_names([running[one]]), len(figures), len(jobs))
                if not done:
                    names = _names([job for one, job in running.items() if one.running()])
                    text = f"after {time.monotonic() - began_s:.0f} s still at {names}"
                    self._on_compiled(text, len(figures), len(jobs))
        return figures


def _names(jobs: Sequence[tuple[int, int, RunProgram]]) -> str:
    return "; ".join(f"{program.name}, {depth} layers" for _, depth, program in jobs)


def _depths_of(
    program: RunProgram, depths: tuple[int, int] | None, layers_each: int, num_layers: int
) -> tuple[int, ...]:
    """Return one or two numbers of layers to compile a program with.

    The figures of a gradient that keeps the input of every N-th layer are linear in N layers.
    """
    if depths is None or not program.is_deep:
        return (num_layers,)
    if program.kind.startswith("accumulate") and layers_each > 1:
        depths = layers_each, 2 * layers_each
    return (num_layers,) if num_layers <= depths[1] else depths


def _kind(program: RunProgram) -> tuple[str, str]:
    return program.part, program.kind


def largest_of_kinds(programs: Sequence[RunProgram]) -> list[int]:
    """Return the index of the largest program of each kind, in the order of the kinds."""
    largest: dict[tuple[str, str], int] = {}
    for i, one in enumerate(programs):
        other = programs[largest.setdefault(_kind(one), i)]
        if (one.order, one.num_tokens) > (other.order, other.num_tokens):
            largest[_kind(one)] = i
    return list(largest.values())
