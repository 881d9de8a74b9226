"""Rounds of Qwen3-8B on TPU v5p, as its own compiler says: nothing runs.

    python -m benchmarks.compiled_rounds --json --output benchmarks/results/compiled_rounds.json

A plain round and one that verifies eight nodes a slot are compiled from shapes for four v5p chips
(`v5p:2x2x1`), weights and heads split over all of them, bfloat16, 64 slots of 16,384 positions,
with the cache in pages and in rows. Models of few layers are compiled and figures of all 36
extrapolated, linear in the layers; `--layers 36` compiles all. The floor is keys, values and
weights read once at the makers' bandwidth. `priced_ratio` is of the bytes that the kernel tells the
compiler that it reads and writes.

Seconds are the compiler's own, which count weights that are copied to VMEM ahead of their product
more than once; and itemized, one instruction after the other: the cycles that the compiler
estimates for a fusion, kernels and copies ahead by their bytes at the makers' bandwidth,
collectives by theirs. Both branches of a condition count, and what is done once in 16 rounds.

Beside them, counted without a device: pages that are allocated for live tokens, programs that run
the whole model, and arguments of rounds and of training of a MiB and more that every chip has whole
(`gathered_mb` are the results of gathers in a round: positions and draws, no weights).

Needs libtpu (`pip install "jax[tpu]"`), no TPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import environment, hlo
from models.config import ModelConfig
from rl.engine.config import EngineConfig
from rl.preflight.targets import devices_of, parse_target, prepare
from spec.config import SamplingConfig

TARGET, SLOTS, NODES, POSITIONS, PROMPT = "v5p:2x2x1", 64, 512, 16384, 1024
LAYERS = 36
MODEL = ModelConfig(
    *("qwen3", 151936, 4096, LAYERS, 32, 8, 128, 12288), qk_norm=True, max_positions=40960
)
CONFIG = EngineConfig(slots=SLOTS, min_slots=SLOTS)
FIGURES = ("temporaries_gb", "accessed_gb", "compiler_ms", "itemized_ms", "gathered_mb")
CLOCK_HZ = 459e12 / (2 * 4 * 2 * 128**2)  # operations/s of two cores of four 128 × 128 products
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_PRICE = re.compile(r'"cost_estimate":\{[^}]*"bytes_accessed":"(\d+)"')


def compiled(cache: str, layers: int, devices: Any) -> dict[str, dict[str, float]]:
    """Compile both kinds of rounds; return what the compiler says of a chip."""
    import jax
    import jax.numpy as jnp

    from models import transformer
    from models.sharding import rollout_mesh
    from rl.engine.engine import Engine
    from rl.warm_up.compile_buckets import lowered
    from rl.warm_up.rollout_programs import Pool, Reach

    model = dataclasses.replace(MODEL, num_layers=layers)
    config = dataclasses.replace(CONFIG, cache=cache)
    engine = Engine(model, config, mesh=rollout_mesh(devices, 8), dtype=jnp.bfloat16)
    sampling, found = SamplingConfig(max_new_tokens=POSITIONS - PROMPT), {}
    with engine.mesh_context(), engine.shapes_only():
        specs = transformer.param_specs(model)
        shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, engine.dtype), specs)
        pool = Pool(engine, engine.place(shapes), sampling, Reach(SLOTS, PROMPT, speculative=True))
        rounds = {"plain": pool.plain_round(SLOTS), "verify": pool.verifying_round(SLOTS, NODES)}
        for name, program in rounds.items():
            begin = time.monotonic()
            step = lowered(engine, program).compile()
            cost, module = step.cost_analysis(), hlo.parse(step.as_text())
            moved = hlo.collectives_of(module)
            found[name] = {
                "temporaries_gb": step.memory_analysis().temp_size_in_bytes / 1e9,
                "accessed_gb": cost["bytes accessed"] / 1e9,
                "compiler_ms": 1e3 * cost["optimal_seconds"],
                "itemized_ms": itemized_ms(module),
                "gathered_mb": sum(x.num_bytes for k, x in moved.items() if "gather" in k) / 1e6,
                "compile_s": round(time.monotonic() - begin),
            }
    return found


def itemized_ms(module: hlo.Module) -> float:
    """Milliseconds of a program, one instruction after the other."""
    figures = parse_target(TARGET).kind.figures
    assert figures is not None
    cycles = moved = 0
    for times, one, _ in module.run():
        if found := _CYCLES.search(one.rest):
            cycles += times * int(found[1])
        if found := _PRICE.search(one.rest):
            moved += times * int(found[1])
        if one.opcode == "copy-start" and one.arrays[1].on_device:
            moved += times * one.arrays[1].num_bytes
    sums = sum(2 * x.num_bytes for x in hlo.collectives_of(module).values())
    return 1e3 * (cycles / CLOCK_HZ + moved / figures.bytes_per_s + sums / figures.link_bytes_per_s)


def extrapolated(few: dict[str, float], more: dict[str, float], a: int, b: int) -> dict[str, float]:
    """Return the figures of all layers, by those of two models."""
    steps = (LAYERS - a) / (b - a)
    return {name: few[name] + (more[name] - few[name]) * steps for name in FIGURES}


def whole_arrays(cache: str, devices: Any) -> int:
    """Count arrays of a MiB and more that lie whole on each of several devices.

    They are arguments of all programs of rollouts and the training state, weights over two ways of
    fsdp and two of tensor.
    """
    import jax

    from rl.config.loader import load
    from rl.loop.experiment import TrainConfig
    from rl.preflight.programs import RunPrograms

    flags = "Mesh.data=1", "Mesh.fsdp=2", "Mesh.tensor=2", f"Engine.cache='{cache}'"
    config = load(TrainConfig, ["configs/real/qwen3_8b_8xh100.gin"], flags)
    run = RunPrograms(config, dataclasses.replace(MODEL, num_layers=2), devices, is_cpu=False)
    held = jax.tree.leaves((run.state, [program.arguments() for program in run.of_rollouts()]))
    shapes = [x for x in held if isinstance(x, jax.ShapeDtypeStruct)]
    assert any(x.sharding is not None and not x.sharding.is_fully_replicated for x in shapes)
    return sum(
        math.prod(x.shape) * x.dtype.itemsize >= 2**20
        and (x.sharding is None or x.sharding.is_fully_replicated)
        for x in shapes
        if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    )


def floor_ms() -> float:
    """Milliseconds in which a chip reads its keys, values and weights once."""
    from models.params import leaves, param_specs

    target = parse_target(TARGET)
    assert target.kind.figures is not None
    numbers = sum(math.prod(spec.shape) for spec in leaves(param_specs(MODEL)))
    numbers -= MODEL.vocab_size * MODEL.d_model  # an embedding is looked up
    keys = 2 * LAYERS * MODEL.num_kv_heads * MODEL.head_dim * SLOTS * POSITIONS
    return 1e3 * 2 * (numbers + keys) / target.count / target.kind.figures.bytes_per_s


def priced_ratio() -> float:
    """Bytes that the kernel prices for a round of eight nodes a slot, against a plain one."""
    import jax
    import jax.numpy as jnp

    from models.kernels.page_attention_tpu import attend_pages

    heads, kv_heads, h, T = MODEL.num_heads // 4, MODEL.num_kv_heads // 4, MODEL.head_dim, 128
    pages = jax.ShapeDtypeStruct((SLOTS * POSITIONS // T, kv_heads, T, h), jnp.bfloat16)
    tables = (SLOTS, POSITIONS // T), (SLOTS,)

    def priced(nodes: int) -> int:
        q = jax.ShapeDtypeStruct((SLOTS, nodes, heads, h), jnp.bfloat16)
        held = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in tables)
        calls = _equations(jax.make_jaxpr(attend_pages)(q, pages, pages, *held).jaxpr)
        return sum(call.params["cost_estimate"].bytes_accessed for call in calls)

    width = min(CONFIG.max_nodes, 2 * NODES // SLOTS)  # nodes of a slot, padded
    return priced(width) / priced(1)


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Yield the calls of kernels, wherever they are."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
        for inner in equation.params.values():
            if hasattr(inner, "jaxpr") and equation.primitive.name != "pallas_call":
                yield from _equations(inner.jaxpr)


def allocation() -> dict[str, float]:
    """Positions that are allocated for one row of 16k tokens and 255 of 2k, by live tokens."""
    from spec.page_table import PageTable

    lengths, T = [16384] + [2048] * 255, 128
    pages = PageTable(256, 16384 // T, 256 * 16384 // T, T)
    for slot, tokens in enumerate(lengths):
        assert pages.reserve(slot, min(16384, tokens + CONFIG.rounds_per_fetch))
    live = sum(lengths)
    return {
        "pages": round(int(pages.held_B.sum()) * T / live, 3),
        "rows": round(256 * 16384 / live, 3),
    }


def whole_model_programs() -> dict[str, int]:
    """Programs that run the whole model, of 256 slots of 18k tokens with drafts."""
    from rl.engine.engine import Engine
    from rl.warm_up.compile_buckets import num_whole_model
    from rl.warm_up.rollout_programs import Reach

    sampling, reach = SamplingConfig(max_new_tokens=16384), Reach(256, 2048, speculative=True)
    settings = {name: EngineConfig(slots=256, cache=name) for name in ("rows", "pages")}
    return {n: num_whole_model(Engine(MODEL, c), sampling, reach) for n, c in settings.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    environment.add_output_flags(parser)
    parser.add_argument("--layers", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--caches", nargs="*", default=["pages", "rows"])
    arguments = parser.parse_args()
    target = parse_target(TARGET)
    prepare(target)
    devices = devices_of(target)
    floor, counted, rounds = floor_ms(), allocation(), {}
    for cache in arguments.caches:
        found = {layers: compiled(cache, layers, devices) for layers in arguments.layers}
        first, last = arguments.layers[0], arguments.layers[-1]
        for name in ("plain", "verify"):
            whole = {key: found[last][name][key] for key in FIGURES}
            if last != LAYERS:
                whole = extrapolated(found[first][name], found[last][name], first, last)
            rounds[f"{cache}, {name}"] = {
                **{key: round(value, 3) for key, value in whole.items()},
                "layers_compiled": {layers: each[name] for layers, each in found.items()},
            }
    result: dict[str, Any] = {
        **environment.record("benchmarks.compiled_rounds", ("jax", "jaxlib", "libtpu")),
        "kind": "compiled",
        "target": TARGET,
        "slots": SLOTS,
        "nodes": NODES,
        "positions": POSITIONS,
        "layers": LAYERS,
        "floor_ms": round(floor, 3),
        "priced_ratio": round(priced_ratio(), 3),
        "allocated": counted,
        "whole_model_programs": whole_model_programs(),
        "whole_arrays": {cache: whole_arrays(cache, devices) for cache in arguments.caches},
        "rounds": rounds,
    }
    for cache in arguments.caches:
        for seconds, ratio in (("compiler_ms", "ratio"), ("itemized_ms", "itemized_ratio")):
            plain, verify = (rounds[f"{cache}, {name}"][seconds] for name in ("plain", "verify"))
            result[f"{cache}_verify_{ratio}"] = round(verify / plain, 3)
            result[f"{cache}_floor_{ratio}"] = round(plain / floor, 3)
    environment.show(result, arguments, {name: result[name] for name in result if "ratio" in name})


if __name__ == "__main__":
    main()
