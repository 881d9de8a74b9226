"""A grid of training runs: its variants, seeds and folders.

A run of the grid is a process of `python -m rl.train` in a folder of its own, so that one
that was stopped is resumed, and one that is done is left alone.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rl.config.loader import ConfigError, dump, load
from rl.loop.experiment import TrainConfig
from rl.metrics.writer import read_metrics
from rl.runtime.run_files import CONFIG_FILE, METRICS_FILE, POLICY


@dataclasses.dataclass(frozen=True)
class AblationConfig:
    """The runs of a grid: every variant with every seed.

    A variant is a name and what it changes, as `("lenient", ("Reuse.mode='lenient:1'",))`; the
    first is what the others are compared with. Runs lie in `directory`, one folder each.
    """

    EXAMPLES: ClassVar = {
        "variants": (
            ("slow", ("Optimizer.learning_rate=1e-5",)),
            ("fast", ("Optimizer.learning_rate=1e-4",)),
        )
    }

    variants: tuple[tuple[str, tuple[str, ...]], ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    directory: str | None = None  # None: runs/NAME_OF_CONFIG

    def __post_init__(self) -> None:
        names = [name for name, _ in self.variants]
        if not names or not self.seeds:
            raise ValueError("an ablation needs one variant and one seed at least")
        for what, values in (("variants", names), ("seeds", self.seeds)):
            if len(set(values)) != len(values):
                raise ValueError(f"{what} must differ from one another, got {values}")
        folders = [folder_name(name) for name in names]
        if len(set(folders)) != len(folders):
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
    def done(self) -> bool:
        """True once all steps are done and the policy is written."""
        return self.steps_done >= self.config.run.steps and (self.folder / POLICY).is_dir()

    @property
    def steps_done(self) -> int:
        if not (self.folder / METRICS_FILE).is_file():
            return 0
        return max((int(row["step"]) for row in read_metrics(self.folder)), default=0)

    @property
    def begun(self) -> bool:
        return (self.folder / CONFIG_FILE).is_file()


def cells(files: Sequence[str | Path], overrides: Sequence[str], directory: Path) -> list[Cell]:
    """Return the runs of a grid, seed by seed: every variant has one run before any has two.

    Raises ConfigError, before anything runs, for whatever `rl.config.loader.load` refuses in any of
    them, and for a folder that holds a run of another configuration.
    """
    grid = load(AblationRun, files, overrides)
    if grid.run.directory:
        raise ConfigError(
            f"Run.directory={grid.run.directory!r}: expected none, since each run of a grid has a "
            "folder of its own; name the grid's with --gin.Ablation.directory"
        )
    found = []
    for seed in grid.ablation.seeds:
        for name, changes in grid.ablation.variants:
            folder = directory / f"{folder_name(name)}-{seed}"
            own = [f"Run.seed={seed}", f"Run.directory={str(folder)!r}"]
            try:
                whole = load(AblationRun, files, [*overrides, *changes, *own])
            except ConfigError as error:
                raise ConfigError(f"variant {name!r}: {error}") from error
            cell = Cell(name, seed, folder, _training_part(whole))
            _check_same(cell)
            found.append(cell)
    return found


def _training_part(whole: AblationRun) -> TrainConfig:
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    return TrainConfig(**{name: getattr(whole, name) for name in names})


def _check_same(cell: Cell) -> None:
    kept = cell.folder / CONFIG_FILE
    if cell.begun and kept.read_text(encoding="utf-8") != dump(cell.config):
        raise ConfigError(
            f"{cell.folder} holds a run of another configuration: name another folder with "
            "--gin.Ablation.directory, or delete this one"
        )


def folder_name(name: str) -> str:
    """Return the name of a variant's folder."""
    return re.sub(r"[^A-Za-z0-9.]+", "_", name).strip("_.") or "_"
