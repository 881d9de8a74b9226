"""What the processes of tests/test_processes.py do."""

import time


def fail_in(place, index):
    """Raise in one process; the others would wait for a minute."""
    if place.index == index:
        raise ValueError(f"process {index} has had enough")
    time.sleep(60)
