"""Programs compiled side by side: who is told, and what a failure does."""

from __future__ import annotations

import threading

import pytest

from rl import memory_mappings
from rl.compiling import compile_all


class Program:
    """Stands in for a lowered step."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.compiled = error, threading.Event()

    def compile(self) -> None:
        if self.error is not None:
            raise self.error
        self.compiled.set()


def test_each_program_is_compiled_and_counted_in_this_thread():
    programs, heard = [Program() for _ in range(20)], []
    compile_all(programs, lambda *counts: heard.append((threading.get_ident(), *counts)))
    assert all(program.compiled.is_set() for program in programs)
    assert heard == [(threading.get_ident(), done, 20) for done in range(1, 21)]


def test_a_program_that_does_not_compile_ends_it():
    with pytest.raises(ValueError, match="no such operation"):
        compile_all([Program(), Program(ValueError("no such operation")), Program()])


def test_what_is_told_may_end_it():
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_all([Program() for _ in range(20)], stop)


def test_programs_that_do_not_fit_are_named(monkeypatch):
    def full(progress: str) -> None:
        raise memory_mappings.TooManyMappings(progress)

    monkeypatch.setattr(memory_mappings, "check", full)
    with pytest.raises(memory_mappings.TooManyMappings, match="1 of 2 programs"):
        compile_all([Program(), Program()])
