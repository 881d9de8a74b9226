"""Names in user files: the form, imports, errors, and comparison with a protocol."""

from __future__ import annotations

import abc
import sys
from typing import Protocol

import pytest

from reprise.rl.runtime import user_files
from reprise.rl.runtime.user_files import (
    check_file,
    check_name,
    is_user_name,
    load_user_name,
    make_once,
    open_named,
    split_user_name,
)


class Thing(Protocol):
    @abc.abstractmethod
    def act(self, one: int, two: int) -> int: ...

    def rest(self) -> None:
        return

    @property
    def size(self) -> int: ...


class MakeThing(Protocol):
    def __call__(self, start: int, *, seed: int) -> Thing: ...


TABLE: dict[str, MakeThing] = {"short": lambda start, *, seed: None}
CLASS = """
class Mine:
    size = 1
    def __init__(self, start, seed=0): pass
    def act(self, one, two): return 0
    def rest(self): pass
"""


@pytest.fixture(autouse=True)
def imports(monkeypatch):
    """Takes back the folders that user files add to the path."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def mine(tmp_path):
    """Writes mine.py, and returns the path."""

    def made(text: str):
        path = tmp_path / "mine.py"
        path.write_text(text)
        return path

    return made


def test_the_form_of_a_name():
    assert is_user_name("mine.py:Mine") and is_user_name("/a b/c.d.py:f")
    for other in ("mine", "mine.py", "mine:f", "mine.py:", "mine.py:a b", "fixed:4", ":f", ""):
        assert not is_user_name(other), other


def test_a_path_starts_in_the_current_folder(mine, monkeypatch, tmp_path):
    path = mine(CLASS)
    monkeypatch.chdir(tmp_path)
    assert split_user_name("mine.py:Mine") == (path, "Mine")
    assert load_user_name("mine.py:Mine") is load_user_name(f"{path}:Mine"), "imported once"


def test_short_names_win_and_wrong_ones_name_the_nearest():
    assert open_named("A.b", "short", TABLE, MakeThing) is TABLE["short"]
    wanted = "A.b: expected a name of short or PATH.py:name, got 'shrt'; did you mean 'short'"
    with pytest.raises(ValueError, match=wanted):
        open_named("A.b", "shrt", TABLE, MakeThing)
    with pytest.raises(ValueError, match="expected b of one, two or PATH.py:name, got 'tow'"):
        check_name("b", "tow", ("one", "two"))
    check_name("b", "tow.py:x", ("one", "two"))


def test_absent_files_are_named_before_anything_runs(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"A\.b: there is no file .*no\.py \(for f\)"):
        open_named("A.b", f"{tmp_path}/no.py:f", TABLE, MakeThing)
    with pytest.raises(ValueError, match=r"A\.b: ~nosuchuser/x\.py:f: .*home"):
        check_file("A.b", "~nosuchuser/x.py:f")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nosuch", r"ModuleNotFoundError: .*nosuch.* \(at .*mine\.py:1\)"),
        ("1 +", r"SyntaxError: .*mine\.py:1"),
        ("raise SystemExit(3)", r"SystemExit: 3 \(at .*mine\.py:1\)"),
        ("Mine = 3", "expected Mine as a function or class, got int"),
        ("class Mind: pass", "no function or class 'Mine'; did you mean 'Mind'.*; it has Mind"),
        ("class Mine: pass", r"expected the parameters \(start, \*, seed\), got \(\)"),
        ("def Mine(start): pass", r"expected the parameters \(start, \*, seed\), got \(start\)"),
    ],
)
def test_errors_of_a_file_are_one_sentence_with_the_setting(mine, text, message):
    before = set(sys.modules)
    with pytest.raises(ValueError, match=rf"^A\.b: .*{message}") as error:
        open_named("A.b", f"{mine(text)}:Mine", TABLE, MakeThing)
    assert "\n" not in str(error.value)
    left = [name for name in set(sys.modules) - before if name.startswith("reprise_user_")]
    assert len(left) == ("import" not in text and "+" not in text and "raise" not in text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("size = 1", ""), "expected size of .*Thing, got a Mine without it: define it"),
        (("def rest(self): pass", ""), "expected rest of .*Thing, got a Mine without it"),
        (("one, two", "one"), r"Mine\.act: expected the parameters \(one, two\), got \(one\)"),
        (("seed=0): pass", "seed=0): 1 / 0"), r"Mine\(start, seed\) raised ZeroDivisionError"),
    ],
)
def test_what_a_name_makes_is_compared_with_a_protocol(mine, change, message):
    whole = mine(CLASS)
    make_once("A.b", "Mine", load_user_name(f"{whole}:Mine"), Thing, start=1, seed=2)
    path = whole.with_name("other.py")
    path.write_text(CLASS.replace(*change))
    make = open_named("A.b", f"{path}:Mine", TABLE, MakeThing)
    with pytest.raises(ValueError, match=message):
        make_once("A.b", f"{path}:Mine", make, Thing, start=1, seed=2)


def test_a_class_that_misses_an_abstract_method_is_refused(mine):
    text = f"from {__name__} import Thing\nclass Mine(Thing): pass"
    sys.modules.setdefault(__name__, sys.modules[Thing.__module__])
    make = load_user_name(f"{mine(text)}:Mine")
    with pytest.raises(ValueError, match="abstract class Mine.*act.*methods of .*Thing"):
        make_once("A.b", "mine.py:Mine", make, Thing)


def test_files_of_two_folders_cannot_import_modules_of_one_name(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "beside_user_files.py").write_text("")
        (tmp_path / folder / "mine.py").write_text("import beside_user_files\ndef f(): pass")
    load_user_name(f"{tmp_path}/one/mine.py:f")
    with pytest.raises(ValueError, match="both have a module beside_user_files"):
        load_user_name(f"{tmp_path}/two/mine.py:f")
    del sys.modules["beside_user_files"]


def test_descriptions_of_files_name_their_paths(tmp_path):
    assert user_files.files_of([f"{tmp_path}/a.py:f"]) == {
        f"file of {tmp_path}/a.py:f": f"{tmp_path}/a.py"
    }
