"""Drafting programs in threads of this process, for teams of remote workers."""

import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from remote_workers import IDENTITY, ThreadChannel
from tiny_team import CONFIG, MODEL, PARAMS, REQUESTS, SAMPLING

from models import hf
from rl.cluster.join import DRAFT_MODEL, identity_of
from rl.drafting.config import DraftingConfig
from rl.drafting.plans import Planner
from rl.remote.drafter_messages import Drafters
from rl.remote.drafting_messages import CODEC, Meet
from rl.remote.drafting_service import DraftingProgram
from rl.remote.drafting_workers import DraftingPrograms
from rl.remote.service import ServiceDeadlines, service_identity
from rl.runtime.waits import ProgramLost
from rl.speculation.config import DraftModelConfig
from spec.decoupled.messages import Block, Commit, DraftPlan

RUN = ""  # the text of its configuration, as that of remote workers
LONGEST = 24  # tokens of a prompt and a response
DEADLINES = ServiceDeadlines(answer_s=5.0, start_s=30.0, silence_s=60.0)


def save_policy(folder):
    """Save the policy as its own draft model; its own draws are proposed. Returns its settings."""
    hf.save_pretrained(folder, MODEL, jax.tree.map(jnp.asarray, PARAMS))
    return DraftModelConfig(str(folder), max_depth=3, proposal="shared_noise")


def told_of(model):
    """What rollout workers are told of a draft model that drafts elsewhere."""
    found = identity_of("", Path(__file__), Path(model.directory))
    identity = IDENTITY | {DRAFT_MODEL: found[DRAFT_MODEL]}
    return {"drafters": Drafters(model, apart=True), "identity": identity}


def meet(model, config=None, *, rows=16, devices=1, identity=None, hang_limit_s=60.0):
    config = config or DraftingConfig(workers=1, window=2)
    identity = identity or service_identity(RUN, Path(model.directory))
    return Meet(
        *(identity, 60.0, MODEL, CONFIG, "float32", devices, model, config, 2, rows, LONGEST),
        *(SAMPLING, hang_limit_s),
    )


class Started:
    """Starts drafting programs for a run, and asks them by name as rollout workers do.

    `changed` gets each program; `channels` are those that were started, by name.
    """

    def __init__(self, changed=lambda program: None):
        self.channels, self._changed = {}, changed

    def connect(self, number, name):
        program = DraftingProgram(RUN)
        self._changed(program)
        channel = ThreadChannel(program.answer)
        channel.program = program
        self.channels[name] = channel
        return channel

    def ask(self, name, message):
        if name not in self.channels or self.channels[name].killed:
            raise ProgramLost("it is not there")
        return self.channels[name].program.answer(message)

    @property
    def programs(self):
        return [channel.program for channel in self.channels.values()]


def programs(model, connect, config, num_workers, said=None, *, deadlines=DEADLINES, **settings):
    """The drafting programs of a run, of `num_workers` of both kinds: a context manager."""
    planner = Planner(config, num_workers, len(REQUESTS), 2)
    planner.drafting_workers = config.workers
    say = (lambda line: None) if said is None else said.append
    met = meet(model, config, **settings)
    return DraftingPrograms(planner, met, connect, deadlines, 120.0, say)


def asker(program):
    """Return a function that asks a program, and reads the answer."""
    return lambda message: CODEC.decode(program.answer(CODEC.encode(message)))


def commit(request_id, number=1, tokens=(1, 2, 3), chain=(4,), first=0, window=2, remaining=5):
    numbers = np.array(tokens, np.int32), 1, remaining, np.array(chain, np.int32)
    plan, processing = DraftPlan(window, number % 2 == 0), (0.5, 3.0, 0.25)
    return Commit(request_id, number, first, *numbers, plan, processing)


def block(request_id=1, tokens=(4, 5, 6), parents=(-1, 0, -1), prob=(0.5, 0.4, 0.25)):
    arrays = np.array(tokens, np.int32), np.array(parents, np.int32), np.array(prob, np.float32)
    return Block(request_id, 2, 3, *arrays)


def wait_for(condition, limit_s=30.0):
    until_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)
