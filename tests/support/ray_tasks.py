"""Rollouts of worker programs on Ray, in a process of their own: what Ray does to it, it does to no
other test.
"""

import os
import signal
import time
from pathlib import Path

import rollouts
from drafting_actors import drafting_actors, save_policy
from processes import Place, descendants
from remote_workers import IDENTITY, make_team
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

from rl.cluster.join import DRAFT_MODEL, identity_of
from rl.cluster.ray_session import reserve
from rl.data.tasks import Example
from rl.engine.engine import Engine
from rl.ray_roles.services import HistoryActors, ScorerActors
from rl.ray_roles.session import RaySession, open_ray
from rl.remote.drafter_messages import Drafters
from rl.remote.history_workers import HistoryWorkers
from rl.remote.scorers import Scorers
from rl.remote.service import ServiceDeadlines
from rl.rewards.config import RewardConfig
from rl.rewards.pool import RewardPool
from rl.rewards.scores import ScoreJob
from rl.speculation.config import SpeculationConfig
from rl.speculation.draft_model import DraftModel
from rl.speculation.sources import Speculation
from rl.workers.multi_engine import Helpers
from sched.protocol import Copy, WorkerLost
from spec.budget.config import MODEL as DRAFT
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
    with open_ray(None, 6, 60.0), Speculation(config, cache) as speculation:
        scores_though_one_is_killed()
        actors = HistoryActors("a run", 1, start_s=30.0)
        deadlines = ServiceDeadlines(30.0, 60.0, 120.0)
        workers = HistoryWorkers("history", cache, 1, actors.connect, "a run", deadlines)
        workers.start()
        speculation.for_others, speculation.index_builder = True, workers
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
            assert drafts.indexed is not None and not drafts.history
            assert_same_tokens(play(multi, drafts=drafts), alone)
            copied = [a for d in multi.decisions for a in d.actions if isinstance(a, Copy)]
            assert copied, "the last requests leave a worker dry"
            assert_same_tokens(play(multi, drafts=drafts, on_finish=on_finish), alone)
            assert multi.stats.accepted_tokens > 20  # the history has the very responses
            lost = [d.event for d in multi.decisions if isinstance(d.event, WorkerLost)]
        workers.close()
        actors.close()
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
    model, said = save_policy(folder), []
    found = identity_of("", Path(__file__), folder)
    told = {"drafters": Drafters(model, apart=True)}
    told["identity"] = IDENTITY | {DRAFT_MODEL: found[DRAFT_MODEL]}
    drafters = {DRAFT: DraftModel.elsewhere(model)}
    with open_ray(None, 6, 60.0), Speculation(config, RolloutCache(), drafters) as speculation:
        speculation.for_others = True
        session = RaySession("", 2, 1, deadline_s=30.0, start_s=60.0)
        with reserve(1, "Drafting.workers=1", 60.0, devices=1) as room:
            with drafting_actors(model, room=room, lines=said) as actors:
                publish = lambda worker: session.publish(worker, actors.apart(worker))  # noqa: E731
                given = {"speculation": config, "said": said, "deadline_s": 30.0, "apart": publish}
                multi, team = make_team(session, 2, **given, **told)
                with team:
                    team.start()
                    actors.wait_ready()
                    (actor,) = actors.actors
                    first, killed = actor.pid, []

                    def on_finish(trajectory):
                        if not killed:
                            killed.append(os.kill(first, signal.SIGKILL))

                    drafts = speculation.drafter_factory(keys_of(PROMPTS), PROMPTS)
                    play_until(lambda: multi.stats.accepted_tokens, multi, drafts, alone)
                    assert_same_tokens(play(multi, drafts=drafts, on_finish=on_finish), alone)
                    replaced = lambda: actor.num_starts == 2 and actors.apart(0).places[0].handle  # noqa: E731
                    play_until(replaced, multi, drafts, alone)
                    play_until(lambda: multi.stats.accepted_tokens, multi, drafts, alone)
        session.close()
    assert team.losses == []
    assert any("it is started again" in line for line in said), said
    return {"starts": actor.num_starts}


def play_until(condition, multi, drafts, alone):
    """Play rollouts: one may be over before it has used a draft."""
    until_s = time.monotonic() + 120
    while True:
        assert_same_tokens(play(multi, drafts=drafts), alone)
        if condition():
            return
        assert time.monotonic() < until_s


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
    actors = ScorerActors("a run", 2, 1, start_s=30.0)
    deadlines = ServiceDeadlines(30.0, 60.0, 120.0)
    scorers = Scorers(config, (), 2, actors.connect, "a run", deadlines, said.append)
    with scorers:
        first = [scorers.submit(job) for job in jobs[:20]]
        os.kill(scorers.scorers[0].pid, signal.SIGKILL)
        futures = first + [scorers.submit(job) for job in jobs[20:]]
        assert [scorers.result(f) for f in futures] == wanted
    actors.close()
    assert len(said) == 1 and "scored elsewhere" in said[0], said
