"""What a gradient step of Qwen3-8B needs on TPU v5p, as its own compiler says: nothing runs.

    python -m benchmarks.compiled_training --json --output benchmarks/results/compiled_training.json

`rl.learner.gradient_accumulation.accumulate` is compiled from shapes for eight v5p chips
(`v5p:2x2x2`), weights split over all of them (`Mesh.fsdp = 8`), one packed row a chip, bfloat16.
Temporaries are what the compiler sets aside on a chip beside the arguments (weights, accumulated
gradients, the micro-batch). Rows are marked as compiled: no figure was measured on a device. All
layers take minutes to compile on two cores.

`--portable` compiles a program again with `models.row_attention`'s portable path in the place of
the kernel. Needs libtpu (`pip install "jax[tpu]"`), no TPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import sys
import time
from typing import Any

from benchmarks import environment

TARGET, CHIPS = "v5p:2x2x2", 8
GOALS_GB = {16384: 8.0, 32768: 12.0}  # temporaries a chip, all layers
WHOLE = 36
# what a machine without a TPU has to say to libtpu
TPU = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclasses.dataclass(frozen=True)
class Program:
    """A gradient step: layers, tokens of a row, and `Trainer.remat`."""

    layers: int
    row_tokens: int
    remat: str
    portable: bool = False

    @classmethod
    def of(cls, text: str, portable: bool = False) -> Program:
        """Read LAYERS/TOKENS/REMAT."""
        layers, tokens, remat = text.split("/")
        return cls(int(layers), int(tokens), remat, portable)


DEFAULT = ("36/16384/layer:6", "36/32768/layer:6", "4/16384/layer", "4/32768/layer")


def lowered(program: Program, devices: Any) -> Any:
    """Return the step, lowered from shapes for these devices."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from models.config import MeshConfig, ModelConfig
    from models.layout import RULES
    from models.params import param_specs
    from models.sharding import fitting_sharding, make_mesh
    from rl.learner import gradient_accumulation, micro_batches, trainer
    from rl.learner.config import TrainerConfig, TrainSpec

    model = ModelConfig(
        *("qwen3", 151936, 4096, program.layers, 32, 8, 128, 12288),
        qk_norm=True,
        max_positions=40960,
    )
    mesh = make_mesh(MeshConfig(fsdp=CHIPS), devices)
    settings = TrainerConfig(
        compute_dtype="bfloat16", remat=program.remat, micro_batch_tokens=program.row_tokens
    )
    recipe = TrainSpec(model, trainer=settings)
    static = {"network": trainer.POLICY, "recipe": recipe}
    whole = NamedSharding(mesh, PartitionSpec())
    by_row = NamedSharding(mesh, PartitionSpec(RULES["batch"]))

    def shaped(tree: Any, sharding: NamedSharding) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    with jax.set_mesh(mesh):
        weights = jax.tree.map(
            lambda spec: jax.ShapeDtypeStruct(
                spec.shape, jnp.float32, sharding=fitting_sharding(mesh, spec.shape, spec.axes)
            ),
            param_specs(model),
        )
        total = jax.eval_shape(lambda: gradient_accumulation.start(**static))
        total = dataclasses.replace(
            total, gradients=weights, statistics=shaped(total.statistics, whole)
        )
        shape = trainer.batch_shape(recipe, program.row_tokens)
        batch = shaped(micro_batches.empty(shape), by_row)
        one, flag = (jax.ShapeDtypeStruct((), t, sharding=whole) for t in (jnp.float32, jnp.bool_))
        scalars = gradient_accumulation.StepScalars(one, one, flag)
        return gradient_accumulation.accumulate.lower(weights, total, batch, scalars, **static)


def compiled_row(program: Program, devices: Any) -> dict[str, Any]:
    """Compile a program; return what the compiler says of a chip's memory."""
    import jax

    from models import row_attention

    jax.clear_caches()  # of what the program before was traced with
    usual = row_attention.why_portable
    if program.portable:
        row_attention.why_portable = lambda *_: "the benchmark asks for it"
    begin = time.monotonic()
    try:
        found = lowered(program, devices).compile()
    finally:
        row_attention.why_portable = usual
    memory = found.memory_analysis()
    return {
        "layers": program.layers,
        "row_tokens": program.row_tokens,
        "remat": program.remat,
        "kind": "compiled",
        "attention_kernel": "dkv_kernel" in found.as_text(),
        "temporaries_gb": round(memory.temp_size_in_bytes / 1e9, 2),
        "arguments_gb": round(memory.argument_size_in_bytes / 1e9, 2),
        "compile_s": round(time.monotonic() - begin),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    environment.add_output_flags(parser)
    parser.add_argument("--programs", nargs="*", default=DEFAULT, metavar="LAYERS/TOKENS/REMAT")
    parser.add_argument("--portable", nargs="*", default=["4/16384/layer"])
    arguments = parser.parse_args()
    if importlib.util.find_spec("libtpu") is None:
        raise SystemExit(
            "expected libtpu, the compiler of TPUs, got none: pip install libtpu (no TPU is needed)"
        )
    os.environ |= TPU
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=TARGET).devices
    programs = [Program.of(text) for text in arguments.programs]
    programs += [Program.of(text, portable=True) for text in arguments.portable]
    rows = []
    for program in programs:
        rows.append(compiled_row(program, devices))
        print(rows[-1], file=sys.stderr, flush=True)
    result = environment.record("benchmarks.compiled_training", ("jax", "jaxlib", "libtpu"))
    result |= {"kind": "compiled", "target": TARGET, "model": "Qwen3-8B", "fsdp": CHIPS}
    for tokens, goal_gb in GOALS_GB.items():
        of_all = [r for r in rows if (r["layers"], r["row_tokens"]) == (WHOLE, tokens)]
        if of_all:
            result[f"temporaries_gb_{tokens}"] = min(r["temporaries_gb"] for r in of_all)
            result[f"goal_gb_{tokens}"] = goal_gb
    result["rows"] = rows
    figures = {
        f"{r['layers']} layers, rows of {r['row_tokens']:,}, {r['remat']}"
        + ("" if r["attention_kernel"] else ", portable attention"): (
            f"{r['temporaries_gb']} GB of temporaries, compiled"
        )
        for r in rows
    }
    environment.show(result, arguments, figures)


if __name__ == "__main__":
    main()
