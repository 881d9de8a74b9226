"""`python -m rl.ablate FILE`: train every variant of a grid with every seed; one table, one figure.

FILE is a training configuration with an `Ablation` section. Runs are processes of
`python -m rl.train`, one after the other, each in a folder of its own; the same command
resumes a grid that was stopped. `table.csv`, `table.md` and `figure.png` are written
after every run.
"""

from __future__ import annotations

import csv
import io
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from models.folder import replace_file
from rl.ablation.grid import AblationRun, Cell, cells
from rl.ablation.results import COLUMNS, by_variant, figure, markdown, read_cell, reward_curves
from rl.config.command_line import config_parser, parse_command_line
from rl.config.loader import ConfigError, dump, load
from rl.loop.experiment import open_inputs
from rl.runtime.exit_codes import EXIT_FAILED, EXIT_STOPPED, EXIT_USAGE
from rl.runtime.progress import say


def main(argv: Sequence[str]) -> int:
    """Parse, check the whole grid, run what is not done; return the exit code."""
    parser = config_parser("rl.ablate", __doc__, files=False)
    parser.add_argument("gin_file", nargs="?", help="a configuration with an Ablation section")
    parser.add_argument("--dry_run", action="store_true", help="check everything, run nothing")
    parser.add_argument("--table", action="store_true", help="write the table of what is done")
    args, overrides = parse_command_line(parser, argv, AblationRun)
    if args.gin_file is None:
        parser.error("expected a file: python -m rl.ablate configs/ablations/lenience.gin")
    try:
        grid = load(AblationRun, [args.gin_file], overrides)
        folder = Path(grid.ablation.directory or Path("runs") / Path(args.gin_file).stem)
        found = cells([args.gin_file], overrides, folder.absolute())
        num_examples = len(open_inputs(found[0].config).task)
    except (ConfigError, ValueError, OSError, ImportError) as error:
        say(f"error: {error}", sys.stderr)
        return EXIT_USAGE
    if args.dry_run:
        for cell in found:
            state = "done" if cell.done else f"{cell.steps_done} of {cell.config.run.steps} steps"
            say(f"{cell.name}, seed {cell.seed}: {state}, {cell.folder}")
        return 0
    if args.table:
        say(_write(folder, [c for c in found if c.done], num_examples))
        return 0
    return _run_all(folder, found, num_examples)


class _Stop:
    """Ends the grid at SIGTERM and Ctrl-C: the present run is told to save, and no other begins."""

    def __init__(self) -> None:
        self.asked = False
        self.child: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, number: int, _: object) -> None:
        self.asked = True
        if self.child is not None:  # a terminal's Ctrl-C has told it too, which does no harm
            self.child.send_signal(signal.SIGTERM)


def _run_all(folder: Path, found: Sequence[Cell], num_examples: int) -> int:
    stop = _Stop()
    table = _write(folder, [c for c in found if c.done], num_examples)
    for number, cell in enumerate(found, start=1):
        title = f"[{number}/{len(found)}] {cell.name}, seed {cell.seed}"
        if cell.done:
            say(f"{title}: done before")
            continue
        say(title)
        code = EXIT_STOPPED if stop.asked else _train(folder, cell, stop)
        if code == EXIT_STOPPED or stop.asked:
            say("stopped; the same command resumes it", sys.stderr)
            return EXIT_STOPPED
        if code:
            say(f"error: {title} ended with {code}: see above", sys.stderr)
            return EXIT_FAILED
        table = _write(folder, [c for c in found if c.done], num_examples)
    say(table)
    say(f"{folder / 'table.md'}, {folder / 'table.csv'}, {folder / 'figure.png'}")
    return 0


def _train(folder: Path, cell: Cell, stop: _Stop) -> int:
    """Train in a process of its own; return its exit code."""
    cell.folder.mkdir(parents=True, exist_ok=True)
    config = folder / "configs" / f"{cell.folder.name}.gin"
    config.parent.mkdir(exist_ok=True)
    replace_file(config, dump(cell.config))
    command = [sys.executable, "-m", "rl.train", f"--gin_file={config}"]
    command += ["--resume"] if cell.begun else []
    with subprocess.Popen(command, env=dict(os.environ)) as stop.child:
        if stop.asked:  # while it started
            stop.child.send_signal(signal.SIGTERM)
        code = stop.child.wait()
    stop.child = None
    return code


def _write(folder: Path, done: Sequence[Cell], num_examples: int) -> str:
    """Write table and figure of the runs that are done; returns the table."""
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
