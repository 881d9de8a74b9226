"""Files that a run reads back: there whole, as they were, or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, content: bytes | str) -> None:
    """Write `content` (text as UTF-8) to `path`, durably and in one atomic step.

    A kill at any moment leaves the old file or the new one. Raises OSError.
    """
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
