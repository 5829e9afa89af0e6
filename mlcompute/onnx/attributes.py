"""Attributes of nodes as Python values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mlcompute.onnx.rows import NotImportedError
from mlcompute.ops.op import Array

if TYPE_CHECKING:
    from onnx import AttributeProto, TensorProto


def attribute_value(attribute: AttributeProto, read: Callable[[TensorProto], Array]) -> Any:
    """What an attribute says.

    read   turns a stored tensor into an array
    """
    from onnx import AttributeProto

    kind = attribute.type
    if kind == AttributeProto.FLOAT:
        return float(attribute.f)
    if kind == AttributeProto.INT:
        return int(attribute.i)
    if kind == AttributeProto.STRING:
        return attribute.s.decode("utf-8", "replace")
    if kind == AttributeProto.TENSOR:
        return read(attribute.t)
    if kind == AttributeProto.FLOATS:
        return [float(number) for number in attribute.floats]
    if kind == AttributeProto.INTS:
        return [int(number) for number in attribute.ints]
    if kind == AttributeProto.STRINGS:
        return [text.decode("utf-8", "replace") for text in attribute.strings]
    if kind == AttributeProto.GRAPH:
        return attribute.g
    raise NotImportedError(f"attribute '{attribute.name}' is of a kind that is not imported")
