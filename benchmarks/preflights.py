"""Whether the configurations for real models fit their devices, by `python -m rl.preflight`.

    python -m benchmarks.preflights --json --output benchmarks/results/preflights.json
    python -m benchmarks.preflights --configurations --auto qwen3_8b_8xh100 --json --output …

Each is compiled with the compiler of its devices, none of which is needed: libtpu for TPUs (`pip
install "jax[tpu]"`), the CUDA plug-in for H100 (`jax[cuda12]` or `[cuda13]`). Nothing runs. Figures
are of the fullest device: its peak by what it has, and what stays there. Configurations
of `--auto` have their slots, pages and micro-batches computed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

from benchmarks import environment
from rl.loop.experiment import SIZES

TARGETS = {
    "qwen3_0.6b_h100": "h100:1x1x1",
    "qwen3_1.7b_8xh100": "h100:1x1x8",
    "qwen3_8b_8xh100": "h100:1x1x8",
    "qwen3_8b_v5e64": "v5e:8x8",
    "qwen3_8b_v6e16": "v6e:4x4",
    "qwen3_32b_v5p64": "v5p:2x4x4",
}
GPU_SHARE = "0.92"  # of its memory that JAX is told to take, as the configurations say


def preflight(name: str, *flags: str) -> dict[str, Any]:
    """Return what a preflight says of a configuration, and the seconds that it took."""
    target = TARGETS[name]
    command = [sys.executable, "-m", "rl.preflight", "--json", f"--target={target}"]
    command += [f"--gin_file=configs/real/{name}.gin", *flags]
    given = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": GPU_SHARE}
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, env=given, check=False)
    took_s = time.monotonic() - began
    if done.returncode not in (0, 2) or not done.stdout.strip().endswith("}"):
        raise RuntimeError(f"{name}: {done.stderr.strip()[-2000:]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    kept = ("fits", "peak_bytes", "device_bytes", "programs", "whole_model_programs", "held_bytes")
    compiled = {one["name"]: one for one in found["compiled"]}
    return {
        "target": target,
        "sizes": {row_key(size): found["sizes"][size] for size in found["sizes"]},
        **{key: found[key] for key in kept},
        "share": round(found["peak_bytes"] / found["device_bytes"], 3),
        "seconds": round(took_s),
        "peak_program": found["peak_program"],
        "temporaries_gb": {n: round(x["temporary_bytes"] / 1e9, 3) for n, x in compiled.items()},
    }


def row_key(name: str) -> str:
    """Return a name as a key in results, where a dot parts the keys of a path."""
    return name.replace(".", "_")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    environment.add_output_flags(parser)
    parser.add_argument("--configurations", nargs="*", default=list(TARGETS))
    parser.add_argument("--auto", nargs="*", default=[])
    arguments = parser.parse_args()
    found = {row_key(name): preflight(name) for name in arguments.configurations}
    flags = [f"--gin.{size}='auto'" for size in SIZES]
    sized = {row_key(name): preflight(name, *flags) for name in arguments.auto}
    result = {
        **environment.record("benchmarks.preflights", ("jax", "jaxlib", "libtpu")),
        "kind": "compiled",
        "gpu_share": GPU_SHARE,
        "configurations": found,
        "auto": sized,
        "all_fit": all(one["fits"] for one in (found | sized).values()),
    }
    figures = {name: f"{x['share']:.0%}, {x['seconds']} s" for name, x in (found | sized).items()}
    environment.show(result, arguments, figures)


if __name__ == "__main__":
    main()
