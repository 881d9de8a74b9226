"""What stays the same over one call of an engine."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from rl.engine.speculate import Speculator
from spec.config import SamplingConfig
from spec.eagle.batch import HiddenStateSink


@dataclasses.dataclass(frozen=True, eq=False)
class Phase:
    """How tokens are drawn, by which policy, and who drafts.

    `kv_tokens` is what rows may hold together (None: as much as there is); `sink` takes
    responses with the policy's hidden states.
    """

    sampling: SamplingConfig
    key: jax.Array
    stop_ids: np.ndarray
    stop_E: jax.Array
    policy_version: int
    speculator: Speculator
    kv_tokens: int | None = None
    sink: HiddenStateSink | None = None
