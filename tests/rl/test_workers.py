"""Several workers under a scheduler: the same tokens as one engine's, whatever moves or dies."""

from __future__ import annotations

import dataclasses
import time

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import transformer
from models.config import ModelConfig
from models.sharding import MeshConfig, make_mesh, param_shardings
from rl.engine import Engine
from rl.engine_config import EngineConfig
from rl.kv_pool import KvPool
from rl.trajectory import Begun, HostKv, Request
from rl.workers import RolloutSpec, WorkerError, Workers
from sched.policies import make_scheduler
from sched.protocol import ChunkDone, Finished, Start
from sched.replay import replay
from sched.request import Kv
from spec.sampling import SamplingConfig, step_key

MODEL = ModelConfig(
    architecture="llama",
    vocab_size=20,
    d_model=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    d_ff=16,
    max_positions=64,
)
CONFIG = EngineConfig(
    slots=4,
    min_slots=4,
    min_positions=32,
    min_prompt_tokens=8,
    rounds_per_fetch=2,
    max_nodes=4,
    prefill_rows=2,
    prefill_chunk_tokens=8,
)
SAMPLING = SamplingConfig(max_new_tokens=16)
STOP = (3,)
ROLLOUT = RolloutSpec(SAMPLING, step_key(0, 0), STOP, policy_version=7)


def make_params():
    rng = np.random.default_rng(0)

    def one(spec):
        return (2 * (spec.scale or 0.5) * rng.standard_normal(spec.shape)).astype(np.float32)

    return jax.tree.map(one, transformer.param_specs(MODEL))


