"""Targets by name, and what of a device's memory a run may use."""

import os

import pytest

from rl.targets.table import KINDS, parse_target


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
        ("v5p:2x2", "expected a topology of 3 positive number(s) behind 'v5p:', got '2x2'"),
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


def test_every_kind_but_the_cpu_has_its_makers_figures():
    assert {name for name, kind in KINDS.items() if kind.figures is None} == {"cpu"}
    assert all(k.slice_name for k in KINDS.values() if k.platform == "tpu")
