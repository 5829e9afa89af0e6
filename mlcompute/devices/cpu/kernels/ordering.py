"""sort and cumulative_sum: every line along the axis by itself, lines shared among threads.

Elements are sorted as whole numbers of 64 bits: 32 bits that have the order of the elements, then 32 of their index,
so that no two are equal and the first of equal elements comes first. Few are kept in order as they come; many go
through four passes of a radix sort, eight bits at a time. Of elements of 64 bits only the indices are sorted, in eight
passes that look the elements up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mlcompute.devices.cpu.codegen.addressing import ThreadWorkspace, thread_floats
from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code, vector, vector_lanes
from mlcompute.devices.cpu.codegen.loops import address_at, axis_registers, unravel_index
from mlcompute.devices.cpu.kernels.elementwise_ops import has_half
from mlcompute.devices.cpu.runtime.entry import Entry, Maker
from mlcompute.devices.cpu.runtime.threads import planned_threads
from mlcompute.devices.loop_nest import Operands, collapsed_axes
from mlcompute.ops.op import Step

#: Up to so many elements are kept in order as they come.
_FEW = 64
_DIGIT = 256
_ADDED = {
    "half": ("double", "fpext", "fptrunc", "fadd", "0.0"),
    "float": ("double", "fpext", "fptrunc", "fadd", "0.0"),
    "double": ("double", "", "", "fadd", "0.0"),
}


def _parts(step: Step) -> dict[str, int]:
    """A thread's memory, in floats: the numbers to sort, and for the radix sort a second set and its counts."""
    count, extent = step.attributes["count"], step.inputs[0].shape[step.attributes["axis"]]
    is_few = count <= _FEW and step.inputs[0].dtype.itemsize < 8
    return {"keys": 2 * count} if is_few else {"keys": 2 * extent, "spare": 2 * extent, "counts": 2 * _DIGIT}


def sort_workspace(step: Step) -> int:
    """Bytes for every thread's line."""
    return 4 * thread_floats(_parts(step)) * planned_threads() if _is_native(step.inputs[0].dtype) else 0


def _is_native(dtype: np.dtype[Any]) -> bool:
    return dtype in MEMORY_TYPES and (dtype != np.float16 or has_half())


