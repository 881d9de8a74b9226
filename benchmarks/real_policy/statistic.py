"""Ratios of sums over questions, with intervals from resampling the questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

RESAMPLES = 2000
INTERVAL = (2.5, 97.5)  # percentiles


def ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, Any]:
    """Return Σ above / Σ below, and the interval that resampling the questions gives."""
    above_Q, below_Q = np.asarray(above, np.float64), np.asarray(below, np.float64)
    if not below_Q.sum():
        return {"value": None, "interval": None, "of": 0}
    picks_RQ = np.random.default_rng(0).integers(len(above_Q), size=(RESAMPLES, len(above_Q)))
    ratios_R = above_Q[picks_RQ].sum(1) / np.maximum(below_Q[picks_RQ].sum(1), 1e-12)
    low, high = np.percentile(ratios_R, INTERVAL)
    return {
        "value": round(float(above_Q.sum() / below_Q.sum()), 5),
        "interval": [round(float(low), 5), round(float(high), 5)],
        "of": int(below_Q.sum()),
    }
