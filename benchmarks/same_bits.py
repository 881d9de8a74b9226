"""Bits that passes and runs find: `python -m benchmarks.same_bits passes|runs|cuts --json`.

passes   The same random texts by plain decoding of 1, 6 and 64 slots, trees, chunks and training
         rows (`benchmarks.passes`), in one page for each text and in several, each against plain
         decoding of 6 slots: the shipped policy, one more if `--policy` names its folder, and
         random weights of odd shapes. `wide` has matrices of bfloat16 and float32 between them, so
         that sums are compared before they are rounded.
runs     `python -m rl.train` with drafts, reuse, work ahead and workers, against the same run
         without any of them: samples and weights after the last step.
cuts     Draws and log-probabilities of the same logits with top-k and top-p (`benchmarks.cuts`), on
         one device, under fsdp=2 and under tensor=2, `--rows` for each size of vocabulary.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import cuts as cut_rows
from benchmarks import environment, workloads
from benchmarks.passes import COUNTS, Passes, Text, differences, random_texts
from reprise.models.config import ModelConfig
from reprise.models.decoder import transformer
from reprise.models.decoder.transformer import Params

KINDS = "float32", "bfloat16", "wide"
PAGE_TOKENS = 64  # the fewest that a GPU's kernel takes
ODD = {
    "7 query heads of 64 for one key/value head, biases, tied": ModelConfig(
        *("qwen2", 1003, 448, 2, 7, 1, 64, 608), qkv_bias=True, tied_embeddings=True
    ),
    "heads of 128": ModelConfig("llama", 1000, 256, 2, 4, 2, 128, 720),
}
LEARNED = "Speculation.sources=('history','group','learned')", "Speculation.budget='fixed:4'"
BASES = {  # without drafts, by the noise of their draws
    "cdf": ("Speculation.budget='off'",),
    "gumbel_blocks": ("Speculation.budget='off'", "Sampling.draw='gumbel_blocks'"),
    "repeated": ("Speculation.budget='off'", "Reuse.mode='repeated_noise'"),
}
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {  # of a base
    "history, siblings, EAGLE": ("cdf", LEARNED),
    "two workers": ("cdf", (*LEARNED, "Sched.workers=2")),
    "ahead": ("gumbel_blocks", (*LEARNED, "Sched.mode='ahead'")),
    "ahead, two workers": ("gumbel_blocks", (*LEARNED, "Sched.mode='ahead'", "Sched.workers=2")),
    "coupled": ("repeated", (*LEARNED, "Reuse.mode='coupled'")),
}
DEVICES = "--xla_force_host_platform_device_count=3"  # workers ahead and two workers have some
CUT_VOCABULARIES = 99, 1000, 1003, 32_000  # meshes of two devices split two of them
MESH = "Mesh.data=1"  # the trainer's one device: gradients are sums of XLA's


def as_kind(kind: str, params: Params) -> Params:
    """Return a policy in float32, in bfloat16, or with matrices alone in bfloat16."""

    def one(path: Any, x: jax.Array) -> jax.Array:
        is_wide = kind == "wide" and (x.ndim == 1 or path[0].name == "embedding_VD")
        return x.astype(jnp.float32 if kind == "float32" or is_wide else jnp.bfloat16)

    return jax.tree_util.tree_map_with_path(one, params)


def rows_of(model: ModelConfig, params: Params, texts: Sequence[Text]) -> Iterator[dict[str, Any]]:
    """Yield what each pass finds otherwise than plain decoding of six slots.

    Accelerators attend in order to pages of certain sizes alone.
    """
    whole, pages = (Passes(model, params, texts, page_tokens) for page_tokens in (0, PAGE_TOKENS))
    is_on_cpu = jax.default_backend() == "cpu"
    some = whole if is_on_cpu else pages
    want = some.decoded(6)
    found = {
        "1 slot": lambda: Passes(model, params, texts[:3], some.page_tokens).decoded(1),
        "64 slots": lambda: some.decoded(64),
        "trees of 9": lambda: some.verified(9),
        "trees of 30": lambda: some.verified(30),
        "chunks of 8": lambda: some.chunked(8, 1),
        "chunks of 32, two at once": lambda: some.chunked(32, 2),
        "training rows": lambda: some.trained(512),
    }
    if is_on_cpu:
        found |= {
            "pages: 6 slots": lambda: pages.decoded(6),
            "pages: trees of 9": lambda: pages.verified(9),
            "pages: chunks of 32, two at once": lambda: pages.chunked(32, 2),
        }
    for name, of in found.items():
        got = of()
        same = type(want)(*(x[: len(got.cdf)] for x in want))  # of the first texts
        yield {"pass": name, **differences(got, same)}


def passes(arguments: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for name, model, params, texts in _policies(arguments):
        for kind in KINDS:
            for row in rows_of(model, as_kind(kind, params), texts):
                rows.append({"policy": name, "kind": kind, **row})
                environment.progress(rows[-1])
    names = "positions", *COUNTS
    return {**{name: sum(row[name] for row in rows) for name in names}, "rows": rows}


def _policies(
    arguments: argparse.Namespace,
) -> Iterator[tuple[str, ModelConfig, Params, list[Text]]]:
    rng, groups = np.random.default_rng(0), arguments.groups
    for name, model in ODD.items():
        params = transformer.init(model, jax.random.key(1))
        yield name, model, params, random_texts(model.vocab_size, groups, 4, rng)
    folders = {"shipped": workloads.BASE_POLICY}
    if arguments.policy != Path():
        folders["given"] = arguments.policy
    for name, folder in folders.items():
        model, params = workloads.policy(folder)
        sizes = (20, 60), (20, 150 if name == "shipped" else 60)
        yield name, model, params, random_texts(model.vocab_size, groups, 4, rng, *sizes)


def runs(arguments: argparse.Namespace) -> dict[str, Any]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for dtype in ("float32", "bfloat16"):
            common = f"Trainer.compute_dtype='{dtype}'", f"Run.steps={arguments.steps}", MESH
            bases = {n: _run(Path(folder, n), *common, *of) for n, of in BASES.items()}
            for name, (base, settings) in RUNS.items():
                run = _run(Path(folder, "run"), *common, *settings)
                rows.append({"dtype": dtype, "run": name, **_compared(run, bases[base])})
                environment.progress(rows[-1])
    names = "samples", "samples_that_differ", "weights", "weights_that_differ"
    return {**{name: sum(row[name] for row in rows) for name in names}, "rows": rows}


def _run(folder: Path, *settings: str) -> tuple[list[Any], dict[str, np.ndarray]]:
    """Return the samples and the weights of a run."""
    from safetensors.numpy import load_file

    at = folder.with_name(f"{folder.name}_{len(list(folder.parent.iterdir()))}")
    flags = [f"--gin.{setting}" for setting in (*settings, f"Run.directory='{at}'")]
    env = os.environ | {"XLA_FLAGS": DEVICES, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "rl.train", *flags]
    subprocess.run(command, cwd=environment.ROOT, env=env, check=True, stdout=sys.stderr)
    samples = [json.loads(line) for line in (at / "samples.jsonl").read_text().splitlines()]
    return samples, load_file(at / "policy" / "model.safetensors")


def _compared(one: tuple, other: tuple) -> dict[str, int]:
    (samples, weights), (other_samples, other_weights) = one, other
    assert len(samples) == len(other_samples) and weights.keys() == other_weights.keys()
    differ = sum(a != b for a, b in zip(samples, other_samples, strict=True))
    bits = {
        name: (x.view(np.uint32), other_weights[name].view(np.uint32))
        for name, x in weights.items()
    }
    return {
        "samples": len(samples),
        "samples_that_differ": differ,
        "weights": sum(x.size for x, _ in bits.values()),
        "weights_that_differ": sum(int((x != y).sum()) for x, y in bits.values()),
    }


def cuts(arguments: argparse.Namespace) -> dict[str, Any]:
    jax.config.update("jax_num_cpu_devices", 2)
    rows = []
    for vocab_size in arguments.vocabularies:
        for row in cut_rows.totals(arguments.rows, vocab_size):
            rows.append(row)
            environment.progress(row)
    return {name: sum(row[name] for row in rows) for name in ("tokens", "logprobs")} | {
        "rows": rows
    }


if __name__ == "__main__":
    parts = {"passes": passes, "runs": runs, "cuts": cuts}
    flags: dict[str, Any] = {"groups": 4, "policy": Path(), "steps": 20}
    flags |= {"rows": 200_000, "vocabularies": CUT_VOCABULARIES}
    environment.run(__doc__, parts, environment.TRAINING, **flags)
