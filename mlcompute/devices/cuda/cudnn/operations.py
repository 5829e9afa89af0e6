"""Operations: several operations of cuDNN as one graph, whose intermediate results exist inside its kernels only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from mlcompute.devices.cuda.cudnn import library as dnn
from mlcompute.devices.cuda.cudnn.library import Cudnn, Descriptor
from mlcompute.devices.loop_nest import dense_strides
from mlcompute.ops.op import Shape


class Pointwise(IntEnum):
    """cudnnPointwiseMode_t"""

    ADD, MUL, DIV, SUB, EXP, LOG = 0, 1, 6, 9, 13, 15
    CMP_GE, GEN_INDEX, BINARY_SELECT = 303, 501, 601


class Reduce(IntEnum):
    """cudnnReduceTensorOp_t"""

    ADD, MAX = 0, 3


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor of a graph; addresses are given for the numbers of those that lie in memory."""

    number: int
    shape: Shape
    descriptor: Descriptor


class Operations:
    """A graph that is being described; each method adds an operation and returns its result.

    scalars  numbers that are passed by value, by the numbers of their tensors
    """

    def __init__(self, cudnn: Cudnn) -> None:
        self.scalars: dict[int, float] = {}
        self._cudnn, self._count = cudnn, 0
        self._operations: list[Descriptor] = []

    def in_memory(self, shape: Shape, strides: Shape, data_type: int) -> Tensor:
        """A tensor at an address that is given when the graph runs, a multiple of 16."""
        return self._tensor(shape, strides, data_type)

    def scalar(self, number: float) -> Tensor:
        """A number, passed by value."""
        tensor = self._tensor((1, 1, 1, 1), (1, 1, 1, 1), dnn.DATA_FLOAT, dnn.TENSOR_IS_BY_VALUE)
        self.scalars[tensor.number] = number
        return tensor

    def pointwise(
        self, mode: Pointwise, x: Tensor, b: Tensor | None = None, t: Tensor | None = None, *,
        data_type: int = dnn.DATA_FLOAT, axis: int | None = None, into: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """op(x), op(x, b) or op(x, b, t), in float32 unless it gives whole numbers or truth values."""
        computed = data_type if data_type in (dnn.DATA_INT32, dnn.DATA_BOOLEAN) else dnn.DATA_FLOAT
        kind = Descriptor(self._cudnn, dnn.KIND_POINTWISE)
        kind.set(dnn.POINTWISE_MODE, dnn.TYPE_POINTWISE_MODE, mode)
        kind.set(dnn.POINTWISE_MATH_PREC, dnn.TYPE_DATA_TYPE, computed)
        if axis is not None:
            kind.set(dnn.POINTWISE_AXIS, dnn.TYPE_INT64, axis)
        y = into or self._virtual(x.shape, data_type)
        tensors = {dnn.OPERATION_POINTWISE_XDESC: x, dnn.OPERATION_POINTWISE_YDESC: y}
        if b is not None:
            tensors[dnn.OPERATION_POINTWISE_BDESC] = b
        if t is not None:
            tensors[dnn.OPERATION_POINTWISE_TDESC] = t
        return self._add(dnn.KIND_OPERATION_POINTWISE, tensors, y, {dnn.OPERATION_POINTWISE_PW_DESCRIPTOR: kind})

    def matmul(self, a: Tensor, b: Tensor, into: Tensor | None = None) -> Tensor:
        """a b, summed in float32."""
        kind = Descriptor(self._cudnn, dnn.KIND_MATMUL).set(dnn.MATMUL_COMP_TYPE, dnn.TYPE_DATA_TYPE, dnn.DATA_FLOAT)
        y = into or self._virtual((*a.shape[:-1], b.shape[-1]), dnn.DATA_FLOAT)
        sides = (dnn.OPERATION_MATMUL_ADESC, dnn.OPERATION_MATMUL_BDESC, dnn.OPERATION_MATMUL_CDESC)
        tensors = dict(zip(sides, (a, b, y), strict=True))
        return self._add(dnn.KIND_OPERATION_MATMUL, tensors, y, {dnn.OPERATION_MATMUL_DESC: kind})

    def reduction(self, operator: Reduce, x: Tensor) -> Tensor:
        """Over the last axis, which stays as 1."""
        kind = Descriptor(self._cudnn, dnn.KIND_REDUCTION)
        kind.set(dnn.REDUCTION_OPERATOR, dnn.TYPE_REDUCTION_OPERATOR_TYPE, operator)
        kind.set(dnn.REDUCTION_COMP_TYPE, dnn.TYPE_DATA_TYPE, dnn.DATA_FLOAT)
        y = self._virtual((*x.shape[:-1], 1), dnn.DATA_FLOAT)
        tensors = {dnn.OPERATION_REDUCTION_XDESC: x, dnn.OPERATION_REDUCTION_YDESC: y}
        return self._add(dnn.KIND_OPERATION_REDUCTION, tensors, y, {dnn.OPERATION_REDUCTION_DESC: kind})

    def reshape(self, x: Tensor, shape: Shape, strides: Shape, data_type: int) -> Tensor:
        """The same elements, seen through another shape."""
        y = self._tensor(shape, strides, data_type, dnn.TENSOR_IS_VIRTUAL)
        tensors = {dnn.OPERATION_RESHAPE_XDESC: x, dnn.OPERATION_RESHAPE_YDESC: y}
        return self._add(dnn.KIND_OPERATION_RESHAPE, tensors, y, {})

    def graph(self, handle: int) -> Descriptor:
        """All of it, for the engines of a handle."""
        graph = Descriptor(self._cudnn, dnn.KIND_OPERATIONGRAPH)
        if handle:
            graph.set(dnn.OPERATIONGRAPH_HANDLE, dnn.TYPE_HANDLE, handle)
        return graph.set(dnn.OPERATIONGRAPH_OPS, dnn.TYPE_BACKEND_DESCRIPTOR, *self._operations).finalize()

    def _virtual(self, shape: Shape, data_type: int) -> Tensor:
        return self._tensor(shape, dense_strides(shape), data_type, dnn.TENSOR_IS_VIRTUAL)

    def _tensor(self, shape: Shape, strides: Shape, data_type: int, flag: int | None = None) -> Tensor:
        self._count += 1
        tensor = Descriptor(self._cudnn, dnn.KIND_TENSOR)
        tensor.set(dnn.TENSOR_UNIQUE_ID, dnn.TYPE_INT64, self._count)
        tensor.set(dnn.TENSOR_DATA_TYPE, dnn.TYPE_DATA_TYPE, data_type)
        tensor.set(dnn.TENSOR_BYTE_ALIGNMENT, dnn.TYPE_INT64, 16)
        tensor.set(dnn.TENSOR_DIMENSIONS, dnn.TYPE_INT64, *shape)
        tensor.set(dnn.TENSOR_STRIDES, dnn.TYPE_INT64, *strides)
        if flag is not None:
            tensor.set(flag, dnn.TYPE_BOOLEAN, True)
        return Tensor(self._count, tuple(shape), tensor.finalize())

    def _add(self, kind: int, tensors: dict[int, Tensor], result: Tensor, more: dict[int, Descriptor]) -> Tensor:
        operation = Descriptor(self._cudnn, kind)
        for attribute, descriptor in more.items():
            operation.set(attribute, dnn.TYPE_BACKEND_DESCRIPTOR, descriptor.finalize())
        for attribute, tensor in tensors.items():
            operation.set(attribute, dnn.TYPE_BACKEND_DESCRIPTOR, tensor.descriptor)
        self._operations.append(operation.finalize())
        return result
