"""What is said where a process does not run on the devices that were meant."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest import mock

import jax
import pytest

from reprise.rl.runtime import devices

ROOT = Path(__file__).parents[3]
NODE = ["/dev/nvidia0"]


@pytest.mark.parametrize(
    ("backend", "asked", "nodes", "plugins"),
    [
        ("cpu", None, [], []),
        ("cpu", "", [], []),
        ("cpu", "cpu", NODE, ["xla_cuda13"]),
        ("gpu", None, NODE, ["xla_cuda13"]),
        ("gpu", "cuda", NODE, []),
        ("gpu", "cuda,cpu", NODE, []),
        ("tpu", "tpu,cpu", [], []),
    ],
)
def test_intended_devices_give_no_warning(backend, asked, nodes, plugins):
    assert devices.fallback(backend, asked, nodes, plugins) is None


@pytest.mark.parametrize(
    ("backend", "asked", "nodes", "plugins", "words"),
    [
        ("cpu", None, NODE, [], "on the CPU, though /dev/nvidia0 is there: install JAX"),
        ("cpu", "", [], ["xla_cuda13"], "CPU: JAX's plug-in 'xla_cuda13' did not start: JAX has"),
        ("cpu", None, NODE, ["xla_cuda13"], "though /dev/nvidia0 is there: JAX's plug-in"),
        ("cpu", None, NODE, ["xla_cuda13"], "pip install -e '.[cuda12]'"),
        ("cpu", None, ["/dev/kfd"], ["xla_rocm7"], "look at its driver, or set"),
        ("cpu", None, NODE, ["xla_cuda13"], "JAX_PLATFORMS=cpu if the CPU is meant"),
        ("cpu", "cuda,cpu", [], [], "on the CPU, not on cuda, which JAX_PLATFORMS='cuda,cpu'"),
        ("gpu", "tpu,cuda", [], [], "on the GPU, not on tpu"),
    ],
)
def test_a_fallback_is_one_line(backend, asked, nodes, plugins, words):
    text = devices.fallback(backend, asked, nodes, plugins)
    assert words in text and "\n" not in text


def test_the_extras_that_are_recommended_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = devices.INSTALL, devices.DRIVERS, (ROOT / "docs" / "accelerators.md").read_text()
    named = {name for text in texts for name in re.findall(r"'\.\[(\w+)\]'", text)}
    assert named == {"cuda", "cuda12", "tpu"} <= set(project["optional-dependencies"])


def test_the_error_of_a_plug_in_is_shown(monkeypatch):
    from jax._src import xla_bridge

    errors = {"tpu": "no libtpu", "cuda": "INTERNAL: no supported devices found\nmore"}
    monkeypatch.setattr(xla_bridge, "_backend_errors", errors)
    text = devices.fallback("cpu", None, NODE, ["xla_cuda13"])
    assert "did not start: INTERNAL: no supported devices found; CUDA 13 needs a driver" in text
    monkeypatch.setattr(jax, "devices", mock.Mock(side_effect=AssertionError()))
    monkeypatch.setattr(devices, "_plugins", lambda: ["xla_cuda13"])
    with pytest.raises(
        ValueError, match="got none: JAX's plug-in 'xla_cuda13' did not start: INTER"
    ):
        devices.found()
    monkeypatch.delattr(xla_bridge, "_backend_errors")  # JAX's own, which may go
    assert "JAX has printed why above" in devices.fallback("cpu", None, NODE, ["xla_cuda13"])


def test_a_missing_platform_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    command = [sys.executable, "-m", "rl.train", "--gin.Run.steps=1"]
    done = subprocess.run(
        [*command, f"--gin.Run.directory='{tmp_path / 'run'}'"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1 and "JAX_PLATFORMS='cuda'" in done.stderr


@pytest.mark.parametrize("error", [RuntimeError("unknown backend\nmore"), AssertionError()])
def test_an_error_of_jax_is_named_in_one_line(monkeypatch, error):
    monkeypatch.setattr(jax, "devices", mock.Mock(side_effect=error))
    with pytest.raises(ValueError, match="got none: (unknown backend|it is not installed);"):
        devices.found()


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_NUM_PROCESSES=2"),
        ({"JAX_COORDINATOR_ADDRESS": "host:1234"}, "JAX_COORDINATOR_ADDRESS"),
        ({"OMPI_COMM_WORLD_SIZE": "8"}, "OMPI_COMM_WORLD_SIZE=8"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NUM_TASKS=4"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "TPU_WORKER_HOSTNAMES"),
    ],
)
def test_one_process_of_several_is_refused(environ, named):
    with pytest.raises(ValueError, match=f"expected one process, got {named}"):
        devices.refuse_several_processes(environ)


def test_one_process_is_accepted():
    alone = {"JAX_NUM_PROCESSES": "1", "SLURM_NTASKS": "8", "TPU_WORKER_HOSTNAMES": "localhost"}
    devices.refuse_several_processes(alone)
