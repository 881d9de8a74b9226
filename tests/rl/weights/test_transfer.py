"""jax's transfer server: processes, one of them killed; offers that never come, or late."""

import datetime
import gc
import socket
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import processes
import pytest
import weights_peers
from weights_by_hand import Pair, same_bits

from rl.weights.errors import CarrierError, DamagedWeights
from rl.weights.subscriber import Subscriber
from rl.weights.transfer import TransferCarrier

PART = 100  # bytes


@pytest.fixture(scope="module")
def carrier():
    """Both ends at once: a server can pull from itself."""
    return TransferCarrier()


@pytest.mark.parametrize(
    "address",
    ["nonsense", "127.0.0.1", "0.0.0.0:0", "[::]:0", "127.0.0.1:99999"],
)
def test_an_address_has_to_be_one_of_this_host(address):
    with pytest.raises(ValueError, match="expected HOST:PORT by which other programs reach"):
        TransferCarrier(address)


def test_a_port_that_is_taken(carrier):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"expected a free port .*, got {taken}: .*in use"):
            TransferCarrier(taken)


def test_a_name_does_not_open_every_address():
    assert TransferCarrier("localhost:0").address.startswith("127.0.0.1:")


def payload(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, size, np.uint8) for size in (0, 10, 950, 1)]


SIZES = [0, 10, 950, 1]


def received(carrier, where, deadline_s=20.0):
    return carrier.receive(where, SIZES, PART, deadline_s)


def equal(found):
    return all(np.array_equal(a, b) for a, b in zip(found, payload(), strict=True))


def test_a_payload_goes_to_any_number_of_receivers(carrier):
    held = carrier.hold(payload(), PART)
    offers = [carrier.offer(held, 60.0) for _ in range(3)]
    carrier.drop(held)
    assert len({n for offer in offers for n in offer["numbers"]}) == 3 * 11
    assert all(equal(received(carrier, offer)) for offer in offers)
    assert carrier.receive({"address": "x:1", "numbers": []}, [0, 0], PART, 1.0)[1].size == 0


def test_a_pull_that_nobody_offers_ends_in_time(carrier):
    where = {"address": carrier.address, "numbers": list(range(11))}
    began_s = time.monotonic()
    with pytest.raises(CarrierError, match="11 parts, got 0 within 0.3 s .*ask for another offer"):
        received(carrier, where, 0.3)
    assert time.monotonic() - began_s < 10.0  # jax's own limit comes when the other end offers
    deadline_s = time.monotonic() + 10.0
    while any(t.name == "weights" for t in threading.enumerate()):
        assert time.monotonic() < deadline_s, "expected the pull's thread to end"
        time.sleep(0.01)
    assert equal(received(carrier, carrier.offer(carrier.hold(payload(), PART), 60.0)))


def test_an_address_where_nobody_is_ends_in_time(carrier):
    with pytest.raises(CarrierError, match="expected weights from 127.0.0.1:1"):
        received(carrier, {"address": "127.0.0.1:1", "numbers": list(range(11))}, 0.3)


def test_a_late_offer_is_waited_for(carrier):
    """The pull comes first; the offer, of the numbers that it asks for, later."""
    held = carrier.hold(payload(), PART)
    numbers = [2**62 + n for n in range(11)]
    until = datetime.datetime.now() + datetime.timedelta(seconds=60)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(received, carrier, {"address": carrier.address, "numbers": numbers})
        time.sleep(0.3)
        assert not found.done()
        for number, arrays in zip(numbers, held, strict=True):
            carrier._server.await_pull(number, arrays, timeout=until)
        assert equal(found.result(20))


def test_parts_of_other_sizes_than_said_are_refused(carrier):
    where = carrier.offer(carrier.hold(payload(), PART), 60.0)
    with pytest.raises(CarrierError, match="expected weights from"):
        carrier.receive(where, [0, 10, 950, 2], PART, 5.0)


@pytest.mark.parametrize(
    "where",
    [
        None,
        {"address": 3, "numbers": [0] * 11},
        {"address": "127.0.0.1:1", "numbers": [0] * 10},
        {"address": "127.0.0.1:1", "numbers": ["0"] * 11},
        {"address": "127.0.0.1:1", "numbers": [-1] * 11},
        {"address": "nonsense", "numbers": [0] * 11},
    ],
)
def test_what_leads_nowhere_is_refused(carrier, where):
    with pytest.raises(DamagedWeights, match="expected the (address|numbers)|expected numbers"):
        received(carrier, where, 1.0)


def test_what_nobody_took_is_freed_after_its_lease(carrier):
    """A worker that died between offer and pull costs memory until then, and no longer."""
    big = np.ones(1000, np.uint8)
    pinned = weakref.ref(big)
    held = carrier.hold([big], PART)
    carrier.offer(held, 0.2)
    carrier.drop(held)
    del held, big
    until_s = time.monotonic() + 20.0
    while pinned() is not None:
        assert time.monotonic() < until_s, "expected the payload to be freed"
        time.sleep(0.3)
        carrier.offer(carrier.hold([np.zeros(1, np.uint8)], PART), 0.1)  # expired ones go then
        gc.collect()


def test_versions_come_through_a_publisher(carrier):
    params = [weights_peers.host_weights(version) for version in range(3)]
    pair = Pair(params[0], carrier)
    worker = pair.subscriber()
    for version in range(3):
        pair.publish(version, params[version])
        assert same_bits(pair.update(worker), params[version])


@pytest.mark.fault
def test_two_trainer_processes_and_one_of_them_killed(carrier, tmp_path):
    """Each offers its half of the matrix; a pull from the killed one fails and changes nothing."""
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(
            processes.launch,
            "weights_peers:trainer",
            2,
            tmp_path,
            limit_s=100.0,
            stop_at_failure=False,
        )

        def ask(source, have):
            return weights_peers.call(tmp_path, source, "offer", have.plain() if have else None)

        host = weights_peers.host_weights
        expected = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in host(0).items()}
        worker = Subscriber(expected, carrier, ask, 5.0, sources=2)
        for version in range(2):
            if version:
                for source in (0, 1):
                    weights_peers.call(tmp_path, source, "publish", version)
            assert same_bits(worker.swap(worker.fetch()), host(version))
        assert worker.fetch() is None

        weights_peers.call(tmp_path, 0, "publish", 2)
        with pytest.raises(CarrierError, match=r"expected offers of one version, got .*\[1, 2\]"):
            worker.stage([ask(0, None), ask(1, None)])
        with pytest.raises(CarrierError, match="expected an offer of every source"):
            worker.fetch()
        weights_peers.call(tmp_path, 1, "publish", 2)
        offers = [ask(source, worker.have(source)) for source in (0, 1)]
        weights_peers.tell(tmp_path, 1, "die")
        time.sleep(0.5)
        with pytest.raises(CarrierError, match="expected weights from .* ask for another offer"):
            worker.stage(offers)
        assert worker.version == 1
        weights_peers.tell(tmp_path, 0, "end")
        first, second = job.result(100)
    assert second.returncode == -9
    assert first.result["pieces"] == [[0, 0], [0, 0], [0]]