def sort_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """Lines of x in order; values are then read at the indices."""
    x, (values, indices) = operands[step.inputs[0]], (operands[result] for result in step.results)
    axis, count, descending = (step.attributes[name] for name in ("axis", "count", "descending"))
    if not x.size or not _is_native(x.dtype) or x.shape[axis] >= 2**32:
        return None
    is_wide = x.dtype.itemsize == 8
    few = count <= _FEW and not is_wide
    code, element = Code("keep_in_order" if few else "radix_sort"), MEMORY_TYPES[x.dtype]
    args = KernelArguments(code)
    source, target, places = (args.pointer(operand) for operand in (x, values, indices))
    parts = _parts(step)
    memory = ThreadWorkspace(args, operands.workspace(step, 0, sort_workspace(step)), parts)
    extent, kept = args.number(x.shape[axis]), args.number(count)
    by_x, by_value, by_index = args.numbers([operand.strides[axis] for operand in (x, values, indices)])
    others = [d for d in range(len(x.shape)) if d != axis]
    strides = [tuple(operand.strides[d] for d in others) for operand in (x, values, indices)]
    axes = axis_registers(args, collapsed_axes(tuple(x.shape[d] for d in others), strides))
    begin, end = code.share(args.number(x.size // x.shape[axis]), max_threads=memory.max_threads)
    with code.loop(begin, end) as line:
        at = unravel_index(code, line, axes)
        seen = address_at(code, source, 0, axes, at, element)

        def ordered_at(index: str) -> str:
            value = code.load(code.at(seen, code.mul(index, by_x), element), element)
            return _ordered(code, value, element, x.dtype, descending)

        def key(index: str) -> str:
            if is_wide:
                return index
            ordered = ordered_at(index)
            wide = code.let(f"zext i32 {ordered} to i64")
            return code.let(f"or i64 {code.let(f'shl i64 {wide}, 32')}, {index}")

        if few:
            _keep_in_order(code, key, memory["keys"], extent, kept)
        else:
            shifted = ordered_at if is_wide else lambda number: code.let(f"lshr i64 {number}, 32")
            turns = 8 if is_wide else 4
            _radix_sort(code, key, shifted, turns, memory["keys"], memory["spare"], memory["counts"], extent)
        made, found = (address_at(code, p, k, axes, at, t) for k, p, t in ((1, target, element), (2, places, "i64")))
        with code.loop(0, kept) as number:
            index = code.let(f"and i64 {code.load(code.at(memory['keys'], number, 'i64'), 'i64')}, {2**32 - 1}")
            value = code.load(code.at(seen, code.mul(index, by_x), element), element)
            code.store(code.at(made, code.mul(number, by_value), element), element, value)
            code.store(code.at(found, code.mul(number, by_index), "i64"), "i64", index)
    return [
        Entry(
            step, code, args.values, reads=[x], writes=[values, indices], scratch=[memory.buffer],
            kernel="keep in order" if few else "radix sort", cost=x.size * 10.0,
        )
    ]  # fmt: skip


def _ordered(code: Code, value: str, element: str, dtype: np.dtype[Any], descending: bool) -> str:
    """32 bits, or 64 for elements of so many, that are ordered as the elements are, without a sign."""
    word, count = ("i64", 64) if dtype.itemsize == 8 else ("i32", 32)
    sign = -(2 ** (count - 1))
    if dtype.kind == "f":
        if element == "half":
            value, element = code.let(f"fpext half {value} to float"), "float"
        # -0 and 0 are equal; a NaN, whatever its sign, is larger than everything.
        bits = code.let(f"bitcast {element} {code.let(f'fadd {element} {value}, 0.0')} to {word}")
        mask = code.let(f"or {word} {code.let(f'ashr {word} {bits}, {count - 1}')}, {sign}")
        bits = code.let(f"xor {word} {bits}, {mask}")
        bits = code.let(f"select i1 {code.let(f'fcmp uno {element} {value}, 0.0')}, {word} -1, {word} {bits}")
    else:
        if element != word:
            value = code.let(f"{'sext' if dtype.kind == 'i' else 'zext'} {element} {value} to {word}")
        is_unsigned = dtype.kind == "u" and dtype.itemsize == 4
        bits = value if is_unsigned else code.let(f"xor {word} {value}, {sign}")
    return code.let(f"xor {word} {bits}, -1") if descending else bits


def _keep_in_order(code: Code, key: Any, keys: str, extent: str, kept: str) -> None:
    """The smallest so far, in order: a new one moves those larger than it up by one place."""
    filled = code.variable("i64", "0")
    with code.loop(0, extent) as index:
        new, count = key(index), code.get("i64", filled)
        is_full = code.let(f"icmp eq i64 {count}, {kept}")
        last = code.load(code.at(keys, code.sub(kept, 1), "i64"), "i64")
        is_late = code.let(f"and i1 {is_full}, {code.let(f'icmp ugt i64 {new}, {last}')}")
        with code.when(code.let(f"xor i1 {is_late}, true")):
            place = code.variable("i64", code.let(f"select i1 {is_full}, i64 {code.sub(kept, 1)}, i64 {count}"))
            head, test, move, done = (code.new_label(name) for name in ("head", "test", "move", "done"))
            code.do(f"br label %{head}")
            code.start_block(head)
            at = code.get("i64", place)
            code.do(f"br i1 {code.let(f'icmp sgt i64 {at}, 0')}, label %{test}, label %{done}")
            code.start_block(test)
            before = code.sub(at, 1)
            other = code.load(code.at(keys, before, "i64"), "i64")
            code.do(f"br i1 {code.let(f'icmp ugt i64 {other}, {new}')}, label %{move}, label %{done}")
            code.start_block(move)
            code.store(code.at(keys, at, "i64"), "i64", other)
            code.set("i64", place, before)
            code.do(f"br label %{head}")
            code.start_block(done)
            code.store(code.at(keys, code.get("i64", place), "i64"), "i64", new)
            code.set("i64", filled, code.minimum(code.add(count, 1), kept))
    code.set("i64", filled, "0")


def _radix_sort(
    code: Code, key: Any, bits_of: Any, turns: int, keys: str, spare: str, counts: str, extent: str
) -> None:
    """By `turns` digits of the bits of every key, the lowest eight first: elements of one digit keep their order."""
    with code.loop(0, extent) as index:
        code.store(code.at(keys, index, "i64"), "i64", key(index))
    for turn in range(turns):
        source, target = (keys, spare) if turn % 2 == 0 else (spare, keys)
        with code.loop(0, _DIGIT) as digit:
            code.store(code.at(counts, digit, "i64"), "i64", "0")

        def digit_of(number: str, shift: int = 8 * turn) -> str:
            bits = code.let(f"lshr i64 {bits_of(number)}, {shift}")
            return code.at(counts, code.let(f"and i64 {bits}, 255"), "i64")

        with code.loop(0, extent) as index:
            place = digit_of(code.load(code.at(source, index, "i64"), "i64"))
            code.store(place, "i64", code.add(code.load(place, "i64"), 1))
        total = code.variable("i64", "0")
        with code.loop(0, _DIGIT) as digit:
            place, start = code.at(counts, digit, "i64"), code.get("i64", total)
            code.set("i64", total, code.add(start, code.load(place, "i64")))
            code.store(place, "i64", start)
        code.set("i64", total, "0")
        with code.loop(0, extent) as index:
            number = code.load(code.at(source, index, "i64"), "i64")
            place = digit_of(number)
            to = code.load(place, "i64")
            code.store(place, "i64", code.add(to, 1))
            code.store(code.at(target, to, "i64"), "i64", number)


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
