"""Rollouts of one engine over a mesh, by one process or several: their tokens and launches.

What the processes of tests/parity/test_parity_processes.py do, and what the test does alone.
"""

import contextlib
import dataclasses
import itertools
import threading
import zlib

import jax
import numpy as np
from loop_runs import counted_compilations
from shapes import PLAIN, one_size

from reprise.models import sharding
from reprise.models.config import MeshConfig, ModelConfig
from reprise.models.decoder import transformer
from reprise.rl.cluster.join import JobStore
from reprise.rl.cluster.lockstep import PREFIX, LockstepWatch
from reprise.rl.cluster.processes import Processes
from reprise.rl.engine import rounds
from reprise.rl.engine.engine import Engine
from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.python.generate import draft_with
from reprise.rl.records.trajectory import Request
from reprise.rl.speculation.config import SpeculationConfig
from reprise.rl.speculation.device_drafters import LearnedDrafter
from reprise.rl.speculation.sources import Speculation
from reprise.rl.warm_up import compile_buckets, round_times
from reprise.rl.warm_up.rollout_programs import Reach
from reprise.spec.budget.budget import FixedBudget, SeeingBudget, equal_trees
from reprise.spec.budget.config import LEARNED
from reprise.spec.config import SamplingConfig
from reprise.spec.eagle import model as eagle
from reprise.spec.eagle.config import TreeConfig
from reprise.spec.eagle.model import EagleWeights
from reprise.spec.reuse.prefix_rule import PrefixRule, parse_mode
from reprise.spec.reuse.rollout_cache import CachedGroup, CachedResponse, RolloutCache
from reprise.spec.round_times import RoundTimes
from reprise.spec.verification.sampling import step_key

MODEL = ModelConfig("qwen3", 32, 16, 1, 4, 2, 8, 16, qk_norm=True, max_positions=64)
CONFIG = one_size(dataclasses.replace(PLAIN, page_tokens=8))
SAMPLING = SamplingConfig(max_new_tokens=16)
KEY = step_key(3, 1)
PROMPTS = [(1, 2, 3), (4,), (5, 6, 7, 8, 9, 10, 11, 12, 13)]


def make_params(scale=3.0, seed=0):
    """Weights on the host, peaked enough for drafts to be accepted."""
    rng = np.random.default_rng(seed)

    def one(spec):
        noise = rng.standard_normal(spec.shape).astype(np.float32)
        return 1 + 0.3 * noise if spec.scale is None else scale * spec.scale * noise

    return jax.tree.map(one, transformer.param_specs(MODEL))


def make_requests(cached=None):
    """Three groups of three: more than there are slots."""
    return [
        Request(3 * g + i, prompt, g, i, cached=(cached or {}).get(3 * g + i))
        for i in range(3)
        for g, prompt in enumerate(PROMPTS)
    ]


class Launches:
    """A `Lockstep` that keeps what it hears."""

    def __init__(self):
        self.heard = []

    def launched(self, digest, what):
        self.heard.append((digest, str(what)))


class Sequences:
    """A sink of hidden states that wants some sequences."""

    def __init__(self):
        self.bits = []

    def wants(self, request_id, num_tokens):
        return request_id % 2 == 0

    def add(self, sequence):
        self.bits.append(zlib.crc32(sequence.hidden_TW.tobytes(), len(sequence.tokens_T)))


