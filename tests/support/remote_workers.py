"""Worker programs in threads of this process, which can be killed, stopped and started late."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tiny_team import CONFIG, MODEL

from rl.cluster.join import identity_of
from rl.remote.drafter_messages import NO_DRAFTERS
from rl.remote.jobs import Jobs
from rl.remote.messages import Hello
from rl.remote.remote_engine import RemoteEngine
from rl.remote.team import Deadlines, Team
from rl.remote.worker import WorkerProgram
from rl.speculation.config import SpeculationConfig
from rl.workers.config import SchedConfig
from rl.workers.group_drafts import GroupDrafts
from rl.workers.multi_engine import MultiEngine
from spec.budget.config import TunerConfig

IDENTITY = identity_of("", Path(__file__))
TUNER = TunerConfig((1, 5), verify_tokens=(3, 1), depths=(1, 2))
HANG_LIMIT_S = 20.0  # rounds compile here


class ThreadChannel:
    """A program in this process; `kill` fails what waits, `stop` lets all wait for ever."""

    def __init__(self, answer, heard=lambda message: None):
        self._answer, self._heard = answer, heard
        self._threads, self._lock = ThreadPoolExecutor(8), threading.Lock()
        self._waiting, self.stopped, self.killed = set(), False, False
        self.ended = 0

    def submit(self, message):
        given = Future()
        with self._lock:
            if self.killed:
                raise RuntimeError("killed")
            self._waiting.add(given)
        self._heard(message)
        self._threads.submit(self._work, message, given)
        return given

    def _work(self, message, given):
        answer = self._answer(message)
        with self._lock:
            if self.killed or self.stopped or given not in self._waiting:
                return
            self._waiting.discard(given)
        given.set_result(answer)

    def kill(self):
        with self._lock:
            self.killed = True
            waiting, self._waiting = self._waiting, set()
        for given in waiting:
            given.set_exception(RuntimeError("killed"))

    def end(self):
        self.ended += 1
        self.kill()


class Programs:
    """Starts programs for a team; `channels` are those of each number, oldest first.

    `changed` gets each channel, which has its `number` and its `program`.
    """

    def __init__(self, *, changed=lambda channel: None):
        self.drafts, self.channels, self._changed = GroupDrafts(), {}, changed
        self.ask_at = None  # history workers
        self.apart = None  # drafting workers, by the number of a worker
        self.hold = {}  # by number: an event that a start waits for

    def connect(self, number):
        if number in self.hold:
            assert self.hold[number].wait(60)
        program = WorkerProgram("", self.drafts.exchange, self.ask_at, self.apart)
        channel = ThreadChannel(program.answer)
        channel.program, channel.number = program, number
        self._changed(channel)
        self.channels.setdefault(number, []).append(channel)
        return channel


def hello(number, speculation=None, identity=None, deadline_s=60.0, drafters=NO_DRAFTERS):
    identity = IDENTITY if identity is None else identity
    return Hello(
        *(identity, "nowhere", number, MODEL, CONFIG, "float32", 1),
        *(deadline_s, speculation or SpeculationConfig(), TUNER, 0, drafters),
    )


def make_team(
    programs,
    count,
    *,
    speculation=None,
    drafting=None,
    drafters=NO_DRAFTERS,
    identity=None,
    spot=None,
    deadline_s=2.0,
    said=None,
    kind=MultiEngine,
    apart=lambda worker: False,
    **options,
):
    """A MultiEngine whose engines are other programs, and their team: start it with `start`.

    `drafting` is the Speculation of the run, and `drafters` what its workers are told of those on
    their devices; `apart` returns True if drafting workers draft for a worker.
    """
    jobs, learned = Jobs(drafting, apart), drafters.learned
    settings = {"dtype": "float32", "jobs": jobs, "hang_limit_s": HANG_LIMIT_S}
    settings["feature_layers"] = None if learned is None else learned.config.feature_layers
    engines = [RemoteEngine(MODEL, CONFIG, number=i, **settings) for i in range(count)]
    config = SchedConfig(
        **{"policy": "divided_fifo", "workers": count, "chunk_tokens": 3, "kv_tokens": 60} | options
    )
    multi = kind(engines, config, keeps_decisions=True, spot=spot)
    deadlines = Deadlines(deadline_s, 60.0, 60.0)
    say = (lambda line: None) if said is None else said.append
    told = partial(hello, speculation=speculation, identity=identity, drafters=drafters)
    team = Team(engines, jobs, programs.connect, told, deadlines, say)
    team.engines = multi.engines
    return multi, team
