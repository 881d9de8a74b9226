"""The standard module `sched` has our modules too, wherever the project is installed.

Tried in fresh virtual environments, one with the wheel and one with an editable
install, and in the interpreter that runs the tests.
"""

from __future__ import annotations

import importlib.metadata
import sys
import venv
from pathlib import Path

import pytest
from installed import execute, install_into, site_packages

# The folder that `sched` has its modules from, after a look at those of the standard module.
WHERE = """
import sched, sys
import sched.protocol
assert sched.Event.__module__ == "sched" and "rl" not in sys.modules
assert sched.time and sched.heapq and sched.threading and sched._sentinel, "private names"
print(*sched.__path__)
"""
USE = """
import importlib, sched
ran = []
queue = sched.scheduler(timefunc=lambda: 0, delayfunc=lambda s: None)
event = queue.enter(0, 1, ran.append, ("b",))
queue.enter(0, 0, ran.append, ("a",))
assert isinstance(event, sched.Event) and event.priority == 1, event
queue.run()
assert ran == ["a", "b"], ran
from sched import Event, scheduler
from sched import *
assert sched.Event is Event
pickle = importlib.import_module("pickle")
event = event._replace(action=print)
assert pickle.loads(pickle.dumps(event)) == event
from sched.ledger import Ledger
"""


@pytest.fixture(scope="module", params=["wheel", "editable", "running"])
def python_and_home(request, tmp_path_factory, checkout_copy, build_wheel):
    """A Python with the project installed, and the folder that our modules must come from."""
    if request.param == "running":
        require_installed()
        return Path(sys.executable), None
    folder = tmp_path_factory.mktemp(request.param)
    python = install_into(folder, build_wheel(checkout_copy, request.param))
    return python, site_packages(folder) if request.param == "wheel" else checkout_copy


def require_installed() -> None:
    try:
        importlib.metadata.distribution("reprise-rl")
    except importlib.metadata.PackageNotFoundError:
        pytest.fail(
            f"expected the project to be installed for {sys.executable}, got no such package; "
            "mend: run `make test`, or `pip install -c constraints.txt -e '.[dev]'` here"
        )


def assert_ours(found: str, home: Path | None) -> None:
    path = Path(found)
    assert path.name == "sched" and (path / "protocol.py").is_file(), found
    if home is not None:
        assert path.parent.samefile(home), f"expected sched of {home}, got {found}"


@pytest.mark.parametrize("flags", [[], ["-I"], ["-E"], ["-P"], ["-OO"]], ids=str)
def test_both_modules_are_found_from_any_folder(python_and_home, flags, tmp_path):
    python, home = python_and_home
    assert_ours(execute([python, *flags, "-c", WHERE], Path("/")), home)
    assert_ours(execute([python, *flags, "-c", WHERE], tmp_path), home)


def test_both_win_over_a_file_and_a_folder_of_that_name(python_and_home, tmp_path):
    python, home = python_and_home
    (tmp_path / "sched.py").write_text("")
    assert_ours(execute([python, "-c", WHERE], tmp_path), home)
    (tmp_path / "sched").mkdir()
    (tmp_path / "sched" / "__init__.py").write_text("")
    assert_ours(execute([python, "-c", WHERE], tmp_path), home)


def test_both_modules_are_found_in_a_script_and_in_a_child_process(python_and_home, tmp_path):
    python, home = python_and_home
    script = tmp_path / "script.py"
    script.write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {WHERE!r}])")
    assert_ours(execute([python, script], Path("/")), home)


def test_the_standard_module_works_and_its_events_pickle(python_and_home, tmp_path):
    python, _ = python_and_home
    execute([python, "-c", USE], tmp_path)
    is_standard = "import sched, os; assert os.path.samefile(sched.__file__, os.path.join("
    is_standard += "os.path.dirname(os.__file__), 'sched.py')), sched.__file__"
    execute([python, "-c", is_standard], tmp_path)


