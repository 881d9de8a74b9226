"""`python -m rl.simulate`: a cluster's rollout under several schedulers, on a virtual clock.

The schedulers are those of real runs; seconds are a roofline's, so that everything it
prints is simulated. Writes `results.json` and `figure.png`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rl.atomic_file import replace_file
from rl.config import ConfigError, add_config_arguments, describe, load, parse_command_line
from rl.simulation import SimulateRun, play, table
from rl.simulation_figure import figure
from rl.train import EXIT_USAGE


def main(argv: Sequence[str]) -> int:
    """Parse, play every policy, write what came of it; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m rl.simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON line, no table")
    parser.add_argument("--list", action="store_true", help="show every section and field")
    args, overrides = parse_command_line(parser, argv)
    if args.list:
        print(describe(SimulateRun))
        return 0
    try:
        config = load(SimulateRun, args.gin_file, overrides)
        name = Path(args.gin_file[-1]).stem if args.gin_file else "default"
        folder = Path(config.simulate.directory or Path("runs") / f"simulate-{name}")
        folder.mkdir(parents=True, exist_ok=True)
        found = list(play(config))
    except (ConfigError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    rows = [row for row, _ in found]
    result = {"simulated": True, "rows": rows}
    replace_file(folder / "results.json", json.dumps(result, indent=1) + "\n")
    last = found[-len(config.simulate.policies) :]
    figure({row["policy"]: record for row, record in last}, folder / "figure.png")
    if args.json:
        print(json.dumps(result))
    else:
        print(table(rows))
        print(f"simulated; {folder / 'results.json'}, {folder / 'figure.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
