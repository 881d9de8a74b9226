"""The meshes of runs, and whether all passes there compute the same bits."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from reprise.rl.gin.loader import load
from reprise.rl.placement import meshes
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import open_policy

DEFAULT = Path(__file__).parents[3] / "configs" / "tiny_cpu.gin"


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ((), [0, 1, 2, 3, 4, 5]),
        (("Sched.mode='pipeline'",), [0, 1, 3, 4]),
        (("Sched.mode='pipeline'", "Mesh.data=2"), [0, 3]),
        (("Sched.mode='pipeline'", "Sched.workers=3"), [0, 1, 2, 3, 4, 5]),
    ],
)
def test_the_mesh_has_the_trainers_devices_of_all_processes(monkeypatch, settings, wanted):
    """Of two processes with three devices each; workers have the last ones of each."""
    there = [SimpleNamespace(process_index=i // 3, id=i) for i in range(6)]
    monkeypatch.setattr(meshes.devices, "found", lambda: there)
    monkeypatch.setattr(meshes, "make_mesh", lambda config, chosen: chosen)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    config = load(TrainConfig, [DEFAULT], ["Cluster.kind='spmd'", "Mesh.data=-1", *settings])
    assert [device.id for device in meshes.run_mesh(config)] == wanted


def test_other_bits_are_named_or_refused():
    def check(model, *overrides):
        return meshes.check_bits(load(TrainConfig, [DEFAULT], overrides), model, None)

    [model] = open_policy(load(TrainConfig, [DEFAULT]).policy.directory)[1:2]
    odd = dataclasses.replace(model, d_ff=100)
    assert check(model) is None and check(model, "Numerics.same_bits=True") is None
    assert "exact up to rounding: expected a d_ff that 16 divides" in check(odd)
    assert check(odd, "Numerics.same_bits=False") is None
    with pytest.raises(ValueError, match=r"Numerics\.same_bits=True: expected a d_ff"):
        check(odd, "Numerics.same_bits=True")
