"""What the processes of tests/test_processes.py do."""

import os
import time


def fail_in(place, index):
    """Raise in one process; the others would wait for a minute."""
    if place.index == index:
        raise ValueError(f"process {index} has had enough")
    time.sleep(60)


def hang_in(place, index):
    """Hang in one process, holding SIGTERM off as jax.distributed does."""
    import signal

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (place.folder / f"pid-{place.index}").write_text(str(os.getpid()))
    if place.index == index:
        time.sleep(60)
