"""What holds for a real policy: `python -m benchmarks.real_policy --policy DIR --work DIR --json`.

Parts, each of which leaves its figures in the working folder and is not repeated while they are
there: `parity` (needs --torch_python), `acceptance`, `cooler`, `one_update`, `after_update`,
`learned` and `flips` are counts, which a busy machine does not change; `timed` wants a machine that
does nothing else. The result joins the figures of all parts that the working folder has.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import bf16_flips, environment
from benchmarks.real_policy import acceptance, learned, one_update, parity, timed
from benchmarks.real_policy.ground import Ground, Sizes
from benchmarks.real_policy.questions import KINDS
from models.params import num_params

PACKAGES = ("jax", "jaxlib", "numpy", "numba", "optax", "transformers", "reasoning-gym")
COUNTS = ("acceptance", "cooler", "one_update", "after_update", "learned", "flips")
COOLER = 0.6  # a temperature
PARTS = ("parity", *COUNTS, "timed")
NAMED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "acceptance": acceptance.named,
    "cooler": acceptance.named,
    "after_update": acceptance.named,
    "learned": learned.named,
    "one_update": one_update.named,
}


def main() -> int:
    arguments = _parser().parse_args()
    record = _record()  # of the code that is loaded, whatever is edited meanwhile
    parts = list(arguments.parts)
    if "parity" in parts and not arguments.torch_python:
        print("parity: expected --torch_python PATH, got none", file=sys.stderr)
        return 2
    sizes = Sizes(
        arguments.questions_a_set, arguments.group_size, arguments.new_tokens, arguments.slots
    )
    ground = Ground(arguments.policy, arguments.questions, arguments.work, sizes)
    for part in parts:
        _once(ground, part, arguments, record)
    kept = {p: ground.work / f"{p}.json" for p in PARTS}
    found = {p: json.loads(path.read_text()) for p, path in kept.items() if path.is_file()}
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
        **found,
        **record,
    }
    figures = {k: v for p in found if p in NAMED for k, v in NAMED[p](found[p]).items()}
    environment.show(result, arguments, figures)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=COUNTS)
    parser.add_argument("--policy", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--name", help="of the policy in the result; default: its folder's")
    parser.add_argument("--work", type=Path, required=True, help="a folder for responses")
    parser.add_argument("--questions", choices=tuple(KINDS), default="chat", help="their kind")
    parser.add_argument("--questions_a_set", type=int, default=8)
    parser.add_argument("--group_size", type=int, default=8)
    parser.add_argument("--new_tokens", type=int, default=96)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--torch_python", help="interpreter of one with torch, transformers")
    parser.add_argument("--chats", type=int, default=64, help="of parity")
    parser.add_argument("--greedy_tokens", type=int, default=64, help="of parity, a response")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--drafter_steps", type=int, default=300)
    parser.add_argument("--flip_seeds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="turns of what is timed")
    environment.add_output_flags(parser)
    return parser


def _record() -> dict[str, Any]:
    hidden = ("--policy", "--work", "--torch_python")
    return environment.record("benchmarks.real_policy", PACKAGES, hidden=hidden)


def _once(
    ground: Ground, part: str, arguments: argparse.Namespace, record: Mapping[str, Any]
) -> None:
    """Measure one part, unless the working folder has its figures."""
    path = ground.work / f"{part}.json"
    if path.is_file():
        return
    began_s = time.perf_counter()
    figures = _measured(ground, part, arguments)
    made = {k: record[k] for k in ("commit", "uncommitted_changes", "device", "date")}
    path.write_text(json.dumps({**figures, "made": made}, indent=1) + "\n")
    print(f"{part}: {time.perf_counter() - began_s:.0f} s", file=sys.stderr, flush=True)


def _measured(ground: Ground, part: str, arguments: argparse.Namespace) -> dict[str, Any]:
    if part == "parity":
        return parity.measure(
            ground, arguments.torch_python, arguments.chats, arguments.greedy_tokens
        )
    if part == "acceptance":
        return acceptance.measure(ground, 1.0)
    if part == "cooler":
        return acceptance.measure(ground, COOLER)
    if part == "after_update":
        return acceptance.measure_after_update(ground)
    if part == "learned":
        return learned.measure(ground, arguments.drafter_steps)
    if part == "one_update":
        return one_update.measure(ground, arguments.rates)
    if part == "flips":
        return _flips(ground, arguments.flip_seeds)
    return timed.measure(ground, arguments.repeats)


def _flips(ground: Ground, seeds: int) -> dict[str, Any]:
    """Flips of `benchmarks.bf16_flips`, on the first half of the questions of each set."""
    half = ground.sizes.questions // 2
    chosen = [g for g in range(len(ground.questions)) if g % ground.sizes.questions < half]
    requests = [r for r in ground.requests(chosen=chosen) if r.sample_index < 2]
    slots = {"slots": len(requests), "min_slots": len(requests)}
    config = ground.engine_config(max_nodes=8, **slots)
    sizes = bf16_flips.Sizes(seeds, ground.sizes.new_tokens, ("cdf",), (1, 8))
    found = bf16_flips.of_policy(ground.model, ground.params, requests, config, sizes)
    return {"responses": seeds * len(requests)} | found


if __name__ == "__main__":
    sys.exit(main())
