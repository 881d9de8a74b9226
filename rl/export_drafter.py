"""`python -m rl.export_drafter RUN OUT`: a run's learned drafter, as serving engines read it.

    python -m rl.export_drafter runs/tlt_tiny_cpu-1 drafter

The run may still be running, stopped or finished; a finished run leaves the same in
RUN/drafter_model. The export takes the whole checkpoint whose drafter was trained longest: the
drafter's own in RUN/drafter, or the run's. Copies of the policy's embedding and head are those of
the run's newest checkpoint, or of RUN/policy, or left out. OUT gets the tokenizer's files too. The
run's config.gin and the files it names must be where they were.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rl.checkpoint.reader import NoWholeCheckpointError, StructureMismatchError
from rl.config.command_line import parse_command_line
from rl.config.loader import ConfigError, load
from rl.drafter_training import export as drafter_folder
from rl.loop import drafter_export
from rl.loop.experiment import TrainConfig, open_inputs
from rl.runtime.exit_codes import EXIT_USAGE
from rl.runtime.progress import say
from rl.runtime.run_files import CONFIG_FILE


def main(argv: Sequence[str]) -> int:
    """Parse, check, export and print; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m rl.export_drafter",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument("out", metavar="OUT", help="a new folder, or a drafter's to replace")
    args, overrides = parse_command_line(parser, argv, TrainConfig)
    if overrides:
        parser.error("a run brings its own configuration: --gin.Section.field has no place here")
    run, out = Path(args.run), Path(args.out).absolute()
    try:
        config = _configuration(run)
        drafter_folder.check_target(out)
        exported = drafter_export.export(config, open_inputs(config), run, out)
    except (
        ConfigError,
        ValueError,
        OSError,
        ImportError,
        NoWholeCheckpointError,
        StructureMismatchError,
    ) as error:
        say(f"error: {error}", sys.stderr)
        return EXIT_USAGE
    for warning in exported.warnings:
        say(f"warning: {warning}", sys.stderr)
    say(f"drafter    {out}: {exported.text}")
    say(f"trained    {exported.num_steps:,} steps, by {exported.source}")
    say(f"start      {drafter_folder.start_command(out, run.absolute() / 'config.gin')}")
    return 0


def _configuration(run: Path) -> TrainConfig:
    saved = run / CONFIG_FILE
    if not saved.is_file():
        raise ConfigError(f"expected a run folder, found no config.gin in {run}")
    config = load(TrainConfig, [saved])
    if not config.speculation.learns:
        raise ConfigError(
            f"{run} has no learned drafter to export (Speculation.sources="
            f"{config.speculation.sources}, Speculation.budget={config.speculation.budget!r}): "
            "name a run with one, or train one on what this run wrote: python -m rl.train_drafter"
        )
    return config


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
