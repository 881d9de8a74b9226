"""Messages: what the released client's own classes read of ours, and arrays by hand."""

from __future__ import annotations

import numpy as np
import pytest
from tinker.proto import tinker_public_pb2 as theirs

from rl.server import wire


def test_the_clients_classes_have_our_fields():
    """Every field of ours has their number and, but for enumerations, their kind of value."""
    for name in wire.MESSAGES:
        if name == "Other":
            continue
        own, other = wire.make(name).DESCRIPTOR, theirs.DESCRIPTOR.message_types_by_name[name]
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
