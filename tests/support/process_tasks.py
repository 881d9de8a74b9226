"""What the processes of tests/test_processes.py do."""

import os
import time

import numpy as np


def add_up(place, first):
    """Add a number of each process over the job; a numpy array and plain values come back."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("all",))
    local = np.full(jax.local_device_count(), first + place.index, np.float32)
    x = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("all")), local)
    whole = jax.jit(lambda x: x * 1, out_shardings=NamedSharding(mesh, PartitionSpec()))(x)
    return {"index": jax.process_index(), "devices": jax.device_count(), "x": np.asarray(whole)}


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