PARAMS = make_params()
PROMPTS = ((4, 5, 6), (7,), (8, 9, 10, 11, 12), (13, 14))
REQUESTS = [Request(4 * g + i, PROMPTS[g], g, i) for i in range(4) for g in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def engines():
    return [Engine(MODEL, CONFIG) for _ in range(3)]


@pytest.fixture(scope="module")
def alone(engines):
    """What one engine gives, by request id."""
    done = engines[0].run(
        PARAMS, REQUESTS, SAMPLING, ROLLOUT.key, stop_token_ids=STOP, policy_version=7
    )
    return {t.request_id: t for t in done}


def workers(engines, count, kv_tokens=60, **options):
    return Workers(engines[:count], kv_tokens=kv_tokens, clock=time.perf_counter, **options)


def play(team, scheduler, **options):
    return team.run([PARAMS] * len(team.engines), REQUESTS, ROLLOUT, scheduler, **options)


def assert_same_tokens(done, alone):
    assert [t.request_id for t in done] == [r.request_id for r in REQUESTS]
    for t in done:
        wanted = alone[t.request_id]
        assert t.response_ids.tolist() == wanted.response_ids.tolist()
        assert t.finish_reason == wanted.finish_reason
        assert t.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
        assert t.emission_logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
        assert (t.policy_versions == 7).all()
        assert (t.group_id, t.sample_index) == (wanted.group_id, wanted.sample_index)


def scheduler(policy="divided_fifo", chunk=3, pool=True):
    return make_scheduler(policy, seed=0, chunk_tokens=chunk, prefer_pool=lambda tokens: pool)


def starts(team):
    return [a for d in team.decisions for a in d.actions if isinstance(a, Start)]


@pytest.mark.parity
@pytest.mark.parametrize("policy", ["group_fifo", "divided_fifo", "seer"])
@pytest.mark.parametrize(("count", "chunk"), [(1, 3), (2, 1), (3, 5)])
def test_tokens_are_those_of_one_engine(engines, alone, policy, count, chunk):
    team = workers(engines, count)
    assert_same_tokens(play(team, scheduler(policy, chunk)), alone)
    assert {a.worker_id for a in starts(team)} == set(range(count))
    chunks = sum(isinstance(d.event, ChunkDone) for d in team.decisions)
    assert (chunks > 0) == (policy != "group_fifo")


@pytest.mark.parity
@pytest.mark.parametrize("pool", [True, False])
def test_chunks_that_move_come_from_the_pool_or_are_computed_anew(engines, alone, pool):
    team = workers(engines, 3, kv_tokens=40)
    assert_same_tokens(play(team, scheduler(chunk=2, pool=pool)), alone)
    later = [a for a in starts(team) if a.chunk > 1]
    wanted = Kv.POOL if pool else Kv.PREFILL
    assert {a.kv for a in later} <= {wanted, Kv.HELD}
    assert sum(a.kv is wanted for a in later) > 3
    ran_on: dict[int, set[int]] = {}
    for a in starts(team):
        ran_on.setdefault(a.request_id, set()).add(a.worker_id)
    assert max(map(len, ran_on.values())) > 1, "a request must move"


def test_a_pool_without_room_has_keys_and_values_computed_anew(engines, alone):
    team = workers(engines, 2, kv_tokens=30, pool_bytes=0)
    assert_same_tokens(play(team, scheduler(chunk=2)), alone)


@pytest.mark.parametrize("policy", ["group_fifo", "divided_fifo", "seer"])
def test_the_simulator_decides_as_the_workers_did_given_their_durations(engines, policy):
    team = workers(engines, 3, kv_tokens=40)
    done = play(team, scheduler(policy))
    found = replay(scheduler(policy), team.decisions)
    assert [(d.event, d.actions) for d in found] == [(d.event, d.actions) for d in team.decisions]
    finished = [d.event.request_id for d in found if isinstance(d.event, Finished)]
    assert sorted(finished) == sorted(t.request_id for t in done)
    # a start that takes longer is reported later: the comparison can fail
    late = list(team.decisions)
    first = next(i for i, d in enumerate(late) if isinstance(d.event, Finished | ChunkDone))
    late[first] = dataclasses.replace(late[first], now_s=late[first].now_s + 10)
    try:
        later = [d.event for d in replay(scheduler(policy), late)]
    except KeyError:  # a start that the workers did not make
        later = []
    assert later != [d.event for d in found]


class Failing(Engine):
    """Raises in its third round, once."""

    rounds = 0

    def _round(self, *args):
        self.rounds += 1
        if self.rounds == 3:
            raise RuntimeError("a device is gone")
        super()._round(*args)


@pytest.mark.fault
def test_a_worker_that_raises_stops_the_rollout_and_names_its_requests(engines):
    team = workers([Failing(MODEL, CONFIG), engines[0]], 2)
    with pytest.raises(WorkerError, match=r"worker 0 failed on requests .*\d.*a device is gone"):
        play(team, scheduler())


@pytest.mark.fault
@pytest.mark.parametrize("policy", ["group_fifo", "divided_fifo", "seer"])
def test_a_worker_that_raises_is_replaced_where_it_may_be(engines, alone, policy):
    team = workers([Failing(MODEL, CONFIG), engines[0]], 2, on_error="restart")
    assert_same_tokens(play(team, scheduler(policy)), alone)
    assert {a.worker_id for a in starts(team)} >= {0, 1, 2}


def test_a_rollout_that_is_given_up_leaves_the_engines_usable(engines, alone):
    class Stop(Exception):
        pass

    def stop():
        raise Stop

    team = workers(engines, 2)
    with pytest.raises(Stop):
        play(team, scheduler(), watch=stop)
    seen = []
    assert_same_tokens(play(team, scheduler(), on_finish=seen.append), alone)
    assert sorted(t.request_id for t in seen) == sorted(alone)


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.skipif(jax.device_count() != 8, reason="needs 8 (virtual) devices")
def test_four_workers_of_two_devices_each(alone):
    devices, engines, params = jax.devices(), [], []
    for i in range(4):
        mesh = make_mesh(MeshConfig(data=1, tensor=2), devices[2 * i : 2 * i + 2])
        engines.append(Engine(MODEL, CONFIG, mesh=mesh))
        shardings = param_shardings(mesh, transformer.param_specs(MODEL))
        params.append(jax.tree.map(jax.device_put, PARAMS, shardings))
    team = Workers(engines, kv_tokens=60, clock=time.perf_counter)
    done = team.run(params, REQUESTS, ROLLOUT, scheduler("seer"))
    assert_same_tokens(done, alone)


def test_an_answer_to_errors_that_there_is_not():
    with pytest.raises(ValueError, match="expected on_error of stop, restart, got 'ignore'"):
        Workers([], kv_tokens=1, on_error="ignore", clock=time.perf_counter)


# --- the pool ---------------------------------------------------------------------------


def entry(request_id, tokens=2):
    kv = HostKv((np.zeros((1, 2, tokens)),), (np.zeros((1, tokens, 2)),))
    return Begun(Request(request_id, (1,)), 0, None, kv)


def test_the_pool_gives_what_was_promised_and_counts_its_bytes():
    pool = KvPool(100)
    assert pool.take(1) is None
    pool.promise(1)
    pool.put(entry(1))
    assert pool.num_bytes == 64 and len(pool) == 1
    pool.promise(2)
    pool.put(entry(2))  # beyond the cap: without keys and values
    assert (pool.num_bytes, pool.dropped) == (64, 1)
    assert pool.take(2).kv is None
    assert pool.take(1).kv.num_tokens == 2
    assert pool.num_bytes == len(pool) == 0


def test_who_takes_what_is_promised_waits_for_it():
    import threading

    pool, taken = KvPool(100), []
    pool.promise(1)
    thread = threading.Thread(target=lambda: taken.append(pool.take(1)))
    thread.start()
    pool.put(entry(1))
    thread.join()
    assert taken[0].request.request_id == 1
    pool.promise(1)
    thread = threading.Thread(target=lambda: taken.append(pool.take(1)))
    thread.start()
    pool.withdraw(1)
    thread.join()
    assert taken[1] is None


@settings(max_examples=50)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_the_pool_never_holds_more_than_it_may(ids):
    pool, held = KvPool(150), set()
    for request_id in ids:
        if request_id in held:
            assert pool.take(request_id) is not None
            held.remove(request_id)
        else:
            pool.promise(request_id)
            pool.put(entry(request_id))
            held.add(request_id)
        assert pool.num_bytes <= 150 and len(pool) == len(held)
