"""Kernels compiled for AVX2 alone have the bits of those that are compiled for AVX-512."""

import hashlib
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import llvmlite.binding
import numpy as np
import pytest

from models.kernels import products_cpu
from models.kernels.cpu_tiles import HAS_WIDE_REGISTERS

# Rows, inputs, outputs.
SIZES = [
    (5, 48, 50),
    (16, 128, 512),
    (37, 656, 99),
    (4, 1536, 7),
    (1, 512, 33),
]
RANKS = 32


def digest():
    """Return a hash of products of many sizes."""
    found, rng = hashlib.sha256(), np.random.default_rng(0)
    for num_rows, num_inputs, num_outputs in SIZES:
        for dtype in (jnp.float32, jnp.bfloat16):
            given = [
                jnp.asarray(rng.standard_normal(shape, np.float32)).astype(dtype)
                for inputs in (num_inputs, RANKS)
                for shape in ((num_rows, inputs), (num_outputs, inputs))
            ]
            found.update(np.asarray(products_cpu.product(*given[:2])))
            found.update(np.asarray(products_cpu.product(*given)))
    return found.hexdigest()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="kernels of CPUs")
@pytest.mark.skipif(not HAS_WIDE_REGISTERS, reason="no AVX-512 to compare with")
def test_products_have_the_same_bits_without_avx512():
    features = llvmlite.binding.get_host_cpu_features()
    for name in features:
        features[name] &= not name.startswith("avx512")
    program = (
        "from tests.models.kernels import test_without_avx512 as kernels; "
        "print(kernels.HAS_WIDE_REGISTERS, kernels.digest())"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "NUMBA_CPU_FEATURES": features.flatten()},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == ["False", digest()]
