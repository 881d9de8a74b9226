"""Programs compiled side by side: who is told, and what a failure does."""

from __future__ import annotations

import threading

import pytest

from reprise.rl.runtime import parallel_compile
from reprise.rl.runtime.parallel_compile import TooManyMappings, check_mappings, compile_all


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


def test_a_failed_compilation_ends_all_of_them():
    with pytest.raises(ValueError, match="no such operation"):
        compile_all([Program(), Program(ValueError("no such operation")), Program()], 3)


def test_a_progress_callback_may_end_compilation():
    def stop(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_all([Program() for _ in range(20)], 20, stop)


def test_programs_that_do_not_fit_are_named(monkeypatch):
    def full(progress: str) -> None:
        raise TooManyMappings(progress)

    monkeypatch.setattr(parallel_compile, "check_mappings", full)
    with pytest.raises(TooManyMappings, match="2 of 2 programs"):
        compile_all([Program(), Program()], 2)


def test_held_mappings_are_compared_with_the_limit(tmp_path, monkeypatch):
    limit, held = tmp_path / "limit", tmp_path / "maps"
    monkeypatch.setattr(parallel_compile, "LIMIT", limit)
    monkeypatch.setattr(parallel_compile, "HELD", held)
    check_mappings("3 of 9 programs are compiled")  # a system without such a limit
    limit.write_text("100\n")
    held.write_text("a mapping\n" * 90)
    check_mappings("3 of 9 programs are compiled")
    held.write_text("a mapping\n" * 91)
    with pytest.raises(TooManyMappings, match=r"3 of 9 .* 91 of the 100 .*max_map_count=400"):
        check_mappings("3 of 9 programs are compiled")


def test_this_process_holds_few_mappings():
    check_mappings("nothing is compiled")