def test_in_a_checkout_that_is_not_installed_both_work(checkout_copy, tmp_path):
    venv.EnvBuilder(with_pip=False, symlinks=True).create(tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    assert_ours(execute([python, "-c", WHERE], checkout_copy), checkout_copy)
    execute([python, "-c", USE], checkout_copy)
    # a folder of the path that comes after the standard library: importing rl extends `sched`
    late = f"import sched, sys; sys.path.append({str(checkout_copy)!r}); import rl\n"
    assert_ours(execute([python, "-c", late + WHERE.replace('"rl" not', '"rl"')], tmp_path), None)


@pytest.mark.parametrize("how", ["wheel", "editable"])
def test_a_standard_module_imported_earlier_is_extended(how, checkout_copy, build_wheel, tmp_path):
    python = install_into(tmp_path / "env", build_wheel(checkout_copy, how))
    folder = site_packages(tmp_path / "env")
    keep = "import sched; import sys; sys.first = sched"
    (folder / "aaa.pth").write_text(keep + "\n")
    same = "import sched, sys\nassert sched is sys.first and sched.scheduler is sys.first.scheduler"
    home = folder if how == "wheel" else checkout_copy
    assert_ours(execute([python, "-c", same + WHERE], tmp_path), home)


def test_installing_twice_changes_nothing(checkout_copy, build_wheel, tmp_path):
    """Python 3.15 may run both start-up files, and `import rl` imports the hook as well."""
    wheel = build_wheel(checkout_copy, "wheel")
    python = install_into(tmp_path / "env", wheel)
    code = """
import sched, sys, _reprise_sched
before, path, finders = sched, list(sched.__path__), list(sys.meta_path)
_reprise_sched.install()
import sched
assert sched is before and list(sched.__path__) == path and sys.meta_path == finders
"""
    execute([python, "-c", code], tmp_path)
    line = (site_packages(tmp_path / "env") / "reprise-sched.start").read_text().strip()
    module, function = line.split(":")
    execute([python, "-c", f"import {module}; {module}.{function}()"], tmp_path)


def test_without_the_hook_the_standard_module_is_alone(checkout_copy, build_wheel, tmp_path):
    """The fault that these tests are for is real, and they see it."""
    python = install_into(tmp_path / "env", build_wheel(checkout_copy, "wheel"))
    (site_packages(tmp_path / "env") / "reprise-sched.pth").unlink()
    with pytest.raises(AssertionError, match="not a package"):
        execute([python, "-c", WHERE], tmp_path)


def test_a_checkout_that_is_gone_breaks_nothing(make_checkout_copy, build_wheel, tmp_path):
    checkout = make_checkout_copy(tmp_path / "checkout")
    python = install_into(tmp_path / "env", build_wheel(checkout, "editable"))
    assert_ours(execute([python, "-c", WHERE], tmp_path), checkout)
    checkout.rename(tmp_path / "moved")
    plain = "import sched; print(hasattr(sched, '__path__'), sched.__file__)"
    found = execute([python, "-c", plain], tmp_path)
    assert found.startswith("False") and found.endswith("sched.py")


def test_never_half_of_two_checkouts(make_checkout_copy, checkout_copy, build_wheel, tmp_path):
    """In a second checkout all four packages come from there, in spite of the installed one."""
    python = install_into(tmp_path / "env", build_wheel(checkout_copy, "editable"))
    second = make_checkout_copy(tmp_path / "second")
    code = "import models, rl, sched, spec\nfor m in models, rl, sched, spec: print(*m.__path__)"
    homes = {Path(line).parent for line in execute([python, "-c", code], second).split()}
    assert homes == {second}


@pytest.mark.parametrize("how", ["bare", "-m"])
def test_both_modules_are_found_under_pytest(how, tmp_path):
    require_installed()
    (tmp_path / "test_it.py").write_text(
        "import sched.protocol\ndef test_it(): assert sched.time and sched.scheduler\n"
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
