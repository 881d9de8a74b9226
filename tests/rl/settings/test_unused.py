"""Settings that a run does not use are reported, and only these."""

import pytest

from reprise.rl.gin.loader import ConfigError, load
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.unused import (
    _NOT_SERVED,
    _READ,
    _RUN_SETTINGS,
    refuse_run_settings,
    unused_settings,
)


@pytest.mark.parametrize(
    ("overrides", "notes"),
    [
        ((), []),
        (("DraftModel.max_depth=3",), ["DraftModel.max_depth"]),
        (("DraftModel.max_depth=3", "Speculation.sources=('model',)"), []),
        (("Drafter.top_k=3", "DataBuffer.max_bytes=9999999"), ["Drafter.top_k", "DataBuffer"]),
        (("Tuner.depths=(8,)",), ["Tuner.depths"]),
        (("Tuner.depths=(8,)", "Speculation.budget='bandit'"), []),
        (("Critic.learning_rate=0.1",), ["Critic.learning_rate"]),
        (("Speculation.sources=('last', 'own')",), ['"last"']),
        (("Speculation.sources=('last', 'own')", "Reuse.mode='coupled'"), []),
        (("Reuse.fresh_share=0.5",), ["Reuse.fresh_share"]),
        (("Reuse.max_age_steps=9", "Reuse.mode='coupled'"), ["Reuse.max_age_steps"]),
        (("Reuse.max_age_steps=9", "Reuse.mode='full'"), []),
        (("Sched.chunk_tokens=64",), ["Sched.chunk_tokens"]),
        (("Sched.chunk_tokens=64", "Sched.workers=2"), []),
        (("Eval.num_prompts=0",), []),
        (("Eval.num_prompts=0", "Eval.samples=2", "Eval.temperature=1.0"), ["Eval.samples"]),
        # a run to compare with keeps its drafters' settings
        (("Speculation.sources=('model',)", "Speculation.budget='off'"), []),
    ],
)
def test_settings_without_effect_are_named(overrides, notes):
    found = unused_settings(load(TrainConfig, ["configs/tiny_cpu.gin"], overrides))
    assert len(found) == len(notes), found
    assert all(line.startswith(name) for line, name in zip(found, notes, strict=True)), found


@pytest.mark.parametrize(
    "setting",
    [
        *("Sched.workers=2", "Sched.policy='seer'", "Reuse.renew_groups=False", "Run.steps=3"),
        *("Optimizer.learning_rate=0.1", "Optimizer.first_moment='bfloat16'"),
        *("Trainer.minibatches=2", "Sampling.by_task=('a: top_k=3',)", "Rollout.group_size=4"),
    ],
)
def test_settings_that_only_a_run_reads_are_refused_elsewhere(setting):
    name = setting.partition("=")[0]
    with pytest.raises(ConfigError, match=f"{name}: no effect here, only rl.train reads it; fix:"):
        refuse_run_settings(["Run.seed=1", setting])


@pytest.mark.parametrize(
    "setting", ["Reuse.mode='coupled'", "Eval.samples=2", "Reward.per='group'"]
)
def test_settings_that_a_server_does_not_read_are_refused_there(setting):
    name = setting.partition("=")[0]
    refuse_run_settings([setting])
    with pytest.raises(ConfigError, match=f"{name}: no effect here, only rl.train reads it; fix:"):
        refuse_run_settings([setting], is_served=True)


def test_all_that_are_refused_exist():
    config = load(TrainConfig)
    sections = {type(x).__name__.removesuffix("Config"): x for x in vars(config).values()}
    for name in [*_RUN_SETTINGS, *_NOT_SERVED, *_READ]:
        section, _, field = name.partition(".")
        assert not field or hasattr(sections[section], field), name
        assert section in sections, name
