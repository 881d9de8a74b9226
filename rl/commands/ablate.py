"""`python -m rl.ablate --gin_file=FILE`: train every variant of a grid with every seed.

FILE is a training configuration with an `Ablation` section. Runs are processes of
`python -m rl.train` in separate folders, started sequentially; the same command resumes a stopped
grid. `table.csv`, `table.md` and `figure.png` are written after every run.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import math
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from reprise.models.folder import replace_file
from reprise.rl.gin.command_line import config_parser, parse_command_line
from reprise.rl.gin.loader import ConfigError, dump, load
from reprise.rl.metrics.writer import Row, read_metrics, step_rows
from reprise.rl.runtime.exit_codes import EXIT_FAILED, EXIT_STOPPED, EXIT_USAGE
from reprise.rl.runtime.progress import say
from reprise.rl.runtime.run_files import CONFIG_FILE, METRICS_FILE, POLICY
from reprise.rl.runtime.signals import stop_signals
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import open_inputs
from reprise.rl.settings.run_folder import today

COLUMNS = (
    *("name", "seed", "epochs", "generated_tokens", "rollout_s", "tail_s", "step_s", "verify_s"),
    *("tokens_per_round", "final_reward"),
    *("eval_reward", "eval_pass"),
    *("reused_fraction", "clip_fraction", "kl", "entropy", "distinct_1", "self_bleu"),
)
MEANS = {  # columns that are means over steps, with their metrics
    "clip_fraction": "clip_ratio/region_mean",
    "kl": "mismatch_kl",
    "entropy": "entropy",
    "distinct_1": "diversity/distinct_1",
    "self_bleu": "diversity/self_bleu",
}
PASS = "eval/pass@"
DIGITS = {
    **{"generated_tokens": 0, "tokens_per_round": 2},
    **{"rollout_s": 1, "tail_s": 1, "step_s": 1, "verify_s": 1},
    "epochs": 1,
    "clip_fraction": 5,
}
LEGEND = (
    "Mean ± deviation over seeds. tokens: generated, relative to the first row; speedup: the first "
    "row's rollout seconds over the row's; final_reward is the mean of the last epoch, or of all "
    "steps if there was less than one; eval_reward and eval_pass are mean reward and pass@k (the "
    "largest k) of the last evaluation, over all sets."
)
NOTES = {
    "tail_s": "tail_s, the seconds after nine tenths of a step's requests, is part of rollout_s.",
    "verify_s": "verify_s is part of rollout_s.",
    "tokens_per_round": "tokens_per_round is a request's, in rounds with draft tokens.",
    "reused_fraction": "reused_fraction is from the second epoch on.",
    "kl": "kl is trainer against sampler.",
}
PANELS = (  # (column, title, relative to the first variant)
    ("generated_tokens", "Generated tokens (first = 1)", True),
    ("rollout_s", "Rollout seconds (first = 1)", True),
    ("final_reward", "Reward, last epoch or whole run", False),
)


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


# --- results ----------------------------------------------------------------------------

Spread = tuple[float, float]  # mean over seeds, sample deviation (nan for one seed)
Spreads = Mapping[str, Mapping[str, Spread]]  # by variant and column


def read_cell(cell: Cell, num_examples: int) -> dict[str, float | str | int]:
    """Return the table row of a run, by `COLUMNS`; nan for metrics that the run does not have.

    Tokens and seconds are sums over all steps; the final reward is the mean over the last epoch.
    """
    every = read_metrics(cell.folder)
    rows = step_rows(every)
    # dynamic sampling takes a varying number of prompts
    per_step = float(cell.config.rollout.prompts_per_step)
    prompts = [float(row.get("dynamic_sampling/generated_groups") or per_step) for row in rows]
    ends = np.cumsum(prompts)
    begins = ends - prompts
    later = [row for row, begin in zip(rows, begins, strict=True) if begin >= num_examples]
    last = [row for row, end in zip(rows, ends, strict=True) if end > ends[-1] - num_examples]
    passes = {name for row in every for name in row if re.fullmatch(PASS + "[0-9]{1,9}", name)}
    return {
        "name": cell.name,
        "seed": cell.seed,
        "epochs": round(sum(prompts) / num_examples, 2),
        "generated_tokens": _total(rows, "rollout/generated_tokens"),
        "rollout_s": _total(rows, "time/rollout") if "time/rollout" in rows[0] else math.nan,
        "tail_s": _total(rows, "rollout/tail_s"),
        "step_s": _total(rows, "step_time"),
        "verify_s": _total(rows, "spec/cached_seconds"),
        "tokens_per_round": _mean(rows, "spec/tokens_per_round"),
        "final_reward": _mean(last, "reward"),
        "eval_reward": _last(every, ["eval/mean_reward"]),
        "eval_pass": _last(every, sorted(passes, key=lambda name: int(name[len(PASS) :]))),
        "reused_fraction": _mean(later, "spec/reused_fraction"),
        **{column: _mean(rows, metric) for column, metric in MEANS.items()},
    }


def _total(rows: Sequence[Row], metric: str) -> float:
    return float(sum(float(row.get(metric) or 0.0) for row in rows))


def _last(rows: Sequence[Row], metrics: Sequence[str]) -> float:
    """Return the newest value of the last metric in `metrics`."""
    values = [row[name] for name in metrics[-1:] for row in rows if row.get(name) is not None]
    return float(values[-1]) if values else math.nan


def _mean(rows: Sequence[Row], metric: str) -> float:
    values = [float(row[metric]) for row in rows if row.get(metric) is not None]
    return float(np.mean(values)) if values else math.nan


def reward_curves(done: Sequence[Cell]) -> dict[str, dict[int, float]]:
    """Return mean rewards by variant and step, over the seeds that have the step."""
    rewards: dict[str, dict[int, list[float]]] = {cell.name: {} for cell in done}
    for cell in done:
        for row in read_metrics(cell.folder):
            if row.get("reward") is not None:
                rewards[cell.name].setdefault(row["step"], []).append(row["reward"])
    return {
        name: {step: float(np.mean(by_step[step])) for step in sorted(by_step)}
        for name, by_step in rewards.items()
    }


def spread(values: Sequence[float]) -> Spread:
    """Return mean and sample deviation of the known values."""
    known = [v for v in values if not math.isnan(v)]
    deviation = float(np.std(known, ddof=1)) if len(known) > 1 else math.nan
    return float(np.mean(known)) if known else math.nan, deviation


def by_variant(rows: Sequence[Mapping[str, float | str | int]]) -> dict[str, dict[str, Spread]]:
    """Return the spread of each column by variant, over its seeds, in the order of the rows."""
    table: dict[str, dict[str, Spread]] = {}
    for name in dict.fromkeys(str(row["name"]) for row in rows):
        own = [row for row in rows if row["name"] == name]
        table[name] = {c: spread([float(row[c]) for row in own]) for c in COLUMNS[2:]}
    return table


def markdown(spreads: Spreads) -> str:
    """Return a table with a row per variant: mean ± deviation over seeds, and ratios to the first.

    Columns without values, or with only zeros, are left out.
    """
    digits = {column: DIGITS.get(column, 4) for column in COLUMNS[2:]}
    shown = [
        column
        for column, d in digits.items()
        if any(round(mean, d) for row in spreads.values() if not math.isnan(mean := row[column][0]))
    ]
    lines = [["name", "tokens", "speedup", *shown], ["---"] * (len(shown) + 3)]
    first = next(iter(spreads.values()))
    for name, row in spreads.items():
        tokens = _ratio(row["generated_tokens"][0], first["generated_tokens"][0])
        speedup = _ratio(first["rollout_s"][0], row["rollout_s"][0])
        times = "" if math.isnan(speedup) else f"{speedup:.2f}×"  # rollouts that ran ahead
        values = [_value(row[column], digits[column]) for column in shown]
        lines.append([name.replace("|", "\\|"), f"{tokens:.2f}", times, *values])
    notes = " ".join([LEGEND, *(note for column, note in NOTES.items() if column in shown)])
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", notes, ""])


def _ratio(value: float, base: float) -> float:
    return value / base if base else math.nan


def _value(spread: Spread, digits: int) -> str:
    mean, deviation = ("" if math.isnan(x) else f"{x:.{digits}f}" for x in spread)
    return f"{mean} ± {deviation}" if deviation else mean


def figure(spreads: Spreads, curves: Mapping[str, Mapping[int, float]], path: Path) -> None:
    """Draw tokens, seconds and reward of every variant, with deviations, and reward by step."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from reprise.rl.reports.style import INK, RUN_COLORS, STYLE, plain_text, run_look, step_axis

    names = list(spreads)
    with rc_context(STYLE):
        bars_inch = 1.2 + 0.36 * len(names)
        picture = Figure(figsize=(11, bars_inch + 3.6), layout="constrained")
        above, below = picture.subfigures(2, 1, height_ratios=(bars_inch, 3.6))
        axes = above.subplots(1, len(PANELS), sharey=True)
        for axis, (column, title, is_relative) in zip(axes, PANELS, strict=True):
            base = spreads[names[0]][column][0] if is_relative else 1.0
            means, errors = ([_ratio(spreads[n][column][i], base) for n in names] for i in (0, 1))
            colors = [RUN_COLORS[-1], *[RUN_COLORS[0]] * (len(names) - 1)]
            lines = {"xerr": np.nan_to_num(errors), "ecolor": INK}
            axis.barh(range(len(names)), means, color=colors, **lines)
            axis.set_title(title)
            axis.grid(axis="y", visible=False)
        axes[0].set_yticks(range(len(names)), [plain_text(n, 28) for n in names])
        axes[0].invert_yaxis()
        curve = below.subplots()
        for index, (name, rewards) in enumerate(curves.items()):
            color, style = run_look(index)
            look = {"color": color, "label": plain_text(name, 28)}
            curve.plot(list(rewards), list(rewards.values()), style, **look)
        curve.set_title("Reward by step, mean over seeds")
        step_axis(curve)
        curve.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        picture.savefig(path)


