"""Idle help and drafting workers of a run: their settings, also on Ray, and their actors."""

import threading
from types import SimpleNamespace

import numpy as np
from drafting_actors import save_policy
from thread_actors import ThreadRoom
from tiny_team import MODEL

from reprise.rl.assembly.drafting_run import (
    drafting_actors,
    have_idle_help,
    make_planner,
    open_actors,
)
from reprise.rl.assembly.ray_run import worker_settings
from reprise.rl.gin.loader import load
from reprise.rl.settings.checks import check_drafting
from reprise.rl.settings.config import TrainConfig
from reprise.rl.slots.config import EngineConfig
from reprise.rl.workers.engines import EngineSettings

RAY = "Cluster.kind='ray'"
ENGINE = EngineSettings(MODEL, EngineConfig(), "float32")
DRAFTS = (
    *("Speculation.sources=('model',)", "Speculation.budget='fixed:3'"),
    *("Sched.workers=4", "Drafting.workers=1"),
)


def settings(config):
    return worker_settings(config, ENGINE, None, 0)


def made(*settings):
    return load(TrainConfig, ["configs/epochs_tiny.gin"], settings)


HELPS = "Drafting.requests_per_helper=2", "Drafting.methods=('model','own')"


def test_workers_on_ray_are_told_that_they_draft_for_copies_with_a_draft_model(tmp_path):
    folder = f"DraftModel.directory={save_policy(tmp_path).directory!r}"
    config = made(*DRAFTS, RAY, folder, *HELPS)
    check_drafting(config)
    assert config.num_verifying == 3 and made(RAY).num_verifying == 1
    assert settings(config).model_here
    assert not settings(made(*DRAFTS, RAY, folder, "Drafting.methods=('model',)")).model_here
    others = made(*DRAFTS, RAY, folder, *HELPS, "Drafting.methods=('own',)")
    assert not settings(others).model_here


def test_idle_workers_help_by_the_methods_and_the_plan_of_the_run():
    config, engine = made(*DRAFTS, *HELPS), SimpleNamespace()
    planner = make_planner(config)
    have_idle_help(engine, planner)
    assert settings(config).methods_of_copies == ("model", "own")
    assert settings(made(*DRAFTS)).methods_of_copies == ()
    assert (engine.helpers.num_methods, engine.helpers.requests_each) == (2, 2)
    assert engine.helpers.worth == planner.worth
    planner.observed.add([5], np.ones(1, int), np.ones(1, int))
    assert set(engine.helpers.acceptance()) == {5}


def test_there_is_an_actor_for_each_device_of_a_drafting_worker(tmp_path):
    more = f"DraftModel.directory={save_policy(tmp_path).directory!r}", "DraftModel.max_depth=3"
    config = made(*DRAFTS, RAY, *more, "Drafting.workers=2", "Sched.devices_per_worker=2")
    room = ThreadRoom()
    with drafting_actors(config, ENGINE, room, print) as actors:
        assert len(actors.actors) == 4
        while len(room.started) < 4 or not all(h.calls[1:] for (h,) in room.started.values()):
            threading.Event().wait(0.01)
        member, target, told = room.started[0][0].calls[1]
        assert (member, target) == ("make", "reprise.rl.drafting.workers:DraftingActor")
        planner = make_planner(config)
        assert told.num_rows * 2 >= planner.num_requests > 0 and told.max_window == 3
        assert told.longest_tokens == config.longest_tokens
        assert (told.sampling, told.drafting) == (config.sampling, config.drafting)
        assert actors.planner.drafting_workers == 2 and actors.planner.num_workers == 4
    assert settings(config).model_apart and not settings(made(RAY)).model_apart
    assert not settings(config).model_here


def test_a_run_without_drafting_workers_starts_none():
    with open_actors(made(RAY), ENGINE, print) as nothing:
        assert nothing is None
