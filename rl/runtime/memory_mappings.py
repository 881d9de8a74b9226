"""A limit of Linux that compiled programs run into: memory mappings of one process.

On CPU every compiled program takes some, and where there are no more XLA ends the process.
"""

from __future__ import annotations

from pathlib import Path

LIMIT = Path("/proc/sys/vm/max_map_count")
HELD = Path("/proc/self/maps")
SPARE = 0.9  # of the limit: compilation needs some for itself


class TooManyMappings(RuntimeError):
    """The next programs would not fit."""


def check(progress: str) -> None:
    """Raise TooManyMappings, saying how to mend it, where nearly all are in use."""
    if not LIMIT.is_file():
        return
    limit = int(LIMIT.read_text(encoding="ascii"))
    held = HELD.read_bytes().count(b"\n")
    if held > SPARE * limit:
        raise TooManyMappings(
            f"{progress}, and this process holds {held:,} of the {limit:,} memory mappings that "
            f"Linux allows one (vm.max_map_count): XLA would crash. Allow more (sysctl -w "
            f"vm.max_map_count={4 * limit}), or compile fewer buckets: a larger "
            "Engine.min_positions, min_slots or min_nodes, a smaller Engine.max_nodes"
        )