# --- the command ------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Parse, check the whole grid, run the cells that are not done; return the exit code."""
    parser = config_parser("ablate", __doc__)
    parser.add_argument("--dry_run", action="store_true", help="check everything, run nothing")
    parser.add_argument("--table", action="store_true", help="write the table of finished runs")
    args, overrides = parse_command_line(parser, argv, AblationRun)
    if not args.gin_file:
        parser.error("expected a grid: --gin_file=configs/ablations/lenience.gin")
    try:
        config = load(AblationRun, args.gin_file, overrides)
        folder = Path(config.ablation.directory or Path("runs") / Path(args.gin_file[-1]).stem)
        grid = cells(args.gin_file, overrides, folder.absolute())
        num_examples = checked_examples(grid)
    except (ValueError, OSError, ImportError) as error:
        say(f"error: {error}", sys.stderr)
        return EXIT_USAGE
    if args.dry_run:
        for cell in grid:
            steps = f"{cell.steps_done} of {cell.config.run.steps} steps"
            state = "done" if cell.is_done else steps
            say(f"{cell.name}, seed {cell.seed}: {state}, {cell.folder}")
        return 0
    if args.table:
        say(_write(folder, grid, num_examples))
        return 0
    return _run_all(folder, grid, num_examples)


class _Stop:
    """Stops the grid on `stop_signals`: the current run saves, and no other run starts."""

    def __init__(self) -> None:
        self.requested = False
        self.child: subprocess.Popen[bytes] | None = None
        for number in stop_signals():
            signal.signal(number, self._request)

    def _request(self, number: int, _: object) -> None:
        self.requested = True
        if self.child is not None:
            self.child.send_signal(number)


