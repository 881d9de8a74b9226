"""The notebooks run from top to bottom, headless, and draw what they promise.

The longer ones do so with fewer prompts and steps than a reader's.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PLOTS = {"speculation.ipynb": 3, "reuse.ipynb": 3, "schedulers.ipynb": 3, "drafter.ipynb": 3}
FEWER = {
    "speculation.ipynb": ("PROMPTS, GROUP = 8, 8", "PROMPTS, GROUP = 4, 4"),
    "reuse.ipynb": ("PROMPTS, GROUP = 8, 8", "PROMPTS, GROUP = 4, 4"),
    "drafter.ipynb": ("RL_STEPS, DRAFTER_STEPS = 5, 20", "RL_STEPS, DRAFTER_STEPS = 2, 5"),
}

# what `plt.show()` would have shown is counted instead
PRELUDE = """
import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
def _show():
    print("PLOT", sum(len(plt.figure(n).axes) > 0 for n in plt.get_fignums()))
    plt.close("all")
plt.show = _show
"""


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_it_runs_and_draws(path, tmp_path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    source = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    script = tmp_path / "notebook.py"
    text = "\n\n".join([PRELUDE, *source])
    theirs, ours = FEWER.get(path.name, ("", ""))
    assert not theirs or text.count(theirs) == 1, "the notebook has other numbers"
    script.write_text(text.replace(theirs, ours) if theirs else text, encoding="utf-8")
    # as a user's: one device, and programs that are worth compiling
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("PLOT 1") == PLOTS[path.name]
