"""Jax's interpreters of kernels as they look for races, which have no public names."""

import dataclasses

from jax._src.pallas.mosaic.interpret import interpret_pallas_call as tpu
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams


def finding_races(parameters=InterpretGPUParams, **options):
    """Return parameters of an interpreter that notes races and goes on."""
    names = {field.name for field in dataclasses.fields(parameters)}
    going_on = {"on_race": "warn"} if "on_race" in names else {}  # jax < 0.12 always goes on
    return parameters(detect_races=True, **going_on, **options)


def has_races():
    """Return whether the last kernel for a GPU had any."""
    return gpu_callbacks.get_races().races_found


def has_races_on_tpu():
    """Return whether the last kernel for a TPU had any."""
    return tpu.races.races_found
