"""Memory that was given back to glibc goes back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

from reprise.rl.runtime import host_memory

GROWN = """
import sys, threading
from reprise.rl.runtime import host_memory

def rss_mib():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

def work(held):  # pieces too small for a mapping of their own, freed out of order
    pieces = [bytes(30_000) for _ in range(300)]
    held.append(pieces[-1])

if sys.argv[1] == "bound":
    host_memory.bound_arenas()
before, held = rss_mib(), []
for _ in range(8):
    threads = [threading.Thread(target=work, args=(held,)) for _ in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    if sys.argv[1] == "bound":
        host_memory.give_back()
print(rss_mib() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's")
def test_threads_leave_less_memory_behind():
    def grown_mib(mode: str) -> float:
        command = [sys.executable, "-c", GROWN, mode]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    if host_memory._glibc("malloc_trim") is None:
        pytest.skip("another C library")
    assert grown_mib("bound") < max(grown_mib("as it is"), 4.0)


def test_nothing_is_done_without_glibc(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    host_memory.bound_arenas()
    host_memory.give_back()
