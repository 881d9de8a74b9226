"""Programs for accelerators as their own compilers see them: `python -m benchmarks.compiled PART`

| part | what is compiled | result |
|---|---|---|
| rounds | plain and verifying rounds of Qwen3-8B on four TPU v5p | compiled_rounds.json |
| collectives | exchanges between devices in these, on several targets | compiled_collectives.json |
| training | a gradient step of Qwen3-8B on eight TPU v5p | compiled_training.json |
| preflights | the configurations of configs/real, by `rl.preflight` | preflights.json |
| auto | `qwen3_8b_8xh100` with "auto" sizes, by `rl.preflight` | preflights_auto.json |

Nothing runs; each target needs its compiler (`pip install "jax[tpu]"`, `"jax[cuda13]"`), no device.

Rounds have 64 slots of 16,384 positions, bfloat16; a verifying round has eight nodes a slot. Models
of `--layers` are compiled; figures of all 36 layers are extrapolated, linear in the layers. The
floor is keys, values and weights read once at the makers' bandwidth. `priced_ratio` is of the bytes
that the kernel names to the compiler. Seconds are the compiler's estimate, which counts weights
that are copied to VMEM ahead of their product more than once; and itemized, one instruction after
the other: estimated cycles of fusions, bytes of kernels, copies and collectives at the makers'
bandwidth. Both branches of a condition count, and work done once in 16 rounds. Counted without a
device: pages allocated for live tokens, programs that run the whole model, and arguments of a MiB
and more that every chip has whole.

Collectives are in MB of one device: gathered (all-gather and all-to-all: whole logits would be
here, 311 MB), summed (all-reduce, reduce-scatter: activations) and passed (collective-permute: the
edges of each device's part of the vocabulary), for a model of the first of `--layers`.

A gradient step has one packed row a chip; temporaries are a chip's memory beside the arguments.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import environment, hlo
from models.config import MeshConfig, ModelConfig
from rl.engine.config import EngineConfig
from rl.preflight.targets import devices_of, parse_target, prepare
from spec.config import SamplingConfig

TARGET, SLOTS, NODES, POSITIONS, PROMPT, LAYERS = "v5p:2x2x1", 64, 512, 16384, 1024, 36
QWEN3 = ModelConfig(
    *("qwen3", 151936, 4096, LAYERS, 32, 8, 128, 12288), qk_norm=True, max_positions=40960
)
QWEN2 = ModelConfig(
    *("qwen2", 152064, 3584, 28, 28, 4, 128, 18944), qkv_bias=True, max_positions=32768
)
MODELS = {"qwen3_8b": QWEN3, "qwen2_5_7b": QWEN2}
CONFIG = EngineConfig(slots=SLOTS, min_slots=SLOTS)
CACHES = ("pages", "rows")
FIGURES = ("temporaries_gb", "accessed_gb", "compiler_ms", "itemized_ms", "gathered_mb")
CLOCK_HZ = 459e12 / (2 * 4 * 2 * 128**2)  # operations/s of two cores of four 128 × 128 products
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_PRICE = re.compile(r'"cost_estimate":\{[^}]*"bytes_accessed":"(\d+)"')
CASES = (
    *(("qwen3_8b", "h100:1x1x8"), ("qwen2_5_7b", "h100:1x1x8")),
    *(("qwen3_8b", "v5p:2x2x1"), ("qwen3_8b", "v6e:2x2"), ("qwen3_8b", "cpu:8")),
)
KINDS = {
    "gathered_mb": ("all-gather", "all-to-all", "ragged-all-to-all", "collective-broadcast"),
    "summed_mb": ("all-reduce", "reduce-scatter"),
    "passed_mb": ("collective-permute",),
}
TRAINING_TARGET, CHIPS = "v5p:2x2x2", 8
# Layers, tokens of a row, remat, and the goal for temporaries a chip.
PROGRAMS = ((LAYERS, 16384, "layer:6", 8.0), (LAYERS, 32768, "layer:6", 12.0))
PREFLIGHTS = {
    "qwen3_0.6b_h100": "h100:1x1x1",
    "qwen3_1.7b_8xh100": "h100:1x1x8",
    "qwen3_8b_8xh100": "h100:1x1x8",
    "qwen3_8b_v5e64": "v5e:8x8",
    "qwen3_8b_v6e16": "v6e:4x4",
    "qwen3_32b_v5p64": "v5p:2x4x4",
}
GPU_SHARE = "0.92"  # of its memory that JAX is told to take, as the configurations say


def round_programs(model: ModelConfig, cache: str, target: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, the compiled program and the engine of a plain and a verifying round."""
    import jax
    import jax.numpy as jnp

    from models import transformer
    from models.sharding import rollout_mesh
    from rl.engine.engine import Engine
    from rl.warm_up.compile_buckets import lowered
    from rl.warm_up.rollout_programs import Pool, Reach

    mesh = rollout_mesh(devices_of(target), model.num_kv_heads)
    config = dataclasses.replace(CONFIG, cache=cache)
    engine = Engine(model, config, mesh=mesh, dtype=jnp.bfloat16)
    sampling = SamplingConfig(max_new_tokens=POSITIONS - PROMPT)
    with engine.mesh_context(), engine.shapes_only():
        specs = transformer.param_specs(model)
        shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, engine.dtype), specs)
        pool = Pool(engine, engine.place(shapes), sampling, Reach(SLOTS, PROMPT, speculative=True))
        programs = {"plain": pool.plain_round(SLOTS), "verify": pool.verifying_round(SLOTS, NODES)}
        for name, program in programs.items():
            options = target.kind.compiler_options
            yield name, lowered(engine, program).compile(compiler_options=options), mesh


