"""The runs of a grid: every variant of an `Ablation` section with every seed."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from reprise.rl.gin.loader import ConfigError, dump, load
from reprise.rl.metrics.writer import read_metrics
from reprise.rl.runtime.run_files import CONFIG_FILE, METRICS_FILE, POLICY
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import open_inputs
from reprise.rl.settings.run_folder import today


@dataclasses.dataclass(frozen=True)
class AblationConfig:
    """The runs of a grid: every variant with every seed."""

    EXAMPLES: ClassVar = {
        "variants": (
            ("slow", ("Optimizer.learning_rate=1e-5",)),
            ("fast", ("Optimizer.learning_rate=1e-4",)),
        )
    }

    variants: tuple[tuple[str, tuple[str, ...]], ...]
    """Names with their changes, such as `("lenient", ("Reuse.mode='lenient:1'",))`; the first
    variant is the baseline of the others."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """The seeds of each variant."""
    directory: str | None = None
    """The folder with a run folder for each run. None: runs/NAME_OF_CONFIG."""

    def __post_init__(self) -> None:
        names = [name for name, _ in self.variants]
        if not names or not self.seeds:
            raise ValueError("an ablation needs one variant and one seed at least")
        for kind, values in (("variants", names), ("seeds", self.seeds)):
            if len(set(values)) != len(values):
                raise ValueError(f"{kind} must differ from one another, got {values}")
        if len(set(map(folder_name, names))) != len(names):
            raise ValueError(f"variants must differ in letters and digits, got {names}")


@dataclasses.dataclass(frozen=True)
class AblationRun(TrainConfig):
    """A training configuration with its grid."""

    ablation: AblationConfig


@dataclasses.dataclass(frozen=True)
class Cell:
    """A run of a grid; `config` includes its seed and its folder."""

    name: str
    seed: int
    folder: Path
    config: TrainConfig

    @property
    def is_done(self) -> bool:
        return self.steps_done >= self.config.run.steps and (self.folder / POLICY).is_dir()

    @property
    def steps_done(self) -> int:
        if not (self.folder / METRICS_FILE).is_file():
            return 0
        return max((int(row["step"]) for row in read_metrics(self.folder)), default=0)

    @property
    def is_started(self) -> bool:
        return (self.folder / CONFIG_FILE).is_file()


def cells(files: Sequence[str | Path], overrides: Sequence[str], directory: Path) -> list[Cell]:
    """Return the runs of a grid, seed by seed: every variant runs once before any runs twice.

    Raises ConfigError, before anything runs, for an invalid variant, or for the folder of another
    configuration.
    """
    whole = load(AblationRun, files, overrides)
    if whole.run.directory:
        raise ConfigError(
            f"Run.directory={whole.run.directory!r}: expected none, since each run of a grid has a "
            "separate folder; name the grid's with --gin.Ablation.directory"
        )
    begun = sorted(directory.glob(f"*/{CONFIG_FILE}"))[:1]
    day = load(TrainConfig, begun).task.date if begun else today()
    sections = [field.name for field in dataclasses.fields(TrainConfig)]
    grid = []
    for seed, (name, changes) in itertools.product(whole.ablation.seeds, whole.ablation.variants):
        folder = directory / f"{folder_name(name)}-{seed}"
        own = [*changes, f"Run.seed={seed}", f"Run.directory={str(folder)!r}"]
        try:
            run = load(AblationRun, files, [*overrides, *own])
        except ConfigError as error:
            raise ConfigError(f"variant {name!r}: {error}") from error
        config = TrainConfig(**{s: getattr(run, s) for s in sections}).on_day(day)
        cell = Cell(name, seed, folder, config)
        saved = folder / CONFIG_FILE
        if cell.is_started and saved.read_text(encoding="utf-8") != dump(cell.config):
            raise ConfigError(
                f"{folder} holds a run of another configuration: name another folder with "
                "--gin.Ablation.directory, or delete this one"
            )
        grid.append(cell)
    return grid


def checked_examples(grid: Sequence[Cell]) -> int:
    """Return the example count of the first variant; raise ConfigError for an invalid variant."""
    counts = []
    for cell in grid:
        if cell.seed == grid[0].seed:  # no check depends on the seed
            try:
                counts.append(len(open_inputs(cell.config).task))
            except (ValueError, OSError) as error:
                raise ConfigError(f"variant {cell.name!r}: {error}") from error
    return counts[0]


def folder_name(name: str) -> str:
    """Return the folder name of a variant."""
    return re.sub(r"[^A-Za-z0-9.]+", "_", name).strip("_.") or "_"
