"""Policies in JAX. Compiled programs keep every rounding to bfloat16.

XLA may drop a rounding between two operations, and does so in one program but not in another
(docs/architecture.md, Exactness). It reads its flags once, when jax opens its first backend:
import this package before that. A value already set in XLA_FLAGS stays.
"""

import os

_EXCESS_PRECISION = "--xla_allow_excess_precision=false"
# On GPUs, no product splits its sum or uses cuBLAS, and all products share one tile shape.
ONE_TILE_FLAGS = (
    "--xla_gpu_experimental_force_split_k=1",
    "--xla_gpu_override_gemm_autotuner=block_m:64,block_n:64,block_k:64,split_k:1,"
    "num_stages:4,num_warps:4,num_ctas:1",
    "--xla_gpu_cublas_fallback=false",
)
# Gradients of embeddings, which are scatters, are summed after a sort.
_NO_ATOMICS = "--xla_gpu_exclude_nondeterministic_ops=true"


def _add(flag: str) -> None:
    if flag.partition("=")[0] not in (flags := os.environ.get("XLA_FLAGS", "")):
        os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()


def sum_in_order_on_accelerators() -> None:
    """Make all accelerator programs of this process sum in the same order.

    TPUs use the kernels of this package for that, GPUs one XLA tile.

    Call it before jax opens a backend; `sums_in_order_on_accelerators` is True from then on.
    """
    for flag in (*ONE_TILE_FLAGS, _NO_ATOMICS):
        _add(flag)


def sums_in_order_on_accelerators() -> bool:
    return all(flag in os.environ.get("XLA_FLAGS", "") for flag in ONE_TILE_FLAGS)


_add(_EXCESS_PRECISION)
