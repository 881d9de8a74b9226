"""Programs compiled side by side: who is told, and what a failure does."""

from __future__ import annotations

import threading

import pytest

from rl.runtime import memory_mappings
from rl.runtime.parallel_compile import compile_all


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
    compile_all(programs, 20, lambda *counts: heard.append((threading.get_ident(), *counts)))
    assert all(program.compiled.is_set() for program in programs)
    assert {(thread, total) for thread, _, total in heard} == {(threading.get_ident(), 20)}
    counts = [done for _, done, _ in heard]
    assert counts[0] == 0 and counts[-1] == 20 and counts == sorted(set(counts))


def test_programs_are_compiled_while_others_are_lowered():
    first = Program()

    def lowered():
        yield first
        assert first.compiled.wait(timeout=60)
        yield Program()

    compile_all(lowered(), 2)


def test_a_program_that_does_not_compile_ends_it():
    with pytest.raises(ValueError, match="no such operation"):
        compile_all([Program(), Program(ValueError("no such operation")), Program()], 3)


def test_what_is_told_may_end_it():
    def stop(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_all([Program() for _ in range(20)], 20, stop)


def test_programs_that_do_not_fit_are_named(monkeypatch):
    def full(progress: str) -> None:
        raise memory_mappings.TooManyMappings(progress)

    monkeypatch.setattr(memory_mappings, "check", full)
    with pytest.raises(memory_mappings.TooManyMappings, match="2 of 2 programs"):
        compile_all([Program(), Program()], 2)
