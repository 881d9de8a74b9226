"""Protocol-buffer messages of the Tinker API, defined by their field numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "tinker_public"
CONTENT_TYPE = "application/x-protobuf"
# (number, name, type) of each field: "X*" is repeated, "{X}" a map from strings. Enumerations are
# int32; members of a oneof are plain fields.
MESSAGES: Mapping[str, str] = {
    "ForwardBackwardRequest": """1 model_id string, 2 seq_id int32, 3 data Datum*, 4 loss_fn string,
        5 loss_fn_config {double}, 6 forward_only bool, 7 loss_fn_config_v2 {LossConfigValue}""",
    "Operation": "1 model_id string, 2 seq_id int32",  # the start of a ForwardBackwardRequest
    "LossConfigValue": "1 number double, 2 text string",
    "Datum": "1 model_input Chunk*, 2 loss_fn_inputs {Tensor}",
    "Chunk": "1 encoded_text EncodedTextChunk, 2 image Other, 3 dmel Other",
    "EncodedTextChunk": "1 tokens bytes",
    "Other": "",
    "Tensor": "1 dense bytes, 2 sparse_csr SparseCsr, 3 dtype int32, 4 shape int64*",
    "SparseCsr": "1 values bytes, 2 crow_indices bytes, 3 col_indices bytes",
    "ForwardBackwardOutput": """1 loss_fn_output_type string, 2 loss_fn_outputs ArrayRecord*,
        3 metrics {double}""",
    "ArrayRecord": "1 type_tag string, 2 fields {BatchedTensor}, 3 num_datums int64",
    "BatchedTensor": "1 data bytes, 2 offsets bytes, 3 dtype int32, 4 trailing_shape int64*",
    "SampleResponse": "1 sequences SampledSequence*, 2 prompt_logprobs bytes",
    "SampledSequence": "1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes",
}
FLOAT32 = 1
INT64 = 2
DTYPES: dict[int, np.dtype[Any]] = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8")}
STOP = 0
LENGTH = 1  # stop_reason
MAX_FIELDS = 2**18  # of a message and of the messages in it
MAX_SPARSE = 2**20  # numbers of a sparse tensor, zeros included

_Field = descriptor_pb2.FieldDescriptorProto


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="wire.proto", package=PACKAGE, syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, field, kind in (x.split() for x in fields.split(",") if x.strip()):
            _add_field(message, int(number), field, kind)
    return file


def _add_field(message: Any, number: int, name: str, kind: str) -> None:
    repeated = kind[-1] in "*}"
    base = kind.strip("*{}")
    added = message.field.add(name=name, number=number)
    added.label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
    if kind.startswith("{"):  # on the wire a map is repeated entries of (1 key, 2 value)
        entry = message.nested_type.add(name="".join(map(str.title, name.split("_"))) + "Entry")
        entry.options.map_entry = True
        _add_field(entry, 1, "key", "string")
        _add_field(entry, 2, "value", base)
        base = f"{message.name}.{entry.name}"
    if base in MESSAGES or "." in base:
        added.type = _Field.TYPE_MESSAGE
        added.type_name = f".{PACKAGE}.{base}"
    else:
        added.type = getattr(_Field, f"TYPE_{base.upper()}")


_POOL = descriptor_pool.DescriptorPool()  # separate from the client pool, since tests import both
_POOL.AddSerializedFile(_file().SerializeToString())
_CLASSES = {
    name: message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))
    for name in MESSAGES
}


def make(name: str, **fields: Any) -> Any:
    """Return a message of this name."""
    return _CLASSES[name](**fields)


def parse(name: str, data: bytes) -> Any:
    """Parse bytes as a message of this name. Raises ValueError."""
    from google.protobuf.message import DecodeError

    try:
        return _CLASSES[name].FromString(data)
    except DecodeError as error:
        raise ValueError(f"expected a {name}: {error}") from error


def check_fields(name: str, data: bytes) -> None:
    """Raise ValueError for a message with more than MAX_FIELDS fields, before it is parsed.

    An empty message of two bytes takes a hundred bytes after parsing.
    """
    count = 0
    waiting = [(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"), 0, len(data))]
    while waiting:
        kind, at, end = waiting.pop()
        while at < end:
            tag, at = _varint(data, at, end)
            field = kind.fields_by_number.get(tag >> 3)
            wire_type = tag & 7
            count += 1
            if wire_type == 0:
                _, at = _varint(data, at, end)
            elif wire_type in (1, 5):
                at += 8 if wire_type == 1 else 4
            elif wire_type == 2:
                size, at = _varint(data, at, end)
                if field is not None and field.message_type is not None:
                    waiting.append((field.message_type, at, at + size))
                elif field is not None and field.is_repeated:
                    count += size  # packed numbers of one byte each
                at += size
            else:
                raise ValueError(f"expected a {name}: found a field of the kind {wire_type}")
            if at > end:
                raise ValueError(f"expected a {name}: it is cut")
            if count > MAX_FIELDS:
                raise ValueError(f"expected at most {MAX_FIELDS:,} fields: send fewer data at once")


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return a varint of 7 bits per byte, and the position after it. Raises ValueError."""
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        value |= (byte & 127) << shift
        at = at + 1
        shift = shift + 7
        if byte < 128:
            return value, at
    raise ValueError("expected a number, which is cut")


