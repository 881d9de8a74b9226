"""Samplers are kept by their checkpoint's content: its path may be deleted and used again."""

from __future__ import annotations

import dataclasses

import pytest

from reprise.rl.server import weights as module
from reprise.rl.server.records import SAMPLER, TRAINING, CheckpointPath, Records
from reprise.rl.server.weights import Weights


@dataclasses.dataclass(frozen=True, eq=False)
class Sampler:
    weights: int
    version: int = 0


class Policy:
    """A policy whose weights are a number, after as many updates as `version`."""

    def __init__(self, weights=0, version=0):
        self.weights = weights
        self.version = version
        self.loads = 0
        self.on_load = lambda: None

    def with_new_adapter(self):
        return self

    def with_adapter(self, folder):
        return self.load_state(folder) or self

    def save_state(self, folder):
        folder.mkdir(parents=True)
        if self.weights < 0:
            raise OSError(28, "No space left on device")
        (folder / "w").write_text(str(self.weights))

    export_adapter = save_state

    def load_state(self, folder, **_):
        self.on_load()
        self.loads, self.weights = self.loads + 1, int((folder / "w").read_text())

    def sampler(self):
        return Sampler(self.weights, self.version)


@pytest.fixture
def records(tmp_path):
    records = Records(tmp_path, lambda: records.clock_s)
    records.clock_s = 0.0
    records.put("runs", "run", dict.fromkeys(("rank", "targets", "last_s")) | RUN)
    return records


RUN = {"session": "s", "user_metadata": {}}


@pytest.fixture
def policy():
    return Policy()


@pytest.fixture
def weights(records, policy):
    return Weights(policy, records)


@pytest.mark.parametrize("kind", [TRAINING, SAMPLER])
def test_a_path_that_is_deleted_and_saved_again_has_its_new_weights(records, weights, kind):
    at = CheckpointPath("run", kind, "f")
    weights.save({}, at, Policy(1))
    assert weights.sampler(str(at)).weights == 1
    records.drop_checkpoint(str(at))
    with pytest.raises(ValueError, match="found no checkpoint"):
        weights.sampler(str(at))
    weights.save({}, at, Policy(2))
    assert weights.sampler(str(at)).weights == 2
    weights.save({"overwrite": True}, at, Policy(3))
    assert weights.sampler(str(at)).weights == 3
    assert len(list((records.folder / "checkpoints").iterdir())) == 1


def test_an_expired_checkpoint_is_not_sampled(records, weights):
    at = CheckpointPath("run", SAMPLER, "f")
    weights.save({"ttl_seconds": 10}, at, Policy(1))
    assert weights.sampler(str(at)).weights == 1
    records.clock_s = 11.0
    with pytest.raises(ValueError, match="found no checkpoint"):
        weights.sampler(str(at))


def test_samplers_of_deleted_checkpoints_leave_the_memory(records, weights, policy):
    paths = [CheckpointPath("run", TRAINING, name) for name in "ab"]
    for at in paths:
        weights.save({}, at, Policy(1))
        weights.sampler(str(at))
    assert policy.loads == 2 and weights.sampler(str(paths[0])) and policy.loads == 2
    records.drop_checkpoint(str(paths[1]))
    weights.sampler(str(paths[0]))
    assert len(weights._samplers) == 1


@pytest.mark.parametrize("kind", [TRAINING, SAMPLER])
def test_a_save_that_fails_leaves_no_folder_and_no_record(records, weights, kind):
    with pytest.raises(OSError, match="No space left"):
        weights.save({}, CheckpointPath("run", kind, "f"), Policy(-1))
    assert not records.checkpoints and not list((records.folder / "checkpoints").iterdir())


def test_a_save_whose_record_fails_leaves_the_old_checkpoint(records, weights, monkeypatch):
    at = CheckpointPath("run", TRAINING, "f")
    weights.save({}, at, Policy(1))

    def full(changes):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(records, "write", full)
        with pytest.raises(OSError, match="No space left"):
            weights.save({"overwrite": True}, at, Policy(2))
    assert weights.sampler(str(at)).weights == 1
    assert len(list((records.folder / "checkpoints").iterdir())) == 1


def test_a_checkpoint_that_goes_while_it_is_read_is_named(records, weights, policy):
    at = CheckpointPath("run", TRAINING, "f")
    weights.save({}, at, Policy(1))
    policy.on_load = lambda: records.drop_checkpoint(str(at))
    with pytest.raises(ValueError, match="found no checkpoint"):
        weights.sampler(str(at))
    weights.save({}, at, Policy(1))
    policy.on_load = lambda: weights.save({"overwrite": True}, at, Policy(2))
    with pytest.raises(ValueError, match="was saved again meanwhile"):
        weights.sampler(str(at))


def test_the_newest_checkpoints_without_a_name_stay(records, weights, monkeypatch):
    """A name of the client's that looks like one of ours is no such checkpoint."""
    monkeypatch.setattr(module, "MAX_SAMPLERS", 2)
    weights.save({}, CheckpointPath("run", SAMPLER, "unnamed-final"), Policy(1))
    for i in range(4):
        weights.save({}, CheckpointPath("run", SAMPLER, f"unnamed~{i}"), Policy(1), f"s:sample:{i}")
    names = [c["name"] for c in records.run_checkpoints("run")]
    assert names == ["unnamed-final", "unnamed~2", "unnamed~3"]
    assert list(records.samplers) == ["s:sample:2", "s:sample:3"]
    weights.drop_unnamed("run", 0)
    assert [c["name"] for c in records.run_checkpoints("run")] == ["unnamed-final"]
    assert not records.samplers


@pytest.mark.parametrize("kind", [TRAINING, SAMPLER])
def test_a_sampler_knows_the_updates_of_its_checkpoint(records, policy, weights, kind):
    """Also one that a server loads from the folder, and from a record without the number."""
    at = CheckpointPath("run", kind, "f")
    weights.save({}, at, Policy(1, version=7))
    for server in (weights, Weights(policy, records)):
        assert server.sampler(str(at)).version == 7
    record = {k: x for k, x in records.checkpoint(str(at)).items() if k != "version"}
    records.put("checkpoints", str(at), record)
    assert Weights(policy, records).sampler(str(at)).version == 0
