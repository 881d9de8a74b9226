"""`python -m rl.simulate`: the rollout of a cluster under several schedulers, on a virtual clock.

Real runs use the same schedulers; seconds come from a roofline or from the measurements of a run,
so all results are simulated. Writes `results.json` and `figure.png`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from reprise.models.folder import replace_file
from reprise.rl.gin.command_line import config_parser, parse_command_line
from reprise.rl.gin.loader import load
from reprise.rl.runtime.exit_codes import EXIT_USAGE
from reprise.rl.runtime.progress import say
from reprise.rl.simulation.config import SimulateRun
from reprise.rl.simulation.report import figure, remarks, table
from reprise.rl.simulation.rollouts import play


def main(argv: Sequence[str]) -> int:
    """Parse the command line, simulate and report; return the exit code."""
    parser = config_parser("simulate", __doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args, overrides = parse_command_line(parser, argv, SimulateRun)
    try:
        config = load(SimulateRun, args.gin_file, overrides)
        name = Path(args.gin_file[-1]).stem if args.gin_file else "default"
        return _report(config, name, as_json=args.json)
    except (ValueError, OSError) as error:
        say(f"error: {error}", sys.stderr)
        return EXIT_USAGE


def _report(config: SimulateRun, name: str, *, as_json: bool) -> int:
    folder = Path(config.simulate.directory or Path("runs") / f"simulate-{name}")
    folder.mkdir(parents=True, exist_ok=True)
    played = list(play(config))
    rows = [row for row, _ in played]
    result = {"simulated": True, "rows": rows}
    replace_file(folder / "results.json", json.dumps(result, indent=1) + "\n")
    last = played[-len(config.simulate.policies) :]
    seed = config.simulate.seeds[-1]
    cluster = config.simulated_cluster
    hardware = cluster.profile or f"{cluster.model} on {cluster.device}, by a roofline"
    title = f"Simulated: {hardware}; {cluster.workers} workers, seed {seed}"
    figure({row["policy"]: record for row, record in last}, folder / "figure.png", title)
    if as_json:
        say(json.dumps(result))
    else:
        say("\n".join([table(rows), "", *remarks(rows)]))
        say(f"simulated; {folder / 'results.json'}; seed {seed} in {folder / 'figure.png'}")
    return 0