def _run_all(folder: Path, grid: Sequence[Cell], num_examples: int) -> int:
    stop = _Stop()
    table = _write(folder, grid, num_examples)
    for number, cell in enumerate(grid, start=1):
        title = f"[{number}/{len(grid)}] {cell.name}, seed {cell.seed}"
        if cell.is_done:
            say(f"{title}: done before")
            continue
        say(title)
        code = EXIT_STOPPED if stop.requested else _train(folder, cell, stop)
        if code == EXIT_STOPPED or stop.requested:
            say("stopped; the same command resumes it", sys.stderr)
            return EXIT_STOPPED
        if code:
            say(f"error: {title} ended with {code}: see above", sys.stderr)
            return EXIT_FAILED
        table = _write(folder, grid, num_examples)
    say(table)
    say(f"{folder / 'table.md'}, {folder / 'table.csv'}, {folder / 'figure.png'}")
    return 0


def _train(folder: Path, cell: Cell, stop: _Stop) -> int:
    """Train in a separate process; return its exit code."""
    cell.folder.mkdir(parents=True, exist_ok=True)
    config = folder / "configs" / f"{cell.folder.name}.gin"
    config.parent.mkdir(exist_ok=True)
    replace_file(config, dump(cell.config))
    command = [sys.executable, "-m", "reprise.rl.train", f"--gin_file={config}"]
    command += ["--resume"] if cell.is_started else []
    # in a separate session, since a terminal would also send it Ctrl-C
    with subprocess.Popen(command, start_new_session=True) as stop.child:
        if stop.requested:  # while it started
            stop.child.send_signal(signal.SIGTERM)
        code = stop.child.wait()
    stop.child = None
    return code


def _write(folder: Path, grid: Sequence[Cell], num_examples: int) -> str:
    """Write table and figure of the finished runs; return the table."""
    done = [cell for cell in grid if cell.is_done]
    if not done:
        return "nothing is done yet"
    rows = [read_cell(cell, num_examples) for cell in done]
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    replace_file(folder / "table.csv", text.getvalue())
    spreads = by_variant(rows)
    table = markdown(spreads)
    replace_file(folder / "table.md", table)
    figure(spreads, reward_curves(done), folder / "figure.png")
    return table
