"""All rows that need a GPU or a TPU, in one command that ends within its budget of seconds.

    python -m benchmarks.accelerator --json --output runs/accelerator/h200.json

Rows are measured in order of worth (`plan.py`), and the file is written after every step of each.
A row that does not fit into the seconds that are left is skipped; one that fails costs its own
figures (`budget.py`). Compiled programs, XLA's choices of tiles and the grown policy stay in `kept`
beside the file, so that a second call starts warm; `--rows` names the rows of a call. `--size tiny`
runs everything on any backend in three minutes, to see that it works: its figures mean nothing. The
exit status is 1 if a row failed or was cut.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.accelerator import budget
from benchmarks.accelerator.plan import NAMES, measures, plan

PACKAGES = (
    *("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "libtpu"),
    "numpy",
)
BUDGET_S = 540.0  # rented time often ends a command after ten minutes
KEPT = "kept"  # the folder beside the file
LOG = "log.txt"
WORKER = "--worker"  # then its flags of XLA and the end of the budget: no flag of users
MIN_COMPILE_S = 0.05  # of a program that is worth keeping
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
BEGAN_S = time.monotonic()


def main() -> int:
    if WORKER in sys.argv:
        at = sys.argv.index(WORKER)
        flags, ends_at_s = sys.argv[at + 1 :]
        del sys.argv[at:]  # the record names the command as it was given
        return worker(_arguments(), flags, float(ends_at_s))
    arguments = _arguments()
    output = arguments.output
    folder = output.parent / KEPT
    folder.mkdir(parents=True, exist_ok=True)
    rows = plan(arguments.size, tuple(arguments.rows))
    is_real = arguments.size == "real"
    record = budget.Record.of(
        output,
        rows,
        kind="measured" if is_real else "try",
        size=arguments.size,
        policies="policies/countdown grown to 0.6B; Qwen3-0.6B's shape with random weights",
        budget_s=arguments.budget_s,
    )
    again = [sys.executable, "-m", "benchmarks.accelerator", *sys.argv[1:]]

    def command(flags: str, ends_at_s: float) -> list[str]:
        return [*again, WORKER, flags, str(ends_at_s)]

    ends_at_s = BEGAN_S + arguments.budget_s
    record = budget.run(
        record, rows, command, folder / LOG, ends_at_s, _environment(folder, arguments.size)
    )
    record.result["seconds"] = round(time.monotonic() - BEGAN_S, 1)
    record.save()
    if arguments.json:
        print(json.dumps(record.result))
    return int(bool(record.with_status(budget.FAILED) or record.with_status(budget.CUT)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="the file of the result")
    parser.add_argument("--budget_s", type=float, default=BUDGET_S, help="default: %(default)s")
    parser.add_argument("--size", choices=("real", "tiny"), default="real")
    parser.add_argument("--rows", nargs="*", choices=NAMES, default=NAMES, metavar="ROW")
    parser.add_argument("--torch_python", default=sys.executable, help="has torch, transformers")
    parser.add_argument("--json", action="store_true", help="print the result, too")
    return parser.parse_args()


def _environment(folder: Path, size: str) -> dict[str, str]:
    """Return the settings of workers: what they compile stays in the folder."""
    quick = {"XLA_FLAGS": QUICK} if size == "tiny" else {}
    return {
        **quick,
        "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",  # a thirtieth of the time to compile
        "JAX_COMPILATION_CACHE_DIR": str((folder / "programs").resolve()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": str(MIN_COMPILE_S),
        # of XLA's caches, that of GPUs' tuned tiles lies in a folder of the programs'
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "xla_gpu_per_fusion_autotune_cache_dir",
        # other processes need memory, too, and the longest slots more than three quarters
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9",
    } | dict(os.environ)


def worker(arguments: argparse.Namespace, flags: str, ends_at_s: float) -> int:
    """Open the device and measure rows."""
    budget.end_with_parent()
    record = budget.Record.read(arguments.output)
    if "device" not in record.result:
        refuse_cpu(arguments.size)
        known = environment.record(PACKAGES, {"--output", "--torch_python"})
        record.result |= known
        record.save()
    rows = plan(arguments.size, tuple(arguments.rows))
    of_rows: Any = measures(arguments.size, arguments.output.parent / KEPT, arguments.torch_python)
    budget.work(rows, of_rows, record, flags, ends_at_s)
    return 0


def refuse_cpu(size: str) -> None:
    """Raise ValueError if this size needs an accelerator, and jax has none."""
    import jax

    try:
        platform = jax.devices()[0].platform
    except RuntimeError as error:
        platform = f"no device ({str(error).splitlines()[0]})"
    if size == "real" and platform not in ("gpu", "tpu"):
        raise ValueError(
            f"expected a GPU or TPU that jax computes on, got {platform}; fix: docs/accelerators.md"
            " (Install JAX for the device), or try the command with --size=tiny"
        )


if __name__ == "__main__":
    sys.exit(main())
