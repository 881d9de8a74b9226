"""What a command loads before it does anything: configuration is leaves, machinery comes later."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Our modules that are loaded, empty packages aside, then whether jax and numba are.
REPORT = (
    "import sys\n"
    "ours = [m for n, m in sys.modules.items() if n.split('.')[0] in {ours!r}]\n"
    "print(sum(not hasattr(m, '__path__') for m in ours), 'jax' in sys.modules, "
    "'numba' in sys.modules)\n"
)
OURS = ("models", "spec", "sched", "rl")
DRY_RUN = (
    "import rl.train\n"
    "def report(config):\n"
    "    exec(REPORT)\n"
    "    raise SystemExit\n"
    "rl.train.open_inputs = report\n"
    "rl.train.main(['--dry_run'])\n"
)


def loaded(code: str) -> tuple[int, bool, bool]:
    """(our modules, jax, numba) that a fresh process has loaded when it reports."""
    report = REPORT.format(ours=OURS)
    done = subprocess.run(
        [sys.executable, "-c", code.replace("exec(REPORT)", report.replace("\n", "\n    "))],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    count, jax, numba = done.stdout.split()
    return int(count), jax == "True", numba == "True"


@pytest.mark.parametrize(
    ("code", "most"),
    [("import rl.simulate\nif True:\n    exec(REPORT)", 40), (DRY_RUN, 60)],
    ids=["simulate", "dry_run"],
)
def test_few_modules_and_no_machinery_are_loaded(code, most):
    count, jax, numba = loaded(code)
    assert 0 < count <= most
    assert not jax and not numba
