"""One program with the devices of both: copies on other devices or in another layout."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from weights_by_hand import same_bits

from models.config import MeshConfig
from models.sharding import make_mesh
from rl.weights.ages import Age
from rl.weights.config import WeightsConfig
from rl.weights.in_program import InProgramPublisher, InProgramSubscriber
from rl.weights.transports import make_carrier


def on(mesh, *axes):
    return NamedSharding(mesh, PartitionSpec(*axes))


@pytest.fixture(scope="module")
def trainer():
    return on(make_mesh(MeshConfig(data=1, fsdp=4), jax.devices()[:4]), "fsdp")


def weights(version, sharding):
    tree = {"a": jnp.arange(64.0).reshape(8, 8) + version, "b": jnp.arange(4, dtype=jnp.bfloat16)}
    return jax.tree.map(lambda x: jax.device_put(x, sharding), tree)


def workers():
    same = make_mesh(MeshConfig(data=2, tensor=2), jax.devices()[:4])
    others = make_mesh(MeshConfig(data=1, tensor=2), jax.devices()[6:])
    return {"same devices": on(same, "tensor"), "other devices": on(others, "tensor")}


@pytest.mark.parametrize("where", ["same devices", "other devices", "same layout"])
def test_weights_are_laid_out_as_the_worker_has_them(trainer, where):
    sharding = workers().get(where, trainer)
    publisher = InProgramPublisher(WeightsConfig("jit"))
    worker = InProgramSubscriber(publisher, {"a": sharding, "b": sharding})
    for version in range(2):
        params = weights(version, trainer)
        publisher.publish(version, params, 0.0)
        staged = worker.fetch()
        assert worker.version == (version - 1 if version else None)
        got = worker.swap(staged)
        publisher.taken("worker", worker.have())
        jax.tree.map(lambda x: x.delete(), params)  # donated to the next update
        assert same_bits(got, weights(version, trainer))
        assert all(x.sharding.is_equivalent_to(sharding, x.ndim) for x in jax.tree.leaves(got))
        assert worker.fetch() is None
    publisher.publish(2, params, 5.0)
    assert publisher.ages(7.0) == {"worker": Age(1, 2.0)}
    assert not publisher.must_fetch("worker", 7.0) and publisher.newest == 2


def test_it_is_no_transport_between_programs():
    with pytest.raises(ValueError, match="expected 'transfer' or 'object_store' between programs"):
        make_carrier(WeightsConfig("jit"))
    with pytest.raises(ValueError, match="needs a store, got none"):
        make_carrier(WeightsConfig("object_store"))
    with pytest.raises(ValueError, match="expected weights to be published"):
        InProgramSubscriber(InProgramPublisher(WeightsConfig("jit")), {}).fetch()
