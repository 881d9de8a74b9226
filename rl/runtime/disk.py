"""Disk errors and their reasons, and free disk space."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)


def refuses(error: BaseException | None) -> str | None:
    """Return the reason of a disk error, which libraries may wrap; None for other errors."""
    while error is not None:
        for number in _ERRORS:
            reason = os.strerror(number)
            if (isinstance(error, OSError) and error.errno == number) or reason in str(error):
                return reason
        error = error.__cause__ or error.__context__
    return None


def is_other_record(record: logging.LogRecord) -> bool:
    """Return False for tracebacks of disk errors, which are reported in one line; a log filter."""
    return not (record.exc_info and refuses(record.exc_info[1]))


def free_bytes(folder: Path) -> int:
    """Return the free space for this user on the disk of `folder`, which may not exist yet."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    stats = os.statvfs(place)
    return stats.f_bavail * stats.f_frsize
