"""Random rollouts with few pages, and hostile inputs; tests run a part of the cases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import environment

SHARES = {1: 8, 2: 7, 4: 5}  # of the rollouts, by parts of the devices
MAX_NAMED = 20  # failures
CASES, ANSWERS = 500, 1500  # of each class of inputs, and of answers


def pages(_: Path, count: int = 20_000) -> dict[str, Any]:
    """Play rollouts on a device that computes hashes; return how many fail.

    Every entry of the cache is a hash of its whole context, so that a wrong page, order or write
    breaks a chain (`tests/support/symbolic_device.py`). All else follows from a seed. A failure is
    a wrong token or log-probability, an assertion, or no end.
    """
    from tests.support import random_rollouts

    found: dict[str, Any] = {"rollouts": 0, "failures": 0, "failed": [], "by_parts": {}}
    totals = dict.fromkeys(random_rollouts.Counts._fields, 0)
    for ways, share in SHARES.items():
        rollouts, failures = -(-count * share // sum(SHARES.values())), 0
        for seed in range(rollouts):
            try:
                counts = random_rollouts.run(seed, ways)
            except Exception as error:  # each of them is a failure
                failures += 1
                why = f"{type(error).__name__}: {error}"[:300]
                found["failed"].append({"seed": seed, "parts": ways, "why": why})
            else:
                totals = {name: totals[name] + getattr(counts, name) for name in totals}
        found["by_parts"][str(ways)] = {"rollouts": rollouts, "failures": failures}
        found["rollouts"] += rollouts
        found["failures"] += failures
    return found | {"failed": found["failed"][:MAX_NAMED]} | totals


def hostile(folder: Path, count: int | None = None) -> dict[str, Any]:
    """Return a row for each class of cases (`tests.hostile`): counts of each kind of failure."""
    from tests.hostile import answers, corpus, watch

    rows, tiny = list[dict[str, Any]](), corpus.make_inputs(folder)
    for kind in (*corpus.CLASSES, *corpus.FILE_CLASSES):
        found = watch.count(corpus.cases(kind, tiny, count or CASES, 0), inputs=folder)
        for line in found.seen:
            environment.progress(line.encode("ascii", "backslashreplace").decode())
        rows.append({"class": kind, **found.row})
    return {"rows": [*rows, {"class": "answers", **answers.run(count or ANSWERS)}]}
