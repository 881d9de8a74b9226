"""`import rl` adds our modules to the standard module `sched`, wherever the project is installed.

Tried in fresh virtual environments, one with the wheel and one with an editable install, and in a
checkout that is not installed.
"""

from __future__ import annotations

import sys
import venv
from pathlib import Path

import pytest
from installed import execute, install_into, site_packages

ROOT = Path(__file__).parents[1]
# Prints the folder of our modules, after a check of the standard module's names.
WHERE = """
import rl, sched, sys
import sched.protocol
assert sched.Event.__module__ == "sched" and "jax" not in sys.modules
assert sched.time and sched.heapq and sched.threading and sched._sentinel, "private names"
print(*sched.__path__)
"""
USE = """
import importlib, rl, sched
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


@pytest.fixture(scope="module", params=["wheel", "editable"])
def python_and_home(request, tmp_path_factory, checkout_copy, wheels):
    """A Python with the project installed, and the folder that our modules must come from."""
    folder = tmp_path_factory.mktemp(request.param)
    python = install_into(folder, wheels[request.param])
    return python, site_packages(folder) if request.param == "wheel" else checkout_copy


def assert_ours(printed: str, home: Path) -> None:
    assert Path(printed).samefile(home / "sched"), f"expected sched of {home}, got {printed}"


@pytest.mark.parametrize("flags", [[], ["-I"], ["-OO"]], ids=str)
def test_both_modules_work_in_any_folder(python_and_home, flags, tmp_path):
    python, home = python_and_home
    assert_ours(execute([python, *flags, "-c", WHERE], Path("/")), home)
    assert_ours(execute([python, *flags, "-c", WHERE], tmp_path), home)


def test_the_standard_module_works_and_its_events_pickle(python_and_home, tmp_path):
    python, _ = python_and_home
    execute([python, "-c", USE], tmp_path)
    is_standard = "import rl, sched, os; assert os.path.samefile(sched.__file__, os.path.join("
    is_standard += "os.path.dirname(os.__file__), 'sched.py')), sched.__file__"
    execute([python, "-c", is_standard], tmp_path)


def test_a_standard_module_imported_earlier_is_extended(python_and_home, tmp_path):
    python, home = python_and_home
    first = "import sched as first\n" + WHERE + "assert sched is first\n"
    assert_ours(execute([python, "-c", first], tmp_path), home)


def test_a_file_of_that_name_in_the_current_folder_is_in_nobodys_way(python_and_home, tmp_path):
    python, home = python_and_home
    (tmp_path / "sched.py").write_text("")
    code = "import rl, sched.protocol\nprint(*sched.__path__)"
    assert_ours(execute([python, "-c", code], tmp_path), home)


def test_without_rl_an_installed_standard_module_is_alone(python_and_home, tmp_path):
    """Documented: outside of a checkout, `import rl` comes first."""
    python, _ = python_and_home
    with pytest.raises(AssertionError, match="not a package"):
        execute([python, "-c", "import sched.protocol"], tmp_path)


def test_in_a_checkout_that_is_not_installed_both_work(checkout_copy, tmp_path):
    venv.EnvBuilder(with_pip=False, symlinks=True).create(tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    for code in (WHERE, WHERE.replace("import rl, ", "import ")):  # here `rl` need not come first
        assert_ours(execute([python, "-c", code], checkout_copy), checkout_copy)
    execute([python, "-c", USE], checkout_copy)
    # a folder on the path after the standard library
    late = f"import sched, sys; sys.path.append({str(checkout_copy)!r})\n"
    assert_ours(execute([python, "-c", late + WHERE], tmp_path), checkout_copy)


def test_never_half_of_two_checkouts(make_checkout_copy, wheels, tmp_path):
    """In a second checkout all four packages come from there, in spite of the installed one."""
    python = install_into(tmp_path / "env", wheels["editable"])
    second = make_checkout_copy(tmp_path / "second")
    code = "import models, rl, sched, spec\nfor m in models, rl, sched, spec: print(*m.__path__)"
    homes = {Path(line).parent for line in execute([python, "-c", code], second).split()}
    assert homes == {second}


def test_sched_needs_no_jax():
    """Every module of `sched` imports if jax and our other packages are absent."""
    code = """
import importlib, pkgutil, sys
for name in ("jax", "jaxlib", "models", "spec", "rl"):
    sys.modules[name] = None
import sched
for module in pkgutil.walk_packages(sched.__path__, "sched."):
    importlib.import_module(module.name)
"""
    execute([sys.executable, "-c", code], ROOT)
    with pytest.raises(AssertionError, match="jax"):
        execute([sys.executable, "-c", code + "\nimport jax"], ROOT)
