"""What stays the same over one call of an engine."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from rl.engine.speculate import Guessing
from spec.eagle.batch import Catcher
from spec.sampling import SamplingConfig


@dataclasses.dataclass(frozen=True, eq=False)
class Phase:
    """How tokens are drawn, by which policy, and who guesses.

    `kv_tokens` is what rows may hold together (None: as much as there is); `catcher` takes
    responses with the policy's hidden states.
    """

    sampling: SamplingConfig
    key: jax.Array
    stop_ids: np.ndarray
    stop_E: jax.Array
    policy_version: int
    guessing: Guessing
    kv_tokens: int | None = None
    catcher: Catcher | None = None
