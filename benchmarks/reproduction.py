"""Published figures beside simulated ones, as a result: `python -m benchmarks.reproduction`

The rows of `python -m rl.simulate --reproduce`, with the constants that were fitted to them.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks import environment
from rl.reproduction import configurations, reproduce

PACKAGES = ("numpy",)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    environment.add_output_flags(parser)
    arguments = parser.parse_args()
    rows = [row.as_json(constants) for row, constants in reproduce(configurations())]
    asked = [row for row in rows if row["required"]]
    published = [row for row in asked if row["published"] is not None]
    shown = {
        "published_rows": len(published),
        "within": sum(row["within"] for row in published),
        "together_least_speedup": min(r["simulated"] for r in asked if r["least"] is not None),
        "short": [f"{r['paper']} {r['workload']} {r['row']}" for r in asked if not r["within"]],
    }
    record = environment.record("benchmarks.reproduction", PACKAGES, hidden=("--output",))
    environment.show(
        {"benchmark": "reproduction", **shown, "rows": rows, **record}, arguments, shown
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
