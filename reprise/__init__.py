"""Reprise: RL post-training of language models in JAX, with fast and exact rollouts.

Use `from reprise import Policy` for your own loop, and `reprise.rl`, `reprise.spec`, … for the
parts. In a checkout this folder links to the top-level packages; a wheel contains the packages
here. The names in `__all__` are imported at their first use, since importing jax takes seconds.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reprise.rl.batches.data import Datum as Datum
    from reprise.rl.learner.objectives import Adam as Adam
    from reprise.rl.learner.objectives import LossSettings as LossSettings
    from reprise.rl.metrics.writer import MetricsWriter as MetricsWriter
    from reprise.rl.metrics.writer import read_metrics as read_metrics
    from reprise.rl.python.api import Policy as Policy
    from reprise.rl.python.episode import Episode as Episode
    from reprise.rl.python.generate import generate as generate
    from reprise.rl.python.questions import Questions as Questions
    from reprise.rl.records.trajectory import Request as Request
    from reprise.rl.settings.config import TrainConfig as TrainConfig
    from reprise.rl.settings.config import load_config as load_config
    from reprise.spec.config import SamplingConfig as SamplingConfig

__version__ = "0.1.0"
IMPORT_ROOT = str(Path(__file__).resolve().parents[1])  # on the import path of child processes
_MODULES = {
    "Adam": "reprise.rl.learner.objectives",
    "Datum": "reprise.rl.batches.data",
    "Episode": "reprise.rl.python.episode",
    "LossSettings": "reprise.rl.learner.objectives",
    "MetricsWriter": "reprise.rl.metrics.writer",
    "Policy": "reprise.rl.python.api",
    "Questions": "reprise.rl.python.questions",
    "Request": "reprise.rl.records.trajectory",
    "SamplingConfig": "reprise.spec.config",
    "TrainConfig": "reprise.rl.settings.config",
    "generate": "reprise.rl.python.generate",
    "load_config": "reprise.rl.settings.config",
    "read_metrics": "reprise.rl.metrics.writer",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'reprise' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