# --- rounds -------------------------------------------------------------------------------


def rounds(arguments: argparse.Namespace) -> dict[str, Any]:
    target, found = parse_target(TARGET), dict[str, Any]()
    prepare(target)
    first, last = arguments.layers[0], arguments.layers[-1]
    for cache in CACHES:
        by_layers = {n: round_figures(cache, n, target) for n in (first, last)}
        for name, few in by_layers[first].items():
            more, steps = by_layers[last][name], (LAYERS - first) / max(last - first, 1)
            whole = {key: few[key] + (more[key] - few[key]) * steps for key in FIGURES}
            found[f"{cache}, {name}"] = {
                **{key: round(value, 3) for key, value in whole.items()},
                "layers_compiled": {layers: each[name] for layers, each in by_layers.items()},
            }
    floor = floor_ms(target)
    result: dict[str, Any] = {
        **{"kind": "compiled", "target": TARGET, "layers": LAYERS},
        **{"slots": SLOTS, "nodes": NODES, "positions": POSITIONS},
        "floor_ms": round(floor, 3),
        "priced_ratio": round(priced_ratio(), 3),
        "allocated": allocation(),
        "whole_model_programs": whole_model_programs(),
        "whole_arrays": {cache: whole_arrays(cache, devices_of(target)) for cache in CACHES},
        "rounds": found,
    }
    for cache in CACHES:
        for seconds, ratio in (("compiler_ms", "ratio"), ("itemized_ms", "itemized_ratio")):
            plain, verify = (found[f"{cache}, {name}"][seconds] for name in ("plain", "verify"))
            result[f"{cache}_verify_{ratio}"] = round(verify / plain, 3)
            result[f"{cache}_floor_{ratio}"] = round(plain / floor, 3)
    return result


def round_figures(cache: str, layers: int, target: Any) -> dict[str, dict[str, float]]:
    """Return the compiler's figures of a chip, for both kinds of rounds."""
    found = {}
    for name, step, _ in round_programs(
        dataclasses.replace(QWEN3, num_layers=layers), cache, target
    ):
        cost, module = step.cost_analysis(), hlo.parse(step.as_text())
        moved = hlo.collectives_of(module)
        found[name] = {
            "temporaries_gb": step.memory_analysis().temp_size_in_bytes / 1e9,
            "accessed_gb": cost["bytes accessed"] / 1e9,
            "compiler_ms": 1e3 * cost["optimal_seconds"],
            "itemized_ms": itemized_ms(module, target),
            "gathered_mb": sum(x for k, x in moved.items() if "gather" in k) / 1e6,
        }
    return found


