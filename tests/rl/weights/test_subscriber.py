"""Staging: damaged weights are refused and change nothing; shards."""

import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from weights_by_hand import Pair, same_bits

from models.config import MeshConfig
from models.sharding import make_mesh
from rl.weights.errors import CarrierError, DamagedWeights
from rl.weights.pieces import fingerprint


def weights(version, num=3000):
    rng = np.random.default_rng(7)
    matrix = rng.integers(0, 2**16, (num // 8, 8)).astype(np.uint16)
    matrix[: 3 * version] ^= 1
    vector = jnp.asarray(rng.normal(size=8).astype(np.float32)) + version
    return {"matrix": jnp.asarray(matrix.view(jnp.bfloat16)), "vector": vector}


def damage(carrier, place, mask):
    """Change one byte of the last payload that was held."""
    key = list(carrier.data)[-1]
    buffers = [b.copy() for b in carrier.data[key]]
    place %= sum(b.size for b in buffers)
    ends = np.cumsum([b.size for b in buffers])
    nth = int(np.searchsorted(ends, place, side="right"))
    buffers[nth][place - ends[nth]] ^= mask
    carrier.data[key] = buffers


def with_body(text, change):
    """An offer with another body, and the checksum of that."""
    body = json.loads(text.partition("\n")[2])
    body = change(body) or body
    body = json.dumps(body)
    return f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}"


def up_to_date():
    """A pair with a worker that has version 0 while version 1 is out."""
    pair = Pair(weights(0))
    worker = pair.subscriber()
    pair.publish(0, weights(0))
    pair.update(worker)
    pair.publish(1, weights(1))
    return pair, worker


@settings(max_examples=200)
@given(st.booleans(), st.integers(0, 2**62), st.integers(1, 255))
def test_any_changed_byte_of_a_payload_is_found_or_harmless(full, place, mask):
    pair, worker = up_to_date()
    offer = pair.publisher.offer("worker", None if full else worker.have(), 0.0)
    damage(pair.carrier, place, mask)
    try:
        staged = worker.stage(offer)
    except DamagedWeights:
        assert worker.version == 0
        return
    assert not full and same_bits(staged.params, weights(1))


@settings(max_examples=200)
@given(st.integers(0, 2**62), st.integers(1, 127))
def test_any_changed_character_of_an_offer_is_found(place, mask):
    pair, worker = up_to_date()
    offer = pair.publisher.offer("worker", worker.have(), 0.0)
    at = place % len(offer)
    changed = offer[:at] + chr(ord(offer[at]) ^ mask) + offer[at + 1 :]
    with pytest.raises(DamagedWeights, match="expected"):
        worker.stage(changed)


def set_at(path, value):
    def change(body):
        *way, last = path
        for key in way:
            body = body[key]
        body[last] = value

    return change


def _none_of(body):
    body["pieces"], body["links"][0]["sizes"] = [], []
    body["to"]["fingerprint"] = fingerprint([])


MATRIX = ("pieces", 0)
WRONG = {
    "name": (set_at((*MATRIX, "name"), "['other']"), r"expected weights of this policy \(2 arrays"),
    "dtype": (set_at((*MATRIX, "dtype"), "float32"), "expected dtype bfloat16, got 'float32'"),
    "shape": (set_at((*MATRIX, "shape"), [375, 9]), r"inside shape \[375, 8\], got shape \[375, 9"),
    "start": (set_at((*MATRIX, "start"), [-1, 0]), "expected a number from 0"),
    "half": (set_at((*MATRIX, "shape"), [100, 8]), "expected the fingerprint"),
    "twice": (lambda b: b["pieces"].append(b["pieces"][0]), "expected the fingerprint"),
    "missing": (
        lambda b: (b["pieces"].pop(), b["links"][0]["sizes"].pop(), None)[2],
        "fingerprint",
    ),
    "no pieces": (lambda b: _none_of(b), "that make up shape"),
    "one size": (lambda b: b["links"][0]["sizes"].pop() and None, "expected sizes of 2 pieces"),
    "sha256": (set_at((*MATRIX, "sha256"), "0" * 64), "expected the fingerprint"),
    "no hex": (set_at((*MATRIX, "sha256"), "x"), "expected 64 hexadecimal digits"),
    "sizes": (set_at(("links", 0, "sizes", 0), 2**40), "expected at most .* bytes, got 10995"),
    "version": (set_at(("to", "version"), "1"), "expected a number from 0"),
    "true": (set_at(("to", "version"), True), "expected a number from 0"),
    "base": (set_at(("base", "version"), 5), "expected deltas from version 0, .* version 5"),
    "field": (set_at(("more",), 1), "expected the fields"),
    "no links": (lambda b: b | {"base": None, "links": []}, "at least that of a full copy"),
    "list": (lambda b: [b], "expected the fields .*, got list"),
    "where": (set_at(("links", 0, "where"), []), "got none for None"),
    "key": (set_at(("links", 0, "where"), {"key": "x"}), "got none for 'x'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_offer_that_does_not_fit_is_refused(name):
    pair, worker = up_to_date()
    change, message = WRONG[name]
    offer = with_body(pair.publisher.offer("worker", worker.have(), 0.0), change)
    with pytest.raises((DamagedWeights, CarrierError), match=message):
        worker.stage(offer)
    assert worker.version == 0
    assert same_bits(pair.update(worker), weights(1))  # nothing else has changed


@pytest.mark.parametrize("text", ["", "no offer", "0" * 64 + "\n{}"])
def test_text_that_is_no_offer_is_refused(text):
    _, worker = up_to_date()
    with pytest.raises(DamagedWeights, match="expected"):
        worker.stage(text)
    with pytest.raises(DamagedWeights, match="in JSON"):
        worker.stage(hashlib.sha256(b"[[").hexdigest() + "\n[[")


def test_a_payload_of_another_length_is_refused():
    pair, worker = up_to_date()
    offer = pair.publisher.offer("worker", None, 0.0)
    key = list(pair.carrier.data)[-1]
    pair.carrier.data[key] = [np.append(b, np.uint8(0)) for b in pair.carrier.data[key]]
    with pytest.raises(DamagedWeights, match="expected the bytes of each piece"):
        worker.stage(offer)


def test_a_damaged_base_in_memory_is_found():
    """The checksum of the result finds a wrong bit in the worker's own copy."""
    pair, worker = up_to_date()
    damaged = worker._in_use.host["['matrix']"].copy()
    damaged.view(np.uint8)[200, 0] ^= 1
    worker._in_use.host["['matrix']"] = damaged
    with pytest.raises(DamagedWeights, match="ask for a full copy"):
        pair.update(worker)
    assert same_bits(worker.stage(pair.publisher.offer("worker", None, 0.0)).params, weights(1))


def test_staging_leaves_the_weights_in_use():
    pair, worker = up_to_date()
    before = worker._in_use.host
    staged = worker.stage(pair.offer(worker))
    assert worker.version == 0 and worker._in_use.host is before
    assert same_bits(before["['matrix']"], weights(0)["matrix"])
    assert same_bits(worker.swap(staged), weights(1)) and worker.version == 1


def sharded(tree, mesh, *axes):
    spec = NamedSharding(mesh, PartitionSpec(*axes))
    return jax.tree.map(lambda x: jax.device_put(x, spec), tree)


def test_shards_travel_as_pieces_and_arrive_on_another_mesh():
    """Of four shards on eight devices (each twice) every one is sent once."""
    trainer = make_mesh(MeshConfig(data=2, fsdp=4), jax.devices())
    workers = make_mesh(MeshConfig(data=1, tensor=2), jax.devices()[:2])

    def make(version):
        return jax.tree.map(jnp.nan_to_num, weights(version, 3200))  # moving may quieten a NaN

    pair = Pair(sharded(make(0), workers, "tensor"))
    worker = pair.subscriber()
    for version in range(3):
        pair.publish(version, sharded(make(version), trainer, "fsdp"))
        got = pair.update(worker)
        assert same_bits(got, make(version))
        assert got["matrix"].sharding == pair.params["matrix"].sharding
    assert len(pair.publisher._newest.pieces) == 8
    assert pair.carrier.seen[0] == 3200 * 2 + 8 * 4
    assert json.loads(pair.offers[-1].partition("\n")[2])["base"]["version"] == 1
