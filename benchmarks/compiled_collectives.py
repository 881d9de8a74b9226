"""What the devices of a mesh exchange in a round, as their own compilers say: nothing runs.

    python -m benchmarks.compiled_collectives --json \
        --output benchmarks/results/compiled_collectives.json

A plain round and one that verifies eight nodes a slot are compiled from shapes: 64 slots of 16,384
positions, bfloat16, weights and heads split as rollouts split them. Megabytes are those of one
device, with both branches of every condition, for a model of `--layers` layers:

- gathered: all-gather and all-to-all. Whole logits would be here, 311 MB. If `data` shares out the
  slots, each layer gathers the queries, keys and values of nodes.
- summed: all-reduce and reduce-scatter, mostly activations, of every layer.
- passed: collective-permute, the edges of each device's part of the vocabulary.

Needs the plug-in of each target (`pip install "jax[cuda13]"`, `"jax[tpu]"`), no device.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from typing import Any

from benchmarks import environment, hlo
from benchmarks.compiled_rounds import CONFIG, MODEL, NODES, POSITIONS, PROMPT, SLOTS
from models.config import ModelConfig
from rl.preflight.targets import devices_of, parse_target, prepare
from spec.config import SamplingConfig

QWEN2 = ModelConfig(
    *("qwen2", 152064, 3584, 28, 28, 4, 128, 18944), qkv_bias=True, max_positions=32768
)
MODELS = {"qwen3_8b": MODEL, "qwen2_5_7b": QWEN2}
CASES = (
    *(("qwen3_8b", "h100:1x1x8"), ("qwen2_5_7b", "h100:1x1x8")),
    *(("qwen3_8b", "v5p:2x2x1"), ("qwen3_8b", "v6e:2x2"), ("qwen3_8b", "cpu:8")),
)
KINDS = {
    "gathered_mb": ("all-gather", "all-to-all", "ragged-all-to-all", "collective-broadcast"),
    "summed_mb": ("all-reduce", "reduce-scatter"),
    "passed_mb": ("collective-permute",),
}


def exchanged(model_name: str, target_name: str, layers: int) -> dict[str, Any]:
    """Compile both rounds for a target, in a process that has opened no other compiler."""
    target = parse_target(target_name)
    prepare(target)
    import jax
    import jax.numpy as jnp

    from models import transformer
    from models.sharding import rollout_mesh
    from rl.engine.engine import Engine
    from rl.warm_up.compile_buckets import lowered
    from rl.warm_up.rollout_programs import Pool, Reach

    model = dataclasses.replace(MODELS[model_name], num_layers=layers)
    mesh = rollout_mesh(devices_of(target), model.num_kv_heads)
    config = dataclasses.replace(CONFIG, cache="pages")
    engine = Engine(model, config, mesh=mesh, dtype=jnp.bfloat16)
    sampling = SamplingConfig(max_new_tokens=POSITIONS - PROMPT)
    found: dict[str, Any] = {"tensor": mesh.shape["tensor"], "data": mesh.shape["data"]}
    with engine.mesh_context(), engine.shapes_only():
        specs = transformer.param_specs(model)
        shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, engine.dtype), specs)
        pool = Pool(engine, engine.place(shapes), sampling, Reach(SLOTS, PROMPT, speculative=True))
        rounds = {"plain": pool.plain_round(SLOTS), "verify": pool.verifying_round(SLOTS, NODES)}
        options = target.kind.compiler_options
        for name, program in rounds.items():
            step = lowered(engine, program).compile(compiler_options=options)
            moved = hlo.collectives_of(hlo.parse(step.as_text()))
            found[name] = {
                kind: round(sum(moved[n].num_bytes for n in names if n in moved) / 1e6, 3)
                for kind, names in KINDS.items()
            }
            found[name]["temporaries_mb"] = round(step.memory_analysis().temp_size_in_bytes / 1e6)
    return found


def apart(model_name: str, target_name: str, layers: int) -> dict[str, Any]:
    """Return what `exchanged` does, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.compiled_collectives", f"--layers={layers}"]
    command += ["--one", model_name, target_name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    environment.add_output_flags(parser)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "TARGET"), help="print this case alone")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(exchanged(*arguments.one, arguments.layers)))
        return
    found = {
        f"{model}, {target}": apart(model, target, arguments.layers) for model, target in CASES
    }
    packages = "jax", "jaxlib", "jax-cuda13-pjrt", "libtpu"
    result = {
        **environment.record("benchmarks.compiled_collectives", packages),
        "kind": "compiled",
        "layers": arguments.layers,
        "slots": SLOTS,
        "nodes": NODES,
        "positions": POSITIONS,
        "rounds": found,
    }
    figures = {name: f"{x['verify']['gathered_mb']} MB" for name, x in found.items()}
    environment.show(result, arguments, figures)


if __name__ == "__main__":
    main()
