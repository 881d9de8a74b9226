"""Devices that only a topology describes, and what is said where there is no compiler for them."""

import sys

import pytest

from rl.targets.table import parse_target
from rl.targets.topologies import devices_of, prepare


def test_the_cpu_gets_as_many_devices_as_the_target_has():
    environ = {"XLA_FLAGS": "--xla_force_host_platform_device_count=3 --xla_other=1"}
    prepare(parse_target("cpu:8"), environ)
    assert environ["XLA_FLAGS"] == "--xla_other=1 --xla_force_host_platform_device_count=8"
    assert environ["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize(
    ("name", "kind"),
    [("v5p:2x2x4", "v5p-32"), ("v5e:4x4", "v5litepod-16"), ("v6e:4x4", "v6e-16")],
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
    ("name", "module", "mend"),
    [("v5p:2x2x1", "libtpu", r"\[tpu\]"), ("h100:1x1x1", "jax_plugins", r"\[cuda\]")],
)
def test_a_missing_compiler_is_told_in_one_sentence(name, module, mend):
    if module in sys.modules or _is_installed(module):
        pytest.skip(f"{module} is installed")
    with pytest.raises(ValueError, match=f"--target={name}: expected the compiler .*{mend}") as e:
        devices_of(parse_target(name))
    assert "\n" not in str(e.value)


def _is_installed(module):
    import importlib.util

    return importlib.util.find_spec(module) is not None
