"""What is installed, from which pins, by which commands."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
PIN = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*==[0-9][A-Za-z0-9.]*(; python_version [<>=]+ '3\.\d+')?"
)


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def pin_lines() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def pins(python: str) -> dict[str, str]:
    """Package → version of the lines that apply to a Python."""
    found: dict[str, str] = {}
    for requirement in map(Requirement, pin_lines()):
        if applies(requirement, python):
            name = canonicalize_name(requirement.name)
            assert name not in found, f"{name} is pinned twice for Python {python}"
            found[name] = str(requirement.specifier).removeprefix("==")
    return found


def applies(requirement: Requirement, python: str, extra: str = "") -> bool:
    marker = requirement.marker
    return marker is None or marker.evaluate({"python_version": python, "extra": extra})


def direct_requirements() -> list[Requirement]:
    extras = project()["optional-dependencies"]
    return [Requirement(line) for line in [*project()["dependencies"], *extras["dev"]]]


def needed(requirements: list[Requirement]) -> Iterator[str]:
    """Names of everything that these requirements bring along in this environment."""
    stack, seen = list(requirements), set()
    while stack:
        requirement = stack.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        yield key[0]
        for line in importlib.metadata.requires(requirement.name) or ():
            inner = Requirement(line)
            if inner.marker is None or any(
                inner.marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)
            ):
                stack.append(inner)


def test_constraints_are_names_and_versions_only():
    odd = [line for line in pin_lines() if not PIN.fullmatch(line)]
    assert not odd, f"expected NAME==VERSION[; python_version …], got {odd}"


@pytest.mark.parametrize("python", PYTHONS)
def test_every_requirement_has_a_pin_that_satisfies_it(python):
    pinned = pins(python)
    for requirement in direct_requirements():
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} against {version}"


def test_the_two_worlds_of_jax():
    assert pins("3.11")["jax"].startswith("0.10.") and pins("3.13")["jax"].startswith("0.12.")
    for python in PYTHONS:
        assert pins(python)["jax"] == pins(python)["jaxlib"]
        assert "torch" not in pins(python) and "flax" not in pins(python)


def test_what_the_requirements_bring_along_is_pinned_too():
    brought = set(needed(direct_requirements()))
    assert {"jaxlib", "tokenizers", "sympy"} <= brought  # the walk goes past the first step
    assert not brought - set(pins("3.11")), "mend: add these to constraints.txt"


def test_the_wheel_holds_the_packages_and_nothing_else(build_wheel, checkout_copy):
    with zipfile.ZipFile(build_wheel(checkout_copy, "wheel")) as wheel:
        names = [name for name in wheel.namelist() if ".dist-info/" not in name]
        info = {name.partition(".dist-info/")[2] for name in wheel.namelist()}
    packages = {"models", "spec", "sched", "rl"}
    tops = {name.partition("/")[0] for name in names}
    hook = {"_reprise_sched.py", "reprise-sched.pth"}
    assert packages | hook <= tops <= packages | hook | {"configs", "policies"}
    assert "licenses/LICENSE" in info and "METADATA" in info
    for folder in ("configs", "policies"):  # data, found beside the packages
        files = [p for p in (checkout_copy / folder).rglob("*") if p.is_file()]
        assert {p.relative_to(checkout_copy).as_posix() for p in files} <= set(names)


def test_an_editable_install_points_at_the_checkout(build_wheel, checkout_copy):
    with zipfile.ZipFile(build_wheel(checkout_copy, "editable")) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        assert names == {"_reprise.pth", "_reprise_sched.py", "reprise-sched.pth"}
        assert Path(wheel.read("_reprise.pth").decode().strip()).samefile(checkout_copy)


def make_dry_run(target: str, *arguments: str, at: Path) -> str:
    """The commands that make would run where nothing is installed yet."""
    outer = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHON", "JOBS", "ARGS")
    env = {name: value for name, value in os.environ.items() if name not in outer}
    makefile = ["make", "--no-print-directory", "-n", "-f", str(ROOT / "Makefile")]
    command = [*makefile, target, *arguments]
    done = subprocess.run(command, cwd=at, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("target", "last"),
    [("train", "-m rl.train --dry_run"), ("test", "-m pytest -n 2 --dist worksteal --dry_run")],
)
def test_make_sets_up_before_it_runs(target, last, checkout_copy):
    commands = make_dry_run(target, "ARGS=--dry_run", at=checkout_copy)
    lines = commands.splitlines()
    assert lines[-1].endswith(last)
    set_up = commands.index("-m venv .venv")
    assert set_up < commands.index("-c constraints.txt") < commands.index("-e '.[dev]'")
    assert commands.index("-e '.[dev]'") < commands.index(last)
    if target == "test":
        for check in ("-m ruff check .", "-m ruff format --check .", "-m mypy"):
            assert check in commands


def test_make_sets_up_once(make_checkout_copy, tmp_path):
    checkout = make_checkout_copy(tmp_path / "checkout")
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / ".installed").touch()
    assert "-m venv" not in make_dry_run("train", at=checkout)
    os.utime(checkout / ".venv" / ".installed", (0, 0))  # older than the pins
    assert "-m venv" in make_dry_run("train", at=checkout)


def test_continuous_integration_calls_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text(encoding="utf-8").rstrip().endswith("exec make test")
