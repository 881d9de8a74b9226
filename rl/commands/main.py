"""`reprise COMMAND …`: the commands of this package, each also run by `python -m rl.COMMAND`.

reprise train --gin_file=configs/tiny_cpu.gin
reprise serve --policy policies/tiny
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import reprise
from reprise.rl.gin.values import nearest
from reprise.rl.runtime.exit_codes import EXIT_USAGE
from reprise.rl.runtime.progress import say
from reprise.rl.runtime.signals import leave

COMMANDS = {
    "demo": "the same responses, plain and with drafts, in three minutes",
    "train": "train a policy on verifiable tasks",
    "evaluate": "mean reward and pass@k of a policy",
    "report": "pages and pictures of runs",
    "serve": "train and sample over HTTP, with the client `tinker`",
    "ablate": "runs of a grid of settings",
    "export": "a policy as a Hugging Face folder",
    "preflight": "does a configuration fit into the memory of its devices?",
    "simulate": "schedules of a rollout on many devices",
    "train_drafter": "an EAGLE drafter for a policy",
}


def main(argv: Sequence[str]) -> int:
    """Run a command; return its exit code."""
    name, *rest = argv or ["--help"]
    if name == "--version":
        say(f"reprise {reprise.__version__}")
        return 0
    if name in ("-h", "--help"):
        say(__doc__ or "")
        for command, text in COMMANDS.items():
            say(f"  {command:14} {text}")
        return 0
    if name not in COMMANDS:
        hint = nearest(name, COMMANDS)
        say(f"error: expected one of {', '.join(COMMANDS)}, got {name!r}.{hint}", sys.stderr)
        return EXIT_USAGE
    status: int = importlib.import_module(f"reprise.rl.commands.{name}").main(rest)
    return status


def run(*command: str) -> None:
    """Run a command with the arguments of this process, then exit."""
    leave(main([*command, *sys.argv[1:]]))
