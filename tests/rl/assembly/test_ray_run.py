"""Workers in other programs are compiled and measured once, also those that come late."""

from types import SimpleNamespace

import rollouts
from ray_workers_in_threads import Store, make_team
from tiny_team import (
    CONFIG,
    KEY,
    MODEL,
    PARAMS,
    PROMPTS,
    REQUESTS,
    SAMPLING,
    STOP,
    assert_same_tokens,
    play,
)

from reprise.rl.assembly import ray_run as ray_workers
from reprise.rl.assembly.first_programs import rollout_reach
from reprise.rl.assembly.ray_run import RayWorkers
from reprise.rl.cluster import ray_session
from reprise.rl.drafting.config import DraftingConfig
from reprise.rl.drafting.plans import Planner
from reprise.rl.engine.engine import Engine
from reprise.rl.gin.loader import load
from reprise.rl.ray_workers.place import Bounds
from reprise.rl.runtime.run_files import ROUNDS_FILE
from reprise.rl.settings.config import TrainConfig
from reprise.rl.speculation.config import SpeculationConfig
from reprise.rl.speculation.sources import Speculation
from reprise.rl.warm_up.measured_run import read_rounds
from reprise.rl.warm_up.rollout_programs import Reach
from reprise.spec.reuse.rollout_cache import RolloutCache

RAY = ("Cluster.kind='ray'", "Sched.workers=2")


def warm_up(workers, bounds, folder):
    workers.warm_up(bounds, PARAMS, folder, (), on_compiled=lambda *_: None, heartbeat=lambda: None)


def test_workers_compile_for_drafters_on_their_devices_and_for_what_idle_ones_learn():
    more = ("Speculation.sources=('learned',)", "Speculation.budget='fixed:3'")
    config = load(TrainConfig, ["configs/epochs_tiny.gin"], (*RAY, *more))
    inputs, reach = SimpleNamespace(evals=SimpleNamespace(num_questions=0)), rollout_reach(config)
    drafter = SimpleNamespace(spot=object())
    found = ray_workers.bounds(config, inputs, reach, drafter)
    slots, sent = config.engine.slots, found.reach
    decisions = [d("learned")(slots) for d in (sent.alone.get, reach.alone.get)]
    there, here = ([(d.num_nodes, d.tree_tokens) for d in some] for some in decisions)
    assert there == here != [] and sent.alone["learned"](slots + 1) == ()
    assert found.batch == (config.drafter.batch_rows, config.drafter.row_tokens)
    assert ray_workers.bounds(config, inputs, reach, SimpleNamespace(spot=None)).batch is None


def test_workers_compile_for_evaluations_that_they_answer():
    config = load(TrainConfig, ["configs/epochs_tiny.gin"], RAY)
    inputs = SimpleNamespace(evals=SimpleNamespace(num_questions=10_000))
    found = ray_workers.bounds(config, inputs, rollout_reach(config))
    assert found.reach.max_requests == 10_000 * config.eval.samples
    assert found.reach.speculative == config.speculation.enabled


def test_programs_are_warmed_up_once_and_late_ones_by_what_was_measured(tmp_path, monkeypatch):
    store, config = Store(), SpeculationConfig(sources=("history", "group", "own"))
    monkeypatch.setattr(ray_session, "fetch", store.fetch)
    bounds = Bounds(SAMPLING, Reach(len(REQUESTS), 5, speculative=True, moves=True), None)
    done = rollouts.run(Engine(MODEL, CONFIG), PARAMS, REQUESTS, SAMPLING, KEY, STOP)
    with Speculation(config, RolloutCache(), for_others=True) as speculation:
        team, room = make_team(store, 1, speculation=config)
        helping = Planner(DraftingConfig(requests_per_helper=2), 2, len(REQUESTS), 3)
        shared = team.places[0]._shared
        workers = RayWorkers(team, team.places, shared, helping=helping)
        warm_up(workers, bounds, tmp_path)
        costs = helping.seconds.costs
        assert costs.copy_seconds(8) > 0 and helping.seconds.verify(1, 2) > 0
        assert not helping.worth(8, 0), "nothing is left to gain"
        assert team.prefer_pool(8) in (True, False)
        assert read_rounds(tmp_path / ROUNDS_FILE)(4, 4, 24) > 0
        room.started[0][0].kill()
        keys = [f"q{g}" for g in range(len(PROMPTS))]
        drafts = speculation.drafter_factory(keys, PROMPTS, group_size=4)
        assert_same_tokens(play(team, drafts=drafts), {t.request_id: t for t in done})
    calls = [call for handle in room.started[0] for call in handle.calls]
    first, late = [call[-1] for call in calls if call[:2] == ("call", "prepare")]
    assert first is None and late == (tmp_path / ROUNDS_FILE).read_text()


def test_other_programs_compile_while_the_first_one_measures(tmp_path, monkeypatch):
    store = Store()
    monkeypatch.setattr(ray_session, "fetch", store.fetch)
    bounds = Bounds(SAMPLING, Reach(len(REQUESTS), 5, moves=True), None)
    team, room = make_team(store, 2)
    workers = RayWorkers(team, team.places, team.places[0]._shared)
    warm_up(workers, bounds, tmp_path)
    first, other = ([c[1] for c in room.started[i][0].calls if c[0] == "call"] for i in (0, 1))
    assert first == ["prepare"] and other == ["compile", "prepare"]
