"""The rows in order of worth, each with the seconds that it is expected to take."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from benchmarks.accelerator.budget import Measures, Row
from reprise import models

# With this, a round's loops whose trip counts the device alone knows wait for no host.
WHILE = "--xla_gpu_enable_command_buffer=+WHILE"
ONE_TILE = " ".join(models.ONE_TILE_FLAGS)
# (name, seconds of the real size, of the tiny one, flags of XLA); compilation is included
ROWS = (
    ("training: plain", 150, 30, ""),
    ("training: drafts", 110, 30, ""),
    ("rounds: first", 80, 8, ""),
    ("rollouts: transformers", 60, 8, ""),
    ("rollouts: vllm", 90, 8, ""),
    ("rounds: second", 70, 8, ""),
    ("gradient: layer", 50, 8, ""),
    ("gradient: dots", 50, 8, ""),
    ("kernels: pages", 30, 6, ""),
    ("kernels: rows", 30, 6, ""),
    ("rounds: loops in command buffers", 75, 10, WHILE),
    ("same bits", 90, 25, ONE_TILE),
)
NAMES = tuple(name for name, *_ in ROWS)


def plan(size: str, names: tuple[str, ...] = NAMES) -> list[Row]:
    """Return the rows with these names; opens no device."""
    return [
        Row(name, float(tiny_s if size == "tiny" else real_s), flags)
        for name, real_s, tiny_s, flags in ROWS
        if name in names
    ]


def measures(size_name: str, folder: Path, torch_python: str) -> Measures:
    """Return what measures each row; a grown policy stays in `folder`."""
    from benchmarks.accelerator import gradient, kernels, rollouts, rounds, same_bits
    from benchmarks.accelerator.sizes import SIZES
    from benchmarks.accelerator.training import Steps

    size = SIZES[size_name]
    steps = Steps(size, folder)
    first, second = size.live_positions
    beside = partial(rollouts.beside, size=size, steps=steps, python=torch_python)
    return {
        "training: plain": partial(steps.run, "plain"),
        "training: drafts": partial(steps.run, "drafts"),
        "rounds: first": partial(rounds.rounds, size, first),
        "rollouts: transformers": partial(beside, "transformers"),
        "rollouts: vllm": partial(beside, "vllm"),
        "rounds: second": partial(rounds.rounds, size, second),
        "gradient: layer": partial(gradient.step, size, "layer"),
        "gradient: dots": partial(gradient.step, size, "dots"),
        "kernels: pages": partial(kernels.of_pages, size),
        "kernels: rows": partial(kernels.of_rows, size),
        "rounds: loops in command buffers": partial(rounds.in_command_buffers, size, first),
        "same bits": partial(same_bits.rows, size),
    }
