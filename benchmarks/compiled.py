"""Programs for accelerators as their own compilers see them: `python -m benchmarks.compiled PART`

| part | what is compiled | result |
|---|---|---|
| collectives | exchanges between devices in rounds, several targets | compiled_collectives.json |
| training | a gradient step of Qwen3-8B on eight TPU v5p | compiled_training.json |
| preflights | the configurations of configs/real, by `rl.preflight` | preflights.json |
| auto | `qwen3_8b_8xh100` with "auto" sizes, by `rl.preflight` | preflights_auto.json |
| waits | kernels of rounds; loops and conditionals that wait for the host | compiled_waits.json |

Nothing runs; each target needs its compiler (`pip install "jax[tpu]"`, `"jax[cuda13]"`), no device.

Collectives are those of plain rounds and of rounds that verify eight nodes a slot, 64 slots of
16,384 positions in pages, bfloat16, of a model of `--layers`. They are in MB of one device:
gathered (all-gather and all-to-all: whole logits would be here, 311 MB), summed (all-reduce,
reduce-scatter: activations) and passed (collective-permute: the edges of each device's part of the
vocabulary).

`waits` compiles rounds of Qwen3-0.6B, plain ones, of any trees, and of chains, and a gradient step,
without and with top-k and top-p. A loop counts if only the device knows its number of iterations, a
conditional waits unless XLA puts it into a command buffer (`waiting_conditionals`). Kernels are
those of XLA's thunks, loops once and all branches; a layer has as many as one more layer adds.

A gradient step has one packed row a chip; temporaries are a chip's memory beside the arguments.

`head` counts what the loops over the vocabulary read and write in a gradient step of 16,384 tokens
of Qwen3-0.6B on an H100, for several values of `Trainer.logprob_chunk_tokens`; their products alone
read and write 60 GB with 1,024.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import environment, hlo
from reprise.models.config import MeshConfig, ModelConfig
from reprise.rl.learner.config import TrainerConfig
from reprise.rl.preflight.targets import devices_of, parse_target, prepare
from reprise.rl.slots.config import EngineConfig
from reprise.spec.config import SamplingConfig

SLOTS, NODES, POSITIONS, PROMPT, LAYERS = 64, 512, 16384, 1024, 36
QWEN3 = ModelConfig(
    *("qwen3", 151936, 4096, LAYERS, 32, 8, 128, 12288), qk_norm=True, max_positions=40960
)
QWEN2 = ModelConfig(
    *("qwen2", 152064, 3584, 28, 28, 4, 128, 18944), qkv_bias=True, max_positions=32768
)
QWEN3_0_6B = ModelConfig(  # as published
    architecture="qwen3",
    vocab_size=151936,
    d_model=1024,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    d_ff=3072,
    qk_norm=True,
    tied_embeddings=True,
    rope_theta=1e6,
    max_positions=40960,
)
ONE_GPU = "h100:1x1x1"
STEP_TOKENS = 4096  # of the gradient step of `waits`
HEAD_TOKENS, HEAD_CHUNKS = 16384, (1024, 4096, 8192)
THUNKS = "thunk_sequence_after_thunk_passes.txt"  # the end of the names of XLA's files
MODELS = {"qwen3_8b": QWEN3, "qwen2_5_7b": QWEN2}
CONFIG = EngineConfig(slots=SLOTS, min_slots=SLOTS)
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


def round_programs(
    model: ModelConfig,
    target: Any,
    positions: int = POSITIONS,
    names: Sequence[str] = ("plain", "verify"),
    *,
    may_cut: bool = True,
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, the compiled program and the mesh of rounds.

    `verify` is a round of any trees, `chains` one of a path for each slot.
    """
    import jax
    import jax.numpy as jnp

    from reprise.models.decoder import transformer
    from reprise.models.sharding import rollout_mesh
    from reprise.rl.engine.engine import Engine
    from reprise.rl.warm_up.compile_buckets import lowered
    from reprise.rl.warm_up.rollout_programs import Pool, Reach

    mesh = rollout_mesh(devices_of(target), model.num_kv_heads)
    engine = Engine(model, CONFIG, mesh=mesh, dtype=jnp.bfloat16, may_cut=may_cut)
    sampling = SamplingConfig(max_new_tokens=positions - PROMPT)
    with engine.mesh_context(), engine.shapes_only():
        specs = transformer.param_specs(model)
        shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, engine.dtype), specs)
        pool = Pool(engine, engine.place(shapes), sampling, Reach(SLOTS, PROMPT, speculative=True))
        programs = {
            "plain": pool.plain_round(SLOTS),
            "verify": pool.verifying_round(SLOTS, NODES),
            "chains": pool.verifying_round(SLOTS, NODES, chains=True),
        }
        for name in names:
            options = target.kind.compiler_options
            compiled = lowered(engine, programs[name]).compile(compiler_options=options)
            yield name, compiled, mesh


