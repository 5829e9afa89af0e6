"""Operator layers as plain data and back, so that a graph that came from a model can be saved like any other."""

from __future__ import annotations

import base64
from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mlcompute.errors import GraphError
from mlcompute.layers.layer_state import layer_state
from mlcompute.onnx.layer import OperatorLayer
from mlcompute.onnx.operands import Derived, Known, Operand, Source, Use, Weight
from mlcompute.onnx.rows import ROWS, load_rows
from mlcompute.ops.bfloat16 import bfloat16, is_bfloat16
from mlcompute.ops.op import Array
from mlcompute.tensor import Tensor

JSON = Any
#: A constant computed from shapes by more operators than this is written as the numbers it is.
_MOST_USES = 64
#: Element types that mean the same to every NumPy; others, such as float8, exist only beside another package.
_NUMPYS_OWN = {"|b1", "|i1", "|u1", *(f"<{kind}{size}" for kind in "iu" for size in (2, 4, 8)), "<f2", "<f4", "<f8"}
#: The same by what stands in files, their codes and their names.
_DTYPES = {word: dtype for dtype in map(np.dtype, _NUMPYS_OWN) for word in (dtype.str, dtype.name)}
_DTYPES["bfloat16"] = bfloat16()


def describe_operator(layer: OperatorLayer, names: Mapping[Tensor, str]) -> dict[str, JSON]:
    """What an operator layer is made of; GraphError when a file cannot say it.

    names  what its tensors are called
    """
    outputs = [[index, list(shape), dtype.name] for index, shape, dtype in layer.outputs]
    node = layer_state(layer).node
    pairs = [] if node is None else list(zip(layer.sources, node.sources, strict=True))
    if any(source.tensor is not now for source, now in pairs):  # of a graph that was applied to other tensors
        names = ChainMap({source.tensor: names[now] for source, now in pairs}, dict(names))
    return {**_describe_use(layer.use, layer.who, names), "outputs": outputs}


def operator_from(data: JSON, tensor: Callable[[JSON], Tensor]) -> OperatorLayer:
    """The layer a description stands for; ValueError or KeyError when it stands for none.

    tensor  finds a tensor by its name
    """
    load_rows()
    outputs = [(int(index), _shape(shape), _dtype(dtype)) for index, shape, dtype in data["outputs"]]
    return OperatorLayer(_use(data, tensor), outputs)


# To data ------------------------------------------------------------------------------------------------------------


def _describe_use(use: Use, who: str, names: Mapping[Tensor, str]) -> dict[str, JSON]:
    if ROWS.get((use.row.domain, use.row.name)) is not use.row:
        raise GraphError(f"{who}: made of other operators, it cannot be described in a file", fix="save it as ONNX")
    return {
        "operator": use.row.name,
        "domain": use.row.domain,
        "version": use.version,
        "attributes": {name: _describe(value, f"{who}: {name}") for name, value in use.attributes.items()},
        "operands": [_describe_operand(operand, who, names) for operand in use.operands],
        "names": list(use.names),
        "output_count": use.output_count,
    }


def _describe_operand(operand: Operand | None, who: str, names: Mapping[Tensor, str]) -> JSON:
    if operand is None:
        return None
    if isinstance(operand, Known):
        found = {"kind": "known", "array": _describe(operand.array, who), "name": operand.name}
        if operand.made is not None and _uses(operand.made[0]) <= _MOST_USES:
            found["made"] = [_describe_use(operand.made[0], who, names), operand.made[1]]
        return found
    if isinstance(operand, Weight):
        return {"kind": "weight", "tensor": names[operand.tensor], "shape": list(operand.shape), "name": operand.name}
    if isinstance(operand, Source):
        typed = {"shape": list(operand.shape), "dtype": operand.dtype.name}
        return {"kind": "source", "tensor": names[operand.tensor], **typed, "name": operand.name}
    if isinstance(operand, Derived):
        typed = {"shape": list(operand.shape), "dtype": operand.dtype.name}
        return {"kind": "derived", "use": _describe_use(operand.use, who, names), "index": operand.index, **typed}
    raise GraphError(f"{who}: has an operand that cannot be described in a file", fix="save it as ONNX")


