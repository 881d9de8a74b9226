"""A folder held by a handle; reads and writes inside follow no links.

A run folder may be untrusted and full of links. So every file of a run is opened by one name
relative to a handle (`dir_fd`), and only if it is a plain file: a pipe or a device would block.
POSIX only: Windows has no `dir_fd`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_COPY_BYTES = 2**20
MAX_READ_BYTES = 2**32  # per read; a sparse file can have any size


class LinkError(OSError):
    """A link, pipe or device in place of a file or folder of a run."""


class LargeFileError(OSError):
    """A file that is too large to read."""


class Folder:
    """An existing folder, held by a handle; names are of direct entries, `path` is for messages."""

    def __init__(self, path: Path | str, *, create: bool = False) -> None:
        """Open `path`, which may be a link, since the user names it. Raises OSError."""
        path = Path(path).absolute()
        if create:
            path.mkdir(parents=True, exist_ok=True)
        self._hold(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def _hold(self, path: Path, handle: int) -> None:
        self.path = path
        self._handle = handle
        self._finalizer = weakref.finalize(self, os.close, handle)

    def close(self) -> None:
        self._finalizer()

    def folder(self, name: str, *, create: bool = True) -> Folder:
        """Open a subfolder. Raises LinkError for anything else of that name."""
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(_plain(name), dir_fd=self._handle)
        inner = Folder.__new__(Folder)
        inner._hold(self.path / name, self._open(name, os.O_RDONLY | os.O_DIRECTORY))
        return inner

    def names(self) -> list[str]:
        return sorted(os.listdir(self._handle))

    def kind(self, name: str) -> int | None:
        """Return the type bits of an entry (stat.S_IFREG, …), or None; follows no link."""
        try:
            return stat.S_IFMT(self._stat(name).st_mode)
        except FileNotFoundError:
            return None

    def exists(self, name: str) -> bool:
        return self.kind(name) is not None

    def is_file(self, name: str) -> bool:
        return self.kind(name) == stat.S_IFREG

    def is_folder(self, name: str) -> bool:
        return self.kind(name) == stat.S_IFDIR

    def size_bytes(self, name: str) -> int:
        return self._stat(name).st_size

    def read(self, name: str, max_bytes: int = MAX_READ_BYTES) -> bytes:
        """Return the content of a plain file. Raises OSError, also if it exceeds `max_bytes`."""
        with self._file(name, os.O_RDONLY, "rb") as file:
            if (size_bytes := os.fstat(file.fileno()).st_size) > max_bytes:
                raise LargeFileError(
                    f"{self.path / name}: expected at most {max_bytes:,} bytes, got "
                    f"{size_bytes:,}; move it to another folder"
                )
            return file.read()

    def replace(self, name: str, content: bytes | str) -> None:
        """Write a file (text as UTF-8) durably and atomically, in place of any entry."""
        temporary = f".{_plain(name)}.tmp"
        self.remove(temporary, missing_ok=True)  # from a killed process
        try:
            with self.create(temporary) as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            self.rename(temporary, name)
        except BaseException:
            with contextlib.suppress(OSError):
                self.remove(temporary)
            raise
        self.sync()

    def create(self, name: str) -> BinaryIO:
        """Create a plain file to write to. Raises FileExistsError."""
        return self._file(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, "wb")

    def append(self, name: str) -> BinaryIO:
        """Open or create a file to append to, unbuffered; a hard link is copied first."""
        if self.is_file(name) and self._stat(name).st_nlink > 1:
            self.replace(name, self.read(name))
        return self._file(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, "ab", buffering=0)

    def lock(self, name: str) -> BinaryIO | None:
        """Open and lock a file until it is closed; None if another process has the lock."""
        file = self._file(name, os.O_RDWR | os.O_CREAT, "r+b", buffering=0)
        try:
            # lockf, not flock: a forked child that outlives a killed run must not keep the lock.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return None
            raise
        return file

    def rename(self, name: str, new: str) -> None:
        os.replace(_plain(name), _plain(new), src_dir_fd=self._handle, dst_dir_fd=self._handle)

    def remove(self, name: str, *, missing_ok: bool = False) -> None:
        """Delete an entry with its contents; for a link, delete only the link."""
        if missing_ok and not self.exists(name):
            return
        if self.is_folder(name):
            shutil.rmtree(name, dir_fd=self._handle)
        else:
            os.unlink(name, dir_fd=self._handle)

    def link(self, source: Folder, name: str, new: str | None = None) -> None:
        """Add a plain file of `source` to this folder, as a hard link if possible, else a copy."""
        new = _plain(new or name)
        handles = {"src_dir_fd": source._handle, "dst_dir_fd": self._handle}
        try:
            os.link(_plain(name), new, **handles, follow_symlinks=False)
        except (FileNotFoundError, FileExistsError):
            raise
        except OSError:  # no hard links on this file system
            with source._file(name, os.O_RDONLY, "rb") as old, self.create(new) as copy:
                shutil.copyfileobj(old, copy, _COPY_BYTES)

    def sync(self) -> None:
        """Flush the entries of this folder to the disk."""
        os.fsync(self._handle)

    def is_in_place(self) -> bool:
        """Return whether `path` still leads to this folder."""
        try:
            return os.path.samestat(os.fstat(self._handle), os.stat(self.path))
        except OSError:
            return False

    def check_in_place(self) -> None:
        """Raise LinkError if `path` now leads elsewhere, because libraries write by path."""
        if not self.is_in_place():
            raise LinkError(f"{self.path} is no longer the folder that was opened: start again")

    def _stat(self, name: str) -> os.stat_result:
        return os.stat(_plain(name), dir_fd=self._handle, follow_symlinks=False)

    def _file(self, name: str, flags: int, mode: str, buffering: int = -1) -> BinaryIO:
        # O_NONBLOCK: opening a pipe without a reader would block
        handle = self._open(name, flags | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise LinkError(f"expected a plain file, got something else: {self.path / name}")
        return os.fdopen(handle, mode, buffering)  # type: ignore[return-value]

    def _open(self, name: str, flags: int) -> int:
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(_plain(name), flags, 0o666, dir_fd=self._handle)
        except OSError as error:
            error.filename = str(self.path / name)
            expected = "a folder" if flags & os.O_DIRECTORY else "a plain file"
            kind = self.kind(name)
            if kind == stat.S_IFLNK and error.errno != errno.EEXIST:
                raise LinkError(
                    f"expected {expected}, got a link: {self.path / name}; a run follows none in "
                    "its folder: remove it, or put what it points to in its place"
                ) from None
            if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.ENXIO) and kind is not None:
                raise LinkError(
                    f"expected {expected}, got something else: {self.path / name}; remove it"
                ) from None
            raise


def read_plain(path: Path, max_bytes: int = MAX_READ_BYTES) -> bytes:
    """Return the content of a file with `Folder.read`. Raises OSError."""
    with held(path.parent) as folder:
        return folder.read(path.name, max_bytes)


def replace_file(path: Path, content: bytes | str) -> None:
    """Write a file with `Folder.replace`. Raises OSError."""
    with held(path.parent) as folder:
        folder.replace(path.name, content)


@contextlib.contextmanager
def held(where: Folder | Path | str) -> Iterator[Folder]:
    """Yield a folder; a folder opened here is closed at the end, a given `Folder` stays open."""
    if isinstance(where, Folder):
        yield where
        return
    folder = Folder(where)
    try:
        yield folder
    finally:
        folder.close()


def _plain(name: str) -> str:
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"expected the name of an entry, got {name!r}")
    return name
