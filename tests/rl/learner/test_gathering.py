"""What a process has on its devices of an array, on its host and back."""

import jax
import numpy as np
import pytest

from models.config import MeshConfig
from models.sharding import make_mesh
from rl.learner.gathering import from_shards, own_shards


@pytest.mark.parametrize(("axes", "parts"), [(("data",), 1), (("fsdp",), 2), ((None, "fsdp"), 2)])
def test_parts_are_kept_once_and_come_back_where_they_were(axes, parts):
    sizes = {"data": 1, "fsdp": 2} if "fsdp" in axes else {"data": 2}
    mesh = make_mesh(MeshConfig(**sizes), jax.devices()[:2])
    spec = jax.P(*axes) if "fsdp" in axes else jax.P()
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    tree = {"x": jax.device_put(whole, jax.NamedSharding(mesh, spec)), "none": None}
    kept = own_shards(tree)
    assert len(kept["x"]) == parts
    assert sum(x.nbytes for x in kept["x"].values()) == whole.nbytes
    jax.tree.leaves(tree)[0].delete()  # as an update does, which donates its buffers
    like = {"x": jax.device_put(whole + 1, jax.NamedSharding(mesh, spec)), "none": None}
    back = from_shards(kept, like)
    np.testing.assert_array_equal(back["x"], whole)
    assert back["x"].sharding == like["x"].sharding and back["none"] is None