def itemized_ms(module: hlo.Module, target: Any) -> float:
    """Return the milliseconds of a program, one instruction after the other."""
    figures, cycles, moved = target.kind.figures, 0, 0
    for times, one, _ in module.run():
        if found := _CYCLES.search(one.rest):
            cycles += times * int(found[1])
        if found := _PRICE.search(one.rest):
            moved += times * int(found[1])
        if one.opcode == "copy-start" and one.arrays[1].on_device:
            moved += times * one.arrays[1].num_bytes
    sums = 2 * sum(hlo.collectives_of(module).values())
    return 1e3 * (cycles / CLOCK_HZ + moved / figures.bytes_per_s + sums / figures.link_bytes_per_s)


def whole_arrays(cache: str, devices: Any) -> int:
    """Count arrays of a MiB and more that each of several devices has whole.

    They are arguments of all programs of rollouts and the training state, weights over two ways of
    fsdp and two of tensor.
    """
    import jax

    from rl.config import TrainConfig
    from rl.gin.loader import load
    from rl.preflight.programs import RunPrograms

    flags = "Mesh.data=1", "Mesh.fsdp=2", "Mesh.tensor=2", f"Engine.cache='{cache}'"
    config = load(TrainConfig, ["configs/real/qwen3_8b_8xh100.gin"], flags)
    run = RunPrograms(config, dataclasses.replace(QWEN3, num_layers=2), devices, is_cpu=False)
    held = jax.tree.leaves((run.state, [program.arguments() for program in run.of_rollouts()]))
    shapes = [x for x in held if isinstance(x, jax.ShapeDtypeStruct)]
    assert any(x.sharding is not None and not x.sharding.is_fully_replicated for x in shapes)
    return sum(
        math.prod(x.shape) * x.dtype.itemsize >= 2**20
        and (x.sharding is None or x.sharding.is_fully_replicated)
        for x in shapes
        if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    )


def floor_ms(target: Any) -> float:
    """Return the milliseconds in which a chip reads its keys, values and weights once."""
    from models.config import leaves, param_specs

    numbers = sum(math.prod(spec.shape) for spec in leaves(param_specs(QWEN3)))
    numbers -= QWEN3.vocab_size * QWEN3.d_model  # an embedding is looked up
    keys = 2 * LAYERS * QWEN3.num_kv_heads * QWEN3.head_dim * SLOTS * POSITIONS
    return 1e3 * 2 * (numbers + keys) / target.count / target.kind.figures.bytes_per_s


