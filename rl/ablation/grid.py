"""A grid of training runs: its variants, its folders, and what is read from them.

A run of the grid is a process of `python -m rl.train` in a folder of its own, so that one
that was stopped goes on where it was, and one that is done is left alone.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from rl.config.loader import ConfigError, dump, load
from rl.loop.experiment import TrainConfig
from rl.metrics.writer import METRICS_FILE, Row, read_metrics

COLUMNS = (
    *("name", "seed", "epochs", "generated_tokens", "rollout_s", "verify_s", "final_reward"),
    *("reused_fraction", "clip_fraction", "kl", "entropy", "distinct_1", "self_bleu"),
)
MEANS = {  # columns that are means over steps, and the metrics that they are of
    "clip_fraction": "clip_ratio/region_mean",
    "kl": "mismatch_kl",
    "entropy": "entropy",
    "distinct_1": "diversity/distinct_1",
    "self_bleu": "diversity/self_bleu",
}


@dataclasses.dataclass(frozen=True)
class AblationConfig:
    """Which runs a grid has: every variant with every seed.

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
    """One run of a grid: `config` is whole, with its seed and its folder."""

    name: str
    seed: int
    folder: Path
    config: TrainConfig

    @property
    def done(self) -> bool:
        """Whether all steps are behind it and its policy is written."""
        return self.steps_done >= self.config.run.steps and (self.folder / "policy").is_dir()

    @property
    def steps_done(self) -> int:
        if not (self.folder / METRICS_FILE).is_file():
            return 0
        return max((int(row["step"]) for row in read_metrics(self.folder)), default=0)

    @property
    def begun(self) -> bool:
        return (self.folder / "config.gin").is_file()


def cells(files: Sequence[str | Path], overrides: Sequence[str], directory: Path) -> list[Cell]:
    """All runs of a grid, seed by seed, so that every variant has one run before any has two.

    Raises ConfigError, before anything runs, for whatever `rl.config.loader.load` refuses in any of
    them, and for a folder that holds a run of another configuration.
    """
    grid = load(AblationRun, files, overrides)
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
    kept = cell.folder / "config.gin"
    if cell.begun and kept.read_text(encoding="utf-8") != dump(cell.config):
        raise ConfigError(
            f"{cell.folder} holds a run of another configuration: name another folder with "
            "--gin.Ablation.directory, or delete this one"
        )


def folder_name(name: str) -> str:
    """A variant's name as a folder's."""
    return re.sub(r"[^A-Za-z0-9.]+", "_", name).strip("_.") or "_"


def read_cell(cell: Cell, num_examples: int) -> dict[str, float | str | int]:
    """The run's row of the table, by `COLUMNS`; nan where a run has no such metric.

    Tokens and seconds are sums over all steps (no rollout seconds where they run ahead); the
    final reward is the mean of the last epoch, in which every prompt was answered once; reuse is
    that from the second epoch on.
    """
    rows = read_metrics(cell.folder)
    # dynamic sampling takes as many prompts as it needs
    per_step = float(cell.config.rollout.prompts_per_step)
    prompts = [float(row.get("dynamic_sampling/generated_groups") or per_step) for row in rows]
    ends = np.cumsum(prompts)
    later = [
        row for row, end, n in zip(rows, ends, prompts, strict=True) if end - n >= num_examples
    ]
    last = [row for row, end in zip(rows, ends, strict=True) if end > ends[-1] - num_examples]
    return {
        "name": cell.name,
        "seed": cell.seed,
        "epochs": round(sum(prompts) / num_examples, 2),
        "generated_tokens": _total(rows, "rollout/generated_tokens"),
        "rollout_s": _total(rows, "time/rollout") if "time/rollout" in rows[0] else math.nan,
        "verify_s": _total(rows, "spec/prefix_pass_seconds"),
        "final_reward": _mean(last, "reward"),
        "reused_fraction": _mean(later, "spec/reused_fraction") if later else math.nan,
        **{column: _mean(rows, metric) for column, metric in MEANS.items()},
    }


def _total(rows: Sequence[Row], metric: str) -> float:
    return float(sum(float(row.get(metric) or 0.0) for row in rows))


def _mean(rows: Sequence[Row], metric: str) -> float:
    values = [float(row[metric]) for row in rows if row.get(metric) is not None]
    return float(np.mean(values)) if values else math.nan


def reward_curves(done: Sequence[Cell]) -> dict[str, tuple[list[int], list[float]]]:
    """Each variant's mean reward by step, over the seeds that have one there: steps, rewards."""
    found: dict[str, dict[int, list[float]]] = {}
    for cell in done:
        by_step = found.setdefault(cell.name, {})
        for row in read_metrics(cell.folder):
            if row.get("reward") is not None:
                by_step.setdefault(int(row["step"]), []).append(float(row["reward"]))
    return {
        name: (sorted(by_step), [float(np.mean(by_step[step])) for step in sorted(by_step)])
        for name, by_step in found.items()
    }


@dataclasses.dataclass(frozen=True)
class Spread:
    """Mean and sample deviation over seeds; deviation nan for one seed."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        known = [v for v in values if not math.isnan(v)]
        if not known:
            return cls(math.nan, math.nan)
        deviation = float(np.std(known, ddof=1)) if len(known) > 1 else math.nan
        return cls(float(np.mean(known)), deviation)


def by_variant(rows: Sequence[Mapping[str, float | str | int]]) -> dict[str, dict[str, Spread]]:
    """Each variant's columns over its seeds, in the order of the rows."""
    names = list(dict.fromkeys(str(row["name"]) for row in rows))
    return {
        name: {
            column: Spread.of([float(row[column]) for row in rows if row["name"] == name])
            for column in COLUMNS[2:]
        }
        for name in names
    }
