"""Rollouts of worker programs on Ray, in a process of their own: what Ray does to it, it does to no
other test.
"""

import os
import signal
import time
from pathlib import Path

import drafting_programs
import rollouts
from processes import Place, descendants
from remote_workers import make_team
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

from rl.cluster.actors import ActorSettings
from rl.cluster.ray_session import open_ray, reserve
from rl.data.tasks import Example
from rl.drafting.config import DraftingConfig
from rl.engine.engine import Engine
from rl.ray_roles.session import RaySession
from rl.remote.service import ServiceDeadlines
from rl.rewards.config import RewardConfig
from rl.rewards.pool import RewardPool
from rl.rewards.scorers import Scorers
from rl.rewards.scores import ScoreJob
from rl.speculation.config import SpeculationConfig
from rl.speculation.draft_model import DraftModel
from rl.speculation.history_workers import HistoryWorkers
from rl.speculation.sources import Speculation
from rl.workers.multi_engine import Helpers
from sched.protocol import Copy, WorkerLost
from spec.budget.config import MODEL as DRAFT
from spec.retrieval.history import RULE
from spec.reuse.rollout_cache import RolloutCache, of_group


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


def tokens_though_one_is_killed(place: Place):
    """Check the tokens of two programs, of which one is killed in mid-rollout.

    Whichever has nothing left to do answers copies of the other's requests.
    """
    done = rollouts.run(Engine(MODEL, CONFIG), PARAMS, REQUESTS, SAMPLING, KEY, STOP)
    alone = {t.request_id: t for t in done}
    config = SpeculationConfig(budget="fixed:3", sources=("history", "group", "own"))
    keys = [f"q{g}" for g in range(len(PROMPTS))]
    cache = RolloutCache(vocab_size=MODEL.vocab_size)
    for g, key in enumerate(keys):
        own = [t.response_ids for t in done if t.group_id == g]
        cache.replace(key, of_group(own, [1.0] * len(own)))
    with (
        open_ray(None, 6, 60.0),
        Speculation(config, cache) as speculation,
        reserve(1, "history", 30.0) as room,
    ):
        scores_though_one_is_killed()
        workers = HistoryWorkers(RULE, cache, 1, room, ActorSettings({}, 30.0, 60.0))
        workers.wait_started()
        speculation.for_others, speculation.history_workers = True, workers
        speculation.methods_of_copies = "own", "group"
        session = RaySession("", 2, 1, deadline_s=30.0, start_s=60.0)
        multi, team = make_team(session, 2, speculation=config, deadline_s=30.0, chunk_tokens=2)
        multi.helpers = Helpers(2, 4, lambda held, left: True, dict)
        with team:
            team.start()
            addresses = listening(descendants(os.getpid()))
            loopback = "0100007F", "0" * 24 + "01000000"
            assert addresses
            assert addresses <= {*loopback, "0000000000000000FFFF00000100007F"}
            # under load one of them may still be starting: its pid is 0, which is ourselves
            victim, killed = next(i for i, engine in enumerate(multi.engines) if engine.pid), []

            def on_finish(trajectory):
                if not killed:
                    killed.append(os.kill(multi.engines[victim].pid, signal.SIGKILL))

            drafts = speculation.drafter_factory(keys, PROMPTS, group_size=4)
            assert drafts.shards and not drafts.history
            assert_same_tokens(play(multi, drafts=drafts), alone)
            copied = [a for d in multi.decisions for a in d.actions if isinstance(a, Copy)]
            assert copied, "the last requests leave a worker dry"
            assert_same_tokens(play(multi, drafts=drafts, on_finish=on_finish), alone)
            assert multi.stats.accepted_tokens > 20  # the history has the very responses
            lost = [d.event for d in multi.decisions if isinstance(d.event, WorkerLost)]
        workers.close()
        session.close()
    assert lost == [WorkerLost(victim)]
    return {"accepted_tokens": multi.stats.accepted_tokens}


def drafts_though_a_program_is_killed(place: Place):
    """Check the tokens of two programs that a third one drafts for, which is killed meanwhile."""
    done = rollouts.run(Engine(MODEL, CONFIG), PARAMS, REQUESTS, SAMPLING, KEY, STOP)
    alone = {t.request_id: t for t in done}
    config = SpeculationConfig(budget="fixed:3", sources=("model",))
    folder = place.folder / "draft"
    folder.mkdir()
    model, said = drafting_programs.save_policy(folder), []
    drafters = {DRAFT: DraftModel.elsewhere(model)}
    with open_ray(None, 6, 60.0), Speculation(config, RolloutCache(), drafters) as speculation:
        speculation.for_others = True
        session = RaySession("", 3, 1, deadline_s=30.0, start_s=60.0)
        made = drafting_programs.programs(
            model,
            lambda number, name: session.connect_drafting(2 + number, name),
            *(DraftingConfig(workers=1, window=2), 3, said),
            deadlines=ServiceDeadlines(30.0, 60.0, 120.0),
        )
        with made as drafting:
            options = drafting_programs.told_of(model) | {"apart": drafting.apart}
            given = {"speculation": config, "said": said, "deadline_s": 30.0}
            multi, team = make_team(session, 2, **given, **options)
            with team:
                team.start()
                drafting.wait_started()
                (worker,) = drafting.workers
                first, killed = worker.pid, []

                def on_finish(trajectory):
                    if not killed:
                        killed.append(os.kill(first, signal.SIGKILL))

                drafts = speculation.drafter_factory(keys_of(PROMPTS), PROMPTS)
                until_s = time.monotonic() + 60
                while not worker.worked:  # a rollout may be over before it has heard of it
                    assert time.monotonic() < until_s
                    assert_same_tokens(play(multi, drafts=drafts), alone)
                assert_same_tokens(play(multi, drafts=drafts, on_finish=on_finish), alone)
                while worker.pid == first or worker.link is None or not worker.worked:
                    assert time.monotonic() < until_s + 60
                    assert_same_tokens(play(multi, drafts=drafts), alone)
        session.close()
    assert team.losses == []
    assert any("go on without its drafts; it is started again" in line for line in said), said
    return {"starts": worker.address.start}


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
