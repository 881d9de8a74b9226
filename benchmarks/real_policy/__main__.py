"""What holds for a real policy: `python -m benchmarks.real_policy --policy DIR --json`.

All parts are counts, which a busy machine does not change; `parity` needs --torch_python. The
record is written after each part.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

from benchmarks import bf16_flips, environment
from benchmarks.real_policy import acceptance, one_update, parity
from benchmarks.real_policy.ground import Ground, Sizes
from benchmarks.real_policy.questions import KINDS
from reprise.models.config import num_params

COOLER = 0.6  # a temperature
FLIP_SEEDS = 2
PARTS = {
    "acceptance": lambda ground: acceptance.measure(ground, 1.0),
    "cooler": lambda ground: acceptance.measure(ground, COOLER),
    "one_update": one_update.measure,
    "after_update": acceptance.measure_after_update,
    "flips": lambda ground: flips(ground),
}


def flips(ground: Ground) -> dict[str, Any]:
    """Count flips as `benchmarks.bf16_flips` does, for the first half of each set's questions."""
    half = ground.sizes.questions // 2
    chosen = [g for g in range(len(ground.questions)) if g % ground.sizes.questions < half]
    requests = [r for r in ground.requests(chosen=chosen) if r.sample_index < 2]
    config = ground.engine_config(max_nodes=8, slots=len(requests), min_slots=len(requests))
    sizes = FLIP_SEEDS, ground.sizes.new_tokens, ("cdf",)
    figures = bf16_flips.of_policy(ground.model, ground.params, requests, config, *sizes)
    return {"responses": FLIP_SEEDS * len(requests)} | figures


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    if not arguments.policy:
        raise SystemExit("expected --policy, the folder of a policy, got none")
    if "parity" in arguments.parts and not arguments.torch_python:
        raise SystemExit("parity: expected --torch_python PATH, got none")
    sizes = Sizes(**{f.name: getattr(arguments, f.name) for f in dataclasses.fields(Sizes)})
    ground = Ground(arguments.policy, arguments.kind, sizes)
    result: dict[str, Any] = {
        "policy": arguments.name or ground.folder.name,
        "parameters": num_params(ground.model),
        "questions": {
            "sets": [s.name for s in KINDS[ground.kind]],
            "asked": len(ground.questions),
            "group_size": sizes.group_size,
            "new_tokens": sizes.new_tokens,
        },
    }
    parts = PARTS | {"parity": lambda ground: parity.measure(ground, str(arguments.torch_python))}
    for part in arguments.parts:
        start_s = time.perf_counter()
        result[part] = parts[part](ground)
        environment.progress(f"{part}: {time.perf_counter() - start_s:.0f} s")
        environment.write(result | arguments.record(), arguments)
    return result


if __name__ == "__main__":
    environment.run(
        __doc__,
        measure,
        (*environment.TRAINING, "transformers"),
        {"parts": ("parity", *PARTS), "kind": tuple(KINDS)},
        policy=Path,
        torch_python=Path,
        name=str,
        kind="chat",
        parts=tuple(PARTS),
        **dataclasses.asdict(Sizes()),
    )
