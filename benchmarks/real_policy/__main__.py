"""What holds for a real policy: `python -m benchmarks.real_policy --policy DIR --json`.

All parts are counts, which a busy machine does not change; `parity` needs --torch_python. The
record is written after each part.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import bf16_flips, environment
from benchmarks.real_policy import acceptance, learned, one_update, parity
from benchmarks.real_policy.ground import Ground, Sizes
from benchmarks.real_policy.questions import KINDS
from models.params import num_params

PACKAGES = ("jax", "jaxlib", "numpy", "numba", "optax", "transformers", "reasoning-gym")
COOLER = 0.6  # a temperature
FLIP_SEEDS = 2
PARTS = {
    "acceptance": lambda ground: acceptance.measure(ground, 1.0),
    "cooler": lambda ground: acceptance.measure(ground, COOLER),
    "one_update": one_update.measure,
    "after_update": acceptance.measure_after_update,
    "learned": learned.measure,
    "flips": lambda ground: flips(ground),
}


def flips(ground: Ground) -> dict[str, Any]:
    """Count flips as `benchmarks.bf16_flips` does, for the first half of each set's questions."""
    half = ground.sizes.questions // 2
    chosen = [g for g in range(len(ground.questions)) if g % ground.sizes.questions < half]
    requests = [r for r in ground.requests(chosen=chosen) if r.sample_index < 2]
    config = ground.engine_config(max_nodes=8, slots=len(requests), min_slots=len(requests))
    sizes = bf16_flips.Sizes(FLIP_SEEDS, ground.sizes.new_tokens, ("cdf",), (1, 8))
    figures = bf16_flips.of_policy(ground.model, ground.params, requests, config, sizes)
    return {"responses": FLIP_SEEDS * len(requests)} | figures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--policy", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--name", help="of the policy in the result; default: its folder's")
    parser.add_argument("--questions", choices=tuple(KINDS), default="chat", help="their kind")
    parser.add_argument("--parts", nargs="+", choices=("parity", *PARTS), default=tuple(PARTS))
    parser.add_argument("--torch_python", help="interpreter that has torch and transformers")
    environment.add_output_flags(parser)
    arguments = parser.parse_args()
    if "parity" in arguments.parts and not arguments.torch_python:
        print("parity: expected --torch_python PATH, got none", file=sys.stderr)
        return 2
    hidden = ("--policy", "--torch_python")
    record = environment.record("benchmarks.real_policy", PACKAGES, hidden=hidden)
    ground = Ground(arguments.policy, arguments.questions, Sizes())
    sizes = ground.sizes
    result = {
        "benchmark": "real_policy",
        "policy": arguments.name or ground.folder.name,
        "parameters": num_params(ground.model),
        "questions": {
            "sets": [s.name for s in KINDS[ground.kind]],
            "asked": len(ground.questions),
            "group_size": sizes.group_size,
            "new_tokens": sizes.new_tokens,
        },
    }
    for part in arguments.parts:
        start_s = time.perf_counter()
        if part == "parity":
            result[part] = parity.measure(ground, arguments.torch_python)
        else:
            result[part] = PARTS[part](ground)
        print(f"{part}: {time.perf_counter() - start_s:.0f} s", file=sys.stderr, flush=True)
        environment.write(result | record, arguments)
    environment.show(result | record, arguments, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
