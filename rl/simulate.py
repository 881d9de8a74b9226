"""`python -m rl.simulate`: a cluster's rollout under several schedulers, on a virtual clock.

The schedulers are those of real runs; seconds are a roofline's, so that all results are
simulated. Writes `results.json` and `figure.png`. With a configuration that has
`Simulate.reproduces`, or with `--reproduce` for all of these, it prints published figures beside
simulated ones instead.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from models.folder import replace_file
from rl.config.command_line import config_parser, parse_command_line
from rl.config.loader import ConfigError, load
from rl.runtime.exit_codes import EXIT_USAGE
from rl.runtime.progress import say
from rl.simulation.compare import play, remarks, table
from rl.simulation.config import SimulateRun


def main(argv: Sequence[str]) -> int:
    """Parse the command line, play and report it; return the exit code."""
    parser = config_parser("rl.simulate", __doc__)
    parser.add_argument(
        "--reproduce",
        action="store_true",
        help="published figures beside simulated ones, of all of configs/sim (minutes)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines, no table")
    args, overrides = parse_command_line(parser, argv, SimulateRun)
    try:
        if args.reproduce:
            if args.gin_file or overrides:
                raise ConfigError(
                    "--reproduce plays the shipped configurations as they are, got others; mend: "
                    "leave --reproduce away, a file that says Simulate.reproduces is enough"
                )
            return _reproduce(None, as_json=args.json)
        config = load(SimulateRun, args.gin_file, overrides)
        name = Path(args.gin_file[-1]).stem if args.gin_file else "default"
        if config.simulate.reproduces:
            return _reproduce([(name, config)], as_json=args.json)
        return _play(config, name, as_json=args.json)
    except (ConfigError, ValueError, OSError) as error:
        say(f"error: {error}", sys.stderr)
        return EXIT_USAGE


def _reproduce(found: list[tuple[str, SimulateRun]] | None, *, as_json: bool) -> int:
    """Print the rows of these configurations; None: of all that ship."""
    from rl.simulation.reproduction.table import configurations, lines_of, reproduce

    found, rows = configurations() if found is None else found, []
    for row in reproduce(found, processes=os.cpu_count() or 1):
        rows.append(row)
        if as_json:
            say(json.dumps(row.as_json()))
        else:
            say(f"{row.paper} {row.figure.workload} {row.figure.row}", sys.stderr)
    if not as_json:
        say("\n".join(lines_of(rows, found)))
    return 0


def _play(config: SimulateRun, name: str, *, as_json: bool) -> int:
    from rl.simulation.figure import figure

    folder = Path(config.simulate.directory or Path("runs") / f"simulate-{name}")
    folder.mkdir(parents=True, exist_ok=True)
    found = list(play(config))
    rows = [row for row, _ in found]
    result = {"simulated": True, "rows": rows}
    replace_file(folder / "results.json", json.dumps(result, indent=1) + "\n")
    last = found[-len(config.simulate.policies) :]
    seed, cluster = config.simulate.seeds[-1], config.simulated_cluster
    hardware = cluster.profile or f"{cluster.model} on {cluster.device}, by a roofline"
    title = f"Simulated: {hardware}; {cluster.workers} workers, seed {seed}"
    figure({row["policy"]: record for row, record in last}, folder / "figure.png", title)
    if as_json:
        say(json.dumps(result))
    else:
        say("\n".join([table(rows), "", *remarks(rows)]))
        say(f"simulated; {folder / 'results.json'}; seed {seed} in {folder / 'figure.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
