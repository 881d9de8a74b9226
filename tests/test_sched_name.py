"""Our `sched` wins over the standard library's wherever the project is installed.

Tried in fresh virtual environments, one with the wheel and one with an editable
install, and in the interpreter that runs the tests.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

WHERE = "import sched; print(sched.__file__)"
USE = """
import sched
ran = []
queue = sched.scheduler(timefunc=lambda: 0, delayfunc=lambda s: None)
event = queue.enter(0, 1, ran.append, ("b",))
queue.enter(0, 0, ran.append, ("a",))
assert isinstance(event, sched.Event) and event.priority == 1, event
queue.run()
assert ran == ["a", "b"], ran
from sched import Event, scheduler
from sched import *
assert sched.Event is Event and Event.__module__ == "sched"
assert "sched" in sys.modules and hasattr(sched, "__path__")
"""


def execute(command: list[str | Path], cwd: Path) -> str:
    """Standard output of a command that must succeed and complain of nothing."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST"))}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr, done.stderr
    return done.stdout.strip()


def install_into(folder: Path, wheel: Path) -> Path:
    """A fresh virtual environment that holds `wheel` and nothing else; its Python."""
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site_packages(folder))
    return folder / "bin" / "python"


def site_packages(folder: Path) -> Path:
    (found,) = folder.glob("lib/python*/site-packages")
    return found


@pytest.fixture(scope="module", params=["wheel", "editable", "running"])
def python_and_home(request, tmp_path_factory, checkout_copy, build_wheel):
    """A Python with the project installed, and the folder that `sched` must come from."""
    if request.param == "running":
        require_installed()
        return Path(sys.executable), None
    folder = tmp_path_factory.mktemp(request.param)
    python = install_into(folder, build_wheel(checkout_copy, request.param))
    return python, site_packages(folder) if request.param == "wheel" else checkout_copy


def require_installed() -> None:
    try:
        importlib.metadata.distribution("reprise")
    except importlib.metadata.PackageNotFoundError:
        pytest.fail(
            f"expected the project to be installed for {sys.executable}, got no such package; "
            "mend: run `make test`, or `pip install -c constraints.txt -e '.[dev]'` here"
        )


def assert_ours(found: str, home: Path | None) -> None:
    path = Path(found)
    assert path.name == "__init__.py" and path.parent.name == "sched", found
    if home is not None:
        assert path.parent.parent.samefile(home), f"expected sched of {home}, got {found}"


@pytest.mark.parametrize("flags", [[], ["-I"], ["-E"], ["-P"], ["-OO"]], ids=str)
def test_ours_wins_from_any_folder(python_and_home, flags, tmp_path):
    python, home = python_and_home
    assert_ours(execute([python, *flags, "-c", WHERE], Path("/")), home)
    assert_ours(execute([python, *flags, "-c", WHERE], tmp_path), home)


def test_ours_wins_over_a_file_and_a_folder_of_that_name(python_and_home, tmp_path):
    python, home = python_and_home
    (tmp_path / "sched.py").write_text("")
    assert_ours(execute([python, "-c", WHERE], tmp_path), home)
    (tmp_path / "sched").mkdir()
    (tmp_path / "sched" / "__init__.py").write_text("")
    assert_ours(execute([python, "-c", WHERE], tmp_path), home)


def test_ours_wins_in_a_script_and_in_a_child_process(python_and_home, tmp_path):
    python, home = python_and_home
    script = tmp_path / "script.py"
    script.write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {WHERE!r}])")
    assert_ours(execute([python, script], Path("/")), home)


def test_the_standard_names_work(python_and_home, tmp_path):
    python, _ = python_and_home
    execute([python, "-c", "import sys" + USE], tmp_path)


def test_the_standard_module_imported_earlier_is_forgotten(checkout_copy, build_wheel, tmp_path):
    python = install_into(tmp_path / "env", build_wheel(checkout_copy, "wheel"))
    (site_packages(tmp_path / "env") / "aaa.pth").write_text("import sched\n")
    assert_ours(execute([python, "-c", WHERE], tmp_path), site_packages(tmp_path / "env"))


def test_without_the_hook_the_standard_module_wins(checkout_copy, build_wheel, tmp_path):
    """The fault that these tests are for is real, and they see it."""
    python = install_into(tmp_path / "env", build_wheel(checkout_copy, "wheel"))
    (site_packages(tmp_path / "env") / "reprise-sched.pth").unlink()
    with pytest.raises(AssertionError):
        assert_ours(execute([python, "-c", WHERE], tmp_path), None)


def test_a_checkout_that_is_gone_breaks_nothing(make_checkout_copy, build_wheel, tmp_path):
    checkout = make_checkout_copy(tmp_path / "checkout")
    python = install_into(tmp_path / "env", build_wheel(checkout, "editable"))
    assert_ours(execute([python, "-c", WHERE], tmp_path), checkout)
    checkout.rename(tmp_path / "moved")
    assert execute([python, "-c", WHERE], tmp_path).endswith("sched.py")


def test_never_half_of_two_checkouts(make_checkout_copy, checkout_copy, build_wheel, tmp_path):
    """In a second checkout all four packages come from there, in spite of the installed one."""
    python = install_into(tmp_path / "env", build_wheel(checkout_copy, "editable"))
    second = make_checkout_copy(tmp_path / "second")
    code = "import models, rl, sched, spec\nfor m in models, rl, sched, spec: print(m.__file__)"
    homes = {Path(line).parent.parent for line in execute([python, "-c", code], second).split()}
    assert homes == {second}


@pytest.mark.parametrize("how", ["bare", "-m"])
def test_ours_wins_under_pytest(how, tmp_path):
    require_installed()
    (tmp_path / "test_it.py").write_text(
        "import sched\ndef test_it(): assert hasattr(sched, '__path__') and sched.scheduler\n"
    )
    python = Path(sys.executable)
    command = [python.with_name("pytest")] if how == "bare" else [python, "-m", "pytest"]
    assert "1 passed" in execute([*command, "-q", "-p", "no:cacheprovider"], tmp_path)


def test_sched_needs_no_jax(tmp_path):
    """Every module of `sched` imports where jax and our other packages cannot be."""
    require_installed()
    code = """
import importlib, pkgutil, sys
for name in ("jax", "jaxlib", "models", "spec", "rl"):
    sys.modules[name] = None
import sched
for module in pkgutil.walk_packages(sched.__path__, "sched."):
    importlib.import_module(module.name)
"""
    execute([sys.executable, "-c", code], tmp_path)
    with pytest.raises(AssertionError, match="jax"):
        execute([sys.executable, "-c", code + "\nimport jax"], tmp_path)
