"""Normalization of rows (layer norm): the elements of a result lie side by side and stay in the cache in all passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code, vector_lanes
from mlcompute.devices.cpu.codegen.combiners import SUM, LineReduction
from mlcompute.devices.cpu.codegen.loops import Line, loop_over, splat, to_float, vector_loop
from mlcompute.devices.cpu.codegen.simd import SimdValue
from mlcompute.devices.cpu.kernels.normalization_forms import Terms
from mlcompute.devices.cpu.kernels.normalization_neighbours import (
    are_neighbours,
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
    scalar,
    source,
    store,
    structure,
)
from mlcompute.devices.cpu.kernels.row_column import RowLoops
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.devices.loop_nest import Axis, iteration_count
from mlcompute.devices.normalization_group import NormalizationGroup, Place
from mlcompute.ops.op import Step, Value

#: Elements of a row from which on rows of a group are reduced one by one: a vector.
_LEAST_OF_GROUPS = 16


def are_rows(group: NormalizationGroup) -> bool:
    """Are the innermost elements reduced together, by the same loops whatever else is read before the sums?"""
    axes = normalized_axes(group)
    if not axes[-1].reduced or _reduced(axes) != _reduced(normalized_axes(group, _before_sums(group))):
        return False
    return group.neighbours == 1 or _are_rows_of_groups(group, axes)


def _are_rows_of_groups(group: NormalizationGroup, axes: Sequence[Axis]) -> bool:
    """Are rows long enough to be reduced one by one, and those of a group neighbours?"""
    kept = [axis for axis in axes if not axis.reduced]
    return axes[-1].extent >= _LEAST_OF_GROUPS and are_neighbours(group, kept[-1])


def _before_sums(group: NormalizationGroup) -> list[Place]:
    """What is read and written before the statistics are known."""
    early = early_values(group)
    read = [group.inputs[value] for value in group.loads_for([*group.along, *early], group.inputs)]
    return [*read, *early.values(), *group.known.values(), *group.found.values()]


def _reduced(axes: Sequence[Axis]) -> list[int]:
    """What is summed, and in which order."""
    return [axis.extent for axis in axes if axis.reduced]


def row_entry(step: Step, group: NormalizationGroup, threads: int) -> Entry:
    """The kernel of a group whose results are rows."""
    units = iteration_count([axis for axis in normalized_axes(group) if not axis.reduced]) // group.neighbours
    rows, own = owned_rows(group, units, threads)
    kernel = _Kernel(group, rows)
    write = kernel.write_rows if group.neighbours == 1 else kernel.write_groups
    kernel.code.later(kernel.code_key, write)
    return Entry(
        step, kernel.code, kernel.args.values,
        reads=[place.operand for place in group.read], writes=[place.operand for place in group.written],
        rows=rows, by_row={number for number, place in enumerate((*group.read, *group.written)) if place in own},
        kernel=kernel_name(group, "rows"), cost=cost_of(group),
    )  # fmt: skip


class _Kernel:
    """Writes the kernel. A class because its parts share many names."""

    def __init__(self, group: NormalizationGroup, rows: int) -> None:
        self.group, self.form = group, form_of(group)
        self._early, self._late = early_values(group), late_values(group)
        first = group.loads_for([*group.along, *self._early], group.inputs)
        self._first = {value: group.inputs[value] for value in first}
        places = group.inputs | self._early
        self._rest = {value: places[value] for value in group.loads_for(self._late, places)}
        self.code = code = Code("normalize_rows")
        self.args = args = KernelArguments(code)
        self.values = GroupValues(code, group)
        pointers = {place: args.pointer(place.operand) for place in group.places}
        size = args.number(_elements(group))
        self._epsilon = epsilon_of(args, group.core)
        self._sums = _Rows(group, args, pointers, _before_sums(group), rows)
        written = [*self._rest.values(), *self._late.values()]
        self._writes = _Rows(group, args, pointers, written, rows, shares=False)
        self._size = to_float(code, size)

    @property
    def code_key(self) -> str:
        """What the rest of the code depends on."""
        return f"{structure(self.group)} {self._sums.code_key} {self._writes.code_key} {vector_lanes()}"

    def write_rows(self) -> None:
        """Every unit is a row: its statistics, then its results."""
        with self._sums.loops.each_unit():
            self._writes.loops.enter(self._sums.loops.unit)
            known = _known(self.values, self._sums)
            statistics = self._statistics(known)
            self._store_found(statistics)
            self._write_results(statistics, known)

    def write_groups(self) -> None:
        """Every unit is a group of rows: the statistics of all of them, then their results."""
        code, neighbours, form = self.code, self.group.neighbours, group_form_of(self.group)
        assert form is not None
        slots = [code.aligned_buffer(neighbours) for _ in range(2)]
        lines = [Line(code, slot, "float") for slot in slots]
        with self._sums.loops.each_group(neighbours) as first:
            with self._each_row_of_group(first) as row:
                known = _known(self.values, self._sums)
                statistics = self._statistics(known)
                if form.gives_own:
                    self._store_found(statistics)
                for line, part in zip(lines, form.parts(statistics, self._known_of_core(known)), strict=True):
                    code.store(line.address(row), "float", part.name)
            join_neighbours(code, form, lines, 0, neighbours, neighbours)
            with self._each_row_of_group(first) as row:
                statistics = [line.load(row, lanes=1) for line in lines]
                if not form.gives_own:
                    self._store_found(statistics)
                self._write_results(statistics, _known(self.values, self._sums))

    @contextmanager
    def _each_row_of_group(self, first: str) -> Iterator[str]:
        with self.code.loop(0, self.group.neighbours) as row:
            for rows in (self._sums, self._writes):
                rows.loops.enter(self.code.add(first, row))
            yield row

    def _known_of_core(self, known: Mapping[Value, SimdValue]) -> list[SimdValue]:
        """The core's inputs that are the same for all elements of a row."""
        return [known[value] for value in self.group.core.inputs[len(self.group.along) :]]

    def _statistics(self, known: Mapping[Value, SimdValue]) -> list[SimdValue]:
        """The statistics of the current row."""
        group, code, values, sums = self.group, self.code, self.values, self._sums
        given = {value: splat(register) for value, register in known.items()}
        seen, unstored = dict(self._first), dict(self._early)

        def sum_row(count: int, terms: Terms) -> list[SimdValue]:
            """One pass over the elements; the first one stores what is computed before the statistics."""
            total, stored = LineReduction(code, SUM, count), dict(unstored)
            unstored.clear()
            with sums.lines([*seen.values(), *stored.values()]) as (lines, extent):
                sources = {value: lines[place].source() for value, place in seen.items()}

                def elements(index: str, mask: str | None) -> Sequence[SimdValue]:
                    found = values.at([*group.along, *stored], sources, index, mask, given)
                    for place, register in zip(stored.values(), found[len(group.along) :], strict=True):
                        store(lines[place].line, index, register, mask)
                    return terms(*values.along(found))

                total.add_each(extent, elements)
            seen.update(stored)
            return [total.result(number) for number in range(count)]

        return self.form.of_row(sum_row, self._size)

    def _store_found(self, statistics: Sequence[SimdValue]) -> None:
        for value, place in self.group.found.items():
            found = statistics[self.group.core.results.index(value) - 1]
            self.code.store(self._sums.address(place), found.element, found.name)

    def _write_results(self, statistics: Sequence[SimdValue], known: Mapping[Value, SimdValue]) -> None:
        """What is formed with the statistics."""
        values, form, small = self.values, self.form, self._known_of_core(known)
        given = {value: splat(register) for value, register in known.items()}
        coefficients = [splat(each) for each in form.coefficients(statistics, self._size, self._epsilon, small)]

        def formed(*elements: SimdValue) -> SimdValue:
            return form.formed(coefficients, *elements)

        with self._writes.lines([*self._rest.values(), *self._late.values()]) as (lines, extent):
            sources = {value: lines[place].source() for value, place in self._rest.items()}

            def finish(index: str, mask: str | None) -> None:
                found = values.at(self._late, sources, index, mask, given, formed)
                for place, register in zip(self._late.values(), found, strict=True):
                    store(lines[place].line, index, register, mask)

            vector_loop(self.code, 0, extent, finish)


