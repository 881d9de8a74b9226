"""Looking at processes that scorers leave behind."""

import os
from pathlib import Path


def runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")  # an unreaped zombie is not running
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
