"""sort and cumulative_sum: every line along the axis by itself, lines shared among threads.

Few elements are kept in order as they come; of many, those wanted are found first; all of them go through four passes
of a radix sort, eight bits at a time (`sorting`). Of elements of 64 bits only the indices are sorted, in eight passes
that look the elements up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mlcompute.devices.cpu.codegen.addressing import ThreadWorkspace, threads_bytes
from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code, vector, vector_lanes
from mlcompute.devices.cpu.codegen.loops import Line, address_at, axis_registers, unravel_index
from mlcompute.devices.cpu.kernels.elementwise_ops import has_half
from mlcompute.devices.cpu.kernels.sorting import DIGIT, Elements, capacity, keep_and_sort, keep_in_order, radix_sort
from mlcompute.devices.cpu.runtime.entry import Entry, Maker
from mlcompute.devices.loop_nest import Operands, collapsed_axes
from mlcompute.ops.op import Step

#: Up to so many elements are kept in order as they come.
_FEW = 64
_ADDED = {
    "half": ("double", "fpext", "fptrunc", "fadd", "0.0"),
    "float": ("double", "fpext", "fptrunc", "fadd", "0.0"),
    "double": ("double", "", "", "fadd", "0.0"),
}


def _capacity(step: Step) -> int | None:
    """Keys to be sorted at a time, where only some of a line are wanted."""
    x, count = step.inputs[0], step.attributes["count"]
    return capacity(count, x.shape[step.attributes["axis"]]) if x.dtype.itemsize < 8 else None


def _is_few(step: Step) -> bool:
    return step.attributes["count"] <= _FEW and step.inputs[0].dtype.itemsize < 8


def _parts(step: Step) -> dict[str, int]:
    """A thread's memory, in floats: the numbers to sort, and for the radix sort a second set and its counts."""
    if _is_few(step):
        return {"keys": 2 * step.attributes["count"]}
    keys = 2 * (_capacity(step) or step.inputs[0].shape[step.attributes["axis"]])
    return {"keys": keys, "spare": keys, "counts": 2 * DIGIT}


def sort_workspace(step: Step) -> int:
    """Bytes for every thread's line."""
    return threads_bytes(_parts(step)) if _is_native(step.inputs[0].dtype) else 0


def _is_native(dtype: np.dtype[Any]) -> bool:
    return dtype in MEMORY_TYPES and (dtype != np.float16 or has_half())


