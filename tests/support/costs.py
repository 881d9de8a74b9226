"""Costs of each test: programs compiled, seconds of tracing, compiling and child processes.

    REPRISE_TEST_COSTS=costs.jsonl .venv/bin/python -m pytest tests/rl/engine
    python -m tests.support.costs costs.jsonl

The first command appends one line of JSON per test; the second prints sums per file and the
tests that take longest.
"""

from __future__ import annotations

import collections
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SECONDS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace_s",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower_s",
    "/jax/core/compile/backend_compile_duration": "compile_s",  # reads of the cache included
}


class Costs:
    """A pytest plugin that appends what each test cost to a file."""

    def __init__(self, path: Path) -> None:
        import jax.monitoring  # conftest.py sets the environment first

        self.path = path
        self.sums = collections.defaultdict[str, float](float)
        jax.monitoring.register_event_duration_secs_listener(self._add_seconds)
        jax.monitoring.register_event_listener(self._count)

    def _add_seconds(self, event: str, seconds: float, **_: object) -> None:
        name = SECONDS.get(event)
        if name is not None:
            self.sums[name] += seconds
        if name == "compile_s":
            self.sums["programs"] += 1

    def _count(self, event: str, **_: object) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            self.sums["programs_read"] += 1

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.sums.clear()
        start_s = time.perf_counter()
        own_s = time.process_time()
        children_s = _children_s()
        result = yield
        line = {
            "test": item.nodeid,
            "wall_s": time.perf_counter() - start_s,
            "cpu_s": time.process_time() - own_s,
            "children_s": _children_s() - children_s,
            **self.sums,
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return result


def _children_s() -> float:
    """Return CPU seconds of child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def install(config: pytest.Config) -> None:
    path = os.environ.get("REPRISE_TEST_COSTS")
    if path:
        config.pluginmanager.register(Costs(Path(path).absolute()))


COLUMNS = (
    "wall_s", "cpu_s", "children_s", "trace_s", "lower_s", "compile_s", "programs", "programs_read",
)  # fmt: skip


def _print_table(rows: dict[str, collections.Counter[str]], count: int) -> None:
    print("  ".join(f"{name:>10}" for name in COLUMNS))
    longest = sorted(rows, key=lambda name: -rows[name]["wall_s"])
    for name in longest[:count]:
        print("  ".join(f"{rows[name][column]:10.1f}" for column in COLUMNS), f" {name}")
    print()


def main(path: Path, count: int = 60) -> None:
    tests: dict[str, collections.Counter[str]] = {}
    files: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for line in path.read_text().splitlines():
        row = json.loads(line)
        name = row.pop("test")
        tests[name] = collections.Counter(row)
        files[name.partition("::")[0]].update(row)
        files["all"].update(row)
    _print_table(files, count)
    _print_table(tests, count)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
