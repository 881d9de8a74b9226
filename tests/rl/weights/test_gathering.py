"""What a process has on its devices of an array, on its host and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reprise.models.config import MeshConfig, ModelConfig
from reprise.models.decoder import transformer
from reprise.models.sharding import make_mesh, param_shardings
from reprise.rl.weights.gathering import from_shards, laid_out, local_weights, own_shards


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


MODEL = ModelConfig("qwen3", 96, 32, 1, 8, 8, 8, 64, qk_norm=True)
LAYOUTS = [
    ({"data": 1, "fsdp": 8}, {"data": 1, "tensor": 8}),
    ({"data": 1, "fsdp": 4, "tensor": 2}, {"data": 1, "tensor": 8}),
    ({"data": 1, "fsdp": 8}, {"data": 4, "tensor": 2}),
    ({"data": 2, "fsdp": 2, "tensor": 2}, {"data": 2, "tensor": 4}),
]


@pytest.mark.skipif(jax.device_count() != 8, reason="needs 8 (virtual) devices")
@pytest.mark.parametrize(("before", "after"), LAYOUTS)
def test_weights_are_laid_out_anew_to_the_bit_and_never_whole(monkeypatch, before, after):
    before, after = (make_mesh(MeshConfig(**sizes), jax.devices()) for sizes in (before, after))
    specs, init = transformer.param_specs(MODEL), transformer.init
    whole = jax.tree.map(np.asarray, init(MODEL, jax.random.key(0), jnp.bfloat16))
    params = jax.tree.map(jax.device_put, whole, param_shardings(before, specs))
    put, passed = jax.device_put, []
    monkeypatch.setattr(jax, "device_put", lambda *given: passed.append(put(*given)) or passed[-1])
    moved = laid_out(params, specs, after)
    assert all(x.dtype == jnp.bfloat16 for x in passed)
    assert all(x.sharding.shard_shape(x.shape) != x.shape for x in passed if x.ndim == 2)
    wanted = param_shardings(after, specs)
    assert jax.tree.map(lambda x: x.sharding, moved) == wanted, "the same as a program returns"
    jax.tree.map(np.testing.assert_array_equal, moved, whole)
    assert laid_out(moved, specs, after) is moved
    elsewhere = make_mesh(MeshConfig(tensor=2), jax.devices()[:2])
    assert laid_out(moved, specs, elsewhere) is moved, "who has other devices takes them itself"


@pytest.mark.skipif(jax.device_count() != 8, reason="needs 8 (virtual) devices")
@pytest.mark.parametrize(
    ("before", "tensor"),
    [
        ({"data": 1, "fsdp": 4, "tensor": 2}, 4),
        ({"data": 2, "fsdp": 4}, 2),
        ({"data": 1, "fsdp": 2, "tensor": 4}, 2),
    ],
)
def test_a_process_gets_weights_of_other_shapes_of_mesh(before, tensor):
    """A program that constrains its results to these meshes leaves them whole."""
    trainer = make_mesh(MeshConfig(**before), jax.devices())
    own = make_mesh(MeshConfig(tensor=tensor), jax.devices()[:tensor])
    specs = transformer.param_specs(MODEL)
    whole = jax.tree.map(np.asarray, transformer.init(MODEL, jax.random.key(0)))
    params = jax.tree.map(jax.device_put, whole, param_shardings(trainer, specs))
    found = local_weights(params, MODEL, own, jnp.float32)
    assert jax.tree.map(lambda x: x.sharding, found) == param_shardings(own, specs)
    jax.tree.map(np.testing.assert_array_equal, found, whole)
