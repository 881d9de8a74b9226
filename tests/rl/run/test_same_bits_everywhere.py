"""`Numerics.same_bits=True` is checked by every program that opens a policy."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
from pathlib import Path

import jax
import pytest

from reprise import models
from reprise.models import sums_in_order_on_accelerators
from reprise.rl.cluster.processes import ALONE
from reprise.rl.commands import evaluate, preflight, serve, train
from reprise.rl.gin.loader import dump, load
from reprise.rl.placement import meshes
from reprise.rl.python import api
from reprise.rl.run import launch, run_process
from reprise.rl.run.ray_trainers import Start
from reprise.rl.runtime import devices
from reprise.rl.settings.config import TrainConfig

RL = Path(meshes.__file__).resolve().parents[1]
TRUE = "--gin.Numerics.same_bits=True"
REFUSAL = "Numerics.same_bits=True: expected another size"


@pytest.fixture(autouse=True)
def refusing(monkeypatch):
    """No policy finds the same bits here, and no flags of XLA stay."""
    monkeypatch.setattr(meshes, "_why_other_bits", lambda *args: "expected another size")
    monkeypatch.setattr(serve, "_serve", lambda *args: 0)  # it would not end
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))


def directory(tiny):
    return load(TrainConfig, [tiny]).policy.directory


def of_train(tiny, folder):
    return train.main([f"--gin_file={tiny}", f"--gin.Run.directory='{folder}'", TRUE])


def of_serve(tiny, folder):
    return serve.main([f"--policy={directory(tiny)}", "--port=0", f"--folder={folder}", TRUE])


def of_evaluate(tiny, folder):
    flags = f"--policy={directory(tiny)}", "--gin.Eval.num_prompts=2"
    return evaluate.main([f"--gin_file={tiny}", *flags, TRUE])


def of_preflight(tiny, folder):
    return preflight.main([f"--gin_file={tiny}", "--target=cpu:1", TRUE])


def of_launch(tiny, folder):
    """A trainer process on Ray, whose actor goes on and which has no others to join."""
    config = load(TrainConfig, [tiny], [f"Run.directory='{folder}'", TRUE.removeprefix("--gin.")])
    start = Start(dump(config), False, os.getcwd(), "127.0.0.1:1", 0, None)
    orders = io.BytesIO(json.dumps(dataclasses.asdict(start)).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_stop_at_end", lambda orders: None)
        patch.setattr(run_process.join, "join", lambda *args: ALONE)
        return launch.main(orders)


@pytest.mark.parametrize("run", [of_train, of_serve, of_evaluate, of_preflight, of_launch])
def test_every_command_refuses_what_it_cannot_promise(run, tiny, tmp_path, capfd):
    assert run(tiny, tmp_path / "run") == 2
    assert REFUSAL in capfd.readouterr().err
    assert sums_in_order_on_accelerators(), "XLA's flags are set before devices are opened"


def test_a_dry_run_refuses_sizes_that_cpus_do_not_take(tiny, tmp_path, capsys):
    flags = f"--gin_file={tiny}", f"--gin.Run.directory='{tmp_path / 'run'}'", "--dry_run"
    assert train.main([*flags, TRUE, "--gin.Policy.lora_rank=5"]) == 2
    assert "Numerics.same_bits=True: expected a " in capsys.readouterr().err


def test_a_policy_of_the_api_is_refused_or_named(tiny, capsys):
    with pytest.raises(ValueError, match=REFUSAL):
        api.Policy(directory(tiny), "Numerics.same_bits=True")
    api.Policy(directory(tiny))
    assert "exact up to rounding: expected another size" in capsys.readouterr().err


def test_policies_are_opened_in_one_place():
    """Who makes a mesh of devices, or loads weights to train, has the check before."""
    found = {
        path.relative_to(RL).as_posix(): set(
            re.findall(r"\b(run_mesh|make_learner|open_mesh)\(", path.read_text())
        )
        for path in RL.rglob("*.py")
    }
    run, own_loop = "assembly/setup.py", "python/api.py"
    callers = {name for name, calls in found.items() if "run_mesh" in calls}
    assert callers == {run, "placement/meshes.py"}
    makers = {name for name, calls in found.items() if "make_learner" in calls}
    assert makers == {run, own_loop} and "open_mesh" in found[own_loop]


def test_flags_that_come_too_late_for_an_accelerator_are_refused(monkeypatch):
    devices.found()
    monkeypatch.setattr(models, "sums_in_order_on_accelerators", lambda: False)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ValueError, match="got ones that this program has opened before"):
        devices.keep_order(True)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    devices.keep_order(True)
