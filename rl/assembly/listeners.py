"""Features that take part in the steps of a run while they are on."""

from __future__ import annotations

from reprise.models.transformer import Params
from reprise.rl.engine.engine import RolloutEngine
from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.engine.stats import EngineStats
from reprise.rl.metrics.writer import Timings


class StepListener:
    """A feature that takes part in each step; a method that it does not override does nothing.

    A step may have several rollouts (dynamic sampling), and calls `metrics` once after them.
    """

    def before_rollout(self, spec: RolloutSpec, step: int) -> RolloutSpec:
        """Return the settings of a rollout of `step`, with additions of the feature."""
        return spec

    def after_rollout(self, engine: RolloutEngine, weights: Params, timings: Timings) -> None:
        """Use the workers, which are idle and have the weights of the rollout."""

    def metrics(self, stats: EngineStats) -> dict[str, float]:
        """Return metrics of the step, whose rollouts had these counts."""
        return {}
