"""Jax's interpreter of Mosaic GPU kernels, which has no public name."""

import dataclasses

from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams


def finding_races():
    """Return parameters of an interpreter that notes races and goes on."""
    names = {field.name for field in dataclasses.fields(InterpretGPUParams)}
    going_on = {"on_race": "warn"} if "on_race" in names else {}  # jax < 0.12 always goes on
    return InterpretGPUParams(detect_races=True, **going_on)


def has_races():
    """Return whether the last kernel had any."""
    return gpu_callbacks.get_races().races_found
