"""Elements by index: gather, scatter, scatter_add."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code
from mlcompute.devices.cpu.codegen.loops import axis_registers, loop_over, share_units
from mlcompute.devices.cpu.codegen.simd import SimdValue
from mlcompute.devices.cpu.kernels.checked_indices import CheckedIndices, adding, is_index
from mlcompute.devices.cpu.runtime.entry import Entry, Maker
from mlcompute.devices.loop_nest import MIN_SHARED_ROWS, Axis, Operand, Operands, Strides, collapsed_axes, enough_rows
from mlcompute.ops.op import Shape, Step

_Part = AbstractContextManager[list[str]]


def gather_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """One element per index, in the order of the indices."""
    x, indices, y = operands[step.inputs[0]], operands[step.inputs[1]], operands[step.results[0]]
    axis = step.attributes["axis"]
    if not (x.size and y.size) or x.dtype not in MEMORY_TYPES or not is_index(indices.dtype):
        return None
    # Along the axis x does not move with the loops: the indices say where to read.
    unindexed = tuple(0 if d == axis else stride for d, stride in enumerate(x.strides))
    axes = collapsed_axes(y.shape, [indices.strides, unindexed, y.strides])
    rows, by_row = 0, {1, 2}
    if y.shape and enough_rows(y.shape[0], operands.threads) and axes[0].extent % y.shape[0] == 0 and indices.is_dense:
        rows = y.shape[0]
        if axis != 0 and x.is_dense and x.shape[0] == rows:
            by_row.add(0)
    return [read_by_index(step, operands, axis, indices.strides, unindexed, rows, by_row)]


def read_by_index(
    step: Step, operands: Operands, axis: int, by_index: Strides, unindexed: Strides, rows: int, by_row: set[int]
) -> Entry:
    """One element after the other: along the result, indices move by `by_index` and x, besides, by `unindexed`."""
    x, indices, y = operands[step.inputs[0]], operands[step.inputs[1]], operands[step.results[0]]
    axes = collapsed_axes(y.shape, [by_index, unindexed, y.strides]) or [Axis(1, (0, 0, 0))]
    code, element = Code("gather"), MEMORY_TYPES[x.dtype]
    args = KernelArguments(code)
    source, target = args.pointer(x), args.pointer(y)
    checked = CheckedIndices(args, indices, x.shape[axis])
    along = args.number(x.strides[axis])
    outermost, *inner = axis_registers(args, axes)
    begin, end = share_units(args, axes[0].extent, rows)
    with code.loop(begin, end) as first:
        pointers, types = [checked.pointer, source, target], [checked.element, element, element]
        addresses = [
            code.at(pointer, code.mul(first, stride), type_)
            for pointer, stride, type_ in zip(pointers, outermost.strides, types, strict=True)
        ]
        with loop_over(code, inner, addresses, types) as (address, seen, made):
            index = checked.load(address, "0")
            code.store(made, element, code.load(code.at(seen, code.mul(index, along), element), element))
    return Entry(
        step, code, args.values, reads=[x, indices], writes=[y], rows=rows, by_row=by_row,
        kernel="gather", cost=y.size * 1.0, status=checked.status,
    )  # fmt: skip


def scatter_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """A copy of the base, then one element per index. Threads own parts of an axis that indices do not cross."""
    updates, indices, base = (operands[value] for value in step.inputs)
    y, axis = operands[step.results[0]], step.attributes["axis"]
    add = adding(y.dtype) if step.op.name == "scatter_add" else None
    if not y.size or base.dtype not in MEMORY_TYPES or not is_index(indices.dtype):
        return None
    others = [d for d in range(len(y.shape)) if d != axis and y.shape[d] > 1]
    # The leading axis if it is long enough, else the longest; with no other axis, ranges of the indexed axis itself.
    owned = axis
    if others:
        owned = others[0] if y.shape[others[0]] >= MIN_SHARED_ROWS else max(others, key=lambda d: y.shape[d])
    owns_axis = owned == axis
    code, element = Code(step.op.name), MEMORY_TYPES[y.dtype]
    args = KernelArguments(code)
    source, kept, target = (args.pointer(operand) for operand in (updates, base, y))
    checked = CheckedIndices(args, indices, y.shape[axis])
    begin, end = code.share(args.number(y.shape[owned]))

    def part(shape: Shape, strides: Sequence[Strides], pointers: list[str], types: list[str]) -> _Part:
        """Loops in row-major order; along the owned axis only over what this thread has."""
        last = code.minimum(end, args.number(shape[owned]))
        axes = [
            ((begin, last) if d == owned else ("0", args.number(shape[d])), args.numbers([own[d] for own in strides]))
            for d in range(len(shape))
        ]
        return _loops(code, axes, pointers, types)

    with part(y.shape, [base.strides, y.strides], [kept, target], [element, element]) as (seen, made):
        code.store(made, element, code.load(seen, element))

    # The updates that fall into this part, row-major along the axis.
    along = args.number(y.strides[axis])
    unindexed = tuple(0 if d == axis else stride for d, stride in enumerate(y.strides))
    strides = [indices.strides, updates.strides, unindexed]
    addresses, types = [checked.pointer, source, target], [checked.element, element, element]
    if owns_axis:
        loops = [Axis(indices.shape[d], tuple(own[d] for own in strides)) for d in range(len(y.shape))]
        with loop_over(code, axis_registers(args, loops), addresses, types) as (address, seen, made):
            index = checked.load(address, "0")
            low, high = code.let(f"icmp sge i64 {index}, {begin}"), code.let(f"icmp slt i64 {index}, {end}")
            with code.when(code.let(f"and i1 {low}, {high}")):
                _put(code, element, seen, code.at(made, code.mul(index, along), element), add)
    else:
        with part(indices.shape, strides, addresses, types) as (address, seen, made):
            index = checked.load(address, "0")
            _put(code, element, seen, code.at(made, code.mul(index, along), element), add)
    rows, by_row = _scatter_rows(updates, indices, base, y, owned, axis)
    return [
        Entry(
            step, code, args.values, reads=[updates, indices, base], writes=[y], rows=rows, by_row=by_row,
            kernel=step.op.name, cost=y.size * 0.5 + indices.size * 1.5, status=checked.status,
        )
    ]  # fmt: skip


@contextlib.contextmanager
def _loops(
    code: Code, axes: Sequence[tuple[tuple[str, str], Sequence[str]]], pointers: list[str], types: list[str]
) -> Iterator[list[str]]:
    """Nested loops, each with its bounds and the operands' strides; gives the operands' addresses inside."""
    with contextlib.ExitStack() as stack:
        for bounds, strides in axes:
            index = stack.enter_context(code.loop(*bounds))
            steps = zip(pointers, strides, types, strict=True)
            pointers = [code.at(pointer, code.mul(index, stride), type_) for pointer, stride, type_ in steps]
        yield pointers


def _put(code: Code, element: str, source: str, target: str, add: Callable[..., SimdValue] | None) -> None:
    value = SimdValue(code, code.load(source, element), element, 1)
    if add is not None:
        value = add(SimdValue(code, code.load(target, element), element, 1), value)
    code.store(target, element, value.name)


def _scatter_rows(
    updates: Operand, indices: Operand, base: Operand, y: Operand, owned: int, axis: int
) -> tuple[int, set[int]]:
    """Rows threads own, and in which of (updates, indices, base, y)."""
    rows = y.shape[0] if y.shape else 0
    if rows < MIN_SHARED_ROWS or owned != 0 or axis == 0:
        return 0, set()
    all_ = (updates, indices, base, y)
    return rows, {i for i, operand in enumerate(all_) if operand.is_dense and operand.shape[0] == rows}


KERNELS: dict[str, Maker] = {
    "gather": gather_entries,
    "scatter": scatter_entries,
    "scatter_add": scatter_entries,
}
