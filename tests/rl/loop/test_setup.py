"""The number of large programs that a run compiles before its first step."""

from pathlib import Path

from rl.config.loader import load
from rl.loop.experiment import TrainConfig, open_policy
from rl.loop.setup import num_whole_model

DEFAULT = Path(__file__).parents[3] / "configs" / "tiny_cpu.gin"
MOST = 12  # of rollouts and training


def count(*overrides):
    config = load(TrainConfig, [DEFAULT], overrides)
    return num_whole_model(config, open_policy(config.policy.directory)[1])


def test_the_default_run_drafts_and_compiles_few_programs_of_the_whole_policy():
    assert load(TrainConfig, [DEFAULT]).speculation.enabled
    assert count("Speculation.budget='off'") < count() <= MOST - 1  # training has one
    # a size more, and the count knows
    assert count("Engine.min_slots=2") > MOST
