"""Bounds on the freed memory that the C library keeps; without glibc this does nothing.

Every save runs in new threads, and each of up to eight arenas per core keeps its peak size, so
that a run would grow over hundreds of saves. Two arenas, trimmed after each save, prevent this.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys

_ARENAS = 2
_FILE_THREADS = 16
_M_ARENA_MAX = -8  # of malloc.h
_log = logging.getLogger(__name__)


def bound_arenas() -> None:
    """Bound the arenas of future threads; call this before any device is used."""
    if "MALLOC_ARENA_MAX" not in os.environ and (mallopt := _glibc("mallopt")):
        mallopt(_M_ARENA_MAX, _ARENAS)


def bound_file_threads() -> None:
    """Bound the files that tensorstore writes concurrently, and so its threads of 140 KiB each.

    Orbax sets 128 and has no option. This does nothing if the Orbax version sets it elsewhere.
    """
    try:
        from orbax.checkpoint._src.serialization import tensorstore_utils

        tensorstore_utils._BASE_TS_CONTEXT["file_io_concurrency"]["limit"] = _FILE_THREADS
    except (ImportError, AttributeError, KeyError, TypeError):
        _log.debug("this Orbax has no limit of file threads that could be set")


def give_back() -> None:
    """Return free memory to the system, which takes some milliseconds."""
    if trim := _glibc("malloc_trim"):
        trim(0)


def _glibc(name: str) -> ctypes._NamedFuncPointer | None:
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), name, None)
