"""One table for all: 8 virtual devices compute what one does, and weights lie where it says."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from reprise.models import layout, sharding
from reprise.models.config import MeshConfig
from reprise.models.decoder import transformer
from reprise.models.formats import hf
from reprise.models.layout import fitting_axes, logits_axes, mesh_axes

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def devices():
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 devices")
    return jax.devices()[:8]


def test_mesh_sizes(devices):
    mesh = sharding.make_mesh(MeshConfig(fsdp=4, tensor=2), devices)
    assert dict(mesh.shape) == {"data": 1, "fsdp": 4, "tensor": 2}
    assert dict(sharding.make_mesh(MeshConfig(), devices).shape)["data"] == 8
    assert dict(sharding.make_mesh(MeshConfig(tensor=2), devices[:4]).shape)["data"] == 2


@pytest.mark.parametrize(
    "config", [MeshConfig(fsdp=3), MeshConfig(tensor=16), MeshConfig(data=2, fsdp=2)]
)
def test_a_mesh_that_does_not_cover_the_devices_is_refused(config, devices):
    with pytest.raises(ValueError, match=r"does not cover 8 device\(s\)"):
        sharding.make_mesh(config, devices)


def test_sizes_below_one_are_refused():
    with pytest.raises(ValueError, match="must be positive"):
        MeshConfig(fsdp=0)
    with pytest.raises(ValueError, match="must be positive"):
        MeshConfig(data=-2)

    with pytest.raises(ValueError, match="must be a positive number or 'auto', got 0"):
        MeshConfig(rollout_tensor=0)


@pytest.mark.parametrize(
    ("num_devices", "weight_ways", "kv_heads", "asked", "tensor"),
    [
        (8, 8, 8, "auto", 8),
        (64, 64, 8, "auto", 8),  # heads are split as far as they go, copies share out requests
        (16, 16, 6, "auto", 2),
        (8, 1, 8, "auto", 1),  # the trainer has whole weights on each device
        (8, 2, 8, "auto", 2),
        (2, 16, 8, "auto", 2),  # of a process
        (8, 8, 8, 2, 2),
        (8, 1, 8, 4, 4),
    ],
)
def test_engines_split_weights_as_far_as_their_heads(
    num_devices, weight_ways, kv_heads, asked, tensor
):
    assert layout.rollout_tensor(num_devices, weight_ways, kv_heads, asked) == tensor


@pytest.mark.parametrize(
    ("num_devices", "kv_heads", "told"),
    [(16, 8, "the 8 key/value heads of the policy, got 16"), (8, 16, "the 8 devices of an engine")],
)
def test_a_width_that_would_leave_caches_whole_is_refused(num_devices, kv_heads, told):
    with pytest.raises(ValueError, match=f"{told}.*: lower it, or set it to 'auto'"):
        layout.rollout_tensor(num_devices, num_devices, kv_heads, 16)


def test_an_engines_mesh_has_the_devices_in_the_order_of_the_trainers(devices):
    trainer = sharding.make_mesh(MeshConfig(fsdp=4, tensor=2), devices)
    mesh = sharding.rollout_mesh(list(trainer.devices.flat), 4, 8)
    assert dict(mesh.shape) == {"data": 2, "fsdp": 1, "tensor": 4}
    assert list(mesh.devices.flat) == list(trainer.devices.flat)
    assert dict(sharding.rollout_mesh(devices, 2).shape) == {"data": 4, "fsdp": 1, "tensor": 2}


def test_logical_axes_map_to_mesh_axes_without_repeats():
    assert mesh_axes(("embed", "mlp")) == ["fsdp", "tensor"]
    assert mesh_axes(("batch", None, "vocab")) == [("data", "fsdp"), None, "tensor"]
    for axes in (("embed", "embed"), ("heads", "mlp"), ("batch", "embed")):
        with pytest.raises(ValueError, match="a mesh axis is used twice"):
            mesh_axes(axes)
    with pytest.raises(KeyError):
        mesh_axes(("no such axis",))


def test_logits_are_split_over_all_that_share_the_weights():
    assert logits_axes({"data": 2, "fsdp": 4, "tensor": 2}, 16) == ("copies", "logits")
    assert logits_axes({"data": 2, "fsdp": 4, "tensor": 2}, 12) == ("batch", "vocab")
    assert fitting_axes(
        {"data": 2, "fsdp": 4, "tensor": 2}, (8, 3, 16), ("copies", None, "logits")
    )[::2] == ["data", ("tensor", "fsdp")]
    assert logits_axes({}, 7) == ("copies", "logits"), "without a mesh nothing is split"


def test_dimensions_that_do_not_divide_stay_whole(devices):
    mesh = sharding.make_mesh(MeshConfig(fsdp=4, tensor=2), devices)
    assert sharding.fitting_sharding(mesh, (32, 40), ("embed", "mlp")).spec == P("fsdp", "tensor")
    assert sharding.fitting_sharding(mesh, (30, 40), ("embed", "mlp")).spec == P(None, "tensor")
    assert sharding.fitting_sharding(mesh, (32, 41), ("embed", "mlp")).spec == P("fsdp")


def test_shardings_are_named_as_programs_return_them(devices):
    """Else a step's result is another program's argument, which compiles it once more."""
    mesh, axes = sharding.make_mesh(MeshConfig(fsdp=4, tensor=2), devices), ("batch", None, None)
    wanted = sharding.fitting_sharding(mesh, (8, 3, 4), axes)
    with jax.set_mesh(mesh):
        made = jax.jit(lambda x: sharding.constrain(x * 2, *axes))(jnp.ones((8, 3, 4)))
    assert made.sharding == wanted


def test_constrain_pins_under_a_mesh_and_passes_without_one(devices):
    x = jnp.ones((8, 3, 4))
    assert sharding.constrain(x, "batch", None, None) is x
    mesh = sharding.make_mesh(MeshConfig(fsdp=4, tensor=2), devices)
    with jax.set_mesh(mesh):
        pinned = jax.jit(lambda x: sharding.constrain(x * 2, "batch", None, None))(x)
    assert {shard.data.shape for shard in pinned.addressable_shards} == {(2, 3, 4)}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama3_tied", MeshConfig(fsdp=2, tensor=2)),
        ("qwen2_untied", MeshConfig(fsdp=4, tensor=2)),  # its one kv head does not divide
        ("qwen3_untied", MeshConfig(fsdp=4, tensor=2)),
    ],
)
def test_eight_devices_compute_what_one_does(name, config, devices):
    tokens = np.load(GOLDEN / f"{name}.npz")["tokens"]
    tokens = np.concatenate([tokens] * 4)  # batch of 8
    model, params = hf.load_pretrained(GOLDEN / name)
    logits = jax.jit(transformer.logits, static_argnums=0)
    expected = np.asarray(logits(model, params, tokens))
    mesh = sharding.make_mesh(config, devices)
    specs = sharding.param_shardings(mesh, transformer.param_specs(model))
    with jax.set_mesh(mesh):
        got = logits(model, jax.device_put(params, specs), tokens)
    assert len(got.sharding.device_set) == 8
    np.testing.assert_allclose(np.asarray(got), expected, atol=1e-5)


def test_loading_puts_tensors_on_their_shards(devices, tmp_path):
    mesh = sharding.make_mesh(MeshConfig(fsdp=4, tensor=2), devices)
    config, params = hf.load_pretrained(GOLDEN / "qwen3_untied", mesh=mesh)
    expected = sharding.param_shardings(mesh, transformer.param_specs(config))
    _, whole = hf.load_pretrained(GOLDEN / "qwen3_untied")

    def same(leaf, spec, reference):
        assert leaf.sharding == spec
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(reference))

    jax.tree.map(same, params, expected, whole)
    gate = params.layers[0].gate_FD  # [40, 32] over tensor=2 and fsdp=4
    assert {shard.data.shape for shard in gate.addressable_shards} == {(20, 8)}
    hf.save_pretrained(tmp_path / "out", config, params)  # sharded weights save as whole ones do
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)),
        hf.load_pretrained(tmp_path / "out")[1],
        whole,
    )
