"""Writing model files: numbers go from the tensors to the file, and are never held a second time.

The message that ONNX's library builds holds everything but the numbers. They are put between its fields while the file
is written: a model is a message of fields, each with its length before it, so only lengths must be known beforehand.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from mlcompute.errors import DataError
from mlcompute.onnx.types import element_type
from mlcompute.onnx.wire import field_key, varint
from mlcompute.ops.op import Array

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto

#: Models larger than this keep their numbers in a file beside them: one message holds at most 2 GiB.
LARGEST_MESSAGE = (1 << 31) - (1 << 24)
#: Constants smaller than this are part of the message: shapes are found with their numbers.
_SMALL = 4096
# ModelProto.graph; GraphProto.node and .initializer; NodeProto.attribute; AttributeProto.t; TensorProto.raw_data
_GRAPH, _NODE, _INITIALIZER, _ATTRIBUTE, _TENSOR, _RAW_DATA = 7, 1, 5, 5, 5, 9


@dataclass(eq=False)
class Model:
    """A model and its numbers.

    proto       the model without what follows
    weights     what becomes an initializer, by name
    constants   what becomes a Constant node, by name
    """

    proto: ModelProto
    weights: Mapping[str, Array]
    constants: dict[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from onnx import helper

        small = {name: array for name, array in self.constants.items() if array.nbytes < _SMALL}
        nodes = [helper.make_node("Constant", [], [n], value=tensor_message(a, n)) for n, a in small.items()]
        self.constants = {name: array for name, array in self.constants.items() if name not in small}
        rest = list(self.proto.graph.node)
        del self.proto.graph.node[:]
        self.proto.graph.node.extend([*nodes, *rest])

    @property
    def size(self) -> int:
        """Bytes of numbers that are not part of the message."""
        return sum(array.nbytes for array in (*self.weights.values(), *self.constants.values()))

    def check(self, full: bool) -> None:
        """Ask ONNX's checker. The numbers are declared as inputs to it: it looks at shapes and types."""
        import onnx
        from onnx import helper

        checked = onnx.ModelProto()
        checked.CopyFrom(self.proto)
        declared = {info.name for info in checked.graph.input}
        for name, array in (*self.weights.items(), *self.constants.items()):
            if name not in declared:
                checked.graph.input.append(helper.make_tensor_value_info(name, element_type(array.dtype), array.shape))
        onnx.checker.check_model(checked, full_check=full)

    def message(self) -> ModelProto:
        """All of it as one message."""
        return self._whole(_fill)

    def _whole(self, fill: Callable[[TensorProto, str, Array], object]) -> ModelProto:
        """The message with all weights and constants, whose tensors `fill` completes in place."""
        import onnx

        whole = onnx.ModelProto()
        whole.CopyFrom(self.proto)
        for name, array in self.weights.items():
            fill(whole.graph.initializer.add(), name, array)
        nodes = list(whole.graph.node)
        del whole.graph.node[:]
        for name, array in self.constants.items():
            whole.graph.node.append(_constant_node(name))
            fill(whole.graph.node[-1].attribute[0].t, name, array)
        whole.graph.node.extend(nodes)
        return whole

    def save(self, target: Path) -> None:
        """Replace the file whole, or leave the old one."""
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                if self.proto.ByteSize() + self.size < LARGEST_MESSAGE:
                    for piece in self._pieces():
                        file.write(piece)
                else:
                    file.write(self._beside(target.with_name(f"{target.name}.data")))
            os.replace(temporary, target)
        except OSError as error:
            raise DataError(f"onnx.save: '{target}' cannot be written", reason=error.strerror) from None
        finally:
            temporary.unlink(missing_ok=True)

    # One file -------------------------------------------------------------------------------------------------------

    def _pieces(self) -> Iterator[Any]:
        """The bytes of the file, in order: constants before the nodes that use them, weights last."""
        import onnx

        outer = onnx.ModelProto()
        outer.CopyFrom(self.proto)
        outer.ClearField("graph")
        inside = self.proto.graph.SerializeToString()
        constants = [self._constant(name, array) for name, array in self.constants.items()]
        weights = [_framed(_INITIALIZER, *_tensor(name, array)) for name, array in self.weights.items()]
        total = len(inside) + sum(_size(pieces) for pieces in (*constants, *weights))
        yield outer.SerializeToString()
        yield field_key(_GRAPH) + varint(total)
        for pieces in constants:
            yield from pieces
        yield inside
        for pieces in weights:
            yield from pieces

    @staticmethod
    def _constant(name: str, array: Array) -> list[Any]:
        node = _constant_node(name)
        attribute = node.attribute[0].SerializeToString()
        del node.attribute[:]
        inner = _framed(_ATTRIBUTE, attribute, *_framed(_TENSOR, *_tensor(name, array)))
        return _framed(_NODE, node.SerializeToString(), *inner)

    # Two files ------------------------------------------------------------------------------------------------------

    def _beside(self, path: Path) -> bytes:
        """Write the numbers to a file of their own; the message that refers to them."""
        with path.open("wb") as file:
            data: bytes = self._whole(functools.partial(_place, file, path.name)).SerializeToString()
        return data


def _constant_node(name: str) -> Any:
    from onnx import AttributeProto, NodeProto

    node = NodeProto(op_type="Constant", output=[name])
    node.attribute.add(name="value", type=AttributeProto.TENSOR)
    return node


def _described(name: str, array: Array) -> TensorProto:
    """A tensor's name, type and shape, without its numbers."""
    from onnx import TensorProto

    return TensorProto(name=name, data_type=element_type(array.dtype), dims=array.shape)


def tensor_message(array: Array, name: str) -> TensorProto:
    """Numbers as ONNX stores them, all in one message."""
    from onnx import TensorProto

    tensor = TensorProto()
    _fill(tensor, name, array)
    return tensor


def _fill(tensor: TensorProto, name: str, array: Array) -> None:
    tensor.MergeFrom(_described(name, array))
    tensor.raw_data = _bytes(array).tobytes()


def _bytes(array: Array) -> memoryview:
    """The numbers in the order and byte order of files, in place where they lie so."""
    plain = np.ascontiguousarray(array, array.dtype.newbyteorder("<") if array.dtype.kind in "iuf" else array.dtype)
    return plain.reshape(-1).view(np.uint8).data


def _tensor(name: str, array: Array) -> list[Any]:
    return [_described(name, array).SerializeToString(), *_framed(_RAW_DATA, _bytes(array))]


def _framed(number: int, *pieces: Any) -> list[Any]:
    """A field with its key and its length."""
    return [field_key(number) + varint(_size(pieces)), *pieces]


def _size(pieces: Any) -> int:
    return sum(map(len, pieces))


def _place(file: BinaryIO, location: str, tensor: TensorProto, name: str, array: Array) -> None:
    """Append numbers to a file; the tensor says where they are."""
    from onnx import TensorProto

    # Readers map the file: numbers begin where pages do.
    offset = file.seek(-(-file.tell() // 4096) * 4096)
    file.write(_bytes(array))
    tensor.MergeFrom(_described(name, array))
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", array.nbytes)):
        tensor.external_data.add(key=key, value=str(value))
