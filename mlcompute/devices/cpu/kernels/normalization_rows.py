"""Normalization of rows (layer norm): the elements of a result lie side by side and stay in the cache in all passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code, vector_lanes
from mlcompute.devices.cpu.codegen.combiners import SUM, LineReduction
from mlcompute.devices.cpu.codegen.loops import Line, loop_over, splat, to_float, vector_loop
from mlcompute.devices.cpu.codegen.simd import SimdValue
from mlcompute.devices.cpu.kernels.normalization_forms import FORMS, Terms
from mlcompute.devices.cpu.kernels.normalization_values import (
    GroupValues,
    Source,
    cost_of,
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


def are_rows(group: NormalizationGroup) -> bool:
    """Are the innermost elements reduced together, by the same loops whatever else is read before the sums?"""
    axes = normalized_axes(group)
    return axes[-1].reduced and _reduced(axes) == _reduced(normalized_axes(group, _before_sums(group)))


def _before_sums(group: NormalizationGroup) -> list[Place]:
    """What is read and written before the statistics are known."""
    read = [group.inputs[value] for value in group.loads_for(group.along, group.inputs)]
    return [*read, *group.early.values(), *group.known.values(), *group.found.values()]


def _reduced(axes: Sequence[Axis]) -> list[int]:
    """What is summed, and in which order."""
    return [axis.extent for axis in axes if axis.reduced]


def row_entry(step: Step, group: NormalizationGroup, threads: int) -> Entry:
    """The kernel of a group whose results are rows."""
    early = group.early
    first = {value: group.inputs[value] for value in group.loads_for(group.along, group.inputs)}
    late = late_values(group)
    places = group.inputs | early
    rest = {value: places[value] for value in group.loads_for(late, places)}
    code = Code("normalize_rows")
    args = KernelArguments(code)
    pointers = {place: args.pointer(place.operand) for place in group.places}
    axes = normalized_axes(group)
    size_number = args.number(iteration_count([axis for axis in axes if axis.reduced]))
    epsilon = epsilon_of(args, group.core)
    units = iteration_count([axis for axis in axes if not axis.reduced])
    rows, own = owned_rows(group, units, threads)
    sums = _Rows(group, args, pointers, _before_sums(group), rows)
    writes = _Rows(group, args, pointers, [*rest.values(), *late.values()], rows, shares=False)
    values, form, size = GroupValues(code, group), FORMS[group.core.op.name], to_float(code, size_number)

    def write() -> None:
        with sums.loops.each_unit():
            writes.loops.enter(sums.loops.unit)
            known = _known(values, sums)
            given = {value: splat(register) for value, register in known.items()}
            seen, unstored = dict(first), dict(early)

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

            statistics = form.of_row(sum_row, size)
            for value, place in group.found.items():
                found = statistics[group.core.results.index(value) - 1]
                code.store(sums.address(place), found.element, found.name)
            small = [known[value] for value in group.core.inputs[len(group.along) :]]
            coefficients = [splat(each) for each in form.coefficients(statistics, size, epsilon, small)]

            def formed(*elements: SimdValue) -> SimdValue:
                return form.formed(coefficients, *elements)

            with writes.lines([*rest.values(), *late.values()]) as (lines, extent):
                sources = {value: lines[place].source() for value, place in rest.items()}

                def finish(index: str, mask: str | None) -> None:
                    found = values.at(late, sources, index, mask, given, formed)
                    for place, register in zip(late.values(), found, strict=True):
                        store(lines[place].line, index, register, mask)

                vector_loop(code, 0, extent, finish)

    code.later(f"{structure(group)} {sums.code_key} {writes.code_key} {vector_lanes()}", write)
    return Entry(
        step, code, args.values,
        reads=[place.operand for place in group.read], writes=[place.operand for place in group.written],
        rows=rows, by_row={number for number, place in enumerate((*group.read, *group.written)) if place in own},
        kernel=kernel_name(group, "rows"), cost=cost_of(group),
    )  # fmt: skip


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
        self.loops = RowLoops(args, axes, rows, operands=1 + len(places), shares=shares)

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