class Worker:
    """An engine over a mesh of `devices`, and its policy there."""

    def __init__(self, devices, mesh, lockstep=None):
        self.launches = lockstep or Launches()
        config = eagle.config_for(MODEL, "eagle")
        made = sharding.make_mesh(MeshConfig(**mesh), devices)
        options = {"mesh": made, "feature_layers": config.feature_layers}
        self.engine = Engine(MODEL, CONFIG, lockstep=self.launches, **options)
        self.spec = RolloutSpec(self.engine.place(make_params()), SAMPLING, KEY, (0,))
        weights = EagleWeights(config, eagle.init(config, jax.random.key(2)))
        self.learned_drafter = LearnedDrafter(weights, TreeConfig(2, 2))
        self.sink = Sequences()
        self.last = []

    def plain(self):
        return self.run()

    def drafts(self, times=None):
        """Drafts from history, siblings and own text, as many as a table of seconds says."""
        cache = RolloutCache()
        rng = np.random.default_rng(1)
        for g, prompt in enumerate(PROMPTS):
            texts = [rng.integers(0, 32, 12).astype(np.int32) for _ in range(2)]
            texts += [t.response_ids for t in self.last if t.group_id == g][:1]
            group = tuple(CachedResponse(i, text, 1.0) for i, text in enumerate(texts))
            cache.replace(str(g), CachedGroup(np.asarray(prompt, np.int32), group))
        config = SpeculationConfig(sources=("history", "group", "own"), budget="goodput")
        with Speculation(config, cache, times=times or seconds(1.05)) as speculation:
            factory = speculation.drafter_factory("012", PROMPTS, group_size=3)
            return self.run(drafts=factory)

    def learned(self):
        """Trees of a learned drafter, on the device and through the host, and hidden states."""
        context = self.engine.drafter_context(self.spec)
        drafter = self.learned_drafter.drafter_for(context)
        host = self.run(drafts=draft_with(drafter, SeeingBudget()))
        drafter = self.learned_drafter.drafter_for(context)
        on_device = self.run(drafts=draft_with(drafter, FixedBudget()), sink=self.sink)
        return host + on_device

    def coupled(self):
        """The last epoch's responses, of which some tokens differ: in chunks, then as nodes."""
        cached = {}
        for t in self.last:
            tokens = t.response_ids.copy()
            tokens[5 + t.request_id % 4 :] += 1
            cached[t.request_id] = CachedResponse(t.sample_index, tokens % 32, 0.0)
        rule = PrefixRule(parse_mode("coupled"), 1.0, 0, 1, False)
        requests = make_requests(cached)
        in_chunks = self.run(requests, rule=rule)
        return in_chunks + self.run(requests, rule=rule, times=seconds(1.05))

    def run(self, requests=None, **changes):
        spec = dataclasses.replace(self.spec, **changes)
        self.last = self.engine.run(spec, requests or make_requests())
        return self.last


def seconds(slope):
    """A table of seconds in which rounds of four times the nodes take `slope` times as long."""
    return RoundTimes({(4, 4 * 4**i, 32): slope**i for i in range(2)})


def facts(worker, trajectories):
    """What must be the same wherever it ran."""
    found = {
        "tokens": np.concatenate([t.response_ids for t in trajectories]),
        "logprobs": np.concatenate([t.logprobs for t in trajectories]),
        "origins": np.concatenate([t.origins for t in trajectories]),
        "lengths": np.array([t.num_tokens for t in trajectories]),
    }
    stats = worker.engine.stats
    rounds = sorted((*key, n) for key, n in stats.rounds.items())
    counts = stats.fetches, stats.accepted_tokens, stats.cached.kept_tokens
    return found | {"rounds": np.array(rounds), "counts": np.array(counts)}


NAMES = ("plain", "drafts", "learned", "coupled")


def title(mesh):
    return ",".join(f"{name}={size}" for name, size in mesh.items())


def all_rollouts(worker, name, rollouts=NAMES):
    """Return the facts of each rollout of a worker, and the digests of its launches."""
    out = {}
    for rollout in rollouts:
        found = facts(worker, getattr(worker, rollout)())
        out |= {f"{name}/{rollout}/{fact}": x for fact, x in found.items()}
    digests = [digest for digest, _ in worker.launches.heard]
    hidden = np.array(worker.sink.bits, np.int64)
    return out | {f"{name}/digests": np.array(digests, np.int64), f"{name}/hidden": hidden}


# -- what one of several processes does ----------------------------------------------------


