"""Hidden states arrive whole and in order, few wait at a time, and what goes wrong is raised."""

import dataclasses
import queue
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from caught_by_hand import equal, sequence
from tiny_team import CONFIG, MODEL

from reprise.rl.engine.engine import Engine
from reprise.rl.slot_memory import cache_ops, state_delivery
from reprise.rl.slot_memory.page_memory import PageMemory
from reprise.rl.slot_memory.state_delivery import Ended, StateDelivery

PIECE = 4


class Sink:
    """Takes all sequences but those of odd requests, each once `gate` is open."""

    def __init__(self):
        self.taken, self.gate = [], threading.Event()
        self.gate.set()

    def wants(self, request_id, num_tokens):
        return request_id % 2 == 0

    def add(self, states):
        assert self.gate.wait(60)
        if states.prompt_tokens == 0:
            raise RuntimeError("the sink is broken")
        self.taken.append(states)


def ended(length, name=0):
    """A response as a row of the cache gives it: in pieces, the last filled up from before it."""
    whole = sequence(length, name)
    held = np.concatenate([whole.hidden_TW, np.full((PIECE, whole.hidden_TW.shape[1]), 1e9)])
    size = max(length, PIECE) - PIECE + 2  # positions of the cache behind the last piece
    starts = [min(start, size) for start in range(0, length - 1, PIECE)]
    copies = [(at, jnp.asarray(held[at : at + PIECE], jnp.float32)) for at in starts]
    return whole, Ended(whole.tokens_T, whole.prompt_tokens, copies, whole.policy_version)


def test_a_row_of_the_cache_arrives_as_it_is(monkeypatch):
    monkeypatch.setattr(cache_ops, "STATE_COPY_TOKENS", 16)
    config = dataclasses.replace(CONFIG, page_tokens=8)
    engine = Engine(MODEL, config, feature_layers=())
    engine.expect(4, 40)
    memory = PageMemory(engine)
    memory.reset(4)
    for num_tokens in (8, 24, 40):  # pages of the rows take turns
        assert memory.pages.reserve(1, num_tokens) and memory.pages.reserve(2, num_tokens)
    [features_P1TW] = memory.held.features
    states_P1TW = np.random.default_rng(0).normal(size=features_P1TW.shape).astype(np.float32)
    memory.cache = dataclasses.replace(memory.held, features=(jnp.asarray(states_P1TW),))
    states_TW = states_P1TW[memory.held.table_BN[2], 0].reshape(40, -1)
    sink, lengths = Sink(), (1, 15, 16, 17, 32, 33, 39, 40)
    with StateDelivery(sink) as delivery:
        for n in lengths:
            copies = memory.copy_states(2, n)
            assert [len(copy) for _, copy in copies] == [16] * -(-n // 16)
            delivery.send(Ended(np.arange(n + 1, dtype=np.int32), 1, copies, 3))
    for n, got in zip(lengths, sink.taken, strict=True):
        np.testing.assert_array_equal(got.hidden_TW, states_TW[:n])
        assert (len(got.tokens_T), got.prompt_tokens, got.policy_version) == (n + 1, 1, 3)


def test_whole_sequences_arrive_in_the_order_in_which_they_were_sent():
    sink, wanted = Sink(), []
    with StateDelivery(sink) as delivery:
        for i, length in enumerate((9, 2, 5, 6, 30)):
            whole, sent = ended(length, i)
            delivery.send(sent)
            wanted.append(whole)
    assert len(sink.taken) == len(wanted)
    assert all(map(equal, sink.taken, wanted))


def test_the_sink_decides_what_is_wanted():
    with StateDelivery(Sink()) as delivery:
        assert [delivery.wants(r, 5) for r in range(4)] == [True, False, True, False]


def test_sending_waits_for_nothing_until_too_much_is_on_its_way(monkeypatch):
    _, one = ended(9)
    monkeypatch.setattr(state_delivery, "MAX_WAITING_BYTES", 3 * one.num_bytes)
    sink = Sink()
    sink.gate.clear()
    sent = queue.SimpleQueue()

    def send_four(delivery):
        for i in range(4):
            delivery.send(ended(9, i)[1])
            sent.put(i)

    with StateDelivery(sink) as delivery:
        sender = threading.Thread(target=send_four, args=(delivery,), daemon=True)
        sender.start()
        assert [sent.get(timeout=60) for _ in range(3)] == [0, 1, 2]
        sender.join(0.05)
        assert sender.is_alive() and sent.empty() and sink.taken == []
        sink.gate.set()
        assert sent.get(timeout=60) == 3
    assert [s.policy_version for s in sink.taken] == [0, 1, 2, 3]


def test_one_sequence_larger_than_the_bound_is_sent(monkeypatch):
    monkeypatch.setattr(state_delivery, "MAX_WAITING_BYTES", 1)
    sink = Sink()
    with StateDelivery(sink) as delivery:
        for i in range(3):
            delivery.send(ended(9, i)[1])
    assert len(sink.taken) == 3


def test_what_goes_wrong_is_raised_at_the_next_sequence_or_at_the_end():
    broken = ended(9)[1]
    broken = Ended(broken.tokens_T, 0, broken.copies, 0)
    with pytest.raises(RuntimeError, match="the sink is broken"), StateDelivery(Sink()) as delivery:
        delivery.send(broken)
    sink = Sink()
    with StateDelivery(sink) as delivery:
        delivery.send(broken)
        delivery._waiting[0][0].exception(60)  # it has gone wrong
        with pytest.raises(RuntimeError, match="the sink is broken"):
            delivery.send(ended(9)[1])
    assert sink.taken == []


def test_a_rollout_that_fails_leaves_nothing_behind():
    """Once it has ended, nothing arrives any more: a step left half way leaves no trace."""
    sink = Sink()
    sink.gate.clear()
    with pytest.raises(ZeroDivisionError), StateDelivery(sink) as delivery:
        for i in range(3):
            delivery.send(ended(9, i)[1])
        sink.gate.set()
        raise ZeroDivisionError
    assert not any(t.name.startswith("hidden states") for t in threading.enumerate())