# --- collectives --------------------------------------------------------------------------


def collectives(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compile every case in a process of its own: one process opens one compiler."""
    found, layers = dict[str, Any](), arguments.layers
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
    for name, step, mesh in round_programs(model, target):
        text, rows = step.as_text(), SLOTS if name == "plain" else NODES
        moved = hlo.collectives_of(hlo.parse(text))
        found |= {"tensor": mesh.shape["tensor"], "data": mesh.shape["data"]}
        found[name] = {
            kind: round(sum(moved.get(n, 0) for n in names) / 1e6, 3)
            for kind, names in KINDS.items()
        }
        found[name]["whole_logits"] = text.count(f"f32[{rows},{model.vocab_size}]")
        found[name]["temporaries_mb"] = round(step.memory_analysis().temp_size_in_bytes / 1e6)
    return found


# --- waits --------------------------------------------------------------------------------


def waits(arguments: argparse.Namespace) -> dict[str, Any]:
    """Count waits for the host in rounds of `--layers` layers of Qwen3-0.6B on one H100."""
    programs = dict[str, Any]()
    for cuts in ("none", "cuts"):
        command = [sys.executable, "-m", "benchmarks.compiled", "--one_waits"]
        command += [str(arguments.layers), cuts]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        programs |= {name if cuts == "none" else f"{name}, cuts": x for name, x in found.items()}
    sizes = {"slots": SLOTS, "nodes": NODES, "positions": POSITIONS}
    return {"kind": "compiled", "layers": arguments.layers, **sizes, "programs": programs}


def waits_of(layers: int, *, may_cut: bool, dump: Path) -> dict[str, Any]:
    """Return waits and temporaries of each program; XLA writes its thunks to the folder `dump`."""
    flags = os.environ.get("XLA_FLAGS", "")  # read once, by the compiler
    os.environ["XLA_FLAGS"] = f"{flags} --xla_dump_to={dump} --xla_dump_hlo_as_text"
    target = parse_target(ONE_GPU)
    prepare(target)
    model = dataclasses.replace(QWEN3_0_6B, num_layers=layers)
    found = dict[str, Any]()

    def count(name: str, program: Any, thunks: str) -> None:
        num_bytes = program.memory_analysis().temp_size_in_bytes
        found[name] = {
            **hlo.decisions(hlo.parse(program.as_text())),
            "waiting_conditionals": hlo.waiting_conditionals(thunks),
            "kernels": hlo.kernels(thunks),
            "temporaries_mb": round(num_bytes / 1e6),
        }

    names = ("plain", "verify", "chains")
    for name, program, _ in round_programs(model, target, names=names, may_cut=may_cut):
        count(name, program, _new_thunks(dump))
    if not may_cut:
        deeper = dataclasses.replace(model, num_layers=layers + 1)
        for name, _, _ in round_programs(deeper, target, names=names, may_cut=may_cut):
            num_kernels = hlo.kernels(_new_thunks(dump))
            found[name]["kernels_a_layer"] = num_kernels - found[name]["kernels"]
    step = gradient_step(model, STEP_TOKENS, "layer", devices_of(target), may_cut=may_cut)
    program = step.compile(compiler_options=target.kind.compiler_options)
    count("training", program, _new_thunks(dump))
    return found


def _new_thunks(dump: Path) -> str:
    """Return the thunks of the program that was compiled last, and forget all others."""
    *_, newest = sorted(dump.glob(f"*{THUNKS}"), key=lambda path: path.stat().st_mtime_ns)
    text = newest.read_text()
    for path in dump.iterdir():
        path.unlink()
    return text


# --- head ---------------------------------------------------------------------------------


def head(arguments: argparse.Namespace) -> dict[str, Any]:
    """Count gigabytes of the loops of a gradient step that hold arrays over the vocabulary."""
    target = parse_target(ONE_GPU)
    prepare(target)
    model = dataclasses.replace(QWEN3_0_6B, num_layers=1)
    options = target.kind.compiler_options
    found = dict[str, Any]()

    def is_head(one: hlo.Instruction) -> bool:
        return one.opcode == "while" and str(model.vocab_size) in one.type_text

    for tokens in HEAD_CHUNKS:
        step = gradient_step(
            model, HEAD_TOKENS, "layer", devices_of(target), may_cut=False, chunk_tokens=tokens
        )
        program = step.compile(compiler_options=options)
        num_bytes = hlo.bytes_of(hlo.parse(program.as_text()), lambda *_: 0, counts=is_head)
        temporaries = program.memory_analysis().temp_size_in_bytes
        found[str(tokens)] = {
            "head_gb": round(num_bytes / 1e9, 1),
            "temporaries_gb": round(temporaries / 1e9, 2),
        }
        environment.progress({tokens: found[str(tokens)]})
    return {"kind": "compiled", "target": ONE_GPU, "tokens": HEAD_TOKENS, "chunk_tokens": found}


# --- training -----------------------------------------------------------------------------


def training(arguments: argparse.Namespace) -> dict[str, Any]:
    target, rows = parse_target(TRAINING_TARGET), list[dict[str, Any]]()
    prepare(target)
    result = {"kind": "compiled", "target": TRAINING_TARGET, "model": "Qwen3-8B", "fsdp": CHIPS}
    for layers, tokens, remat, goal_gb in PROGRAMS:
        begin, devices = time.monotonic(), devices_of(target)
        model = dataclasses.replace(QWEN3, num_layers=layers)
        program = gradient_step(model, tokens, remat, devices).compile()
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


def gradient_step(
    model: ModelConfig,
    row_tokens: int,
    remat: str,
    devices: Any,
    *,
    may_cut: bool = True,
    chunk_tokens: int = TrainerConfig.logprob_chunk_tokens,
) -> Any:
    """Return the step, lowered from shapes for these devices, over which `fsdp` splits weights."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from reprise.models.config import param_specs
    from reprise.models.layout import RULES
    from reprise.models.sharding import fitting_sharding, make_mesh
    from reprise.rl.batches import micro_batches
    from reprise.rl.learner import gradient_accumulation, trainer
    from reprise.rl.learner.config import TrainSpec

    mesh = make_mesh(MeshConfig(fsdp=len(devices)), devices)
    trainer_config = TrainerConfig(
        compute_dtype="bfloat16",
        remat=remat,
        micro_batch_tokens=row_tokens,
        logprob_chunk_tokens=chunk_tokens,
    )
    recipe = TrainSpec(model, trainer=trainer_config, may_cut=may_cut)
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
    from reprise.rl.settings.config import SIZES

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
    "collectives": collectives,
    "training": training,
    "preflights": preflights,
    "auto": auto,
    "waits": waits,
    "head": head,
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        model, target, layers = sys.argv[2:]
        print(json.dumps(exchanged(model, target, int(layers))))
    elif sys.argv[1:2] == ["--one_waits"]:
        layers, cuts = sys.argv[2:]
        with tempfile.TemporaryDirectory() as folder:
            found = waits_of(int(layers), may_cut=cuts == "cuts", dump=Path(folder))
        print(json.dumps(found))
    else:
        packages = ("jax", "jaxlib", "jax-cuda13-pjrt", "libtpu")
        environment.run(__doc__, PARTS, packages, layers=2)
