"""Copies between operands of one shape that lie differently in memory: a part of what other kernels do."""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute.devices.cuda.kernels.elementwise import nest_launches
from mlcompute.devices.cuda.kernels.launch import Launch
from mlcompute.devices.loop_nest import LoopNest, Operand, dense_strides
from mlcompute.ops.op import Shape, Step


def strided_copy(step: Step, source: Operand, target: Operand) -> Sequence[Launch]:
    """Copy all elements, in the order in which the target lies in memory."""
    order = sorted(range(len(target.shape)), key=lambda axis: -target.strides[axis])
    views = [
        Operand(
            each.base, each.offset, tuple(each.shape[axis] for axis in order),
            tuple(each.strides[axis] for axis in order), each.dtype,
        )
        for each in (source, target)
    ]  # fmt: skip
    value = step.inputs[0]  # stands for what is copied
    return nest_launches(step, LoopNest.of(views[0].shape, [(value, views[0])], [], [(value, views[1])]))


def transposed(operand: Operand) -> Operand:
    """An operand with its last two axes swapped."""
    *shape, rows, columns = operand.shape
    *strides, by_row, by_column = operand.strides
    return Operand(operand.base, operand.offset, (*shape, columns, rows), (*strides, by_column, by_row), operand.dtype)


def reshaped(operand: Operand, shape: Shape) -> Operand:
    """A dense operand seen in another shape."""
    assert operand.is_dense
    return Operand(operand.base, operand.offset, shape, dense_strides(shape), operand.dtype)
