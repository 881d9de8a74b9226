"""What every test runs under: virtual CPU devices, a compilation cache, no network.

All of it is environment variables set before jax is imported, so that programs
which a test starts inherit it. Single-device code runs on device 0 of the 8.
`REPRISE_TEST_PLATFORM=cuda` (or `tpu`) runs the suite on an accelerator;
`REPRISE_TEST_OPTIMIZED=1` has its programs compiled as a user's are.
"""

from __future__ import annotations

import collections
import gc
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import costs
import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).parents[1]
NUM_VIRTUAL_DEVICES = 8
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
# What tests run takes milliseconds to run and seconds to compile: XLA's optimizations
# of machine code, which change no test, are half of the suite's time.
QUICK_COMPILATION = [
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
]
_JAXLIB = tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2]))
if _JAXLIB < (0, 12):  # which has no other emitters
    QUICK_COMPILATION.append("--xla_cpu_use_fusion_emitters=false")

if "jax" in sys.modules:
    raise RuntimeError(
        "expected tests/conftest.py to run before jax is imported, got jax imported already; "
        "fix: disable the pytest plugin that imports it (-p no:NAME)"
    )
os.environ["JAX_PLATFORMS"] = os.environ.get("REPRISE_TEST_PLATFORM", "cpu")
flags = [f"{DEVICE_COUNT_FLAG}={NUM_VIRTUAL_DEVICES}"]
if os.environ["JAX_PLATFORMS"] == "cpu" and not os.environ.get("REPRISE_TEST_OPTIMIZED"):
    flags += QUICK_COMPILATION
given = os.environ.get("XLA_FLAGS", "").split()
names = {flag.partition("=")[0] for flag in given}
os.environ["XLA_FLAGS"] = " ".join(given + [f for f in flags if f.partition("=")[0] not in names])
# Where each operation of a program was written is a thirtieth of the time to compile it.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")

# Tracing makes many objects and hardly any cycles: looking for these is a tenth of its time.
gc.set_threshold(200_000, 50, 100)

hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_configure(config: pytest.Config) -> None:
    """Compiled programs outlive the run and are shared by the workers of pytest-xdist."""
    cache = getattr(config, "cache", None)
    if cache is not None:  # -p no:cacheprovider
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache.mkdir("jax")))
        # most programs here compile in milliseconds, and are read in fewer
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    costs.install(config)


# Folders whose files share policies and engines, the longest first.
SHARED = ("tests/parity", "tests/rl/learner")
# Files in them that share nothing with another one.
ALONE = (
    "tests/parity/test_arrays_of_processes.py",
    "tests/parity/test_combinations.py",
    "tests/parity/test_joint_law.py",
    "tests/parity/test_parity_processes.py",
    "tests/parity/test_same_bits.py",
    "tests/parity/test_same_bits_accelerators.py",
)


def _unit(nodeid: str) -> str:
    """Return what runs on one worker of pytest-xdist: a folder of these, or else a file."""
    file = nodeid.partition("::")[0]
    folder = file.rpartition("/")[0]
    return folder if folder in SHARED and file not in ALONE else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Each shape is on one worker, which traces and compiles it once."""

    class ByUnit(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _unit(nodeid)

    return ByUnit(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first: the last to start is what all wait for."""
    slow = collections.Counter(_unit(x.nodeid) for x in items if x.get_closest_marker("slow"))
    slow.update({folder: len(items) - i for i, folder in enumerate(SHARED)})
    items.sort(key=lambda x: -slow[_unit(x.nodeid)])


PACKAGED = ("reprise", "models", "spec", "sched", "rl", "configs", "policies")


@pytest.fixture(scope="session")
def make_checkout_copy() -> Callable[[Path], Path]:
    """Copies what an install is made of into a new folder."""

    def copy(folder: Path) -> Path:
        folder.mkdir()
        for name in (*PACKAGED, "requirements"):
            ignored = shutil.ignore_patterns("__pycache__")
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
        for path in ROOT.iterdir():
            if path.is_file() and path.suffix in (".toml", ".md", ".py", ".txt", ""):
                shutil.copy(path, folder)
        return folder

    return copy


@pytest.fixture(scope="session")
def checkout_copy(make_checkout_copy, tmp_path_factory) -> Path:
    return make_checkout_copy(tmp_path_factory.mktemp("copy") / "checkout")


@pytest.fixture(scope="session")
def wheels(tmp_path_factory, checkout_copy) -> dict[str, Path]:
    """The wheels of the copied checkout, `wheel` and `editable`, by the back end's own hooks."""
    folders = {kind: tmp_path_factory.mktemp(f"built_{kind}") for kind in ("wheel", "editable")}
    code = "from hatchling.build import build_editable, build_wheel\n"
    code += "".join(f"build_{kind}({str(folder)!r})\n" for kind, folder in folders.items())
    command = [sys.executable, "-I", "-c", code]
    done = subprocess.run(command, cwd=checkout_copy, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    wheels = {}
    for kind, folder in folders.items():
        (wheels[kind],) = folder.glob("*.whl")
    return wheels
