"""A user's project with packages of our names: import, training, a reward beside them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import tiny_run

ROOT = Path(__file__).parents[1]
FILES = {
    "models/__init__.py": "",
    "models/net.py": "class Net: pass",
    "spec/__init__.py": "NAME = 'theirs'",
    "sched.py": "NAME = 'theirs'",
    "rl.py": "NAME = 'theirs'",
    "configs/__init__.py": "NAME = 'theirs'",
    "policies.py": "NAME = 'theirs'",
    "rewards.py": """
from models.net import Net
import sched

assert sched.NAME == "theirs"

def score(completions, **columns):
    return [float(len(text) % 2) for text in completions]
""",
    "research.py": """
import configs, policies, rl, sched, spec
from models.net import Net
from reprise import Policy, TrainConfig, load_config
from reprise.models.config import ModelConfig
from reprise.sched.request import RequestSpec

assert {m.NAME for m in (configs, policies, rl, sched, spec)} == {"theirs"}
assert load_config(overrides=["Run.steps=3"]).run.steps == 3
print(Policy.__module__, ModelConfig.__module__, RequestSpec.__module__)
""",
}


@pytest.fixture
def project(tmp_path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "project"


def started_in(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A Python whose path has the folder, then this checkout, as an editable install's has."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = (sys.executable, *command)
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def test_a_script_imports_its_own_packages_and_ours(project):
    done = started_in(project, "research.py")
    assert done.stdout.split() == [
        "reprise.rl.python.api",
        "reprise.models.config",
        "reprise.sched.request",
    ], done.stderr


def test_a_run_with_a_reward_that_imports_its_neighbours(project, tmp_path):
    config = tiny_run.make_inputs(tmp_path / "inputs")
    flags = (
        f"--gin_file={config}",
        "--gin.Run.steps=1",
        "--gin.Reward.functions=('rewards.py:score',)",
        f"--gin.Run.directory={str(project / 'run')!r}",
    )
    done = started_in(project, "-m", "reprise.rl.train", *flags)
    assert done.returncode == 0, done.stderr
    assert (project / "run" / "metrics.jsonl").is_file()
