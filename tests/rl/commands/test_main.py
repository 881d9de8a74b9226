"""`reprise COMMAND`: names lead to the programs, and a wrong one to their list."""

from __future__ import annotations

import importlib

import pytest

import reprise
from reprise.rl.commands import main
from reprise.rl.runtime.exit_codes import EXIT_USAGE


def test_version_and_help(capsys):
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"reprise {reprise.__version__}\n"
    assert main.main([]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in main.COMMANDS)


def test_a_wrong_name_shows_the_others(capsys):
    assert main.main(["trian"]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert "train, evaluate" in error and error.endswith("got 'trian'. Did you mean train?\n")


@pytest.mark.parametrize("name", main.COMMANDS)
def test_each_command_is_a_program(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main.main([name, "--help"])
    assert ended.value.code == 0 and f"rl.{name}" in capsys.readouterr().out
    assert importlib.util.find_spec(f"reprise.rl.{name}") is not None
