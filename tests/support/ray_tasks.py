"""Rollouts of workers on Ray, in a process of their own: what Ray does to it, it does to no
other test.
"""

import os
import signal
import time
from pathlib import Path

import drafting_actors
import rollouts
from processes import Place, descendants
from ray_workers_in_threads import make_team
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

from reprise.rl.cluster import ray_session
from reprise.rl.cluster.actors import ActorSettings
from reprise.rl.cluster.ray_session import open_ray, reserve
from reprise.rl.data.tasks import Example
from reprise.rl.engine.engine import Engine
from reprise.rl.rewards.config import RewardConfig
from reprise.rl.rewards.pool import RewardPool
from reprise.rl.rewards.scorers import Scorers
from reprise.rl.rewards.scores import ScoreJob
from reprise.rl.sessions.multi_engine import Helpers
from reprise.rl.speculation.config import SpeculationConfig
from reprise.rl.speculation.device_drafters import DraftModel
from reprise.rl.speculation.history_workers import HistoryWorkers
from reprise.rl.speculation.sources import Speculation
from reprise.sched.protocol import Copy, WorkerLost
from reprise.spec.budget.config import MODEL as DRAFT
from reprise.spec.retrieval.history import RULE
from reprise.spec.reuse.rollout_cache import RolloutCache, of_group


def listening(pids):
    """The addresses, in the kernel's hexadecimal, that these processes listen on."""
    sockets = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets.add(os.readlink(fd))
            except FileNotFoundError:
                continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and f"socket:[{columns[9]}]" in sockets:
                found.add(columns[1].partition(":")[0])
    return found


def killing(team, killed):
    """Return an `on_finish` that kills a worker once."""

    def on_finish(trajectory):
        if not killed:
            place = next(p for p in team.places if p.actor.pid)
            killed.append(os.kill(place.actor.pid, signal.SIGKILL))

    return on_finish


def everything(place: Place):
    """Both checks below, on one Ray."""
    done = rollouts.run(Engine(MODEL, CONFIG), PARAMS, REQUESTS, SAMPLING, KEY, STOP)
    with open_ray(None, 6, 60.0):
        found = tokens_though_one_is_killed(done)
        return found | drafts_though_a_program_is_killed(done, place.folder / "draft")


def tokens_though_one_is_killed(done):
    """Check the tokens of two workers, of which one is killed in mid-rollout.

    Whichever has nothing left to do answers copies of the other's requests.
    """
    alone = {t.request_id: t for t in done}
    config = SpeculationConfig(budget="fixed:3", sources=("history", "group", "own"))
    keys = keys_of(PROMPTS)
    cache = RolloutCache(vocab_size=MODEL.vocab_size)
    for g, key in enumerate(keys):
        own = [t.response_ids for t in done if t.group_id == g]
        cache.replace(key, of_group(own, [1.0] * len(own)))
    settings, killed = ActorSettings({}, 30.0, 60.0), []
    with (
        reserve(1, "history", 30.0) as beside,
        reserve(2, "workers", 30.0) as room,
    ):
        scores_though_one_is_killed()
        history = HistoryWorkers(RULE, cache, 1, beside, settings)
        history.wait_started()
        speculation = Speculation(config, cache, for_others=True, history_workers=history)
        own = {"methods_of_copies": ("own", "group")}
        given = {"room": room, "settings": settings, "speculation": config}
        team, _ = make_team(ray_session, 2, chunk_tokens=2, worker=own, **given)
        team.helpers = Helpers(2, 4, lambda held, left: True, dict)
        drafts = speculation.drafter_factory(keys, PROMPTS, group_size=4)
        assert drafts.shards and not drafts.history
        assert_same_tokens(play(team, drafts=drafts), alone)
        addresses = listening(descendants(os.getpid()))
        loopback = "0100007F", "0" * 24 + "01000000"
        assert addresses
        assert addresses <= {*loopback, "0000000000000000FFFF00000100007F"}
        copied = [a for d in team.decisions for a in d.actions if isinstance(a, Copy)]
        assert copied, "the last requests leave a worker dry"
        assert_same_tokens(play(team, drafts=drafts, on_finish=killing(team, killed)), alone)
        assert team.stats.accepted_tokens > 20  # the history has the very responses
        lost = [d.event for d in team.decisions if isinstance(d.event, WorkerLost)]
        history.close()
        for one in team.places:
            one.actor.close()
    assert len(lost) == 1
    return {"accepted_tokens": team.stats.accepted_tokens}


def drafts_though_a_program_is_killed(done, folder):
    """Check the tokens of two workers that a third one drafts for, which is killed meanwhile."""
    alone = {t.request_id: t for t in done}
    config = SpeculationConfig(budget="fixed:3", sources=("model",))
    folder.mkdir()
    model, lines = drafting_actors.save_policy(folder), []
    drafters = {DRAFT: DraftModel.elsewhere(model)}
    with (
        Speculation(config, RolloutCache(), drafters, for_others=True) as speculation,
        reserve(1, "drafting", 30.0) as beside,
        reserve(2, "workers", 30.0) as room,
        drafting_actors.drafting_actors(model, room=beside, lines=lines) as drafting,
    ):
        given = {"room": room, "speculation": config, "apart": drafting.apart}
        own = {"draft_model": model, "model_here": False, "model_apart": True}
        team, _ = make_team(ray_session, 2, worker=own, **given)
        drafting.wait_ready()
        drafts, killed = speculation.drafter_factory(keys_of(PROMPTS), PROMPTS), []
        assert_same_tokens(play(team, drafts=drafts), alone)
        first = drafting.actors[0].pid

        def on_finish(trajectory):
            if not killed:
                killed.append(os.kill(first, signal.SIGKILL))

        assert_same_tokens(play(team, drafts=drafts, on_finish=on_finish), alone)
        drafter = drafting.actors[0]
        while drafter.pid == first or not drafter.is_there:
            time.sleep(0.05)
        assert_same_tokens(play(team, drafts=drafts), alone)
        for one in team.places:
            one.actor.close()
    assert any("it is started again" in line for line in lines), lines
    return {"starts": drafting.actors[0].num_starts}


def keys_of(prompts):
    return [f"q{g}" for g in range(len(prompts))]


def scores_though_one_is_killed():
    """Check the scores of two scorers, of which one is killed while it has responses."""
    config, said = RewardConfig(functions=("exact_match",), workers=1, deadline_s=30.0), []
    jobs = [
        ScoreJob(Example(f"q{i}", "2+2?", str(i % 3), {"n": i}, "jsonl:x"), f"#### {i % 2}", (i,))
        for i in range(60)
    ]
    with RewardPool(config) as pool:
        wanted = [pool.result(f) for f in [pool.submit(job) for job in jobs]]
    settings = ActorSettings({}, 30.0, 60.0, said.append)
    with (
        reserve(2, "scorers", 30.0) as room,
        Scorers(config, (), 2, room, settings) as scorers,
    ):
        first = [scorers.submit(job) for job in jobs[:20]]
        os.kill(scorers.actors[0].pid, signal.SIGKILL)
        futures = first + [scorers.submit(job) for job in jobs[20:]]
        assert [scorers.result(f) for f in futures] == wanted
    assert all("it is started again" in line for line in said), said
