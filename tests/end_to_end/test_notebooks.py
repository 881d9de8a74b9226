"""The notebooks run from top to bottom, headless, and draw what they promise.

Their sizes are in a cell tagged `parameters`; here it is followed by smaller ones. The shipped
policy is its first layer alone: what takes long here is to compile the others.
"""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from reprise.models.formats import hf
from reprise.rl.metrics.writer import MetricsConfig, MetricsWriter

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PLOTS = dict.fromkeys(("ahead", "drafter", "reuse", "schedulers", "speculation"), 3)
PLOTS |= {"countdown": 5, "custom_loop": 1, "episodes": 1}
SMALLER = {
    "countdown.ipynb": "from pathlib import Path\nFOLDER, PICTURE = Path('grid'), 'grid.png'",
    "ahead.ipynb": "STEPS, MORE = 3, ['Rollout.prompts_per_step=2', 'Rollout.group_size=4', "
    "'Sampling.max_new_tokens=24', 'Engine.slots=4', 'Engine.min_slots=4', 'Engine.max_nodes=4', "
    "'Speculation.budget=\"off\"', 'Trainer.minibatches=1']",
    "custom_loop.ipynb": "FOLDER, STEPS, NUMBERS, GAMES, TURNS = 'policies/tiny', 5, 2, 4, 2\n"
    "SETTINGS = [*SETTINGS, "
    "'Sampling.max_new_tokens=24', 'Engine.slots=8', 'Engine.min_slots=8']",
    "episodes.ipynb": "FOLDER, GROUPS, GROUP = 'policies/tiny', 2, 4\n"
    "TURN_TOKENS, SLOTS, NODES = 16, 8, 2",
    "speculation.ipynb": "PROMPTS, GROUP, MAX_NEW_TOKENS, SLOTS, NODES = 4, 4, 32, 4, 2",
    "reuse.ipynb": "PROMPTS, GROUP, MAX_NEW_TOKENS, SLOTS = 4, 4, 32, 4",
    "schedulers.ipynb": "GROUPS, SHARES, SEEDS, MORE = 40, (0.0, 0.9), (0,), "
    "['Workload.num_groups=100']",
    "drafter.ipynb": "RL_STEPS, DRAFTER_STEPS, PROMPTS, NODES, DEPTH, MORE = 2, 2, 4, 4, 2, "
    "['Sampling.max_new_tokens=24', 'Engine.slots=16', 'Engine.min_slots=16', "
    "'Engine.max_nodes=2', 'Drafter.max_depth=1', 'Drafter.top_k=1', 'Drafter.row_tokens=192', "
    "'Drafter.batch_rows=1', 'Speculation.budget=\"fixed:1\"']",
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


def script_of(path):
    """The notebook's code, with the smaller sizes after its own."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [c for c in cells if c["cell_type"] == "code"]
    tagged = [i for i, c in enumerate(code) if "parameters" in c["metadata"].get("tags", ())]
    assert len(tagged) == 1, "the sizes are in one cell, tagged `parameters`"
    sources = ["".join(c["source"]) for c in code]
    sources.insert(tagged[0] + 1, SMALLER[path.name])
    return "\n\n".join(sources)


def write_grid(folder):
    """Write two runs of a grid, as far as countdown.ipynb reads them: equal but for the seconds."""
    responses = {"completions/mean_length": 9, "completions/max_length": 20, "completions/count": 1}
    figures = responses | {"reward": 1.0, "entropy": 0.2, "rollout/generated_tokens": 9}
    sample = {"example_id": "a", "sample_index": 0, "prompt": "?", "completion": "!", "reward": 1.0}
    drafted = {"spec/group/speculated_fraction": 0.5, "spec/group/accept_rate": 0.5}
    options = MetricsConfig(tensorboard=False, samples_per_step=-1)
    for name, seconds, more in (("plain", 4.0, {}), ("drafts", 2.0, drafted)):
        with MetricsWriter(folder / f"{name}-0", options) as out:
            out.write(0, {"eval/mean_reward": 0.5, "eval_s": 1.0})
            times = {"time/rollout": seconds, "step_time": 8.0, "rollout/tail_s": seconds / 2}
            for step in range(1, 7):
                out.write(step, figures | times | more)
                out.write_samples(step, [sample | {"num_tokens": 9}])
    (folder / "table.csv").write_text("name,seed\nplain,0\ndrafts,0\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder to run them in, whose own `policies/tiny` comes before the project's."""
    folder, shipped = tmp_path_factory.mktemp("notebooks"), ROOT / "policies" / "tiny"
    model, params = hf.load_pretrained(shipped)
    one = dataclasses.replace(params, layers=params.layers[:1])
    hf.save_pretrained(folder / "policies" / "tiny", dataclasses.replace(model, num_layers=1), one)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(shipped / name, folder / "policies" / "tiny")
    write_grid(folder / "grid")
    return folder


@pytest.mark.slow
def test_they_run_and_draw(folder):
    """One after the other in one process, each with names of its own."""
    script = folder / "notebooks.py"
    parts = [PRELUDE]
    for path in NOTEBOOKS:
        code = f"compile({script_of(path)!r}, {path.name!r}, 'exec')"
        parts.append(f"print('NOTEBOOK {path.stem}')\nexec({code}, {{}})\n")
    script.write_text("\n".join(parts), encoding="utf-8")
    # one device, as a user's
    flags = [f for f in os.environ["XLA_FLAGS"].split() if "device_count" not in f]
    env = dict(os.environ) | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": " ".join(flags)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    shown = [part.partition("\n") for part in done.stdout.split("NOTEBOOK ")[1:]]
    assert {name: out.count("PLOT 1") for name, _, out in shown} == PLOTS
    assert "of which 0 differ" in done.stdout
    assert re.search("drafts +2.00 .* 0 of 6", done.stdout) and (folder / "grid.png").is_file()
