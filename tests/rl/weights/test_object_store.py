"""A folder as a store: whole files only, keys that are keys, and a deadline."""

import numpy as np
import pytest

from rl.weights.errors import CarrierError, DamagedWeights
from rl.weights.object_store import FolderStore, ObjectStoreCarrier


def test_what_was_put_is_got_until_it_is_deleted(tmp_path):
    store = FolderStore(tmp_path)
    keys = [store.put(data) for data in (b"", b"weights")]
    assert [FolderStore(tmp_path).get(key, 1.0) for key in keys] == [b"", b"weights"]
    for _ in range(2):
        store.delete(keys[1])
    assert [path.name for path in tmp_path.iterdir()] == [keys[0]]
    with pytest.raises(CarrierError, match=f"under key {keys[1]} within 0.05 s, found none"):
        store.get(keys[1], 0.05)


@pytest.mark.parametrize("key", ["../secret", "", "A" * 32, "/etc/passwd", 3, None])
def test_a_key_leads_nowhere_else(tmp_path, key):
    (tmp_path / "store").mkdir()
    (tmp_path / "secret").write_text("secret")
    store = FolderStore(tmp_path / "store")
    for use in (lambda: store.get(key, 1.0), lambda: store.delete(key)):
        with pytest.raises(DamagedWeights, match="expected a key of 32 hexadecimal digits"):
            use()
    assert (tmp_path / "secret").exists()


def test_the_folder_has_to_be_there(tmp_path):
    with pytest.raises(ValueError, match="expected a folder for weights"):
        FolderStore(tmp_path / "none")


def test_a_put_that_fails_leaves_no_part_behind(tmp_path):
    store = FolderStore(tmp_path)
    put, puts = store.put, []

    def full_disk(data):
        if len(puts) == 2:
            raise OSError(28, "No space left on device")
        puts.append(put(data))
        return puts[-1]

    store.put = full_disk
    with pytest.raises(OSError, match="No space"):
        ObjectStoreCarrier(store).hold([np.zeros(100, np.uint8)], 30)
    assert len(puts) == 2 and list(tmp_path.iterdir()) == []
