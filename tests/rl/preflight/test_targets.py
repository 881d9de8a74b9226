"""Targets by name, the memory that a run may use of them, and their devices."""

import importlib.util
import os

import pytest

from reprise.rl.preflight.targets import devices_of, parse_target, prepare


@pytest.mark.parametrize(
    ("name", "count", "platform"),
    [
        ("v5p:2x2x4", 16, "tpu"),
        ("v5e:8x8", 64, "tpu"),
        ("v6e:4x4", 16, "tpu"),
        ("h100:2x1x8", 16, "cuda"),
        ("cpu:8", 8, "cpu"),
    ],
)
def test_targets_are_read_from_their_names(name, count, platform):
    target = parse_target(name)
    assert (target.name, target.count, target.kind.platform) == (name, count, platform)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("v7x:2x2", "expected v5e, v5p, v6e, h100, cpu and a topology, got 'v7x:2x2'"),
        ("v5p:2x2", "expected a topology of 3 positive number(s) after 'v5p:', got '2x2'"),
        ("h100:1x0x8", "got '1x0x8'"),
        ("v6e:4x-4", "got '4x-4'"),
        ("cpu:", "got ''"),
        ("cpu:4096", "expected at most 256 devices of cpu, got 4096"),
    ],
)
def test_what_is_no_target_is_told_in_one_sentence(name, said):
    with pytest.raises(ValueError, match="--target: expected") as error:
        parse_target(name)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_memory_is_the_makers_of_gpus_what_jax_takes_of_the_cpu_a_part_of_the_hosts(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    assert parse_target("v5p:2x2x1").device_bytes == 95e9
    assert parse_target("h100:1x1x8").device_bytes == 60e9
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    assert parse_target("h100:1x1x8").device_bytes == 72e9
    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert parse_target("cpu:4").device_bytes == host_bytes // 4


def test_the_cpu_gets_as_many_devices_as_the_target_has():
    environ = {"XLA_FLAGS": "--xla_force_host_platform_device_count=3 --xla_other=1"}
    prepare(parse_target("cpu:8"), environ)
    assert environ["XLA_FLAGS"] == "--xla_other=1 --xla_force_host_platform_device_count=8"
    assert environ["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize(
    ("name", "kind"), [("v5p:2x2x4", "v5p-32"), ("v5e:4x4", "v5litepod-16"), ("v6e:4x4", "v6e-16")]
)
def test_a_slice_is_named_by_its_cores(name, kind):
    environ = {}
    prepare(parse_target(name), environ)
    assert environ["TPU_ACCELERATOR_TYPE"] == kind and "XLA_FLAGS" not in environ


def test_devices_of_the_cpu_are_those_that_jax_has():
    assert len(devices_of(parse_target("cpu:4"))) == 4
    with pytest.raises(ValueError, match="expected 64 devices of the CPU, got 8: leave"):
        devices_of(parse_target("cpu:64"))


@pytest.mark.parametrize(
    ("name", "module", "fix"),
    [("v5p:2x2x1", "libtpu", r"\[tpu\]"), ("h100:1x1x1", "jax_plugins", r"\[cuda\]")],
)
def test_a_missing_compiler_is_told_in_one_sentence(name, module, fix):
    if importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    with pytest.raises(ValueError, match=f"--target={name}: expected the compiler .*{fix}") as e:
        devices_of(parse_target(name))
    assert "\n" not in str(e.value)