def _uses(use: Use, most: int = _MOST_USES) -> int:
    """How many operators computed a constant from shapes; those used twice count twice, as they are written twice."""
    count = 1
    for operand in use.operands:
        if isinstance(operand, Known) and operand.made is not None and count <= most:
            count += _uses(operand.made[0], most - count)
    return count


def _describe(value: object, who: str) -> JSON:
    """A number, text, list or array; arrays as text, so that they come back bitwise identical."""
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if isinstance(value, np.ndarray):
        word = value.dtype.name if is_bfloat16(value.dtype) else value.dtype.str
        if word not in _DTYPES:
            raise GraphError(f"{who}: {value.dtype} cannot be described in a file", fix="save it as ONNX")
        raw = np.ascontiguousarray(value).tobytes()
        return {"array": [word, list(value.shape), base64.b64encode(raw).decode()]}
    if isinstance(value, float):
        return {"float": value.hex()}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_describe(item, who) for item in value]
    raise GraphError(f"{who}: a {type(value).__name__} cannot be described in a file", fix="save it as ONNX")


# From data ----------------------------------------------------------------------------------------------------------


def _use(data: JSON, tensor: Callable[[JSON], Tensor]) -> Use:
    row = ROWS.get((data["domain"], data["operator"]))
    if row is None:
        raise ValueError(f"there is no operator {str(data['operator'])[:100]!r}")
    attributes = {str(name): _value(value) for name, value in data["attributes"].items()}
    operands = [_operand(operand, tensor) for operand in data["operands"]]
    names = [str(name) for name in data["names"]]
    return Use(row, int(data["version"]), attributes, operands, names, int(data["output_count"]))


def _operand(data: JSON, tensor: Callable[[JSON], Tensor]) -> Operand | None:
    if data is None:
        return None
    kind = data["kind"]
    if kind == "known":
        made = data.get("made")
        came = None if made is None else (_use(made[0], tensor), int(made[1]))
        return Known(np.asarray(_value(data["array"])), str(data["name"]), made=came)
    if kind == "weight":
        return Weight(tensor(data["tensor"]), _shape(data["shape"]), str(data["name"]))
    shape, dtype = _shape(data["shape"]), _dtype(data["dtype"])
    if kind == "source":
        return Source(tensor(data["tensor"]), shape, dtype, str(data["name"]))
    if kind == "derived":
        return Derived(_use(data["use"], tensor), int(data["index"]), shape, dtype)
    raise ValueError(f"there is no kind of operand {str(kind)[:100]!r}")


def _value(data: JSON) -> Any:
    if isinstance(data, list):
        return [_value(item) for item in data]
    if not isinstance(data, dict):
        return data
    ((kind, value),) = data.items()
    if kind == "array":
        return _array(*value)
    if kind == "float":
        return float.fromhex(value)
    raise ValueError(f"there is no value {str(kind)[:100]!r}")


def _array(dtype: str, shape: list[int], data: str) -> Array:
    array: Array = np.frombuffer(base64.b64decode(data, validate=True), _dtype(dtype)).reshape(_shape(shape)).copy()
    return array


def _shape(data: JSON) -> tuple[int, ...]:
    if not isinstance(data, list) or not all(type(extent) is int and extent >= 0 for extent in data):
        raise ValueError(f"{str(data)[:100]} is no shape")
    return tuple(data)


def _dtype(name: JSON) -> np.dtype[Any]:
    # Looked up: NumPy takes nearly any text for a description of some type, and parses it as Python in places.
    if not isinstance(name, str) or name not in _DTYPES:
        raise ValueError(f"{str(name)[:100]!r} is no type of numbers")
    return _DTYPES[name]
