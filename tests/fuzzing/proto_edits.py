"""Damage to an ONNX model that stays a model: fields of any of its messages replaced, removed, doubled, exchanged."""

from __future__ import annotations

from typing import Any

import onnx
from google.protobuf.descriptor import FieldDescriptor

from tests.fuzzing.byte_edits import damaged_bytes
from tests.fuzzing.choices import Choices

WHOLE = (
    0, 1, -1, 2, 3, 4, 7, 8, 10, 11, 13, 18, 21, 255, 4096, 2**31 - 1, -(2**31), 2**31, 2**40, 2**62, -(2**63),
    2**63 - 1,
)  # fmt: skip
REAL = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e30, -1e30, float("inf"), float("nan"), 1e-40)
TEXTS = (
    "", "x", "y", "nothing", "N", "ai.onnx.ml", "constant", "reflect", "linear", "cubic", "SAME_UPPER", "LSTM", "sum",
    "ij,jk->ik", "Add", "Expand", "Tile", "Pad", "ConstantOfShape", "Range", "Loop", "If", "Scan", "GRU", "Einsum",
    "Resize", "OneHot", "Col2Im", "DFT", "Gather", "Split", "Conv", "ConvTranspose", "Reshape", "Slice", "Concat",
    "TopK", "Shape", "Cast", "NonZero", "Constant", "CumSum", "MaxPool", "SequenceInsert", "Identity", "Where",
    "ScatterND", "Unsqueeze", "EyeLike",
)  # fmt: skip


def damaged_model(model: onnx.ModelProto, choices: Choices) -> bytes:
    """The model with one to four edits, as a file."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    for _ in range(1 + choices.randrange(4)):
        _edit(_message(model, choices), choices)
    data: bytes = model.SerializeToString()
    return damaged_bytes(data, choices) if choices.randrange(8) == 1 else data


def _message(message: Any, choices: Choices) -> Any:
    """Any message inside: from the model down, a way chosen at every fork."""
    while True:
        inside = [value for field, value in message.ListFields() if field.message_type is not None]
        if not inside or (choices.randrange(4) == 1 and not isinstance(message, (onnx.ModelProto, onnx.GraphProto))):
            return message
        value = choices.choice(inside)
        message = choices.choice(value) if _is_repeated(value) else value


def _is_repeated(value: Any) -> bool:
    return hasattr(value, "append")  # how a field tells has changed between versions of protobuf


def _edit(message: Any, choices: Choices) -> None:
    fields = [field for field, _ in message.ListFields()]
    if not fields or choices.randrange(8) == 1:
        fields = list(message.DESCRIPTOR.fields)  # one it does not have yet
    field = choices.choice(fields)
    values = getattr(message, field.name)
    repeated = _is_repeated(values)
    kind = choices.randrange(4)
    if kind == 0 and not (repeated and values):
        message.ClearField(field.name)
    elif repeated and values and kind == 0:
        del values[choices.randrange(len(values))]
    elif repeated and values and kind == 1:
        values.extend([values[choices.randrange(len(values))]] * choices.choice((1, 2, 9, 70)))
    elif field.message_type is not None:
        if repeated and len(values) > 1:
            values[choices.randrange(len(values))].CopyFrom(values[choices.randrange(len(values))])
        elif repeated:
            values.add()
        else:
            values.SetInParent()
    else:
        new = _value(field, choices, message)
        if repeated and values and kind == 2:
            values[choices.randrange(len(values))] = new
        elif repeated:
            values.append(new)
        else:
            setattr(message, field.name, new)


def _value(field: Any, choices: Choices, message: Any) -> Any:
    """A value the field can hold."""
    kind = field.cpp_type
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return choices.choice(REAL)
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return choices.choice([value.number for value in field.enum_type.values])
    if kind == FieldDescriptor.CPPTYPE_INT32:
        return choices.randrange(30) - 1  # element types, mostly
    if kind == FieldDescriptor.CPPTYPE_UINT64:
        return abs(choices.choice(WHOLE))
    if kind == FieldDescriptor.CPPTYPE_INT64:
        return choices.choice(WHOLE)
    if field.type == FieldDescriptor.TYPE_BYTES:
        now = getattr(message, field.name)
        return damaged_bytes(now, choices, 2) if isinstance(now, bytes) else choices.choice(TEXTS).encode()
    return choices.choice(TEXTS)
