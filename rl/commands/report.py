"""`python -m rl.report RUN...`: a report on one or several runs, as PNG and one HTML page.

For several runs, the command prints and shows ratios to the first run: seconds, tokens, rewards.

The command reads metrics.jsonl, samples.jsonl, eval_samples.jsonl, timeline.json and workers.jsonl
of each run folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from reprise.models.folder import Folder
from reprise.models.hints import program
from reprise.rl.metrics.run_summary import summary_lines
from reprise.rl.metrics.writer import Row, spread
from reprise.rl.reports import page as report_page
from reprise.rl.reports import plots as report_plots
from reprise.rl.reports.comparison import comparison
from reprise.rl.reports.evaluations import eval_table
from reprise.rl.reports.runs import ReportError, Run, load_runs, summary_table
from reprise.rl.runtime.progress import aligned, say
from reprise.rl.runtime.run_files import REPORT_FOLDER

PAGE_FILE = "index.html"


def pick_samples(samples: Sequence[Row], wanted: int) -> list[Row]:
    """Pick at most `wanted` evenly spread samples, including the last sample; -1 picks all."""
    total = len(samples)
    return [samples[total - 1 - index] for index in reversed(spread(total, wanted))]


def write_report(
    runs: Sequence[Run], output: Path, *, smooth_steps: int | None = None, max_samples: int = 60
) -> list[Path]:
    """Write the overview PNG, a PNG per panel, and the page; return their paths, page first.

    Raises ReportError if the runs have no metric that can be drawn.
    """
    images = report_plots.draw(runs, smooth_steps)
    if not images:
        raise ReportError(f"{', '.join(run.label for run in runs)}: no metric that can be drawn")
    folder = Folder(output, create=True)
    written = [output / PAGE_FILE]
    for name, png in images.items():
        folder.replace(name, png)
        written.append(output / name)
    page = report_page.page(
        title=", ".join(run.label for run in runs),
        runs=[
            (run.label, len(run.rows), int(run.steps[-1]), summary_lines(run.rows, run.evals))
            for run in runs
        ],
        images=[
            (name, png, report_plots.CAPTIONS[name])
            for name, png in images.items()
            if name != report_plots.OVERVIEW_FILE
        ],
        summaries=summary_table(runs),
        evaluations=eval_table(runs),
        compared=comparison(runs),
        samples=[
            (run.label, row)
            for run in runs
            for samples in (run.samples, run.eval_samples)
            for row in pick_samples(samples, max_samples)
        ],
    )
    # A model may emit half a surrogate pair, which UTF-8 cannot encode.
    folder.replace(PAGE_FILE, page.encode(errors="replace"))
    return written


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 with a message if there is nothing to report."""
    parser = argparse.ArgumentParser(prog=program("report"), description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder; several are overlaid")
    parser.add_argument("--output", metavar="DIR", help="default: report/ in the first run folder")
    parser.add_argument(
        "--smooth",
        type=int,
        metavar="STEPS",
        help="draw means of this many steps over the raw values; 1 is off; default: by length",
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=60,
        metavar="N",
        help="samples a run on the page, and as many of its evaluations; -1: all",
    )
    arguments = parser.parse_args(argv)
    if arguments.smooth is not None and arguments.smooth < 1:
        parser.error(f"--smooth {arguments.smooth}: expected at least 1 step")
    first = Path(arguments.runs[0])
    default = (first.parent if first.is_file() else first) / REPORT_FOLDER
    try:
        runs = load_runs(arguments.runs)
        written = write_report(
            runs,
            Path(arguments.output) if arguments.output else default,
            smooth_steps=arguments.smooth,
            max_samples=arguments.samples,
        )
    except (OSError, ValueError) as error:
        say(f"rl.report: {error}", sys.stderr)
        return 2
    for warning in (warning for run in runs for warning in run.warnings):
        say(f"warning: {warning}", sys.stderr)
    for path in written:
        say(path)
    if rows := comparison(runs):
        for line in aligned([list(rows[0]), *(list(row.values()) for row in rows)]):
            say(line)
    return 0