def array(tensor: Any) -> np.ndarray:
    """Return the numbers of a tensor as a dense array. Raises ValueError."""
    if tensor.HasField("sparse_csr"):
        return _from_csr(tensor)
    return _reshaped(_numbers(tensor.dense, _dtype(tensor)), tensor.shape)


def _dtype(tensor: Any) -> np.dtype:
    if tensor.dtype not in DTYPES:
        raise ValueError(f"expected float32 or int64 numbers, got the type {tensor.dtype}")
    return DTYPES[tensor.dtype]


def _numbers(data: bytes, dtype: np.dtype) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise ValueError(f"expected numbers of {dtype.itemsize} bytes, got {len(data)} bytes")
    return np.frombuffer(data, dtype)


def _reshaped(numbers: np.ndarray, shape: Any) -> np.ndarray:
    shape = tuple(shape) or numbers.shape
    if any(n < 0 for n in shape) or int(np.prod(shape, dtype=object)) != numbers.size:
        raise ValueError(f"expected numbers of shape {shape}, got {numbers.size} of them")
    return numbers.reshape(shape)


def _from_csr(tensor: Any) -> np.ndarray:
    """Return a CSR tensor of two axes as a dense array; missing entries are 0."""
    values = _numbers(tensor.sparse_csr.values, _dtype(tensor))
    ends = _numbers(tensor.sparse_csr.crow_indices, DTYPES[INT64])
    columns = _numbers(tensor.sparse_csr.col_indices, DTYPES[INT64])
    rows, width = tensor.shape if len(tensor.shape) == 2 else (-1, 0)
    if rows * width > MAX_SPARSE:
        raise ValueError(f"expected a sparse tensor of at most {MAX_SPARSE:,} numbers")
    fits = rows == len(ends) - 1 >= 0 and width >= 0 and len(values) == len(columns)
    # checked by sorting, since differences of large numbers wrap around
    if not fits or ends[0] != 0 or ends[-1] != len(values) or (np.sort(ends) != ends).any():
        raise ValueError("expected a sparse tensor of two axes with row ends and columns")
    counts = np.diff(ends)
    if len(columns) and not (0 <= columns.min() and columns.max() < width):
        raise ValueError(f"expected columns below {width}, got {columns.min()} to {columns.max()}")
    result = np.zeros((rows, width), values.dtype)
    result[np.repeat(np.arange(rows), counts), columns] = values
    return result


def int32s(data: bytes) -> np.ndarray:
    """Return the numbers of an array of int32. Raises ValueError."""
    return _numbers(data, np.dtype("<i4"))


def int32_bytes(values: Any) -> bytes:
    return np.asarray(values, "<i4").tobytes()


def float32_bytes(values: Any) -> bytes:
    return np.asarray(values, "<f4").tobytes()


def batched(arrays: Any) -> Any:
    """Return one field for several data, from float32 arrays with one axis."""
    ends = np.cumsum([0, *(4 * len(x) for x in arrays)], dtype="<i8")
    data = b"".join(float32_bytes(x) for x in arrays)
    return make("BatchedTensor", data=data, offsets=ends.tobytes(), dtype=FLOAT32)
