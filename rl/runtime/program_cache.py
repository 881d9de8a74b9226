"""The persistent cache of compiled programs: one folder of the user's, for all runs.

jax loads its files as machine code, so only this user may write to it: the folder is made for its
owner alone (0700), and not used if it is another user's, a link, or open to others.
`JAX_COMPILATION_CACHE_DIR` overrides it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import stat
from pathlib import Path

import jax

MAX_BYTES = 4 * 2**30
_MIN_COMPILE_S = 0.1  # of a program that is worth keeping


def keep() -> str | None:
    """Have jax keep compiled programs; return a warning if it cannot, else None."""
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_S)
    if jax.config.jax_compilation_cache_dir is not None:
        return None
    try:
        folder = own_folder()
        prune(folder, MAX_BYTES)
    except (OSError, RuntimeError) as error:  # a user without a home
        return (
            f"compiled programs are not kept ({error}): every run compiles them again; set "
            "JAX_COMPILATION_CACHE_DIR to a folder of your own"
        )
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return None


def own_folder() -> Path:
    """Return the folder `reprise/compiled-HOST` of the user's cache, made if it is missing.

    Raises PermissionError if others can write to it or to a folder above, OSError if it cannot be
    made.
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
    """Delete the oldest files until the rest are at most `max_bytes`."""
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
    """Return a name for the kind of processor: machines of several kinds may share a home."""
    lines = [platform.machine()]
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        named = [s for s in text.splitlines() if s.startswith(("flags", "Features", "model name"))]
        lines += named[:2]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
