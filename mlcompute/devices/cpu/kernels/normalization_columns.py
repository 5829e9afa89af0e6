"""Normalization of columns (channels-last images): results lie side by side, and so do the rows they are found in.

Threads own columns, or samples of them: statistics and results in one go. Columns with many rows are cut into blocks
of rows instead: one kernel finds the statistics of every block; in another one, every block joins those of all blocks
and writes its rows. The number of blocks depends on the shape alone.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code, vector_lanes
from mlcompute.devices.cpu.codegen.combiners import ROWS, SUM
from mlcompute.devices.cpu.codegen.loops import Line, row_groups, splat, to_float, vector_loop
from mlcompute.devices.cpu.codegen.simd import SimdValue
from mlcompute.devices.cpu.kernels.normalization_forms import Terms
from mlcompute.devices.cpu.kernels.normalization_neighbours import (
    GroupForm,
    are_neighbours,
    columns_together,
    form_of,
    group_form_of,
    join_neighbours,
)
from mlcompute.devices.cpu.kernels.normalization_values import (
    GroupValues,
    Source,
    cost_of,
    early_values,
    epsilon_of,
    kernel_name,
    late_values,
    normalized_axes,
    owned_rows,
    source,
    store,
    structure,
)
from mlcompute.devices.cpu.kernels.row_column import MIN_COLUMNS, UNITS, WORTH_BLOCKS, ColumnLoops
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.devices.loop_nest import Axis, Operand, Operands, dense_strides, iteration_count
from mlcompute.devices.normalization_group import NormalizationGroup, Place
from mlcompute.ops.op import Step, Value

#: Columns worked on at once, or those of one group; rows written at once, fewer where much is computed for each.
_TILE, _ROWS = 512, 4
_MANY_OPS = 8
Columns = tuple[str, str]
#: Both statistics of some columns: of an index, and of the lanes of a mask.
Statistics = Callable[[str, "str | None"], Sequence[SimdValue]]


def are_columns(group: NormalizationGroup) -> bool:
    """Are the innermost elements those of different results, and is only one loop around them reduced?"""
    axes = normalized_axes(group, group.places)
    if axes[-1].reduced or sum(axis.reduced for axis in axes) != 1:
        return False
    return group.neighbours == 1 or are_neighbours(group, axes[-1])


def block_count(axes: Sequence[Axis]) -> int:
    """Into how many blocks the rows are cut; each block joins all of them again, so not into too many."""
    rows = next(axis.extent for axis in axes if axis.reduced)
    others = iteration_count([axis for axis in axes[:-1] if not axis.reduced])
    if iteration_count(axes) < WORTH_BLOCKS or others * -(-axes[-1].extent // MIN_COLUMNS) >= UNITS // 2:
        return 1
    return max(1, min(-(-UNITS // others), math.isqrt(rows // 16)))


def column_entries(step: Step, group: NormalizationGroup, operands: Operands, blocks: int) -> list[Entry]:
    """The kernels of a group whose results are columns."""
    along = next(axis for axis in normalized_axes(group) if axis.reduced)
    size = -(-along.extent // blocks)
    blocks = -(-along.extent // size)
    if blocks == 1:
        return [_one_kernel(step, group, operands.threads)]
    # Per block: two statistics of all results, each like a result with one element.
    count = group.result_count
    parts = [operands.workspace(step, part * blocks * count * 4, blocks * count * 4) for part in range(2)]
    cut = _Cut(blocks, size, count)
    return [_statistics_of_blocks(step, group, parts, cut), _join_and_write(step, group, parts, cut)]


class _Cut(NamedTuple):
    """Rows in blocks: how many blocks, rows of each, and the numbers between the statistics of two."""

    blocks: int
    size: int
    pitch: int


def _one_kernel(step: Step, group: NormalizationGroup, threads: int) -> Entry:
    """Every unit finds the statistics of its columns, then writes them."""
    others = iteration_count([axis for axis in normalized_axes(group)[:-1] if not axis.reduced])
    rows, own = owned_rows(group, others, threads)
    kernel = _Kernel("normalize_columns", group, group.places, rows)

    def write() -> None:
        slots = [kernel.slot() for _ in range(2)]
        with kernel.loops.each_unit() as columns:
            unit, extent = _Unit(kernel, columns), kernel.loops.along.extent
            found = [kernel.loops.buffer(columns, slot) for slot in slots]
            unit.find_statistics(extent, found)
            size = splat(to_float(kernel.code, extent))

            def statistics(index: str, mask: str | None) -> list[SimdValue]:
                return kernel.form.of_one_block([line.load(index, mask) for line in found], size)

            unit.write_results(extent, size, statistics)

    kernel.code.later(kernel.code_key, write)
    return Entry(
        step, kernel.code, kernel.args.values,
        reads=[place.operand for place in group.read], writes=[place.operand for place in group.written],
        rows=rows, by_row={number for number, place in enumerate((*group.read, *group.written)) if place in own},
        kernel=kernel_name(group, "columns"), cost=cost_of(group),
    )  # fmt: skip


def _statistics_of_blocks(step: Step, group: NormalizationGroup, parts: Sequence[Operand], cut: _Cut) -> Entry:
    """Two statistics of every block, and what is stored that they are computed from."""
    early = list(early_values(group).values())
    read = [group.inputs[value] for value in group.loads_for([*group.along, *early_values(group)], group.inputs)]
    read += group.known.values()
    kernel = _Kernel("normalize_blocks", group, [*read, *early], 0, parts, cut)

    def write() -> None:
        with kernel.loops.each_unit() as columns:
            _Unit(kernel, columns).find_statistics(kernel.rows_of_block(), [kernel.part(part) for part in range(2)])

    kernel.code.later(kernel.code_key, write)
    return Entry(
        step, kernel.code, kernel.args.values,
        reads=[place.operand for place in read], writes=[*(place.operand for place in early), *parts],
        kernel=f"{'statistics' if len(group.along) == 1 else 'sums'} of {cut.blocks} blocks",
        cost=cost_of(group) / 2,
    )  # fmt: skip


def _join_and_write(step: Step, group: NormalizationGroup, parts: Sequence[Operand], cut: _Cut) -> Entry:
    """The statistics of all blocks become one, then each block writes its rows."""
    places, late = group.inputs | early_values(group), late_values(group)
    read = [places[value] for value in group.loads_for(late, places)]
    read += group.known.values()
    written = [*late.values(), *group.found.values()]
    kernel = _Kernel("normalize_join", group, [*read, *written], 0, parts, cut._replace(pitch=0))
    pitch = kernel.args.number(cut.pitch)

    def write() -> None:
        with kernel.loops.each_unit() as columns:
            size = splat(to_float(kernel.code, kernel.loops.along.extent))

            def statistics(index: str, mask: str | None) -> list[SimdValue]:
                blocks = functools.partial(kernel.each_block, index, mask, pitch)
                return kernel.form.joined(kernel.code, blocks, size)

            _Unit(kernel, columns).write_results(kernel.rows_of_block(), size, statistics)

    kernel.code.later(kernel.code_key, write)
    return Entry(
        step, kernel.code, kernel.args.values,
        reads=[*(place.operand for place in read), *parts], writes=[place.operand for place in written],
        kernel=kernel_name(group, f"columns in {cut.blocks} blocks"), cost=cost_of(group) / 2,
    )  # fmt: skip


class _Kernel:
    """A kernel's arguments and loops.

    places   the operands that it reads and writes
    parts    the statistics of blocks; between those of two blocks lie `cut.pitch` numbers, or 0: not moved from
    """

    def __init__(
        self,
        name: str,
        group: NormalizationGroup,
        places: Sequence[Place],
        rows: int,
        parts: Sequence[Operand] = (),
        cut: _Cut | None = None,
    ) -> None:
        self.group, self.form = group, form_of(group)
        places = list(dict.fromkeys(places))  # one may be read, and written to later
        self.code = Code(name)
        self.args = KernelArguments(self.code)
        self.values = GroupValues(self.code, group)
        self.pointers = {place: self.args.pointer(place.operand) for place in places}
        self._parts = [self.args.pointer(part) for part in parts]
        self.epsilon = splat(epsilon_of(self.args, group.core))
        small = dense_strides(tuple(1 if axis in group.axes else size for axis, size in enumerate(group.shape)))
        kept = tuple(0 if axis in group.axes else stride for axis, stride in enumerate(small))
        axes = normalized_axes(group, places, *([kept] if parts else []))
        # Operand 0 is not read: it gives the loops their order.
        self.numbers = {place: number for number, place in enumerate(places, 1)}
        self.innermost = axes[-1].strides
        lead, self._cut = None, cut
        if cut is not None:
            along = next(axis for axis in axes if axis.reduced)
            lead = Axis(cut.blocks, (*(cut.size * stride for stride in along.strides[:-1]), cut.pitch))
            self._size, self._blocks = self.args.numbers([cut.size, cut.blocks])
        together = columns_together(group.neighbours)
        self._tile = max(_TILE // together, 1) * together
        self.loops = ColumnLoops(self.args, axes, rows, self._tile, lead, together=together)

    @property
    def code_key(self) -> str:
        """What the rest of the code depends on."""
        names = [place.name for place in self.numbers]
        fixed = [stride == 0 for stride in self.innermost]
        apart = f"{self._cut is None} {self._tile}"
        return f"{structure(self.group)} {self.loops.code_key} {names} {fixed} {apart} {vector_lanes()}"

    def slot(self, element: str = "float") -> str:
        """Memory on the stack for the columns of a unit."""
        return self.code.aligned_buffer(self._tile, element)

    def rows_of_block(self) -> str:
        """How many rows the current block has."""
        return self._rows_of(self.loops.indices[0])

    def _rows_of(self, block: str) -> str:
        code, size = self.code, self._size
        return code.minimum(size, code.sub(self.loops.along.extent, code.mul(block, size)))

    def part(self, number: int) -> Line:
        """A statistic of the current block, or of the first one, by column."""
        address = self.loops.address(self._parts[number], len(self.numbers) + 1, "float")
        return Line(self.code, address, "float", self.loops.strides[-1])

    def each_block(
        self, index: str, mask: str | None, pitch: str, body: Callable[[Sequence[SimdValue], SimdValue], None]
    ) -> None:
        """body(both statistics of some columns, how many rows they are of) for all blocks, in order."""
        code, first = self.code, [self.part(number) for number in range(2)]
        with code.loop(0, self._blocks) as block:
            start = code.mul(block, pitch)
            own = [line._replace(pointer=code.at(line.pointer, start, "float")).load(index, mask) for line in first]
            body(own, splat(to_float(code, self._rows_of(block))))

    def stores_found(self) -> contextlib.AbstractContextManager[None]:
        """Code that only one of several blocks runs."""
        if self._cut is None:
            return contextlib.nullcontext()
        return self.code.when(self.code.let(f"icmp eq i64 {self.loops.indices[0]}, 0"))


class _Unit:
    """The columns that a thread works on, of one block of rows or of all."""

    def __init__(self, kernel: _Kernel, columns: Columns) -> None:
        self.kernel, self.columns, self.group, self.code = kernel, columns, kernel.group, kernel.code
        self._addresses = {
            place: kernel.loops.address(pointer, kernel.numbers[place], MEMORY_TYPES[place.operand.dtype])
            for place, pointer in kernel.pointers.items()
        }
        self._known = {value: self._source(place) for value, place in self.group.known.items()}
        self._add_computed_known()

    def _add_computed_known(self) -> None:
        """Known values that are computed go to the stack: every row reads them."""
        computed = self.kernel.values.computed_known
        lines = []
        for value in computed:
            element = MEMORY_TYPES[value.dtype]
            lines.append(self.kernel.loops.buffer(self.columns, self.kernel.slot(element), element))

        def column(index: str, mask: str | None) -> None:
            found = self.kernel.values.at(computed, self._known, index, mask, {})
            for line, register in zip(lines, found, strict=True):
                store(line, index, register, mask)

        if computed:
            vector_loop(self.code, *self.columns, column)
            self._known |= {value: source(line, value.dtype) for value, line in zip(computed, lines, strict=True)}

    def _line(self, place: Place, row: str | None = None) -> Line:
        """An operand's columns, of a row where it has rows."""
        number, element = self.kernel.numbers[place], MEMORY_TYPES[place.operand.dtype]
        if row is not None:
            return self.kernel.loops.row(number, self._addresses[place], row, element)
        return Line(self.code, self._addresses[place], element, self.kernel.loops.strides[number])

    def _source(self, place: Place, row: str | None = None) -> Source:
        is_one = self.kernel.innermost[self.kernel.numbers[place]] == 0
        return source(self._line(place, row), place.operand.dtype, is_one=is_one)

    def _known_at(self, values: Sequence[Value], index: str, mask: str | None) -> dict[Value, SimdValue]:
        """Some known values of a vector of columns."""
        return {value: self._known[value](index, mask) for value in values}

    def _read_known(self, targets: Iterable[Value], given: Iterable[Value]) -> list[Value]:
        """The known values that full steps on the way to some targets read."""
        group = self.group
        steps = [step for step in group.needed(targets, given) if step is not group.core]
        return [value for value in dict.fromkeys(v for step in steps for v in step.inputs) if group.is_known(value)]

    def find_statistics(self, rows: str, lines: Sequence[Line]) -> None:
        """The statistics of some rows; what is stored that they are computed from is stored first."""
        group, values, code = self.group, self.kernel.values, self.code
        unstored = early_values(group)
        seen = {value: group.inputs[value] for value in group.loads_for([*group.along, *unstored], group.inputs)}

        def add_rows(targets: Sequence[Line], terms: Callable[[str, str | None], Terms]) -> None:
            stored = dict(unstored)
            unstored.clear()
            wanted = [*group.along, *stored]
            known = self._read_known(wanted, seen)

            def add(numbers: Sequence[str]) -> None:
                sources = [{value: self._source(place, row) for value, place in seen.items()} for row in numbers]
                stores = [[self._line(place, row) for place in stored.values()] for row in numbers]

                def column(index: str, mask: str | None) -> None:
                    given, of_column = self._known_at(known, index, mask), terms(index, mask)
                    found = []
                    for own, lines in zip(sources, stores, strict=True):
                        registers = values.at(wanted, own, index, mask, given)
                        for line, register in zip(lines, registers[len(group.along) :], strict=True):
                            store(line, index, register, mask)
                        found.append(of_column(*values.along(registers)))
                    for number, target in enumerate(targets):
                        total = SUM.combine_all([each[number] for each in found])
                        target.store(index, target.load(index, mask) + total, mask)

                vector_loop(code, *self.columns, column)

            row_groups(code, rows, ROWS, add)
            seen.update(stored)

        self.kernel.form.of_rows(code, add_rows, rows, self.columns, lines)

    def _lines(self, count: int) -> list[Line]:
        """Lines on the stack, for one number per column each."""
        return [self.kernel.loops.buffer(self.columns, self.kernel.slot()) for _ in range(count)]

    def _known_of_core(self, index: str, mask: str | None) -> list[SimdValue]:
        """The core's inputs that are the same for all elements of a column."""
        return [self._known[value](index, mask) for value in self.group.core.inputs[len(self.group.along) :]]

    def _store_found(self, statistics: Sequence[SimdValue], index: str, mask: str | None) -> None:
        with self.kernel.stores_found():
            for value, place in self.group.found.items():
                number = self.group.core.results.index(value) - 1
                self._line(place).store(index, statistics[number], mask)

    def _of_groups(self, form: GroupForm, statistics: Statistics) -> Statistics:
        """The statistics of the group that each column belongs to."""
        lines = self._lines(2)

        def part(index: str, mask: str | None) -> None:
            own = statistics(index, mask)
            if form.gives_own:
                self._store_found(own, index, mask)
            for line, value in zip(lines, form.parts(own, self._known_of_core(index, mask)), strict=True):
                line.store(index, value, mask)

        vector_loop(self.code, *self.columns, part)
        join_neighbours(self.code, form, lines, *self.columns, self.group.neighbours)
        return lambda index, mask: [line.load(index, mask) for line in lines]

    def write_results(self, rows: str, size: SimdValue, statistics: Statistics) -> None:
        """What is formed with the statistics of all rows, and these."""
        group, values, form, code = self.group, self.kernel.values, self.kernel.form, self.code
        lines = self._lines(form.coefficient_count)
        of_group = group_form_of(group)
        joined = statistics if of_group is None else self._of_groups(of_group, statistics)

        def prepare(index: str, mask: str | None) -> None:
            both = joined(index, mask)
            if of_group is None or not of_group.gives_own:
                self._store_found(both, index, mask)
            small = self._known_of_core(index, mask)
            for line, value in zip(lines, form.coefficients(both, size, self.kernel.epsilon, small), strict=True):
                line.store(index, value, mask)

        vector_loop(code, *self.columns, prepare)
        places, late = group.inputs | early_values(group), late_values(group)
        read = {value: places[value] for value in group.loads_for(late, places)}
        known = self._read_known(late, read)

        def write(numbers: Sequence[str]) -> None:
            sources = [{value: self._source(place, row) for value, place in read.items()} for row in numbers]
            targets = [self._line(place, row) for row in numbers for place in late.values()]

            def column(index: str, mask: str | None) -> None:
                coefficients, given = [line.load(index, mask) for line in lines], self._known_at(known, index, mask)
                formed = functools.partial(form.formed, coefficients)
                registers = [one for own in sources for one in values.at(late, own, index, mask, given, formed)]
                for target, register in zip(targets, registers, strict=True):
                    store(target, index, register, mask)

            vector_loop(code, *self.columns, column)

        row_groups(code, rows, _ROWS if len(group.steps) <= _MANY_OPS else _ROWS // 2, write)
