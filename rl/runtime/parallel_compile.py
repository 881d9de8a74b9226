"""Parallel compilation of programs before their first use, and a cache for later runs.

On CPU every compiled program takes memory mappings. Linux limits the mappings of a process, and XLA
crashes at the limit, so their number is checked as programs are compiled.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

MAX_CACHE_BYTES = 4 * 2**30
_MIN_COMPILE_S = 0.1  # of a program that is worth keeping
OnCompiled = Callable[[int, int], None]  # (programs compiled, total)
CHECK_EVERY = 16  # programs
LIMIT = Path("/proc/sys/vm/max_map_count")
HELD = Path("/proc/self/maps")
MAX_SHARE = 0.9  # of the limit, since compilation itself needs some


class TooManyMappings(RuntimeError):
    """The memory mappings that Linux allows this process are nearly used up."""


def unwatched(done: int, total: int) -> None:
    """Ignore the progress of a compilation."""


def compile_all(lowered: Iterable[Any], total: int, on_compiled: OnCompiled = unwatched) -> None:
    """Compile `total` lowered steps in threads, while later steps are still being lowered.

    `on_compiled` is called in this thread with the number compiled. Raises TooManyMappings.
    """
    pool = ThreadPoolExecutor(os.cpu_count())
    compiled: list[Future[Any]] = []
    done = 0

    def report() -> None:
        nonlocal done
        before = done
        done = sum(future.done() for future in compiled)
        if done // CHECK_EVERY != before // CHECK_EVERY or 0 < done == total:
            check_mappings(f"{done} of {total} programs are compiled")
        if done > before:
            on_compiled(done, total)

    on_compiled(0, total)
    try:
        for step in lowered:
            compiled.append(pool.submit(step.compile))
            report()
        for future in as_completed(compiled):
            future.result()
            report()
    finally:
        pool.shutdown(cancel_futures=True)


def check_mappings(progress: str) -> None:
    """Raise TooManyMappings, with the fix, if nearly all mappings are in use."""
    if not LIMIT.is_file():
        return
    limit = int(LIMIT.read_text(encoding="ascii"))
    held = HELD.read_bytes().count(b"\n")
    if held > MAX_SHARE * limit:
        raise TooManyMappings(
            f"{progress}, and this process holds {held:,} of the {limit:,} memory mappings that "
            f"Linux allows one (vm.max_map_count): XLA would crash. Allow more (sysctl -w "
            f"vm.max_map_count={4 * limit}), or compile fewer buckets: a larger "
            "Engine.min_slots, a smaller Engine.max_round_nodes"
        )


def keep_programs() -> str | None:
    """Let jax keep compiled programs in a user folder; return a warning if that is impossible.

    jax loads the files as machine code, so only this user may write to the folder.
    `JAX_COMPILATION_CACHE_DIR` overrides the folder.
    """
    import jax

    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_S)
    if jax.config.jax_compilation_cache_dir is not None:
        return None
    try:
        folder = own_folder()
        prune(folder, MAX_CACHE_BYTES)
    except (OSError, RuntimeError) as error:  # a user without a home
        return (
            f"compiled programs are not kept ({error}): every run compiles them again; set "
            "JAX_COMPILATION_CACHE_DIR to a folder of your own"
        )
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return None


def own_folder() -> Path:
    """Return the folder `reprise/compiled-HOST` in the user cache, created if missing.

    Raises PermissionError if others can write to this folder or to a folder above.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    cache = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    cache.mkdir(parents=True, exist_ok=True)
    status = cache.stat()
    shared = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
    if status.st_uid not in (os.geteuid(), 0) or shared:
        raise PermissionError(f"{cache} can be written by others")
    folder = cache
    for name in ("reprise", f"compiled-{_host()}"):
        folder = folder / name
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise PermissionError(f"{folder} is no folder")
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise PermissionError(f"{folder} can be written by others")
    return folder


def prune(folder: Path, max_bytes: int) -> None:
    """Delete the oldest files until the rest take at most `max_bytes`."""
    files = []
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # another run prunes as well
            status = entry.stat(follow_symlinks=False)
            files.append((status.st_mtime, status.st_size, entry.path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= max_bytes:
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        total -= size


def _host() -> str:
    """Return a name for the kind of processor, since machines of several kinds may share a home."""
    lines = [platform.machine()]
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        named = [s for s in text.splitlines() if s.startswith(("flags", "Features", "model name"))]
        lines += named[:2]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
