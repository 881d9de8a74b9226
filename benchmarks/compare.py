"""Our plain decoding against the tunix sampler and transformers' generate, interleaved.

    python -m benchmarks.compare --json --tunix_python PATH --transformers_python PATH

`--before` compares with another checkout of this project as well, which its commit names.

One process a system, kept alive; they take turns, A B C A B C …, so that only one
computes at a time and all see the same machine. All load one policy folder with
the same random weights (or that of `--policy`, whose shape then counts) and generate
the same prompts with log-probabilities. First
each system's variants take turns, and the fastest one is what is compared. Ratios
are taken pair by pair within a turn; the median counts. `greedy_agreement` is the
share of tokens that equal ours at temperature 0: the work is the same. A system
that is not `steady` met a busy machine: its figures do not count.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import environment
from benchmarks.baselines.reprise import model_config
from benchmarks.child import Child
from benchmarks.shape import Shape, add_flags, from_flags
from models import hf, transformer

RESULT = environment.ROOT / "benchmarks" / "results" / "rollout_vs_others.json"
MODULES = {
    "reprise": "benchmarks.baselines.reprise",
    "tunix": "benchmarks.baselines.tunix_sampler",
    "transformers": "benchmarks.baselines.transformers_generate",
}
REQUIRED = {"tunix": 1.5, "transformers": 3.0}  # goals; other checkouts have none here


class System(Child):
    """A sampler in its own process, with the variants that it can run."""

    def __init__(self, name: str, python: str, checkout: Path) -> None:
        super().__init__(name, [python, "-m", MODULES.get(name, MODULES["reprise"])], checkout)
        hello = self.answer()
        self.variants: list[str] = hello["variants"]
        self.versions: dict[str, str] = hello["versions"]


def write_policy(shape: Shape, folder: Path) -> None:
    """The shape's random weights as a Hugging Face folder, which every system reads."""
    config = model_config(shape)
    params = transformer.init(config, jax.random.key(0), jnp.dtype(shape.dtype))
    hf.save_pretrained(folder, config, params)


def choose_variant(
    child: System, shape: Shape, policy: str, repeats: int
) -> tuple[str, dict[str, float]]:
    """The variant with the best median, and the tokens per second of all of them.

    A variant whose warm run took twice the best so far is not run again.
    """
    if len(child.variants) == 1:
        return child.variants[0], {}
    seconds: dict[str, list[float]] = {}
    for variant in child.variants:
        warm = child.ask(
            do="prepare", shape=dataclasses.asdict(shape), policy=policy, variant=variant
        )
        best_s = min((statistics.median(values) for values in seconds.values()), default=1e9)
        runs = repeats if warm["warm_call_s"] < 2 * best_s else 0
        seconds[variant] = [child.ask(do="run", seed=seed)["seconds"] for seed in range(runs)]
        seconds[variant] = seconds[variant] or [warm["warm_call_s"]]
    speeds = {
        variant: round(shape.total_new_tokens / statistics.median(values), 1)
        for variant, values in seconds.items()
    }
    return max(speeds, key=lambda variant: speeds[variant]), speeds


def shape_of(policy: Path, shape: Shape) -> Shape:
    """The batch of `shape`, and the model of a policy's folder."""
    model = hf.check(policy)
    return dataclasses.replace(
        shape,
        layers=model.num_layers,
        d_model=model.d_model,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        d_ff=model.d_ff,
        vocab=model.vocab_size,
        tied=model.tied_embeddings,
    )


def compare(
    pythons: dict[str, str],
    shape: Shape,
    repeats: int,
    choosing_repeats: int,
    folder: Path | None = None,
    before: Mapping[str, Path] = MappingProxyType({}),
) -> dict[str, Any]:
    """One row: every system on this shape, `repeats` turns after all are warm.

    `before` are other checkouts by name, run by our own interpreter.
    """
    children: list[System] = []
    with tempfile.TemporaryDirectory() as scratch:
        policy = str(folder or Path(scratch) / "policy")
        if folder is None:
            write_policy(shape, Path(policy))
        try:
            systems: dict[str, dict[str, Any]] = {}
            checkouts = {name: environment.ROOT for name in pythons} | dict(before)
            for name, checkout in checkouts.items():
                python = pythons.get(name, sys.executable)
                children.append(child := System(name, python, checkout))
                variant, speeds = choose_variant(child, shape, policy, choosing_repeats)
                systems[name] = {"variant": variant, "variants_tokens_per_s": speeds}
                systems[name] |= child.ask(
                    do="prepare", shape=dataclasses.asdict(shape), policy=policy, variant=variant
                )
                systems[name]["versions"] = child.versions
            greedy = {c.name: c.ask(do="greedy")["tokens"] for c in children}
            turns = [
                {child.name: child.ask(do="run", seed=seed)["seconds"] for child in children}
                for seed in range(repeats)
            ]
        finally:
            for child in children:
                child.close()
    for name, system in systems.items():
        system |= speed(shape, [turn[name] for turn in turns])
        system["greedy_agreement"] = agreement(greedy["reprise"], greedy[name])
        system["steady"] = steady(system)
    return {
        "shape": dataclasses.asdict(shape),
        "systems": systems,
        "ratios": {name: ratio(turns, name) for name in systems if name != "reprise"},
    }