def priced_ratio() -> float:
    """Return the kernel's bytes for a round of eight nodes a slot over those of a plain one."""
    import jax
    import jax.numpy as jnp

    from models.kernels.page_attention_tpu import attend_pages

    heads, kv_heads, h, T = QWEN3.num_heads // 4, QWEN3.num_kv_heads // 4, QWEN3.head_dim, 128
    pages = jax.ShapeDtypeStruct((SLOTS * POSITIONS // T, kv_heads, T, h), jnp.bfloat16)
    tables = (SLOTS, POSITIONS // T), (SLOTS,)

    def priced(nodes: int) -> int:
        q = jax.ShapeDtypeStruct((SLOTS, nodes, heads, h), jnp.bfloat16)
        held = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in tables)
        calls = kernels_of(jax.make_jaxpr(attend_pages)(q, pages, pages, *held).jaxpr)
        return sum(call.params["cost_estimate"].bytes_accessed for call in calls)

    width = min(CONFIG.max_nodes, 2 * NODES // SLOTS)  # nodes of a slot, padded
    return priced(width) / priced(1)


def kernels_of(jaxpr: Any) -> Iterator[Any]:
    """Yield the calls of kernels, however deep."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
            continue
        for inner in equation.params.values():
            if hasattr(inner, "jaxpr"):
                yield from kernels_of(inner.jaxpr)


def allocation() -> dict[str, float]:
    """Return positions allocated for one row of 16k tokens and 255 of 2k, over live tokens."""
    from spec.page_table import PageTable

    lengths, T = [16384] + [2048] * 255, 128
    pages = PageTable(256, 16384 // T, 256 * 16384 // T, T)
    for slot, tokens in enumerate(lengths):
        assert pages.reserve(slot, min(16384, tokens + CONFIG.rounds_per_fetch))
    allocated = {"pages": int(pages.held_B.sum()) * T, "rows": 256 * 16384}
    return {name: round(tokens / sum(lengths), 3) for name, tokens in allocated.items()}


def whole_model_programs() -> dict[str, int]:
    """Return the programs that run the whole model, 256 slots of 18k tokens with drafts."""
    from rl.engine.engine import Engine
    from rl.warm_up.compile_buckets import num_whole_model
    from rl.warm_up.rollout_programs import Reach

    sampling, reach = SamplingConfig(max_new_tokens=16384), Reach(256, 2048, speculative=True)
    settings = {name: EngineConfig(slots=256, cache=name) for name in CACHES}
    return {n: num_whole_model(Engine(QWEN3, c), sampling, reach) for n, c in settings.items()}


# --- collectives --------------------------------------------------------------------------


def collectives(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compile every case in a process of its own: one process opens one compiler."""
    found, layers = dict[str, Any](), arguments.layers[0]
    for model, target in CASES:
        command = [sys.executable, "-m", "benchmarks.compiled", "--one", model, target, str(layers)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[f"{model}, {target}"] = json.loads(done.stdout.splitlines()[-1])
    sizes = {"slots": SLOTS, "nodes": NODES, "positions": POSITIONS}
    return {"kind": "compiled", "layers": layers, **sizes, "rounds": found}


def exchanged(model_name: str, target_name: str, layers: int) -> dict[str, Any]:
    """Return megabytes by kind of collective, of both rounds."""
    target = parse_target(target_name)
    prepare(target)
    model, found = dataclasses.replace(MODELS[model_name], num_layers=layers), dict[str, Any]()
    for name, step, mesh in round_programs(model, "pages", target):
        moved = hlo.collectives_of(hlo.parse(step.as_text()))
        found |= {"tensor": mesh.shape["tensor"], "data": mesh.shape["data"]}
        found[name] = {
            kind: round(sum(moved.get(n, 0) for n in names) / 1e6, 3)
            for kind, names in KINDS.items()
        }
        found[name]["temporaries_mb"] = round(step.memory_analysis().temp_size_in_bytes / 1e6)
    return found


# --- training -----------------------------------------------------------------------------


def training(arguments: argparse.Namespace) -> dict[str, Any]:
    target, rows = parse_target(TRAINING_TARGET), list[dict[str, Any]]()
    prepare(target)
    result = {"kind": "compiled", "target": TRAINING_TARGET, "model": "Qwen3-8B", "fsdp": CHIPS}
    for layers, tokens, remat, goal_gb in PROGRAMS:
        begin, devices = time.monotonic(), devices_of(target)
        program = gradient_step(layers, tokens, remat, devices).compile()
        memory = program.memory_analysis()
        rows.append({"layers": layers, "row_tokens": tokens, "remat": remat})
        rows[-1] |= {
            "attention_kernel": "dkv_kernel" in program.as_text(),
            "temporaries_gb": round(memory.temp_size_in_bytes / 1e9, 2),
            "arguments_gb": round(memory.argument_size_in_bytes / 1e9, 2),
            "compile_s": round(time.monotonic() - begin),
        }
        environment.progress(rows[-1])
        result[f"temporaries_gb_{tokens}"] = rows[-1]["temporaries_gb"]
        result[f"goal_gb_{tokens}"] = goal_gb
    return result | {"rows": rows}


def gradient_step(layers: int, row_tokens: int, remat: str, devices: Any) -> Any:
    """Return the step, lowered from shapes for these devices."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from models.config import param_specs
    from models.layout import RULES
    from models.sharding import fitting_sharding, make_mesh
    from rl.learner import gradient_accumulation, micro_batches, trainer
    from rl.learner.config import TrainerConfig, TrainSpec

    model = dataclasses.replace(QWEN3, num_layers=layers)
    mesh = make_mesh(MeshConfig(fsdp=CHIPS), devices)
    sizes: Any = {"remat": remat, "micro_batch_tokens": row_tokens}
    recipe = TrainSpec(model, trainer=TrainerConfig(compute_dtype="bfloat16", **sizes))
    static = {"network": trainer.POLICY, "recipe": recipe}
    whole = NamedSharding(mesh, PartitionSpec())
    by_row = NamedSharding(mesh, PartitionSpec(RULES["batch"]))

    def shaped(x: Any, sharding: NamedSharding, dtype: Any = None) -> Any:
        return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=sharding)

    def weight(spec: Any) -> Any:
        return shaped(spec, fitting_sharding(mesh, spec.shape, spec.axes), jnp.float32)

    with jax.set_mesh(mesh):
        weights = jax.tree.map(weight, param_specs(model))
        total = jax.eval_shape(lambda: gradient_accumulation.start(**static))
        statistics = jax.tree.map(lambda x: shaped(x, whole), total.statistics)
        total = dataclasses.replace(total, gradients=weights, statistics=statistics)
        rows = micro_batches.empty(trainer.batch_shape(recipe, row_tokens))
        batch = jax.tree.map(lambda x: shaped(x, by_row), rows)
        one, flag = (jax.ShapeDtypeStruct((), t, sharding=whole) for t in (jnp.float32, jnp.bool_))
        scalars = gradient_accumulation.StepScalars(one, one, flag)
        return gradient_accumulation.accumulate.lower(weights, total, batch, scalars, **static)


# --- preflights ---------------------------------------------------------------------------


def preflights(arguments: argparse.Namespace) -> dict[str, Any]:
    found = {name.replace(".", "_"): preflight(name) for name in PREFLIGHTS}
    fit = all(one["fits"] for one in found.values())
    return {"kind": "compiled", "configurations": found, "all_fit": fit}


def auto(arguments: argparse.Namespace) -> dict[str, Any]:
    from rl.config import SIZES

    name, flags = "qwen3_8b_8xh100", [f"--gin.{size}='auto'" for size in SIZES]
    return {"kind": "compiled", "auto": {name: preflight(name, *flags)}}


def preflight(name: str, *flags: str) -> dict[str, Any]:
    """Return a preflight's figures of the fullest device, and the seconds that it took."""
    target, began = PREFLIGHTS[name], time.monotonic()
    command = [sys.executable, "-m", "rl.preflight", "--json", f"--target={target}"]
    command += [f"--gin_file=configs/real/{name}.gin", *flags]
    env = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": GPU_SHARE}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode not in (0, 2) or not done.stdout.strip().endswith("}"):
        raise RuntimeError(f"{name}: {done.stderr.strip()[-2000:]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    kept = ("fits", "peak_bytes", "device_bytes", "programs", "whole_model_programs", "held_bytes")
    compiled = {one["name"]: one["temporary_bytes"] for one in found["compiled"]}
    return {
        "target": target,  # a dot parts the keys of a path
        "sizes": {size.replace(".", "_"): value for size, value in found["sizes"].items()},
        **{key: found[key] for key in kept},
        "share": round(found["peak_bytes"] / found["device_bytes"], 3),
        "seconds": round(time.monotonic() - began),
        "peak_program": found["peak_program"],
        "temporaries_gb": {n: round(x / 1e9, 3) for n, x in compiled.items()},
    }


PARTS = {
    "rounds": rounds,
    "collectives": collectives,
    "training": training,
    "preflights": preflights,
    "auto": auto,
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        model, target, layers = sys.argv[2:]
        print(json.dumps(exchanged(model, target, int(layers))))
    else:
        packages = ("jax", "jaxlib", "jax-cuda13-pjrt", "libtpu")
        environment.run(__doc__, PARTS, packages, layers=(2, 4))
