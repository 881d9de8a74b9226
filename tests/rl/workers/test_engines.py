"""The engines of workers, on their devices."""

import dataclasses

import jax
import numpy as np
import pytest
from replay import RecordedTeam
from tiny_team import CONFIG, MODEL, assert_same_tokens, play, starts

from reprise.models.sharding import rollout_mesh
from reprise.rl.engine.engine import ThreadedEngine
from reprise.rl.workers.config import SchedConfig
from reprise.rl.workers.engines import EngineSettings, make_engine, make_engines

SETTINGS = EngineSettings(MODEL, CONFIG, "float32")


def test_an_engine_is_on_a_mesh_a_device_or_nowhere_in_particular():
    settings = dataclasses.replace(SETTINGS, dtype="bfloat16", feature_layers=(0,))
    device = jax.devices()[-1]
    mesh = rollout_mesh([device], MODEL.num_kv_heads)
    on_mesh = make_engine(settings, mesh, number=3)
    on_device = make_engine(settings, device, kind=ThreadedEngine)
    default = make_engine(SETTINGS)
    assert (on_mesh.mesh, on_mesh.device, on_mesh.number) == (mesh, None, 3)
    assert on_mesh.dtype == np.dtype("bfloat16") and on_mesh.feature_layers == (0,)
    assert on_device.mesh is None and on_device.device == device
    assert isinstance(on_device, ThreadedEngine)
    assert default.mesh is default.device is default.feature_layers is None


@pytest.mark.parity
@pytest.mark.skipif(jax.device_count() != 8, reason="needs 8 (virtual) devices")
def test_workers_on_eight_devices(alone):
    """As many of them as there is room for; the last ones of each size work together."""
    last = []
    for count, size in ((4, 2), (8, 1)):
        config = SchedConfig(workers=count, devices_per_worker=size, chunk_tokens=3, kv_tokens=60)
        made = make_engines(SETTINGS, config)
        first = jax.devices()[0]  # of an engine without a place
        devices = [e.mesh.devices.flat if e.mesh else [e.device or first] for e in made]
        assert len({d for mine in devices for d in mine}) == 8
        last.append(made[-1])
    team = RecordedTeam(last, dataclasses.replace(config, workers=2))
    assert_same_tokens(play(team), alone)
    assert {a.worker_id for a in starts(team)} == {0, 1}


def test_more_devices_than_there_are_is_refused():
    config = SchedConfig(workers=5, devices_per_worker=2)
    with pytest.raises(ValueError, match="expected 10 devices for .* got 8; fix: fewer"):
        make_engines(SETTINGS, config)
