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
    read, written = source.permuted(order), target.permuted(order)
    value = step.inputs[0]  # stands for what is copied
    return nest_launches(step, LoopNest.of(read.shape, [(value, read)], [], [(value, written)]))


def transposed(operand: Operand) -> Operand:
    """An operand with its last two axes swapped."""
    *others, row, column = range(len(operand.shape))
    return operand.permuted([*others, column, row])


def reshaped(operand: Operand, shape: Shape) -> Operand:
    """A dense operand seen in another shape."""
    assert operand.is_dense
    return operand._replace(shape=shape, strides=dense_strides(shape))
