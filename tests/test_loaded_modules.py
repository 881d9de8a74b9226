"""What a command loads before it does anything: configuration is leaves, machinery comes later."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

# Our modules that are loaded, empty packages aside, then whether jax and numba are.
REPORT = """
import sys
ours = [m for name, m in sys.modules.items() if name.startswith("reprise.")]
print(sum(not hasattr(m, "__path__") for m in ours), "jax" in sys.modules, "numba" in sys.modules)
"""
SIMULATE = "import reprise.rl.commands.simulate\n" + REPORT
# reports where the inputs would be opened
DRY_RUN = f"""
from reprise.rl.commands import train
def report(config):
{textwrap.indent(REPORT, "    ")}
    raise SystemExit
train.open_inputs = report
train.main(["--dry_run"])
"""


def loaded(code: str) -> tuple[int, bool, bool]:
    """(our modules, jax, numba) that a fresh process has loaded when it reports."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    count, jax, numba = done.stdout.split()
    return int(count), jax == "True", numba == "True"


@pytest.mark.parametrize(
    ("code", "most"), [(SIMULATE, 40), (DRY_RUN, 76)], ids=["simulate", "dry_run"]
)
def test_few_modules_and_no_machinery_are_loaded(code, most):
    count, jax, numba = loaded(code)
    assert 0 < count <= most
    assert not jax and not numba