def speed(shape: Shape, seconds: Sequence[float]) -> dict[str, Any]:
    return {
        "tokens_per_s": round(shape.total_new_tokens / statistics.median(seconds), 1),
        "tokens_per_s_all": [round(shape.total_new_tokens / s, 1) for s in seconds],
    }


def ratio(turns: Sequence[dict[str, float]], name: str) -> dict[str, Any]:
    """How many times faster we are than `name`, turn by turn."""
    ratios = [turn[name] / turn["reprise"] for turn in turns]
    median = statistics.median(ratios)
    found: dict[str, Any] = {
        "median": round(median, 3),
        "least": round(min(ratios), 3),
        "most": round(max(ratios), 3),
    }
    if name in REQUIRED:
        found |= {"required": REQUIRED[name], "reached": median >= REQUIRED[name]}
    return found


def commit_of(checkout: Path) -> str:
    """The short hash of a checkout's commit."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def steady(system: dict[str, Any]) -> bool:
    """Whether the turns went about as fast as the choosing: else the machine was not quiet."""
    chosen = system["variants_tokens_per_s"].get(system["variant"], system["tokens_per_s"])
    speeds = [chosen, *system["tokens_per_s_all"]]
    return max(speeds) < 1.5 * min(speeds)


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    pairs = [(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)]
    return round(sum(a == b for a, b in pairs) / len(pairs), 6)


def show(row: dict[str, Any]) -> None:
    shape = row["shape"]
    print(
        f"batch {shape['batch']}, {'tied' if shape['tied'] else 'untied'} head, tokens per second"
    )
    for name, system in row["systems"].items():
        times = row["ratios"].get(name)
        goal = f" (required {times['required']}×)" if times and "required" in times else ""
        ours = f"ours is {times['median']:.2f}×{goal}" if times else ""
        unsteady = "" if system["steady"] else "  UNSTEADY: run again on a quiet machine"
        print(f"  {name:14}{system['variant']:26}{system['tokens_per_s']:>9.0f}  {ours}{unsteady}")


def parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_flags(parser, without=("batch",))
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64], help="a row for each")
    parser.add_argument("--policy", type=Path, help="weights of a folder instead of random ones")
    parser.add_argument("--tunix_python", help="interpreter of an environment with google-tunix")
    parser.add_argument("--transformers_python", help="interpreter of one with torch, transformers")
    parser.add_argument("--before", type=Path, action="append", default=[], help="a checkout")
    parser.add_argument("--repeats", type=int, default=9, help="turns; the medians count")
    parser.add_argument("--choosing_repeats", type=int, default=3, help="runs of each variant")
    parser.add_argument("--json", action="store_true", help="print one JSON line last")
    parser.add_argument("--output", type=Path, default=RESULT, help="where the result is written")
    return parser, parser.parse_args()


def main() -> int:
    parser, arguments = parse()
    pythons = {"reprise": sys.executable}
    for name in REQUIRED:
        python = getattr(arguments, f"{name}_python")
        if python:
            pythons[name] = python
        else:
            print(f"{name} is left out: give --{name}_python to compare with it", file=sys.stderr)
    try:
        shapes = [from_flags(arguments, batch=batch) for batch in arguments.batches]
        if arguments.policy:
            shapes = [shape_of(arguments.policy, shape) for shape in shapes]
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    before = {commit_of(checkout): checkout.resolve() for checkout in arguments.before}
    hidden = ("--policy", "--tunix_python", "--transformers_python", "--before", "--output")
    result = {
        "benchmark": "rollout_vs_others",
        **environment.record("benchmarks.compare", ("jax", "jaxlib", "numpy"), hidden=hidden),
        "repeats": arguments.repeats,
        "rows": [],
    }
    for shape in shapes:
        repeats = arguments.repeats, arguments.choosing_repeats
        row = compare(pythons, shape, *repeats, arguments.policy, before)
        result["rows"].append(row)
        if not arguments.json:
            show(row)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
