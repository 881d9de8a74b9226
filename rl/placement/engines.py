"""The settings of the engines of a run, from its configuration."""

from __future__ import annotations

import dataclasses

import numpy as np

from reprise.models.config import ModelConfig
from reprise.rl.settings.config import TrainConfig, drafter_shape
from reprise.rl.slots.config import EngineConfig
from reprise.rl.workers.engines import EngineSettings


def engine_settings(
    config: TrainConfig, model: ModelConfig, *, drafts: bool = True, any_sampling: bool = False
) -> EngineSettings:
    """Return the settings of engines that answer with this policy.

    Unless `drafts` is False, they keep the hidden states that a learned drafter reads. Requests
    have the sampling of the configuration, or with `any_sampling` any.
    """
    shape = drafter_shape(config, model) if drafts else None
    return EngineSettings(
        model=model,
        config=config.engine,
        dtype=np.dtype(config.trainer.dtype).name,
        feature_layers=None if shape is None else shape.feature_layers,
        may_cut=any_sampling or config.sampling.may_cut,
    )


def evaluation_engine(config: TrainConfig, num_requests: int, ways: int) -> EngineConfig:
    """Return the settings of an evaluation-only engine on a mesh that splits slots `ways` ways.

    The engine has at most the pages that its requests can need, since `Engine.pages` may be sized
    for other devices.
    """
    engine = config.engine
    if not engine.pages or engine.pages == "auto":
        return engine
    max_tokens = config.longest_tokens
    slots = engine.over(ways).slot_bucket(num_requests)
    needed = dataclasses.replace(engine, pages=0).num_pages(slots, max_tokens, ways)
    return dataclasses.replace(engine, pages=min(engine.pages, needed))
