"""Our plain decoding against the tunix sampler and transformers' generate, in turns.

    python -m benchmarks.compare --json --tunix_python PATH --transformers_python PATH

One process a system, kept alive; they take turns, so that only one computes at a time. Each
system's fastest variant is compared. Ratios are taken pair by pair within a turn; the median
counts. `greedy_agreement` is the share of tokens that equal ours at temperature 0: the work is the
same. If a system is not `steady`, the machine was busy, and its figures do not count.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import environment
from benchmarks.baselines.reprise import model_config
from benchmarks.child import Child
from benchmarks.shape import BATCH, Shape
from benchmarks.turns import in_turns
from reprise.models.decoder import transformer
from reprise.models.formats import hf

MODULES = {
    "reprise": "reprise",
    "tunix": "tunix_sampler",
    "transformers": "transformers_generate",
    "vllm": "vllm_generate",
}
REQUIRED = {"tunix": 1.5, "transformers": 3.0}  # goals


class System(Child):
    """A sampler in its own process, with the variants that it can run."""

    def __init__(self, name: str, python: str, shape: Shape, policy: str) -> None:
        command = [python, "-m", f"benchmarks.baselines.{MODULES[name]}"]
        super().__init__(name, command, environment.ROOT)
        self.hello, self.seed = self.answer(), 0
        self._given = {"shape": dataclasses.asdict(shape), "policy": policy}

    def prepare(self, variant: str) -> dict[str, Any]:
        return self.ask(do="prepare", variant=variant, **self._given)

    def seconds(self) -> float:
        self.seed += 1
        return float(self.ask(do="run", seed=self.seed)["seconds"])

    def choose_variant(self, repeats: int) -> dict[str, float]:
        """Return the median seconds of variants, the fastest first; slow ones run once."""
        found: dict[str, float] = {}
        for variant in self.hello["variants"]:
            warm_s = self.prepare(variant)["warm_call_s"]
            runs = repeats if warm_s < 2 * min(found.values(), default=1e9) else 0
            found[variant] = statistics.median([self.seconds() for _ in range(runs)] or [warm_s])
        return dict(sorted(found.items(), key=lambda item: item[1]))


def shape_of(policy: Path, shape: Shape) -> Shape:
    """Return the batch of `shape`, and the model of a policy's folder."""
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
    pythons: Mapping[str, str], shape: Shape, repeats: int, choosing: int, folder: Path | None
) -> dict[str, Any]:
    """Return a row: every system on this shape, in turns after all are warm."""
    children: dict[str, System] = {}
    systems: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        policy = str(folder or Path(scratch) / "policy")
        if folder is None:
            config = model_config(shape)
            params = transformer.init(config, jax.random.key(0), jnp.dtype(shape.dtype))
            hf.save_pretrained(policy, config, params)
        try:
            for name, python in pythons.items():
                child = children[name] = System(name, python, shape, policy)
                tried = child.choose_variant(choosing)
                best = next(iter(tried))
                speeds = {v: round(shape.total_new_tokens / s, 1) for v, s in tried.items()}
                systems[name] = {"variant": best, "variants_tokens_per_s": speeds}
                systems[name] |= child.prepare(best) | {"versions": child.hello["versions"]}
            greedy = {name: child.ask(do="greedy")["tokens"] for name, child in children.items()}
            kinds = {name: child.seconds for name, child in children.items()}
            seconds = in_turns(kinds, repeats, warm=0)
        finally:
            for child in children.values():
                child.close()
    for name, system in systems.items():
        speeds_T = (shape.total_new_tokens / seconds[name]).round(1)
        system["tokens_per_s"] = float(np.median(speeds_T))
        system["tokens_per_s_all"] = speeds_T.tolist()
        same = np.asarray(greedy["reprise"]) == np.asarray(greedy[name])
        system["greedy_agreement"] = round(float(same.mean()), 6)
        all_speeds = [system["variants_tokens_per_s"][system["variant"]], *speeds_T]
        system["steady"] = bool(max(all_speeds) < 1.5 * min(all_speeds))
    return {
        "shape": dataclasses.asdict(shape),
        "systems": systems,
        "ratios": {
            name: ratio(seconds[name] / seconds["reprise"], REQUIRED[name])
            for name in systems
            if name != "reprise"
        },
    }


def ratio(ratios_T: np.ndarray, required: float) -> dict[str, Any]:
    """Return how many times faster we are, turn by turn."""
    median = float(np.median(ratios_T))
    ends = {"least": round(ratios_T.min(), 3), "most": round(ratios_T.max(), 3)}
    return {"median": round(median, 3), **ends, "required": required, "reached": median >= required}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each batch."""
    pythons = {"reprise": sys.executable}
    for name in REQUIRED:
        if python := getattr(arguments, f"{name}_python"):
            pythons[name] = str(python)
        else:
            environment.progress(f"{name} is left out: give --{name}_python to compare with it")
    result = {"repeats": arguments.repeats, "rows": list[Any]()}
    for batch in arguments.batches:
        shape = Shape(batch=batch, **{name: getattr(arguments, name) for name in BATCH})
        if arguments.policy:
            shape = shape_of(arguments.policy, shape)
        repeats = arguments.repeats, arguments.choosing_repeats
        result["rows"].append(compare(pythons, shape, *repeats, arguments.policy))
        environment.write(result | arguments.record(), arguments)
    return result


if __name__ == "__main__":
    environment.run(
        __doc__,
        measure,
        batches=(16, 64),
        policy=Path,
        tunix_python=Path,
        transformers_python=Path,
        repeats=9,
        choosing_repeats=3,
        **BATCH,
    )
