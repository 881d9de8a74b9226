"""Messages: what the released client's own classes read of ours, and arrays by hand."""

from __future__ import annotations

import numpy as np
import pytest
from tinker.proto import tinker_public_pb2 as theirs

from reprise.rl.http import wire


def test_the_clients_classes_have_our_fields():
    """Every field of ours has their number and, but for enumerations, their kind of value."""
    for name in wire.MESSAGES:
        if name == "Other":
            continue
        there = {"Operation": "ForwardBackwardRequest"}.get(name, name)
        own, other = wire.make(name).DESCRIPTOR, theirs.DESCRIPTOR.message_types_by_name[there]
        for field in own.fields:
            known = other.fields_by_name[field.name]
            assert (field.number, field.is_repeated) == (known.number, known.is_repeated)
            if known.enum_type is None and field.message_type is None:
                assert field.type == known.type, (name, field.name)


def test_a_message_of_theirs_is_read():
    request = theirs.ForwardBackwardRequest(model_id="m", seq_id=3, loss_fn="ppo")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(3, dtype="<i4").tobytes()
    tensor = datum.loss_fn_inputs["weights"]
    tensor.dense, tensor.dtype = np.float32([1, 2, 3]).tobytes(), wire.FLOAT32
    found = wire.parse("ForwardBackwardRequest", request.SerializeToString())
    assert (found.model_id, found.seq_id, found.loss_fn) == ("m", 3, "ppo")
    assert wire.int32s(found.data[0].model_input[0].encoded_text.tokens).tolist() == [0, 1, 2]
    assert wire.array(found.data[0].loss_fn_inputs["weights"]).tolist() == [1.0, 2.0, 3.0]


def test_a_sparse_tensor_by_hand():
    tensor = wire.make("Tensor", dtype=wire.INT64, shape=[2, 3])
    tensor.sparse_csr.values = np.int64([5, 7, 9]).tobytes()
    tensor.sparse_csr.crow_indices = np.int64([0, 1, 3]).tobytes()
    tensor.sparse_csr.col_indices = np.int64([2, 0, 1]).tobytes()
    assert wire.array(tensor).tolist() == [[0, 0, 5], [7, 9, 0]]
    tensor.sparse_csr.col_indices = np.int64([3, 0, 1]).tobytes()
    with pytest.raises(ValueError, match="expected columns below 3, got 0 to 3"):
        wire.array(tensor)
    with pytest.raises(ValueError, match=r"expected numbers of shape \(4,\), got 1"):
        wire.array(wire.make("Tensor", dtype=wire.FLOAT32, dense=bytes(4), shape=[4]))


def csr(ends, shape=(2, 3), values=(5, 7, 9), columns=(2, 0, 1)):
    tensor = wire.make("Tensor", dtype=wire.INT64, shape=list(shape))
    tensor.sparse_csr.values = np.int64(values).tobytes()
    tensor.sparse_csr.crow_indices = np.array(ends, np.int64).tobytes()
    tensor.sparse_csr.col_indices = np.int64(columns).tobytes()
    return tensor


@pytest.mark.parametrize(
    ("ends", "shape"),
    [
        ([], (2, 3)),
        ([], (-1, 3)),
        ([0], (0, 3)),
        ([0, 2, 1, 3], (3, 3)),
        ([0, 2**62, -(2**63), -(2**62), 3], (4, 3)),  # their differences wrap around to be positive
        ([0, 1, 3], (2, -3)),
        ([0, 1, 3], (2, 2**40)),
        ([0, 1, 3], (2, 3, 1)),
    ],
)
def test_a_sparse_tensor_that_cannot_be_is_refused(ends, shape):
    with pytest.raises(ValueError, match="expected a sparse tensor"):
        wire.array(csr(ends, shape))


def test_a_message_of_many_tiny_messages_is_refused_before_it_is_parsed(monkeypatch):
    monkeypatch.setattr(wire, "MAX_FIELDS", 1000)
    request = wire.make("ForwardBackwardRequest", model_id="m", seq_id=3, loss_fn="ppo")
    for _ in range(50):
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = bytes(400)
        datum.loss_fn_inputs["weights"].dense = bytes(400)
        datum.loss_fn_inputs["weights"].shape.extend([100])
    honest = request.SerializeToString()
    wire.check_fields("ForwardBackwardRequest", honest)
    chunks = b"\x0a" + b"\xd0\x0f" + b"\x0a\x00" * 1000
    for more in (
        b"\x1a\x00" * 1000,  # data
        b"\x1a" + b"\xd3\x0f" + chunks,  # one datum of empty chunks
        b"\x12\x01" * 1000,  # a field of another wire type
        b"\x78\x01" * 1000,  # an unknown one
    ):
        with pytest.raises(ValueError, match="expected at most 1,000 fields|it is cut"):
            wire.check_fields("ForwardBackwardRequest", honest + more)
    shape = wire.make("Tensor", shape=[1] * 1100).SerializeToString()  # packed: a byte each
    with pytest.raises(ValueError, match="expected at most 1,000 fields"):
        wire.check_fields("Tensor", shape)


@pytest.mark.parametrize("data", [b"\x0a", b"\x0a\x05abc", b"\xff" * 12, b"\x0b\x00", b"\x0d\x00"])
def test_a_message_that_is_cut_is_refused(data):
    with pytest.raises(ValueError, match="expected a"):
        wire.check_fields("ForwardBackwardRequest", data)


def test_the_start_of_a_request_names_its_operation():
    request = wire.make("ForwardBackwardRequest", model_id="m", seq_id=3, loss_fn="ppo")
    request.data.add().model_input.add().encoded_text.tokens = bytes(40)
    found = wire.parse("Operation", request.SerializeToString())
    assert (found.model_id, found.seq_id) == ("m", 3)
