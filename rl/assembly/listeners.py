"""The interface of features that take part in the steps of a run while they are enabled."""

from __future__ import annotations

from reprise.models.decoder.transformer import Params
from reprise.rl.engine.engine import RolloutEngine
from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.metrics.writer import Timings
from reprise.rl.records.stats import EngineStats


class StepListener:
    """A feature that takes part in each step; the methods do nothing unless overridden.

    A step may have several rollouts (dynamic sampling), and calls `metrics` once afterwards.
    """

    def before_rollout(self, spec: RolloutSpec, step: int) -> RolloutSpec:
        """Return the settings of a rollout of `step`, with additions by this feature."""
        return spec

    def after_rollout(self, engine: RolloutEngine, weights: Params, timings: Timings) -> None:
        """Run work on the workers, with these weights; they are idle, except in a pipeline."""

    def metrics(self, stats: EngineStats) -> dict[str, float]:
        """Return metrics of a step from the counts of its rollouts."""
        return {}
