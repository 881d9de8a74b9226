"""The settings of the engines of a run."""

from pathlib import Path

import pytest

from reprise.rl.gin.loader import load
from reprise.rl.placement.engines import engine_settings
from reprise.rl.settings.config import TrainConfig, drafter_shape
from reprise.rl.settings.inputs import open_policy

DEFAULT = Path(__file__).parents[3] / "configs" / "tiny_cpu.gin"
LEARNED = "Speculation.sources=('learned',)", "Speculation.budget='fixed:3'"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engines_compute_in_the_dtype_of_the_trainer(dtype):
    config = load(TrainConfig, [DEFAULT], [f"Trainer.compute_dtype='{dtype}'"])
    model = open_policy(config.policy.directory)[1]
    found = engine_settings(config, model)
    assert (found.dtype, found.config, found.model) == (dtype, config.engine, model)


def test_hidden_states_are_kept_only_for_a_learned_drafter():
    plain = load(TrainConfig, [DEFAULT])
    learns = load(TrainConfig, [DEFAULT], LEARNED)
    model = open_policy(plain.policy.directory)[1]
    layers = drafter_shape(learns, model).feature_layers
    assert engine_settings(learns, model).feature_layers == layers is not None
    assert engine_settings(learns, model, drafts=False).feature_layers is None
    assert engine_settings(plain, model).feature_layers is None
