"""Rollouts and updates against another checkout: `python -m benchmarks.before_after`.

One process a checkout, kept alive, which measures with the checkout's own code: its
`benchmarks/ways.py`, or before that was there its `benchmarks/before_after.py`, whose children
answer the same commands. Both have the same questions, noise and policy, and every way of both
takes its turn. A ratio is that checkout's seconds of a response token over ours in one turn; the
median of the turns counts. A way that only one of them has is in `absent`. Each way is compared
with plain rollouts of its own checkout too, as `benchmarks.ways` does.

Each budget decides by the seconds that its own checkout's rounds take. Tokens are compared with
the other's; if they differ, the work does too. A change of the noise changes all tokens: pick it
onto the other checkout first (`git cherry-pick`).

Updates are those of `python -m rl.train` with its default configuration, one run of each checkout
in a turn: the median of its steps but the first, by its own metrics. `--turns 0` measures them
alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.environment import ROOT
from benchmarks.turns import in_turns
from benchmarks.ways import EXPECTED, TINY, Checkout, Turns, lost, open_checkout, take_turns

SIZES = "prompts", "group_size", "slots"


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each way to roll out and for updates, and the named figures."""
    folder = arguments.before and arguments.before.resolve()
    if folder is None or not (folder / "rl" / "engine" / "engine.py").is_file():
        raise SystemExit(f"expected --before a folder with a checkout, got {arguments.before}")
    found: dict[str, Any] = {}
    if arguments.turns:
        found = rollouts(open_checkout("before", folder), open_checkout("after", ROOT), arguments)
    rows = found.pop("rows", [])
    if arguments.runs:
        checkouts = {"before": folder, "after": ROOT}
        updates = {name: partial(update_s, c, arguments.steps) for name, c in checkouts.items()}
        rows.append(update_row(in_turns(updates, arguments.runs, warm=0)))
    ratios = {f"{row['way']}_ratio": row["ratio"] for row in rows}
    return {
        **ratios,
        "reached": all(r >= EXPECTED for r in ratios.values()) and not found.get("lost"),
        "differing_responses": sum(row.get("differing_responses", 0) for row in rows),
        "before_commits": last_commits(folder),
        **found,
        "rows": rows,
    }


def rollouts(before: Checkout, after: Checkout, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each way of both checkouts, their ways over plain, and what one lacks."""
    checkouts = before, after
    sizes = {name: getattr(arguments, name) for name in SIZES}
    if arguments.policy != TINY:
        if missing := [c.name for c in checkouts if arguments.policy not in c.policies]:
            raise SystemExit(f"--policy: expected {TINY}, got another one; no ways: {missing}")
        sizes["policy"] = arguments.policy
    children = {}
    try:
        for checkout in checkouts:
            children[checkout.name], _ = checkout.start(**sizes)
        ways = {checkout.name: checkout.ways for checkout in checkouts}
        turns = take_turns(children, ways, arguments.turns)
    finally:
        for child in children.values():
            child.close()
    both = [way for way in after.ways if way in before.ways]
    every = dict.fromkeys([*after.ways, *before.ways])
    over_plain = {checkout.name: turns.over_plain(checkout) for checkout in checkouts}
    found = {
        "over_plain": over_plain,
        "lost": lost(over_plain["after"]),
        "absent": {c.name: [way for way in every if way not in c.ways] for c in checkouts},
        "rows": [row(way, turns) for way in both],
    }
    for name, rows in over_plain.items():
        environment.progress(name, {way: figures["over_plain"] for way, figures in rows.items()})
    environment.progress("absent", found["absent"])
    return found


def row(way: str, turns: Turns) -> dict[str, Any]:
    """Return the figures of a way in both checkouts, turn by turn."""
    before, after = ("before", way), ("after", way)
    ratios = turns.ratios(after, over=before)
    pairs = zip(turns.responses[before], turns.responses[after], strict=True)
    return {
        **of_ratios(way, ratios),
        "before_s": round(statistics.median(turns.seconds[before]), 4),
        "after_s": round(statistics.median(turns.seconds[after]), 4),
        "tokens": sum(map(len, turns.responses[after])),
        "responses": len(turns.responses[after]),
        "differing_responses": sum(a != b for a, b in pairs),
    }


def update_row(seconds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of updates, turn by turn."""
    pairs = zip(seconds["before"], seconds["after"], strict=True)
    medians = {f"{name}_s": round(statistics.median(s), 4) for name, s in seconds.items()}
    return {**of_ratios("update", [b / a for b, a in pairs]), **medians}


def of_ratios(way: str, ratios: Sequence[float]) -> dict[str, Any]:
    """Return the median of a way's turns, and each of them."""
    median = round(statistics.median(ratios), 4)
    return {"way": way, "ratio": median, "ratios": [round(r, 3) for r in ratios]}


def update_s(checkout: Path, steps: int) -> float:
    """Return the median seconds of a run's updates, the first left out."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        flags = f"--gin.Run.directory={run}", f"--gin.Run.steps={steps}", "--gin.Eval.num_prompts=0"
        command = [sys.executable, "-P", "-m", "rl.train", *flags]
        env = os.environ | {"PYTHONPATH": str(checkout)}
        subprocess.run(command, cwd=checkout, env=env, capture_output=True, check=True)
        rows = map(json.loads, (run / "metrics.jsonl").read_text("utf-8").splitlines())
        found = [float(row["time/update"]) for row in rows if "time/update" in row]
    assert len(found) == steps
    return statistics.median(found[1:])


def last_commits(checkout: Path) -> list[str]:
    """Return the newest two commits: a change may be picked onto an old one."""
    command = ["git", "log", "-2", "--format=%h %s"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


if __name__ == "__main__":
    environment.run(
        __doc__, measure, packages=(*environment.JAX, "numba"), before=Path, policy=TINY, turns=15,
        runs=5, steps=8, prompts=16, group_size=8, slots=64,
    )  # fmt: skip
