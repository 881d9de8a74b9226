"""Contents of the timed saves: ours has what is trained, the other one everything."""

import jax
import numpy as np
import pytest

from benchmarks.drafter import saves
from models.config import ModelConfig
from rl.checkpoint import reader
from spec.eagle import model as eagle

MODEL = ModelConfig("llama", 64, 16, 1, 2, 1, 8, 16)
REPEATS = 2


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saves")
    return folder, saves.checkpoint_stall(
        folder, policies={"one": MODEL, "two": MODEL}, repeats=REPEATS
    )


def weights_bytes():
    shapes = jax.eval_shape(lambda: eagle.init(eagle.config_for(MODEL), jax.random.key(0)))
    return sum(4 * np.prod(x.shape) for x in jax.tree.leaves(shapes))


def test_ours_leaves_out_the_frozen_parts_alone(saved):
    _, found = saved
    assert {k for k in found if "ratio" in k} == {
        "checkpoint_stall_ratio",
        "checkpoint_stall_ratio_two",
    }
    for row in found["checkpoint_rows"].values():
        # weights and two moments; three counters: the state's, Adam's, the learning rate's
        assert row["selective_bytes"] == 3 * weights_bytes() + 3 * 4
        assert row["everything_bytes"] - row["selective_bytes"] == 2 * 64 * 16 * 4
        assert [len(s) for s in row["seconds"].values()] == [REPEATS] * 3
        assert row["ratio"] > 0 and row["ratio_of_background"] > 0


def test_every_save_is_a_whole_checkpoint_of_what_it_says(saved):
    folder, _ = saved
    trainer = saves._trainer(eagle.config_for(MODEL))
    turns = 3 * (1 + REPEATS)
    newest = {}
    for name in ("selective", "waiting"):
        restored = reader.restore(folder / "one" / name, trainer.state)
        newest[name] = restored.step
        for a, b in zip(
            jax.tree.leaves(restored.arrays), jax.tree.leaves(trainer.state), strict=True
        ):
            np.testing.assert_array_equal(a, b)
    full = folder / "one" / "full"
    with pytest.raises(reader.StructureMismatchError):
        reader.restore(full, trainer.state)
    shape = (MODEL.vocab_size, MODEL.d_model)
    parts = [saves._random(s) for s in (shape, shape[::-1])]
    everything = {"drafter": trainer.state, "frozen": eagle.SharedParams(*parts)}
    restored = reader.restore(full, everything)
    newest["full"] = restored.step
    np.testing.assert_array_equal(restored.arrays["frozen"].head_UD, parts[1])
    # all saves were taken: none was left out since another was still being written
    assert sorted(newest.values()) == [turns - 2, turns - 1, turns]
    assert trainer.state.step == 1 and np.asarray(trainer.state.optimizer[1][0].nu.fc_DE).any()