def everything(place, mesh, wide):
    """Rollouts on a mesh of a device of each process, warmed up before; then planted faults.

    Between them on a wide mesh, whose last axis crosses processes.
    """
    processes = Processes(place.index, place.count, JobStore(), 60.0)
    devices = sorted(jax.devices(), key=lambda d: (d.id % jax.local_device_count(), d.id))
    pair = devices[: place.count]
    worker = Worker(pair, mesh)
    out = warmed_up(worker, processes, place.folder / f"times-{place.index}.json")
    with counted_compilations() as compiled:
        out |= all_rollouts(worker, title(mesh))
    out["compiled"] = len(compiled)
    out |= all_rollouts(Worker(devices, wide), title(wide), NAMES[:2])
    for fault in (a_token, an_order, a_table):
        out[fault.__name__] = named(fault, processes, pair, mesh)
    return out


def warmed_up(worker, processes, path):
    """Compile and time what rollouts can reach; return the table, and whether it was written."""
    drafters = {LEARNED: worker.learned_drafter}
    alone = {LEARNED: lambda num_slots: [equal_trees(3, [16], num_slots)]}
    reach = Reach(9, 9, True, True, drafters=drafters, alone=alone)
    settings = worker.engine, worker.spec.params, SAMPLING, reach
    programs = compile_buckets.warm_up(*settings)
    own = round_times.load_or_measure(path, *settings, processes=processes)
    again = round_times.load_or_measure(path, *settings, processes=processes)
    assert again.rows() == own.rows()
    return {"table": own.rows(), "written": path.exists(), "programs": programs}


class Diverged(Exception):
    """A run has ended because its launches are not those of the other process."""


class Held:
    """Holds each launch until it is compared, and ends a run that has diverged.

    Gloo aborts a process that receives the message of another program.
    """

    HOLD_S = 0.5  # ten beats of the watch

    def __init__(self, watch, heard, is_on):
        self.watch, self.heard, self.is_on = watch, heard, is_on

    def launched(self, digest, what):
        self.watch.launched(digest, what)
        if self.is_on and self.heard.wait(self.HOLD_S):
            raise Diverged


def named(fault, processes, devices, mesh):
    """Return what the watch says of a fault in process 1: in a thread, as it may never end."""
    lines, heard = [], threading.Event()

    def run_until_it_diverges(worker):
        with contextlib.suppress(Diverged):
            fault(worker, processes.index == 1)

    def differs(line):
        lines.append(line)
        heard.set()

    with LockstepWatch(processes, differs, beat_s=0.05) as watch:
        worker = Worker(devices, mesh, Held(watch, heard, fault is not a_table))
        run = threading.Thread(target=run_until_it_diverges, args=(worker,), daemon=True)
        run.start()
        assert heard.wait(60), "the fault was not found"
    if fault is not a_table:
        run.join(60)
        assert not run.is_alive(), "its programs would overlap those of the next fault"
        processes.barrier("before the next fault")
        for key in [] if processes.index else processes.store.entries(PREFIX):
            processes.store.delete(key)
        processes.barrier("the next fault")
    return lines


def a_token(worker, is_here):
    """Another token comes in the third fetch."""
    times, by_slot = itertools.count(1), rounds.by_slot

    def spoilt(*args):
        tokens_BN, *rest = by_slot(*args)
        if next(times) == 3:
            tokens_BN[0, 0] = tokens_BN[0, 0] % 30 + 1
        return tokens_BN, *rest

    rounds.by_slot = spoilt if is_here else by_slot
    try:
        worker.plain()
    finally:
        rounds.by_slot = by_slot


def an_order(worker, is_here):
    """Requests come in another order."""
    requests = make_requests()
    worker.run(requests[::-1] if is_here else requests)


def a_table(worker, is_here):
    """Rounds are thought to cost something else: another program, in which process 0 hangs."""
    worker.plain()
    worker.launches.is_on = is_here
    worker.drafts(seconds(30.0 if is_here else 1.05))
