"""Tables of round seconds that runs share, in the user folder of compiled programs.

A file is plain JSON, named by a digest of the settings, the machine and the code; nothing in it is
executed.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from reprise.models.folder import Folder
from reprise.rl.runtime import devices
from reprise.rl.runtime.run_files import code_digest
from reprise.spec.round_times import RoundTimes

MAX_BYTES = 2**20
LIBRARIES = "jax", "jaxlib", "numba", "numpy"


def folder() -> Path | None:
    """Return the folder of compiled programs; None if programs are not kept on this host."""
    path = jax.config.jax_compilation_cache_dir
    if not path or "://" in path or not jax.config.jax_enable_compilation_cache:
        return None
    return Path(path)


def read(
    where: Path, settings: Mapping[str, Any], say: Callable[[str], object]
) -> RoundTimes | None:
    """Return the table for these settings, this machine and this code; None if not found.

    A file with other content is reported to `say` and ignored.
    """
    settings = {**settings, **_machine()}
    name = _name(settings)
    try:
        cache_folder = Folder(where)
        if not cache_folder.exists(name):
            return None
        content = json.loads(cache_folder.read(name, MAX_BYTES))
        if content["settings"] != settings:
            raise ValueError("it was made for something else")
        table = RoundTimes.from_rows(content["rows"])
        if table.rounds.keys() != {tuple(bucket) for bucket in settings["buckets"]}:
            raise ValueError("it has other rounds")
        return table
    except FileNotFoundError:
        return None
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        say(f"ignoring {where / name} ({error}): rounds are measured anew")
        return None


def write(
    where: Path, times: RoundTimes, settings: Mapping[str, Any], say: Callable[[str], object]
) -> None:
    """Keep a table for other runs; replace an older table atomically."""
    settings = {**settings, **_machine()}
    content = {"settings": settings, "rows": times.rows()}
    name = _name(settings)
    temporary = f".{uuid.uuid4().hex}.tmp"  # another run may write as well
    try:
        cache_folder = Folder(where, create=True)
        with cache_folder.create(temporary) as file:
            file.write(json.dumps(content).encode() + b"\n")
        cache_folder.rename(temporary, name)
    except OSError as error:
        say(f"seconds of rounds are not kept for other runs ({error})")


def _name(settings: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return f"round_times-{digest[:32]}.json"


def _machine() -> dict[str, Any]:
    """Return the properties of machine and code that seconds depend on."""
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
        "flags": os.environ.get("XLA_FLAGS", ""),
        "versions": devices.versions(LIBRARIES),
        "code": code_digest(),
    }
