"""Digests of a policy's files: every tensor counts, and large files are not read as a whole."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from reprise.models.text import digests

SHAPES = {"embed": (500, 16), "norm": (16,), "bias": (3,), "head": (16, 500)}


@pytest.fixture
def small_pieces(monkeypatch):
    """Files above 4 KiB are large, and pieces have 256 bytes."""
    monkeypatch.setattr(digests, "WHOLE_BYTES", 4096)
    monkeypatch.setattr(digests, "PIECE_BYTES", 256)


def tensors(seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def test_each_tensor_of_a_large_file_counts(tmp_path, small_pieces):
    path, found = tmp_path / "model.safetensors", set()
    for name in (None, *SHAPES):
        changed = tensors() | ({} if name is None else {name: tensors(1)[name]})
        save_file(changed, path)
        found.add(digests.digest_file(path))
    changed = tensors()
    changed["embed"][-1, -1] += 1  # a row that was added for a token, at the end
    save_file(changed, path)
    assert len(found | {digests.digest_file(path)}) == 2 + len(SHAPES)
    save_file(tensors(), path)
    assert digests.digest_file(path) in found


def test_a_large_file_is_read_in_part(tmp_path, small_pieces):
    path = tmp_path / "model.safetensors"
    save_file(tensors(), path)
    with path.open("rb") as file:
        parts = list(digests._read_parts(file, path.stat().st_size))
    num_bytes = sum(size for _, size in parts)
    assert 4 * 256 * 2 < num_bytes < 4096 < path.stat().st_size
    assert parts[0][0] == 0  # the header too
    path.write_bytes(bytes(5000))
    with path.open("rb") as file:  # no header: evenly over all of it
        assert sum(size for _, size in digests._read_parts(file, 5000)) == 5000


@pytest.mark.parametrize(
    "header",
    [
        *(b"{", b"[]", b'{"a": 1}', b'{"a": {"data_offsets": [0]}}', b'{"a": {}}', b"[" * 100_000),
        *(b'{"a": {"data_offsets": [0, 99999999]}}', b'{"a": {"data_offsets": [-9, 9]}}'),
        b'{"a": {"data_offsets": [0, 5000]}, "b": {"data_offsets": [0, 5000]}}',
    ],
    ids=lambda header: header[:40].decode(),
)
def test_a_header_that_makes_no_sense_is_bytes(tmp_path, small_pieces, header):
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(6000))
    before = digests.digest_file(path)
    path.write_bytes(path.read_bytes()[:-1] + b"1")
    assert digests.digest_file(path) != before
    path.write_bytes((2**63).to_bytes(8, "little") + bytes(6000))
    assert digests.digest_file(path)


def test_the_files_of_a_policy(tmp_path):
    for name in ("config.json", "model-1.safetensors", "tokenizer.json", "README.md", "run.log"):
        (tmp_path / name).write_text(name)
    (tmp_path / "of.safetensors").mkdir()
    found = digests.digest_policy(tmp_path)
    assert list(found) == ["config.json", "model-1.safetensors", "tokenizer.json"]
    file = tmp_path / "tokenizer.json"
    assert digests.digest_policy(file) == {"tokenizer.json": digests.digest_file(file)}
    (tmp_path / "x.gguf").write_text("x")
    assert list(digests.digest_policy(tmp_path / "x.gguf")) == ["tokenizer.json", "x.gguf"]
    assert digests.combine(found) != digests.combine(found | {"config.json": "0"})
    assert digests.digest_policy(tmp_path / "nothing") == {}
