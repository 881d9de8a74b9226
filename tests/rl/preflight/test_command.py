"""`python -m rl.preflight`: a shipped configuration, what is wrong, policies without weights."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from figured_programs import figured

from reprise.rl.commands import preflight

ROOT = Path(__file__).parents[3]
TINY = "configs/plain_tiny.gin"
FEW = (  # one size of everything
    *("--gin.Engine.min_slots=8", "--gin.Engine.slots=8"),
    *("--gin.Rollout.prompts_per_step=1", "--gin.Engine.max_nodes=2"),
)


def run(*flags, cwd=ROOT):
    command = [sys.executable, "-m", "rl.preflight", *flags]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=600, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_a_shipped_configuration_for_eight_devices_of_the_cpu():
    status, out, err = run(f"--gin_file={TINY}", "--target=cpu:8", "--json", *FEW)
    assert status == 0, err
    *text, last = out.splitlines()
    found = json.loads(last)
    assert found["fits"] is True and found["devices"] == 8
    assert 0 < found["peak_bytes"] < found["device_bytes"]
    # a figure check: the peak is what stays and what the compiler says of one program
    stays = sum(sum(names.values()) for names in found["held_bytes"].values())
    beyond = [one["needed_bytes"] - one["held_bytes"] for one in found["compiled"]]
    assert found["peak_bytes"] == stays + max(beyond)
    for one in found["compiled"]:
        parts = [one[f"{part}_bytes"] for part in ("argument", "output", "alias", "temporary")]
        assert one["needed_bytes"] == parts[0] + parts[1] - parts[2] + parts[3]
    assert len(found["compiled"]) <= found["programs"]
    assert {"accumulate", "apply", "decode_rounds"} <= {
        one["name"].partition(",")[0] for one in found["compiled"]
    }
    assert any(line.startswith("fits: ") for line in text)


def test_frozen_weights_are_counted_beside_adapters(monkeypatch):
    shapes = []
    monkeypatch.setattr(preflight, "_preflight", lambda config, model, *_: shapes.append(model))
    preflight.main(["--target=cpu:1", "--gin.Policy.lora_rank=16"])
    assert shapes[0].lora.rank == 16


def errors(capsys, *flags):
    status = preflight.main(flags)
    err = capsys.readouterr().err
    return status, [line for line in err.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--target=v9:2x2",), "expected v5e, v5p, v6e, h100, cpu and a topology"),
        (("--target=cpu:8", "--gin.Mesh.fsdp=3"), "does not cover 8 device(s)"),
        (("--target=cpu:8", "--gin.Policy.directory=nowhere"), "expected a local Hugging Face"),
        (("--target=cpu:8", "--gin.Sampling.max_new_tokens=100000"), "lower one of them"),
    ],
)
def test_what_is_wrong_is_told_in_one_sentence(flags, said, capsys, monkeypatch):
    monkeypatch.setattr(preflight.targets, "prepare", lambda target: None)  # of this process
    status, told = errors(capsys, f"--gin_file={TINY}", *flags)
    assert status == 2
    assert len(told) == 1 and said in told[0]


def test_a_run_that_does_not_fit_names_the_program_and_what_helps(capsys, monkeypatch):
    monkeypatch.setattr(preflight.targets, "prepare", lambda target: None)
    monkeypatch.setattr(preflight.targets.Target, "device_bytes", 20_000_000)
    figured(monkeypatch, lambda program: 10_000 * program.num_tokens)
    status, told = errors(capsys, f"--gin_file={TINY}", "--target=cpu:8", *FEW)
    assert status == 2
    assert len(told) == 1
    assert "expected a run that fits 0.020 GB of a device of cpu:8, got " in told[0]
    assert " rows of " in told[0] and "Trainer.micro_batch_tokens" in told[0]


def test_a_policy_needs_no_weights(tmp_path):
    folder = tmp_path / "somewhere" / "tiny"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "policies" / "tiny" / "config.json", folder)
    shape = preflight.policy_shape(str(folder), [])
    assert shape.num_layers > 0
    # beside a configuration, and among those that ship
    assert preflight.policy_shape("downloads/tiny", [str(tmp_path / "somewhere/x.gin")]) == shape
    assert preflight.policy_shape("downloads/Qwen3-8B", []).num_layers == 36
    with pytest.raises(FileNotFoundError, match="hf download"):
        preflight.policy_shape("downloads/unknown", [])


@pytest.mark.parametrize(
    ("name", "num_params"),
    [("Qwen3-0.6B", 0.596e9), ("Qwen3-1.7B", 1.72e9), ("Qwen3-8B", 8.19e9), ("Qwen3-32B", 32.8e9)],
)
def test_shapes_that_ship_have_the_published_numbers_of_parameters(name, num_params):
    from reprise.models.config import num_params as count

    assert count(preflight.policy_shape(f"downloads/{name}", [])) == pytest.approx(
        num_params, rel=0.005
    )
