"""What one order of sums costs: `python -m benchmarks.compiled_bits --json`

A plain round, a round that verifies eight nodes a slot (64 slots, pages for 16,384 positions, on
TPUs for 2,048), and a gradient step on rows of 16,384 tokens, of Qwen3-8B's widths in `--layers`
layers: with `Numerics.same_bits` and without, on one H100, eight H100s and four v5p chips. Engines
split weights as they do by default, over all chips. Each program is compiled in a process of its
own, without a device (`pip install "jax[cuda13]" libtpu`).

On GPUs `products` are counted by their tile: one of three numbers is a product of parts, which
another kernel adds (`split_sums`). `gb` are bytes as `benchmarks.hlo.bytes_of` counts them, for
slots of 2,048 live positions with one path of drafts each.

On TPUs `kernels` are products with one order of inputs, `xla_products` others: none in rounds, the
backward passes in training. `ms` is the compiler's estimate, which counts a kernel as its
`cost_estimate` says, and a loop once: without `same_bits` the feed-forward of long rows, a loop
over its parts, is compiled in one piece. An operation unknown to it counts −1 s; whole seconds are
added until the estimate is above the time of its products at XLA's rate.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
import re
import subprocess
import sys
from typing import Any

from benchmarks import compiled, environment, hlo
from reprise.models import sum_in_order_on_accelerators
from reprise.rl.preflight.targets import devices_of, parse_target, prepare

GPUS, TPUS = ("h100:1x1x1", "h100:1x1x8"), ("v5p:2x2x1",)
ROW_TOKENS = 16384
TPU_POSITIONS = 2048
TPU_FLOPS = 394e12  # that XLA expects of a v5p's products, by its estimate of a large one
SHARE = 8  # positions of a slot for each that is live, and nodes for each path
FIRST_PAGES = 9  # of the operands of a kernel
PROGRAMS = "plain", "verify", "training"
MODES = {"on": True, "off": False}
PRODUCT = re.compile(
    r'"kind":"__triton_nested_gemm_fusion".*?"output_tiles":\[\{"sizes":\[([^\]]*)'
)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    found, ratios = dict[str, Any](), dict[str, float]()
    for target in (*GPUS, *TPUS):
        for mode in MODES:
            command = [sys.executable, "-m", "benchmarks.compiled_bits", "--one", target, mode]
            command.append(str(arguments.layers))
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[f"{target}, {mode}"] = json.loads(done.stdout.splitlines()[-1])
            environment.progress({target: mode, **found[f"{target}, {mode}"]})
        size = "gb" if target in GPUS else "ms"
        for program in PROGRAMS:
            on, off = (found[f"{target}, {mode}"][program][size] for mode in MODES)
            ratios[f"{program}, {target}"] = round(on / off, 4)
    on_gpus = [found[f"{target}, on"][program] for target in GPUS for program in PROGRAMS]
    rounds = [found[f"{target}, on"][program] for target in TPUS for program in PROGRAMS[:2]]
    return {
        "kind": "compiled",
        "layers": arguments.layers,
        "split_sums": sum(x["split_sums"] for x in on_gpus),
        "cublas": sum(x["cublas"] for x in on_gpus),
        "tiles": sorted({tile for x in on_gpus for tile in x["products"]}),
        "xla_products": sum(x["xla_products"] for x in rounds),
        "on_over_off": ratios,
        "programs": found,
    }


def one(target_name: str, mode: str, layers: int) -> dict[str, Any]:
    """Return the figures of all programs, compiled in this process."""
    target = parse_target(target_name)
    prepare(target)
    if MODES[mode]:
        sum_in_order_on_accelerators()
    figures, positions = gpu_figures, compiled.POSITIONS
    if target_name in TPUS:
        from reprise.models.decoder import layers as arithmetic

        figures, positions = tpu_figures, TPU_POSITIONS
        arithmetic.LONG_ROW_TOKENS = 2 * ROW_TOKENS  # of a loop
    model = dataclasses.replace(compiled.QWEN3, num_layers=layers)
    rounds = compiled.round_programs(model, target, positions)
    programs = {name: program for name, program, _ in rounds}
    step = compiled.gradient_step(model, ROW_TOKENS, "layer", devices_of(target))
    programs["training"] = step.compile(compiler_options=target.kind.compiler_options)
    return {name: figures(program) for name, program in programs.items()}


def gpu_figures(program: Any) -> dict[str, Any]:
    text = program.as_text()
    tiles = collections.Counter(x.replace('"', "") for x in PRODUCT.findall(text))
    num_bytes = hlo.bytes_of(hlo.parse(text), bytes_of_kernel)
    return {
        "products": dict(tiles),
        "split_sums": sum(n for tile, n in tiles.items() if tile.count(",") > 1),
        "cublas": len(re.findall(r'custom_call_target="__cublas', text)),
        "gb": round(num_bytes / 1e9, 3),
        "temporaries_gb": round(program.memory_analysis().temp_size_in_bytes / 1e9, 3),
    }


def tpu_figures(program: Any) -> dict[str, Any]:
    text, cost = program.as_text(), program.cost_analysis()
    cost = cost[0] if isinstance(cost, list) else cost
    seconds = cost["optimal_seconds"]
    seconds += max(0, math.ceil(cost["flops"] / TPU_FLOPS - seconds))
    return {
        "kernels": len(re.findall(r'tpu_custom_call[^\n]*/product/pallas_call"', text)),
        "xla_products": len(re.findall(r" convolution\(", text)),
        "ms": round(1e3 * seconds, 3),
        "temporaries_gb": round(program.memory_analysis().temp_size_in_bytes / 1e9, 3),
    }


def bytes_of_kernel(one: hlo.Instruction, by_name: hlo.Body) -> int:
    """Return a kernel's bytes: of pages, parts of slots and paths one in `SHARE` is live."""
    sizes = [by_name[name].num_bytes for name in one.operands]
    if "page_attention_parts" in one.rest:
        return one.num_bytes + sum(sizes) // SHARE
    if "page_attention" in one.rest:
        return one.num_bytes // SHARE + sum(sizes[:FIRST_PAGES]) + sum(sizes[FIRST_PAGES:]) // SHARE
    return one.num_bytes + sum(sizes)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        target, mode, layers = sys.argv[2:]
        print(json.dumps(one(target, mode, int(layers))))
    else:
        packages = ("jax", "jaxlib", "jax-cuda13-pjrt", "libtpu")
        environment.run(__doc__, measure, packages, layers=8)  # 36 take over 24 GB to compile