def _elements(group: NormalizationGroup) -> int:
    """Of one row."""
    return iteration_count([axis for axis in normalized_axes(group) if axis.reduced])


def _known(values: GroupValues, rows: _Rows) -> dict[Value, SimdValue]:
    """The current row's known values: operands, and what is computed from them."""
    group = values.group
    found = {
        value: scalar(Line(values.code, rows.address(place), MEMORY_TYPES[value.dtype]), value.dtype)
        for value, place in group.known.items()
    }
    computed = values.computed_known
    found.update(zip(computed, values.at(computed, {}, "0", None, found, lanes=1), strict=True))
    return found


class _RowLine:
    """An operand along the innermost loop; `is_one`: one element stands for all."""

    def __init__(self, line: Line, place: Place, is_one: bool) -> None:
        self.line, self._place, self._is_one = line, place, is_one

    def source(self) -> Source:
        return source(self.line, self._place.operand.dtype, is_one=self._is_one)


class _Rows:
    """Loops over rows, and where the current one lies in some operands."""

    def __init__(
        self,
        group: NormalizationGroup,
        args: KernelArguments,
        pointers: Mapping[Place, str],
        places: Sequence[Place],
        rows: int,
        *,
        shares: bool = True,
    ) -> None:
        axes = normalized_axes(group, places)
        self._code, self._pointers, self._innermost = args.code, pointers, axes[-1].strides
        # Operand 0 is not read: it gives the loops their order.
        self._numbers = {place: number for number, place in enumerate(places, 1)}
        self.loops = RowLoops(args, axes, rows, 1 + len(places), shares=shares, together=group.neighbours)

    @property
    def code_key(self) -> str:
        names = [place.name for place in self._numbers]
        return f"{self.loops.code_key} {names} {[stride == 0 for stride in self._innermost]}"

    def address(self, place: Place) -> str:
        """Where the current row begins in an operand."""
        element = MEMORY_TYPES[place.operand.dtype]
        return self.loops.address(self._pointers[place], self._numbers[place], element)

    @contextmanager
    def lines(self, places: Sequence[Place]) -> Iterator[tuple[dict[Place, _RowLine], str]]:
        """The loops around the innermost one: lines of some operands, and how many elements they have."""
        *outer, innermost = self.loops.reduced
        numbers = [self._numbers[place] for place in places]
        types = [MEMORY_TYPES[place.operand.dtype] for place in places]
        inner = [axis._replace(strides=[axis.strides[number] for number in numbers]) for axis in outer]
        with loop_over(self._code, inner, [self.address(place) for place in places], types) as addresses:
            lines = {}
            for place, address, type_, number in zip(places, addresses, types, numbers, strict=True):
                line = Line(self._code, address, type_, self.loops.strides[number])
                lines[place] = _RowLine(line, place, self._innermost[number] == 0)
            yield lines, innermost.extent
