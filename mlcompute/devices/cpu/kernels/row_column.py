"""The skeleton of kernels that reduce: rows (the innermost loop is reduced) or columns (it is kept).

Reductions, softmax and normalization differ in what they do to a line, not in how they find it: which loops threads
share, how a unit of sharing becomes addresses, which columns it has. That is written once, here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.loops import (
    AxisRegisters,
    Line,
    address_at,
    axis_registers,
    line_stride,
    share_units,
    unravel_index,
)
from mlcompute.devices.loop_nest import Axis, iteration_count

#: Columns a unit has at least, so that no two threads write to one cache line for long.
MIN_COLUMNS = 64
#: Units there should be, for threads to share them evenly.
UNITS = 32
#: Fewer elements than this are not worth a second pass.
WORTH_BLOCKS = 1 << 16


class ColumnTiles:
    """Ranges of columns that are units of sharing: as wide as possible while there are enough units.

    together   columns that must be of one range, and those after them, and so on; `max_width` is a multiple of it
    """

    def __init__(
        self, args: KernelArguments, columns: int, others: int, max_width: int = 2048, together: int = 16
    ) -> None:
        pieces = max(1, min(-(-UNITS // max(others, 1)), columns // MIN_COLUMNS))
        width = -(-columns // pieces)
        width = min(-(-width // together) * together, max_width)
        self.count = -(-columns // width)
        self._code = args.code
        self._columns, self._width, self._count = args.numbers([columns, width, self.count])

    def split(self, unit: str) -> tuple[str, tuple[str, str]]:
        """What a unit means: (the rest of its number, first and last column)."""
        code = self._code
        begin = code.mul(code.rem(unit, self._count), self._width)
        return code.div(unit, self._count), (begin, code.minimum(code.add(begin, self._width), self._columns))


class _Loops:
    """What rows and columns share: registers of the kept and the reduced loops, and addresses along the kept ones."""

    #: Of operands along the innermost loop: None for neighbours.
    strides: list[str | None]

    def __init__(self, args: KernelArguments, kept: Sequence[Axis], axes: Sequence[Axis], full: int | None) -> None:
        self.args, self.code = args, args.code
        self.kept = axis_registers(args, kept)
        self.reduced = axis_registers(args, [axis for axis in axes if axis.reduced])
        self._full = full
        self._full_extent: str | None = None
        #: The current unit, and its indices along the kept loops.
        self.unit, self.indices = "", list[str]()

    @property
    def code_key(self) -> str:
        """What code inside the loops depends on, beside the arguments it reads."""
        apart = [stride is not None for stride in self.strides]
        return f"{len(self.kept)} {len(self.reduced)} {apart} {self._full is None}"

    def _share(self, units: int, rows: int) -> None:
        self.units = share_units(self.args, units, rows)
        self._full_extent = self.args.number(self._full) if self._full is not None else None

    def enter(self, unit: str) -> None:
        """Find the kept indices of a unit; where it is one of several blocks, how many rows the block has."""
        code = self.code
        self.unit = unit
        self.indices = unravel_index(code, unit, self.kept)
        if self._full_extent is not None:
            size = self.reduced[0].extent
            rest = code.sub(self._full_extent, code.mul(self.indices[0], size))
            self.reduced[0] = self.reduced[0]._replace(extent=code.minimum(size, rest))

    def address(self, pointer: str, operand: int, element: str) -> str:
        """Where the current unit begins in an operand."""
        return address_at(self.code, pointer, operand, self.kept, self.indices, element)


class RowLoops(_Loops):
    """One unit of sharing per result; its elements lie along the innermost loop.

    operands   how many of the axes' strides are those of operands that are read or written along lines
    full       the first axis numbers blocks of the first reduced axis, whose full extent this is
    shares     False: loops over the same units, in other memory; `enter` follows the loops that share them
    together   neighbouring results of one unit of sharing: see `each_group`
    """

    def __init__(
        self,
        args: KernelArguments,
        axes: Sequence[Axis],
        rows: int,
        operands: int,
        full: int | None = None,
        shares: bool = True,
        together: int = 1,
    ) -> None:
        kept = [axis for axis in axes if not axis.reduced]
        super().__init__(args, kept, axes, full)
        self.strides = [line_stride(args, stride) for stride in axes[-1].strides[:operands]]
        if shares:
            self._share(iteration_count(kept) // together, rows)

    @contextlib.contextmanager
    def each_unit(self) -> Iterator[None]:
        """The loop over this thread's units."""
        with self.code.loop(*self.units) as unit:
            self.enter(unit)
            yield

    @contextlib.contextmanager
    def each_group(self, together: int) -> Iterator[str]:
        """The loop over this thread's units of several results each; gives the first result of each."""
        with self.code.loop(*self.units) as unit:
            yield self.code.mul(unit, together)


class ColumnLoops(_Loops):
    """A unit of sharing is a range of columns of one iteration of the outer loops; rows are combined into one.

    lead       an axis of blocks before the kept ones
    full       the first axis numbers blocks of the first reduced axis, whose full extent this is
    together   see `ColumnTiles`
    """

    def __init__(
        self,
        args: KernelArguments,
        axes: Sequence[Axis],
        rows: int,
        max_width: int = 2048,
        lead: Axis | None = None,
        full: int | None = None,
        together: int = 16,
    ) -> None:
        outer = [*([lead] if lead else []), *(axis for axis in axes[:-1] if not axis.reduced)]
        super().__init__(args, outer, axes, full)
        self.strides = [line_stride(args, stride) for stride in axes[-1].strides]
        self.tiles = ColumnTiles(args, axes[-1].extent, iteration_count(outer), max_width, together)
        self._share(iteration_count(outer) * self.tiles.count, rows)

    @property
    def along(self) -> AxisRegisters:
        """The innermost of the reduced loops."""
        return self.reduced[-1]

    @contextlib.contextmanager
    def each_unit(self) -> Iterator[tuple[str, str]]:
        """The loop over this thread's units; gives the first and the last column of each."""
        with self.code.loop(*self.units) as unit:
            rest, columns = self.tiles.split(unit)
            self.enter(rest)
            yield columns

    def buffer(self, columns: tuple[str, str], slot: str, element: str = "float") -> Line:
        """A line on the stack for the columns of a unit."""
        return Line(self.code, self.code.at(slot, self.code.sub(0, columns[0]), element), element)

    def row(self, operand: int, first: str, row: str, element: str = "float") -> Line:
        """A row of an operand whose first row lies at `first`."""
        address = self.code.at(first, self.code.mul(row, self.along.strides[operand]), element)
        return Line(self.code, address, element, self.strides[operand])
