"""Names of files and folders in a run folder, and the location of shipped files and our code."""

from __future__ import annotations

import hashlib
from pathlib import Path

CONFIG_FILE = "config.gin"  # resolved; a run resumes from it
MARKER_FILE = ".reprise"  # marks a run folder, and is locked during the run
NEWEST_FILE = "newest_checkpoint"  # the step of the newest complete checkpoint
METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
EVAL_SAMPLES_FILE = "eval_samples.jsonl"
WORKERS_FILE = "workers.jsonl"  # worker records of each step, with joins and losses
ROW_FILES = METRICS_FILE, SAMPLES_FILE, EVAL_SAMPLES_FILE, WORKERS_FILE
EVALUATION_FILE = "evaluation.json"  # the best step by evaluation
ROUNDS_FILE = "round_times.json"
MOVES_FILE = "move_times.json"  # measured seconds
SECONDS_FILE = "step_seconds.jsonl"  # of the rounds of each step, for budgets of a resumed run
TIMELINE_FILE = "timeline.json"  # of rollouts in the last saved step
LEGS_FILE = "legs.jsonl"  # each start of the run: when, on what device, with which versions
WANDB_ID_FILE = "wandb_id"
TENSORBOARD_FOLDER = "tensorboard"
WANDB_FOLDER = "wandb"
REPORT_FOLDER = "report"
CHECKPOINTS = "checkpoints"
ROLLOUTS = "rollouts"  # of run state; spilled responses
POLICY = "policy"
DRAFTER_MODEL = "drafter_model"
ADAPTER = "adapter"  # of a finished run
DRAFTER = "drafter"  # separate checkpoints of the learned drafter


def spill_folder(process: int) -> str:
    """Return the folder of the responses that a process of the run has spilled."""
    return ROLLOUTS if process == 0 else f"{ROLLOUTS}_{process}"


OWN_NAMES = (
    *(CONFIG_FILE, MARKER_FILE, NEWEST_FILE, *ROW_FILES, EVALUATION_FILE),
    *(ROUNDS_FILE, MOVES_FILE, SECONDS_FILE, TIMELINE_FILE, LEGS_FILE, WANDB_ID_FILE),
    *(WANDB_FOLDER, TENSORBOARD_FOLDER, REPORT_FOLDER),
    *(CHECKPOINTS, ROLLOUTS, POLICY, ADAPTER, DRAFTER, DRAFTER_MODEL),
)

PROJECT_ROOT = Path(__file__).resolve().parents[2]
PACKAGES = "models", "spec", "sched", "rl"  # of this project, in that folder


def code_digest(root: Path = PROJECT_ROOT) -> str:
    """Return a digest of the source of our packages in a folder."""
    result = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            result.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    return result.hexdigest()[:16]


def resolve_path(path: str | Path) -> Path:
    """Return `path`, or the path below the project root if only the latter exists."""
    path = Path(path).expanduser()
    in_project = PROJECT_ROOT / path
    return in_project if not path.exists() and in_project.exists() else path
