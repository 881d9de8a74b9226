"""What is restored equals what was saved, bit for bit; what cannot be saved is refused."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from whole_steps import whole_steps

from reprise.rl.checkpoint import contents, reader
from reprise.rl.checkpoint import manifest as checkpoint_manifest
from reprise.rl.checkpoint.checkpointer import Checkpointer
from reprise.rl.checkpoint.config import CheckpointConfig
from reprise.rl.runtime import host_memory


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    weight: jax.Array
    scale: jax.Array


class State(NamedTuple):
    layers: tuple[Layer, ...]
    extra: dict[str, Any]


def make_state() -> State:
    """Every dtype in use, and bit patterns that arithmetic would not keep."""
    nans = np.array([0x7FC01234, 0xFFC00001, 0x00000001, 0x80000000], np.uint32).view(np.float32)
    extra = {
        "a/b.c": jnp.asarray(nans),
        "nothing": None,
        "zeros": -jnp.zeros((3, 2)),
        "flags": jnp.array([True, False, True]),
        "count": jnp.array(7, jnp.int32),
        "bits": jnp.array([0, 2**32 - 1], jnp.uint32),
        "nested": ({"x": jnp.arange(5, dtype=jnp.int8)}, (jnp.ones((1, 1, 1), jnp.float16),)),
    }
    layers = tuple(
        Layer(
            jnp.linspace(-3, 3, 12, dtype=jnp.bfloat16).reshape(3, 4) * i, jnp.full((4,), 0.1 * i)
        )
        for i in (1, 2)
    )
    return State(layers, extra)


def shapes_of(tree: Any) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), tree)


def assert_same_bits(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_any_pytree_comes_back_bitwise(tmp_path):
    state = make_state()
    with Checkpointer(tmp_path) as saver:
        saver.save(3, state)
    restored = reader.restore(tmp_path, shapes_of(state))
    assert (restored.step, restored.host, restored.warnings) == (3, {}, ())
    assert_same_bits(restored.arrays, state)


def test_arrays_may_be_donated_and_host_changed_once_save_returns(tmp_path):
    step = jax.jit(lambda a: a + 1, donate_argnums=0)
    a = jnp.zeros((256, 1024))
    host = {"cursor": [0], "cache": np.zeros(3, np.int32)}
    with Checkpointer(tmp_path, CheckpointConfig(keep=9)) as saver:
        for i in range(4):
            saver.save(i, {"a": a}, host)
            host["cursor"][0] += 1
            host["cache"] += 1
            a = step(step(a))
            a.block_until_ready()
    for i in range(4):
        restored = reader.restore(tmp_path, {"a": a}, step=i)
        np.testing.assert_array_equal(restored.arrays["a"], np.full((256, 1024), 2.0 * i))
        assert restored.host["cursor"] == [i]
        np.testing.assert_array_equal(restored.host["cache"], np.full(3, i, np.int32))


def test_host_state_keeps_values_and_types(tmp_path):
    generator = np.random.Generator(np.random.MT19937(3))  # its state holds an array
    generator.random(5)
    pcg = np.random.Generator(np.random.PCG64(4))  # 128-bit integers
    host = {
        "cursor": {"epoch": 2, "order": [3, 1, 2]},
        "rate": 0.1 + 0.2,
        "huge": 1e308,
        "text": 'é "quoted" \n',
        "none": None,
        "yes": True,
        "mt": generator.bit_generator.state,
        "pcg": pcg.bit_generator.state,
        "cache": [{"ids": np.array([[1, 2], [3, 4]], np.int64)}, np.zeros((0, 2), np.float32)],
        "names": np.array(["ab", "c"]),
    }
    with Checkpointer(tmp_path) as saver:
        saver.save(0, {"x": jnp.ones(1)}, host)
    got = reader.restore(tmp_path, {"x": jnp.ones(1)}).host
    for old in (host, got):
        old["mt"]["state"]["key"] = old["mt"]["state"]["key"].tobytes()
        cache = old.pop("cache")
        old["cache"] = [(a.dtype, a.shape, a.tobytes()) for a in (cache[0]["ids"], cache[1])]
        old["names"] = old["names"].tolist()
    assert got == host
    resumed = np.random.Generator(np.random.PCG64())
    resumed.bit_generator.state = got["pcg"]
    assert resumed.random() == pcg.random()


@pytest.mark.parametrize(
    ("host", "path"),
    [
        ({"a": [{"b": (1, 2)}]}, r"host\['a'\]\[0\]\['b'\].*tuple"),
        ({"a": np.int64(3)}, r"host\['a'\].*int64"),
        ({"a": {3: 1}}, r"host\['a'\].*keys.*3"),
        ({"$array": "0"}, r"host.*\$array"),
        ({"a": np.array([object()])}, r"host\['a'\].*array of object"),
        ({"a": jnp.ones(2)}, r"host\['a'\]"),
    ],
)
def test_host_state_that_would_change_is_refused(tmp_path, host, path):
    with Checkpointer(tmp_path) as saver, pytest.raises(TypeError, match=path):
        saver.save(0, {"x": jnp.ones(1)}, host)
    assert whole_steps(tmp_path) == []


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.ones(2)}, r"\['a'\].*jax array.*ndarray"),
        ({"a": [1.0]}, r"\['a'\]\[0\].*float"),
        ({"a": jax.random.key(0)}, r"\['a'\].*key_data"),
        ({"a": jnp.ones((0, 2))}, r"\['a'\].*\(0, 2\)"),
        ({}, "at least one array"),
    ],
)
def test_arrays_that_cannot_be_saved_are_refused(tmp_path, arrays, message):
    with Checkpointer(tmp_path) as saver, pytest.raises((TypeError, ValueError), match=message):
        saver.save(0, arrays)


def test_another_model_is_told_by_its_first_differing_paths(tmp_path):
    saved = {"w": jnp.ones((4, 8)), "b": jnp.ones(3), "old": jnp.ones(1)}
    with Checkpointer(tmp_path) as saver:
        saver.save(0, saved)
    template = {"w": jnp.ones((4, 16)), "b": jnp.ones(3, jnp.int32), "new": jnp.ones(2)}
    with pytest.raises(reader.StructureMismatchError) as caught:
        reader.restore(tmp_path, template)
    text = str(caught.value)
    assert "4 of 4 arrays" in text
    assert "['w']: expected float32[4, 16], got float32[4, 8]" in text
    assert "['b']: expected int32[3], got float32[3]" in text
    assert "['new']: expected float32[2], got no array" in text
    assert "['old']: expected no array, got float32[1]" in text


def test_parts_may_be_lacking_or_left_over_and_floats_of_another_type(tmp_path):
    saved = {"w": jnp.ones(3) / 3, "old": {"x": jnp.ones(2)}}
    with Checkpointer(tmp_path) as saver:
        saver.save(0, saved)
    wanted = {"w": jnp.zeros(3, jnp.bfloat16), "new": {"y": jnp.full(2, 7.0)}}
    names = ["['old']", "['new']"]
    restored = reader.restore(tmp_path, wanted, optional=names)
    assert restored.lacking == ("['new']",)
    want = {"w": saved["w"].astype(jnp.bfloat16), "new": wanted["new"]}
    assert_same_bits(restored.arrays, want)
    for lacking in ([], names[:1], names[1:]):
        with pytest.raises(reader.StructureMismatchError):
            reader.restore(tmp_path, wanted, optional=lacking)
    other = {"w": wanted["w"], "old": {"x": jnp.ones(3)}}
    with pytest.raises(reader.StructureMismatchError, match="old"):
        reader.restore(tmp_path, other, optional=names)


def test_a_subset_restores_the_policy_alone(tmp_path):
    state = make_state()
    with Checkpointer(tmp_path) as saver:
        saver.save(0, {"params": state, "momentum": jnp.ones((5, 5))})
    template = {"params": state}
    with pytest.raises(reader.StructureMismatchError, match="momentum"):
        reader.restore(tmp_path, template)
    assert_same_bits(reader.restore(tmp_path, template, subset=True).arrays, template)
    with pytest.raises(reader.StructureMismatchError, match="other"):
        reader.restore(tmp_path, {"other": jnp.ones(1)}, subset=True)


def test_keeps_the_newest_and_touches_nothing_else(tmp_path):
    outside, directory = tmp_path / "outside", tmp_path / "checkpoints"
    outside.mkdir()
    (outside / "precious").write_text("x")
    (directory / "step_notes").mkdir(parents=True)
    (directory / "step_00000000").symlink_to(outside)
    with Checkpointer(directory, CheckpointConfig(keep=2)) as saver:
        for step in (1, 2, 3):
            saver.save(step, {"x": jnp.full(2, float(step))})
            assert whole_steps(saver)[0] == step
    names = sorted(entry.name for entry in directory.iterdir())
    # a link is no checkpoint: it is left alone
    assert names == [".lock", "step_00000000", "step_00000002", "step_00000003", "step_notes"]
    assert (outside / "precious").read_text() == "x"


def test_a_damaged_checkpoint_does_not_count_as_kept(tmp_path):
    with Checkpointer(tmp_path, CheckpointConfig(keep=2)) as saver:
        for step in (1, 2):
            saver.save(step, {"x": jnp.ones(2)})
        saver.wait()
        (tmp_path / "step_00000002" / checkpoint_manifest.MANIFEST_NAME).unlink()
        saver.save(3, {"x": jnp.ones(2)})
    assert whole_steps(tmp_path) == [3, 1]


def test_what_is_no_longer_spared_is_deleted_when_it_closes(tmp_path):
    spared = {1}
    with Checkpointer(tmp_path, CheckpointConfig(keep=1), spared=lambda: spared) as saver:
        for step in (1, 2):
            saver.save(step, {"x": jnp.ones(2)})
        saver.wait()
        assert whole_steps(tmp_path) == [2, 1]
        spared.clear()
    assert whole_steps(tmp_path) == [2]


def test_saving_a_step_again_replaces_it_and_sets_later_ones_aside(tmp_path):
    with Checkpointer(tmp_path, CheckpointConfig(keep=5)) as saver:
        for step in (1, 2, 3):
            saver.save(step, {"x": jnp.full(2, float(step))})
        saver.save(2, {"x": jnp.full(2, 20.0)})
    restored = reader.restore(tmp_path, {"x": jnp.ones(2)})
    assert restored.step == 2
    np.testing.assert_array_equal(restored.arrays["x"], [20.0, 20.0])
    assert whole_steps(tmp_path) == [2, 1]
    assert (tmp_path / "abandoned-step_00000003" / checkpoint_manifest.MANIFEST_NAME).exists()
    with Checkpointer(tmp_path, CheckpointConfig(keep=5)) as saver:
        saver.save(3, {"x": jnp.ones(2)})
    assert whole_steps(tmp_path) == [3, 2, 1]
    assert not list(tmp_path.glob("abandoned-*")), "it was passed"


def test_one_that_keeps_all_replaces_sets_aside_and_deletes_nothing(tmp_path):
    for step in (1, 2, 4, 3):  # 3 after another policy went on from 2
        with Checkpointer(tmp_path, CheckpointConfig(keep=1), keeps_all=True) as saver:
            saver.save(step, {"x": jnp.full(2, float(step))})
    with Checkpointer(tmp_path, keeps_all=True) as saver:
        with pytest.raises(FileExistsError, match="has step 2 already, .* another folder"):
            saver.save(2, {"x": jnp.zeros(2)})
        saver.save(5, {"x": jnp.full(2, 5.0)})
    assert whole_steps(tmp_path) == [5, 4, 3, 2, 1]
    for step in (1, 2, 3, 4):
        restored = reader.restore(tmp_path, {"x": jnp.ones(2)}, step)
        np.testing.assert_array_equal(restored.arrays["x"], float(step))


def test_what_a_kill_in_the_last_save_left_is_deleted(tmp_path):
    with Checkpointer(tmp_path, CheckpointConfig(keep=9)) as saver:
        for step in (1, 2, 3):
            saver.save(step, {"x": jnp.ones(2)})
    with Checkpointer(tmp_path, CheckpointConfig(keep=1)) as saver:
        saver.tidy()
        assert whole_steps(tmp_path) == [3]


def test_devices_hold_one_state_while_it_is_read(tmp_path, monkeypatch):
    size = 2**16 + 1  # no other test leaves arrays of this size
    state = {"w": jnp.arange(float(size)), "n": jnp.ones(3)}
    with Checkpointer(tmp_path) as saver:
        saver.save(1, state)
    whole, most, free_as = 4 * size, [0], contents._free_as

    def watched(*arguments):
        most[0] = max(most[0], sum(x.nbytes for x in jax.live_arrays() if x.size == size))
        return free_as(*arguments)

    monkeypatch.setattr(contents, "_free_as", watched)
    restored = reader.restore(tmp_path, state, frees=("['w']",))
    assert most[0] == whole, "the template's was deleted first"
    assert state["w"].is_deleted() and not state["n"].is_deleted()
    assert restored.arrays["w"][-1] == size - 1


def test_several_processes_hash_and_verify_a_part_each(tmp_path):
    class One:
        alone, count, is_first, index = False, 3, False, 0

        def gather_large(self, what, value, waiting=None):
            return [value]

    with Checkpointer(tmp_path) as saver:
        saver.save(1, {"x": jnp.ones(2), "y": jnp.ones(3)})
    for path in (tmp_path / "step_00000001").rglob("*"):
        if path.is_file() and path.name != checkpoint_manifest.MANIFEST_NAME:
            path.write_bytes(path.read_bytes() + b"x")
    names = []
    for index in range(3):
        one = One()
        one.index = index
        problems, _ = reader.problems_of(tmp_path, 1, one)
        names.append({problem.file for problem in problems})
    whole, _ = reader.problems_of(tmp_path, 1)
    assert all(names) and set.union(*names) == {problem.file for problem in whole}
    assert sum(map(len, names)) == len(whole), "no file is read twice"


def test_save_returns_before_the_disk_is_done(tmp_path, monkeypatch):
    gate, write = threading.Event(), checkpoint_manifest.write_manifest

    def slow(*args):
        assert gate.wait(60)
        write(*args)

    monkeypatch.setattr(checkpoint_manifest, "write_manifest", slow)
    with Checkpointer(tmp_path) as saver:
        saver.save(1, {"x": jnp.ones(2)})
        assert whole_steps(tmp_path) == []  # and save has returned
        gate.set()
        saver.wait()
        assert whole_steps(tmp_path) == [1]


def test_a_synchronous_save_counts_when_it_returns(tmp_path):
    with Checkpointer(tmp_path, CheckpointConfig(asynchronous=False)) as saver:
        saver.save(1, {"x": jnp.ones(2)})
        assert whole_steps(tmp_path) == [1]


def test_config_says_when_a_step_is_due():
    assert [s for s in range(7) if CheckpointConfig(every_steps=3).due(s)] == [3, 6]
    assert not any(CheckpointConfig(every_steps=0).due(s) for s in range(7))
    for bad in ({"every_steps": -1}, {"keep": 0}, {"every_minutes": -1.0}):
        with pytest.raises(ValueError, match="expected"):
            CheckpointConfig(**bad)


@pytest.mark.parametrize("where", ["gs://bucket/run", Path("s3://bucket/run")])
def test_a_bucket_address_is_refused(where):
    with pytest.raises(ValueError, match="mounted file system"):
        Checkpointer(where)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_sharded_arrays_come_back_on_the_shardings_of_the_template(tmp_path):
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"))
    turned = jax.make_mesh((2, 4), ("fsdp", "tensor"))
    values = {"w": jnp.arange(128.0).reshape(8, 16) / 7, "b": jnp.arange(16.0), "n": jnp.int32(5)}
    specs = {"w": jax.P("fsdp", "tensor"), "b": jax.P("tensor"), "n": jax.P()}

    def on(mesh):
        return {name: jax.NamedSharding(mesh, spec) for name, spec in specs.items()}

    with Checkpointer(tmp_path) as saver:
        saver.save(1, jax.device_put(values, on(mesh)))
    one = dict.fromkeys(values, jax.sharding.SingleDeviceSharding(jax.devices()[3]))
    for shardings in (on(mesh), on(turned), one):
        template = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[name])
            for name, x in values.items()
        }
        got = reader.restore(tmp_path, template).arrays
        assert {name: x.sharding for name, x in got.items()} == shardings
        assert_same_bits(got, values)


def test_two_directories_are_written_in_turn(tmp_path):
    """Orbax alone would have one of two saves at once wait for ever (its timeout is minutes)."""
    arrays = {"x": jnp.arange(2.0**16)}
    with (
        Checkpointer(tmp_path / "a", CheckpointConfig(keep=1)) as one,
        Checkpointer(tmp_path / "b", CheckpointConfig(keep=1)) as other,
    ):
        threads = [
            threading.Thread(target=lambda c=c: [c.save(i, arrays) for i in range(8)])
            for c in (one, other)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert (whole_steps(one), whole_steps(other)) == ([7], [7])


def test_few_threads_write_files(tmp_path):
    tensorstore_utils = pytest.importorskip("orbax.checkpoint._src.serialization.tensorstore_utils")
    with Checkpointer(tmp_path):
        limit = tensorstore_utils.get_ts_context(use_ocdbt=False)["file_io_concurrency"]
    assert limit.to_json() == {"limit": host_memory._FILE_THREADS}
