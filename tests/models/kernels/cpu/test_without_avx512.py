"""Kernels compiled for AVX2 alone have the bits of those that are compiled for AVX-512."""

import hashlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import without_avx512
from reprise.models.kernels.cpu import products_cpu
from reprise.models.kernels.cpu.cpu_tiles import HAS_WIDE_REGISTERS

needs_avx512 = pytest.mark.skipif(
    jax.default_backend() != "cpu" or not HAS_WIDE_REGISTERS, reason="no AVX-512 to compare with"
)

# Rows, inputs, outputs.
SIZES = [
    (5, 48, 50),
    (16, 128, 512),
    (37, 656, 99),
    (4, 1536, 7),
    (1, 512, 33),
]
RANKS = 32
OFTEN = 60, (64, 1280, 960)  # in blocks of inputs, whose sums two threads keep meanwhile


def digest():
    """Return a hash of products of many sizes, one of them often."""
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
    times, (num_rows, num_inputs, num_outputs) = OFTEN
    x = jnp.asarray(rng.standard_normal((num_rows, num_inputs), np.float32))
    w = jnp.asarray(rng.standard_normal((num_outputs, num_inputs), np.float32))
    for _ in range(times):
        found.update(np.asarray(products_cpu.product(x, w)))
    return found.hexdigest()


def run_without_avx512(*command):
    """Return the output of a process whose kernels are compiled without AVX-512, with one heap."""
    run = subprocess.run(
        [sys.executable, *command],
        env={**without_avx512.environment(), "MALLOC_ARENA_MAX": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@needs_avx512
def test_products_have_the_same_bits_without_avx512():
    program = (
        "from tests.models.kernels.cpu import test_without_avx512 as kernels; "
        "print(kernels.HAS_WIDE_REGISTERS, kernels.digest())"
    )
    assert run_without_avx512("-c", program).split() == ["False", digest()]


@needs_avx512
def test_attention_is_right_without_avx512():
    files = [
        f"tests/models/kernels/cpu/{name}_cpu.py"
        for name in ("test_page_attention", "test_row_attention")
    ]
    chosen = "attends or alone or bfloat16 or outputs_and_gradients or whatever_follows"
    text = run_without_avx512("-m", "pytest", "-q", "-p", "no:xdist", "-k", chosen, *files)
    assert " passed" in text
