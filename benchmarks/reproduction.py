"""Published figures beside simulated ones, as a result: `python -m benchmarks.reproduction`

The rows of `python -m rl.simulate --reproduce`, the constants that no paper gives, and a summary:
median errors of the gain, those of a null model, and the orderings that hold.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from benchmarks import environment
from rl.simulation.reproduction.table import configurations, constants, reproduce, summary

PACKAGES = ("numpy",)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    environment.add_output_flags(parser)
    arguments = parser.parse_args()
    record = environment.record("benchmarks.reproduction", PACKAGES)
    found, began_s, rows = configurations(), time.monotonic(), []
    for row in reproduce(found, processes=arguments.processes):
        rows.append(row)
        print(row.as_json(), file=sys.stderr, flush=True)
    shown = summary(rows) | {"wall_s": round(time.monotonic() - began_s, 1)}
    content = {"rows": [row.as_json() for row in rows], "constants": constants(found)}
    environment.show({"benchmark": "reproduction", **shown, **content, **record}, arguments, shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
