"""`python -m rl.ablate --gin_file=FILE`: train every variant of a grid with every seed.

FILE is a training configuration with an `Ablation` section. Runs are processes of
`python -m rl.train` in separate folders, started sequentially; the same command resumes a stopped
grid. `table.csv`, `table.md` and `figure.png` are written after every run.
"""

from __future__ import annotations

import csv
import io
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from reprise.models.folder import replace_file
from reprise.rl.ablation.grid import AblationRun, Cell, cells, checked_examples
from reprise.rl.ablation.results import (
    COLUMNS,
    by_variant,
    figure,
    markdown,
    read_cell,
    reward_curves,
)
from reprise.rl.gin.command_line import config_parser, parse_command_line
from reprise.rl.gin.loader import dump, load
from reprise.rl.runtime.exit_codes import EXIT_FAILED, EXIT_STOPPED, EXIT_USAGE
from reprise.rl.runtime.progress import say
from reprise.rl.runtime.signals import stop_signals


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