def sort_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """Lines of x in order; values are then read at the indices."""
    x, (values, indices) = operands[step.inputs[0]], (operands[result] for result in step.results)
    axis, count, descending = (step.attributes[name] for name in ("axis", "count", "descending"))
    if not x.size or not _is_native(x.dtype) or x.shape[axis] >= 2**32:
        return None
    few, room = _is_few(step), _capacity(step)
    kernel = "keep in order" if few else "radix sort" if room is None else "radix sort of the first"
    code, element = Code(kernel.replace(" ", "_")), MEMORY_TYPES[x.dtype]
    args = KernelArguments(code)
    source, target, places = (args.pointer(operand) for operand in (x, values, indices))
    parts = _parts(step)
    memory = ThreadWorkspace.of(args, operands, step, parts)
    extent, kept, limit = args.numbers([x.shape[axis], count, room or 0])
    by_x, by_value, by_index = args.numbers([operand.strides[axis] for operand in (x, values, indices)])
    stride = None if x.strides[axis] == 1 else by_x
    others = [d for d in range(len(x.shape)) if d != axis]
    strides = [tuple(operand.strides[d] for d in others) for operand in (x, values, indices)]
    axes = axis_registers(args, collapsed_axes(tuple(x.shape[d] for d in others), strides))
    begin, end = code.share(args.number(x.size // x.shape[axis]), max_threads=memory.max_threads)
    with code.loop(begin, end) as line:
        at = unravel_index(code, line, axes)
        seen = address_at(code, source, 0, axes, at, element)
        elements = Elements(Line(code, seen, element, stride), x.dtype, descending)
        if few:
            keep_in_order(code, elements, memory["keys"], extent, kept)
        elif room is not None:
            keep_and_sort(code, elements, memory["keys"], memory["spare"], memory["counts"], extent, kept, limit)
        else:
            _sort_all(code, elements, memory, extent)
        made, found = (address_at(code, p, k, axes, at, t) for k, p, t in ((1, target, element), (2, places, "i64")))
        with code.loop(0, kept) as number:
            index = code.let(f"and i64 {code.load(code.at(memory['keys'], number, 'i64'), 'i64')}, {2**32 - 1}")
            value = code.load(code.at(seen, code.mul(index, by_x), element), element)
            code.store(code.at(made, code.mul(number, by_value), element), element, value)
            code.store(code.at(found, code.mul(number, by_index), "i64"), "i64", index)
    return [
        Entry(
            step, code, args.values, reads=[x], writes=[values, indices], scratch=memory.scratch,
            kernel=kernel, cost=x.size * (10.0 if room is None else 1.0),
        )
    ]  # fmt: skip


def _sort_all(code: Code, elements: Elements, memory: ThreadWorkspace, extent: str) -> None:
    """All keys of a line, or the indices of elements of 64 bits."""
    is_wide = elements.dtype.itemsize == 8
    with code.loop(0, extent) as index:
        code.store(code.at(memory["keys"], index, "i64"), "i64", index if is_wide else elements.key(index))

    def bits_of(key: str) -> str:
        return elements.ordered(key).name if is_wide else code.let(f"lshr i64 {key}, 32")

    turns = 8 if is_wide else 4
    radix_sort(code, bits_of, turns, memory["keys"], memory["spare"], memory["counts"], extent)


def cumulative_sum_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """One sum per line; neighbouring lines that lie side by side have theirs in one vector."""
    x, y = operands[step.inputs[0]], operands[step.results[0]]
    axis, exclusive, reverse = (step.attributes[name] for name in ("axis", "exclusive", "reverse"))
    if not x.size or x.dtype not in MEMORY_TYPES or x.dtype.kind == "b":
        return None
    element = MEMORY_TYPES[x.dtype]
    if element == "half" and not has_half():
        return None
    others = [d for d in range(len(x.shape)) if d != axis]
    strides = [tuple(operand.strides[d] for d in others) for operand in (x, y)]
    lines = collapsed_axes(tuple(x.shape[d] for d in others), strides)
    lanes = vector_lanes()
    side_by_side = bool(lines) and lines[-1].strides == (1, 1) and lines[-1].extent % lanes == 0
    width = lanes if side_by_side else 1
    code = Code("cumulative_sum")
    args = KernelArguments(code)
    source, target = args.pointer(x), args.pointer(y)
    extent = args.number(x.shape[axis])
    by_x, by_y = args.numbers([operand.strides[axis] for operand in (x, y)])
    axes = axis_registers(args, lines)
    count = x.size // x.shape[axis] // width
    # A sum waits for the one before it: several lines at a time hide that.
    chains = next(chains for chains in (8, 4, 2, 1) if count % chains == 0)
    begin, end = code.share(args.number(count // chains))
    sum_type, widen, narrow, add, zero = _ADDED.get(element, (element, "", "", "add", "0"))
    wide, loaded = vector(sum_type, width), vector(element, width)
    between = vector("float" if element == "half" else element, width)
    start = zero if width == 1 else "zeroinitializer"
    totals = [code.variable(wide, start) for _ in range(chains)]
    with code.loop(begin, end) as group:
        ends = []
        for chain, total in enumerate(totals):
            at = unravel_index(code, code.mul(code.add(code.mul(group, chains), chain), width), axes)
            ends.append([address_at(code, one, k, axes, at, element) for k, one in enumerate((source, target))])
            code.set(wide, total, start)
        with code.loop(0, extent) as number:
            index = code.sub(code.sub(extent, 1), number) if reverse else number
            for (seen, made), total in zip(ends, totals, strict=True):
                value = code.load(code.at(seen, code.mul(index, by_x), element), loaded)
                if element == "half":
                    value = code.let(f"fpext {loaded} {value} to {vector('float', width)}")
                if widen:
                    value = code.let(f"{widen} {between} {value} to {wide}")
                before = code.get(wide, total)
                after = code.let(f"{add} {wide} {before}, {value}")
                code.set(wide, total, after)
                shown = before if exclusive else after
                if narrow:
                    shown = code.let(f"{narrow} {wide} {shown} to {between}")
                if element == "half":
                    shown = code.let(f"fptrunc {between} {shown} to {loaded}")
                code.store(code.at(made, code.mul(index, by_y), element), loaded, shown)
    return [
        Entry(
            step, code, args.values, reads=[x], writes=[y], kernel="cumulative sum", cost=x.size * 1.2 / width**0.5,
        )
    ]  # fmt: skip


KERNELS: dict[str, Maker] = {"sort": sort_entries, "cumulative_sum": cumulative_sum_entries}
WORKSPACES = {"sort": sort_workspace}
