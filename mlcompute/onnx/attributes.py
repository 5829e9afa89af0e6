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
    from onnx import AttributeProto, helper

    kinds = ("FLOAT", "INT", "STRING", "TENSOR", "FLOATS", "INTS", "STRINGS", "GRAPH")
    if attribute.type not in [getattr(AttributeProto, kind) for kind in kinds]:
        raise NotImportedError(f"attribute '{attribute.name}' is of a kind that is not imported")
    value = helper.get_attribute_value(attribute)
    if attribute.type == AttributeProto.TENSOR:
        return read(value)
    if attribute.type == AttributeProto.STRINGS:
        return [text.decode("utf-8", "replace") for text in value]
    return value.decode("utf-8", "replace") if attribute.type == AttributeProto.STRING else value
