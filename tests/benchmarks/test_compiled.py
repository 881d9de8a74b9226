"""Programs for H100s, compiled without one: no waits for the host, no logits gathered."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = ROOT / ".venv" / "gpu_compiler"  # of `make`; elsewhere it may be installed


def compiled(*command):
    """The last line of a benchmark that needs the compiler for GPUs."""
    path = os.pathsep.join(map(str, (ROOT, COMPILER)))
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    if "install the CUDA plug-in" in done.stderr and not os.environ.get("CI"):
        pytest.skip("the compiler for GPUs is not installed: `make soak` does")
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.soak
def test_a_gpu_does_not_wait_for_the_host():
    """The loop over plain rounds ends when requests do. Conditionals of greedy draws are in command
    buffers; without a request with top-k or top-p, there are no others."""
    found = compiled("benchmarks.compiled", "--one_waits", "1", "none")
    loops = {name: one["unknown_loops"] for name, one in found.items()}
    assert loops == {"plain": 1, "verify": 0, "chains": 0, "training": 0}
    conditionals = {name: one["conditionals"] for name, one in found.items()}
    assert conditionals == {"plain": 1, "verify": 4, "chains": 4, "training": 0}
    assert not any(one["waiting_conditionals"] for one in found.values())
    cuts = compiled("benchmarks.compiled", "--one_waits", "1", "cuts")
    assert all(one["waiting_conditionals"] for one in cuts.values()), "of top-k and top-p"
    assert found["plain"]["temporaries_mb"] < 50 and found["chains"]["temporaries_mb"] < 125
    assert found["verify"]["temporaries_mb"] < 175, "with side blocks for 512 paths, not 64"
    assert found["plain"]["kernels_a_layer"] <= 18, "no select of idle rows"


@pytest.mark.soak
def test_products_have_one_tile_and_no_split_sums():
    on, off = (
        compiled("benchmarks.compiled_bits", "--one", "h100:1x1x8", mode, "1")
        for mode in ("on", "off")
    )
    for name, found in on.items():
        assert {*found["products"]} == {"64,64"} and not found["split_sums"], name
        assert found["gb"] < 1.1 * off[name]["gb"]
    assert off["plain"]["split_sums"], "the compiler splits sums unless it is told not to"


@pytest.mark.soak
def test_rounds_on_eight_gpus_gather_less_than_a_megabyte():
    """Whole logits of a verify round are 311 MB, of a plain one 39, of one token 0.6."""
    found = compiled("benchmarks.compiled", "--one", "qwen3_8b", "h100:1x1x8", "1")
    assert found["tensor"] == 8
    assert 0 < found["plain"]["gathered_mb"] < 0.1 and 0 < found["verify"]["gathered_mb"] < 1
    assert found["verify"]["summed_mb"] > 4, "512 activations are summed in each layer"
    # no branch of top-p is computed on whole logits
    assert found["plain"]["whole_logits"] == found["verify"]["whole_logits"] == 0
    assert found["plain"]["temporaries_mb"] < 39 and found["verify"]["temporaries_mb"] < 311
