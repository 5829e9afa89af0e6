"""normalize_gradient: dx = (dn - mean dn - y mean(dn y)) / sqrt(v + epsilon), dn = scale dy, in two passes over memory.

The first sums dy and dy y, the second writes dx = a dy - b - c y with three numbers per row or column. Rows stay in the
cache between the two. Columns with many rows are cut into blocks as in `normalize`; every block of the second pass adds
up the sums of all blocks, in order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code
from mlcompute.devices.cpu.codegen.combiners import ROWS, SUM, LineReduction, fill
from mlcompute.devices.cpu.codegen.loops import (
    Line,
    Variable,
    loop_over,
    row_groups,
    splat,
    splat_constant,
    to_float,
    vector_loop,
)
from mlcompute.devices.cpu.codegen.simd import SimdValue
from mlcompute.devices.cpu.kernels.normalization import (
    _ROWS,
    _TILE,
    _axes,
    _blocks,
    _epsilon,
    has_rows_or_columns,
    supports_normalize,
)
from mlcompute.devices.cpu.kernels.row_column import ColumnLoops, RowLoops
from mlcompute.devices.cpu.runtime.entry import Entry, Maker, always
from mlcompute.devices.loop_nest import Axis, Operand, Operands, dense_strides, iteration_count, shared_rows
from mlcompute.ops.op import Step

_NS_PER_ELEMENT = 0.4
# Operands of a kernel in their order; the scale comes last, if there is one.
_DY, _Y, _DX, _STATISTICS = range(4)


def normalize_gradient_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """By rows when elements that are reduced lie side by side, else by columns."""
    axes = step.attributes["axes"]
    dy, y, *small = (operands[value] for value in step.inputs)
    dx, shift, slope = (operands[value] for value in step.results)
    statistics = [*small, shift, slope]
    if not supports_normalize(step) or not reads_normalize_gradient(step, operands):
        return None
    kept = tuple(0 if axis in axes else stride for axis, stride in enumerate(shift.strides))
    loops = _axes(dy.shape, axes, [dy.strides, y.strides, dx.strides, kept])
    if loops[-1].reduced:
        return [_row_entry(step, [dy, y, dx], statistics, loops, operands.threads)]
    blocks = _blocks(loops)
    assert workspace(step) >= 2 * blocks * shift.size * 4
    along = next(axis for axis in loops if axis.reduced)
    size = -(-along.extent // blocks)
    blocks = -(-along.extent // size)
    sums = [operands.workspace(step, part * blocks * shift.size * 4, blocks * shift.size * 4) for part in range(2)]
    cut = (loops, blocks, size, shift.size)
    return [_sums_entry(step, [dy, y], sums, *cut), _write_entry(step, [dy, y, dx], statistics, sums, *cut)]


def reads_normalize_gradient(step: Step, operands: Operands) -> bool:
    """Statistics lie one after the other, so that they share their strides; all else must be rows or columns."""
    dy, y, *small = (operands[value] for value in step.inputs)
    axes, dense = step.attributes["axes"], dense_strides(dy.shape)
    if not all(operand.is_dense for operand in small):
        return False
    if not has_rows_or_columns(dy.shape, axes, [dy.strides, y.strides, dense]):
        return False
    # The sums of blocks were planned for dense operands.
    found, planned = (_axes(dy.shape, axes, strides) for strides in ([dy.strides, y.strides, dense], [dense]))
    return found[-1].reduced == planned[-1].reduced and (found[-1].reduced or _blocks(found) <= _blocks(planned))


def workspace(step: Step) -> int:
    """Bytes for the sums of the blocks."""
    shape = step.inputs[0].shape
    if not step.inputs[0].size:
        return 0
    loops = _axes(shape, step.attributes["axes"], [dense_strides(shape)])
    return 0 if loops[-1].reduced else 2 * _blocks(loops) * step.results[1].nbytes


# Rows ---------------------------------------------------------------------------------------------------------------


def _row_entry(
    step: Step, images: Sequence[Operand], statistics: Sequence[Operand], axes: Sequence[Axis], threads: int
) -> Entry:
    code = Code("normalize_gradient_rows")
    args = KernelArguments(code)
    pointers = [args.pointer(operand) for operand in images]
    types = [MEMORY_TYPES[operand.dtype] for operand in images]
    variances, *scales, shifts, slopes = (args.pointer(operand) for operand in statistics)
    count = args.number(iteration_count([axis for axis in axes if axis.reduced]))
    epsilon, size = _epsilon(args, step), to_float(code, count)
    operands = [*images[:2], *statistics[:-2], images[2], *statistics[-2:]]
    units = iteration_count([axis for axis in axes if not axis.reduced])
    rows = shared_rows(images[0].shape, step.attributes["axes"], operands, units, threads)
    loops = RowLoops(args, axes, rows, operands=3)
    *outer, innermost = loops.reduced
    with loops.each_unit():
        addresses = [loops.address(p, i, types[i]) for i, p in enumerate(pointers)]

        def statistic(pointer: str) -> Line:
            return Line(code, loops.address(pointer, _STATISTICS, "float"), "float")

        shift, slope = LineReduction(code, SUM), LineReduction(code, SUM)
        with loop_over(code, outer, addresses[:2], types[:2]) as inner:
            dy, y = map(functools.partial(Line, code), inner, types, loops.strides)
            shift.add(dy, innermost.extent)
            slope.add(dy, innermost.extent, lambda value, index, mask: value * y.load(index, mask))
        sums = shift.result(), slope.result()
        for pointer, value in zip((shifts, slopes), sums, strict=True):
            statistic(pointer).store(0, value)
        factor = 1.0 / (statistic(variances).load(0, lanes=1) + epsilon).sqrt()
        for pointer in scales:
            factor = factor * statistic(pointer).load(0, lanes=1)
        a, b, c = (splat(value) for value in (factor, factor * (sums[0] / size), factor * (sums[1] / size)))
        with loop_over(code, outer, addresses, types) as inner:
            lines = list(map(functools.partial(Line, code), inner, types, loops.strides))

            def finish(index: str, mask: str | None) -> None:
                lines[_DX].store(
                    index, _formed(lines[_DY].load(index, mask), lines[_Y].load(index, mask), a, b, c), mask
                )

            vector_loop(code, 0, innermost.extent, finish)
    return Entry(
        step, code, args.values, reads=operands[: -3], writes=operands[-3:],
        rows=rows, by_row=set(range(len(operands))) if rows else set(),
        kernel="normalize gradient of rows", cost=images[0].size * _NS_PER_ELEMENT,
    )  # fmt: skip


def _formed(dy: SimdValue, y: SimdValue, a: SimdValue, b: SimdValue, c: SimdValue) -> SimdValue:
    return dy * a - b - y * c


# Columns ------------------------------------------------------------------------------------------------------------


def _sums_entry(
    step: Step,
    images: Sequence[Operand],
    sums: Sequence[Operand],
    axes: Sequence[Axis],
    blocks: int,
    size: int,
    columns: int,
) -> Entry:
    """sum dy and sum dy y of every block."""
    code = Code("normalize_gradient_sums")
    args = KernelArguments(code)
    pointers = [args.pointer(operand) for operand in (*images, *sums)]
    loops = ColumnLoops(args, axes, 0, _TILE, _lead(axes, blocks, size, columns))
    step_ = args.number(size)
    with loops.each_unit() as range_:
        rows = code.minimum(step_, code.sub(loops.along.extent, code.mul(loops.indices[0], step_)))
        types = [MEMORY_TYPES[operand.dtype] for operand in images]
        addresses = [loops.address(p, i, types[i]) for i, p in enumerate(pointers[:2])]
        targets = [
            Line(
                code,
                loops.address(p, _STATISTICS, "float"),
                "float",
                loops.strides[_STATISTICS],
            )
            for p in pointers[2:]
        ]
        for target in targets:
            fill(code, target, range_, splat_constant(code, 0.0))
        _add_rows(loops, list(zip(addresses, types, strict=True)), rows, range_, targets)
    return Entry(
        step, code, args.values, reads=list(images), writes=list(sums),
        kernel=f"sums of {blocks} blocks", cost=images[0].size * _NS_PER_ELEMENT / 2,
    )  # fmt: skip


def _lead(axes: Sequence[Axis], blocks: int, size: int, columns: int) -> Axis:
    """The axis of blocks, before all others."""
    along = next(axis for axis in axes if axis.reduced)
    return Axis(blocks, (*(size * stride for stride in along.strides[:3]), columns))


def _add_rows(
    loops: ColumnLoops,
    images: Sequence[tuple[str, str]],
    rows: str,
    columns: tuple[str, str],
    targets: Sequence[Line],
) -> None:
    """Add dy and dy y of some rows to two lines, several rows at once."""

    def column(index: str, mask: str | None, lines: Sequence[Sequence[Line]]) -> None:
        pairs = [(dy.load(index, mask), y.load(index, mask)) for dy, y in lines]
        found = SUM.combine_all([dy for dy, _ in pairs]), SUM.combine_all([dy * y for dy, y in pairs])
        for target, value in zip(targets, found, strict=True):
            target.store(index, target.load(index, mask) + value, mask)

    _each_vector(loops, images, rows, ROWS, columns, column)


def _each_vector(
    loops: ColumnLoops,
    images: Sequence[tuple[str, str]],
    rows: str,
    most: int,
    columns: tuple[str, str],
    body: Callable[[str, str | None, Sequence[Sequence[Line]]], None],
) -> None:
    """body(index, mask, lines of all images by row) for every vector of columns, of up to `most` rows at once.

    images   address and type of elements
    """
    code = loops.code

    def group(numbers: Sequence[str]) -> None:
        lines = [[loops.row(i, address, row, type_) for i, (address, type_) in enumerate(images)] for row in numbers]
        vector_loop(code, *columns, lambda index, mask: body(index, mask, lines))

    row_groups(code, rows, most, group)


def _write_entry(
    step: Step,
    images: Sequence[Operand],
    statistics: Sequence[Operand],
    sums: Sequence[Operand],
    axes: Sequence[Axis],
    blocks: int,
    size: int,
    columns: int,
) -> Entry:
    """The sums of all blocks become one, then each block writes its rows of dx."""
    code = Code("normalize_gradient_write")
    args = KernelArguments(code)
    pointers = [args.pointer(operand) for operand in images]
    small = [args.pointer(operand) for operand in (*statistics, *sums)]
    epsilon = splat(_epsilon(args, step))
    # Along the blocks, the statistics themselves do not move: every block joins all of them.
    lead = _lead(axes, blocks, size, 0)
    loops = ColumnLoops(args, axes, 0, _TILE, lead)
    step_, count, pitch = args.numbers([size, blocks, columns])
    slots = [code.variable(f"[{_TILE} x float]", "poison") for _ in range(3)]
    with loops.each_unit() as range_:
        rows = code.minimum(step_, code.sub(loops.along.extent, code.mul(loops.indices[0], step_)))
        types = [MEMORY_TYPES[operand.dtype] for operand in images]
        addresses = [loops.address(p, i, types[i]) for i, p in enumerate(pointers)]
        at = [loops.address(p, _STATISTICS, "float") for p in small]
        lines = [Line(code, address, "float", loops.strides[_STATISTICS]) for address in at]
        variance, *scales = lines[: len(statistics) - 2]
        shift, slope, *parts = lines[len(statistics) - 2 :]
        is_first = code.let(f"icmp eq i64 {loops.indices[0]}, 0")
        full = splat(to_float(code, loops.along.extent))
        factors = [loops.buffer(range_, slot) for slot in slots]

        def column(index: str, mask: str | None) -> None:
            totals = [Variable(splat_constant(code, 0.0)) for _ in parts]
            with code.loop(0, count) as block:
                for total, part in zip(totals, parts, strict=True):
                    address = code.at(part.pointer, code.mul(block, pitch), "float")
                    total.set(total.get() + Line(code, address, "float", part.stride).load(index, mask))
            found = [total.get() for total in totals]
            with code.when(is_first):
                for target, value in zip((shift, slope), found, strict=True):
                    target.store(index, value, mask)
            factor = 1.0 / (variance.load(index, mask) + epsilon).sqrt()
            for scale in scales:
                factor = factor * scale.load(index, mask)
            values = (factor, factor * (found[0] / full), factor * (found[1] / full))
            for line, value in zip(factors, values, strict=True):
                line.store(index, value, mask)

        vector_loop(code, *range_, column)
        _write(loops, list(zip(addresses, types, strict=True)), rows, range_, factors)
    return Entry(
        step, code, args.values,
        reads=[*images[:2], *statistics[:-2], *sums], writes=[images[_DX], *statistics[-2:]],
        kernel=f"normalize gradient of columns in {blocks} blocks", cost=images[0].size * _NS_PER_ELEMENT / 2,
    )  # fmt: skip


def _write(
    loops: ColumnLoops,
    images: Sequence[tuple[str, str]],
    rows: str,
    columns: tuple[str, str],
    factors: Sequence[Line],
) -> None:
    """dx = a dy - b - c y, several rows at once."""

    def column(index: str, mask: str | None, lines: Sequence[Sequence[Line]]) -> None:
        a, b, c = (factor.load(index, mask) for factor in factors)
        for dy, y, dx in lines:
            dx.store(index, _formed(dy.load(index, mask), y.load(index, mask), a, b, c), mask)

    _each_vector(loops, images, rows, _ROWS, columns, column)


KERNELS: dict[str, Maker] = {"normalize_gradient": normalize_gradient_entries}
WORKSPACES: dict[str, Callable[[Step], int]] = {"normalize_gradient": workspace}
READS = {"normalize_gradient": reads_normalize_gradient}
SUPPORTS = {"normalize_gradient": supports_normalize}
BFLOAT16 = dict.fromkeys(KERNELS, always)
