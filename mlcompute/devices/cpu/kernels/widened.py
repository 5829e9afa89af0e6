"""bfloat16 for kernels that compute with float32 alone: operands are converted into the step's own memory, and results
back from there. The copies live as long as the step; what is stored is bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mlcompute.devices.cpu.kernels.elementwise import loop_entry
from mlcompute.devices.cpu.runtime.entry import Entry, Maker
from mlcompute.devices.loop_nest import LoopNest, Operand, Operands, Strides, dense_strides
from mlcompute.ops.bfloat16 import is_bfloat16
from mlcompute.ops.op import FLOAT32, TABLE, Step, Value

Measure = Callable[[Step], int]
Reads = Callable[[Step, Operands], bool]


def has_bfloat16(step: Step) -> bool:
    """Does a step read or write bfloat16?"""
    # By the one type of nearly all values first, written out: large programs ask this of every step.
    other = [value.dtype for value in step.inputs + step.results if value.dtype is not FLOAT32]
    return bool(other) and any(map(is_bfloat16, other))


def widened(step: Step) -> Step:
    """The same step on float32."""
    twins = {value: _twin(value) for value in (*step.inputs, *step.results) if is_bfloat16(value.dtype)}
    inputs, results = ([twins.get(value, value) for value in values] for values in (step.inputs, step.results))
    attributes: dict[str, Any] = {name: value for name, value in step.attributes.items() if name != "to"}
    return Step(step.op, tuple(inputs), tuple(results), attributes, step.layer, step.phase)


def _twin(value: Value) -> Value:
    return Value(value.trace, value.index, value.shape, FLOAT32, "temporary", value.label)


def widened_workspace(step: Step, measure: Measure | None) -> int:
    """Bytes for the copies in float32, and for what the kernel needs beside them."""
    return _copied_bytes(step) + (measure(widened(step)) if measure is not None else 0)


def _copied_bytes(step: Step) -> int:
    return sum(map(_aligned_bytes, _narrow_values(step)))


def _narrow_values(step: Step) -> list[Value]:
    return [value for value in dict.fromkeys((*step.inputs, *step.results)) if is_bfloat16(value.dtype)]


def _aligned_bytes(value: Value) -> int:
    return -(-4 * value.size // 64) * 64


class _WideOperands(Operands):
    """Operands of a widened step: copies of its own, everything else as planned."""

    def __init__(self, step: Step, wide: Step, operands: Operands) -> None:
        self._step, self._operands = step, operands
        self.threads = operands.threads
        self._start = _copied_bytes(step)
        self._originals = dict(zip((*wide.inputs, *wide.results), (*step.inputs, *step.results), strict=True))
        #: bfloat16 value -> its copy.
        self.copies: dict[Value, Operand] = {}
        start = 0
        for value in _narrow_values(step):
            place = operands.workspace(step, start, 4 * value.size)
            self.copies[value] = place.holding(value.shape, FLOAT32, same_order(operands[value]))
            start += _aligned_bytes(value)

    def __getitem__(self, value: Value) -> Operand:
        value = self._originals.get(value, value)
        return self.copies[value] if value in self.copies else self._operands[value]

    def make_dense(self, values: Sequence[Value]) -> None:
        """Copies with their elements in the order of their axes."""
        for value in values:
            if value in self.copies:
                self.copies[value] = self.copies[value]._replace(strides=dense_strides(value.shape))

    def workspace(self, step: Step, offset: int, nbytes: int) -> Operand:
        return self._operands.workspace(self._step, self._start + offset, nbytes)


def same_order(operand: Operand) -> Strides:
    """Strides of a copy whose elements lie in the order of the operand's, without gaps or repetitions."""
    order = sorted(range(len(operand.shape)), key=lambda axis: -abs(operand.strides[axis]))
    packed = dense_strides(tuple(operand.shape[axis] for axis in order))
    strides = [0] * len(order)
    for axis, stride in zip(order, packed, strict=True):
        strides[axis] = stride
    return tuple(strides)


def widened_entries(step: Step, operands: Operands, maker: Maker, reads: Reads | None) -> Sequence[Entry] | None:
    """Conversions, the kernels of the step on float32, and conversions of what they gave.

    reads   can the kernels read their operands as they lie? Else the copies are dense.
    """
    wide = widened(step)
    places = _WideOperands(step, wide, operands)
    if reads is not None and not reads(wide, places):
        places.make_dense(step.inputs)
    inner = maker(wide, places)
    if inner is None:
        return None
    for entry in inner:
        entry.step = step
    before = [
        conversion_entry(step, value, operands[value], places.copies[value], operands.threads)
        for value in dict.fromkeys(step.inputs)
        if is_bfloat16(value.dtype)
    ]
    after = [
        conversion_entry(step, value, places.copies[value], operands[value], operands.threads)
        for value in step.results
        if is_bfloat16(value.dtype)
    ]
    return [*before, *inner, *after]


def conversion_entry(step: Step, value: Value, source: Operand, target: Operand, threads: int) -> Entry:
    """target = source in the other type, in the order in which the elements lie."""
    order = sorted(range(len(source.shape)), key=lambda axis: -abs(target.strides[axis]))
    seen, made = (_placed(value, operand) for operand in (source, target))
    convert = Step(TABLE["convert"], (seen,), (made,), {"to": target.dtype, "flush": True}, step.layer, step.phase)
    loads, stores = (operand.permuted(order) for operand in (source, target))
    nest = LoopNest.of(loads.shape, [(seen, loads)], [convert], [(made, stores)])
    entry = loop_entry(step, nest, threads)
    entry.kernel = "bfloat16 to float32" if is_bfloat16(source.dtype) else "float32 to bfloat16"
    return entry


def _placed(value: Value, operand: Operand) -> Value:
    return Value(value.trace, value.index, operand.shape, operand.dtype, "temporary", value.label)
