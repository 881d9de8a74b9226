"""A benchmark as on a CPU without AVX-512: `python -m benchmarks.without_avx512 MODULE …`.

It runs `python -m MODULE …` with kernels and XLA's programs compiled for AVX2. The record's
`instructions` name the kernels'.
"""

from __future__ import annotations

import os
import sys


def environment() -> dict[str, str]:
    """Return the variables that leave AVX-512 out of kernels and of XLA's programs."""
    import llvmlite.binding

    features = llvmlite.binding.get_host_cpu_features()
    for name in features:
        features[name] &= not name.startswith("avx512")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa=AVX2".strip()
    return {**os.environ, "NUMBA_CPU_FEATURES": features.flatten(), "XLA_FLAGS": flags}


if __name__ == "__main__":
    command = [sys.executable, "-m", *sys.argv[1:]]
    os.execve(sys.executable, command, environment())
