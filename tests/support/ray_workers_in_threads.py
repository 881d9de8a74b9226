"""Rollout workers whose actors are threads of this process, under a `MultiEngine`."""

import itertools
import os

from replay import RecordedTeam
from thread_actors import SETTINGS, ThreadRoom
from tiny_team import CONFIG, MODEL, PARAMS

from reprise.rl.cluster.actors import Actor
from reprise.rl.engine.engine import Engine
from reprise.rl.ray_workers.place import RayPlace, Shared, WorkerSettings
from reprise.rl.speculation.config import SpeculationConfig
from reprise.rl.workers.config import SchedConfig
from reprise.rl.workers.engines import EngineSettings
from reprise.spec.budget.config import TunerConfig

TUNER = TunerConfig((1, 5), verify_tokens=(3, 1), depths=(1, 2))
NO_DRAFTS = SpeculationConfig()
TARGET = "reprise.rl.ray_workers.actor:WorkerActor"


class Store(dict):
    """The references of Ray's store, as numbers."""

    def __init__(self):
        self._numbers = itertools.count()

    def share(self, value):
        number = next(self._numbers)
        self[number] = value
        return number

    def fetch(self, references, limit_s):
        return [self[reference] for reference in references]


def settings_of(number, speculation, **options):
    given = {"draft_model": None, "model_here": True, "model_apart": False, "learned": None}
    given |= {"methods_of_copies": (), "fetch_s": 30.0, "folder": os.getcwd()} | options
    own = number, EngineSettings(MODEL, CONFIG, "float32"), 1, speculation, TUNER, 0
    return WorkerSettings(*own, **given)


def make_team(
    store,
    count,
    *,
    room=None,
    speculation=NO_DRAFTS,
    kind=RecordedTeam,
    settings=SETTINGS,
    apart=None,
    worker=None,
    **options,
):
    """Return workers that are prepared, and their room; nothing is compiled beforehand."""
    config = SchedConfig(
        **{"policy": "divided_fifo", "workers": count, "chunk_tokens": 3, "kv_tokens": 60} | options
    )
    room, shared = room or ThreadRoom(), Shared(store.share, apart=apart)
    shared.weights.publish(PARAMS)
    places = []
    for i in range(count):
        own = settings_of(i, speculation, **worker or {})
        actor = Actor(f"worker {i}", TARGET, (own, None), settings, room, i, concurrency=1)
        limits = {"call_limit_s": 300.0, "compile_s": 300.0}
        places.append(RayPlace(i, actor, shared, report=lambda line: None, **limits))
    team = kind([Engine(MODEL, CONFIG)], config, places=places)
    return team, room
