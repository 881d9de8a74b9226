"""Random rollouts with few pages on a device that computes hashes: how many of them fail.

    python -m benchmarks.page_soak --json --output benchmarks/results/page_soak.json

The engine's host side (admission, pages, preemption, chunks, moves with keys and values, draft
trees) runs as it is; every entry of the cache is a hash of its whole context, so that a wrong page,
row, order or write breaks a chain (`tests/support/symbolic_device.py`). Sizes, requests and drafts
follow from a seed. One, two and four parts of devices share out the slots; rows have one. A failure
is a token or log-probability that is not the right one, an assertion, or no end.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks import environment

KINDS = (("pages", 1), ("pages", 2), ("pages", 4), ("rows", 1))  # cache, and parts of the devices
SHARES = (7, 6, 5, 2)  # of the rollouts, of each kind
MOST_FAILURES = 20  # that are named


def measure(num_rollouts: int, first_seed: int) -> dict[str, Any]:
    from tests.support import random_rollouts

    found: dict[str, Any] = {"rollouts": 0, "failures": 0, "failed": [], "by_parts": {}}
    totals = dict.fromkeys(random_rollouts.Counts._fields, 0)
    for (cache, ways), share in zip(KINDS, SHARES, strict=True):
        count = -(-num_rollouts * share // sum(SHARES))
        failures = 0
        for seed in range(first_seed, first_seed + count):
            try:
                counts = random_rollouts.run(seed, cache, ways)
            except Exception as error:  # each of them is a failure
                failures += 1
                if len(found["failed"]) < MOST_FAILURES:
                    why = f"{type(error).__name__}: {error}"[:300]
                    found["failed"].append(
                        {"seed": seed, "cache": cache, "parts": ways, "why": why}
                    )
            else:
                totals = {name: totals[name] + getattr(counts, name) for name in totals}
        found["by_parts"][f"{cache} {ways}"] = {"rollouts": count, "failures": failures}
        found["rollouts"], found["failures"] = (
            found["rollouts"] + count,
            found["failures"] + failures,
        )
    return found | totals


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page_soak", description=__doc__)
    parser.add_argument("--rollouts", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first one of each kind")
    environment.add_output_flags(parser)
    arguments = parser.parse_args()
    figures = measure(arguments.rollouts, arguments.seed)
    record = environment.record("benchmarks.page_soak", ("numpy", "numba", "jax"))
    environment.show(record | figures, arguments, figures)
    return int(figures["failures"] > 0)


if __name__ == "__main__":
    sys.exit(main())
