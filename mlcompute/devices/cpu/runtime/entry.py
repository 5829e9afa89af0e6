"""One entry of a program's tape: a kernel, its arguments, and which memory it touches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mlcompute.devices.cpu.codegen.arguments import Argument
from mlcompute.devices.cpu.codegen.code import Code
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.ops.op import Array, Step, Value


class Touch(NamedTuple):
    """Memory that an entry reads or writes.

    base      which of the entry's bases it lies in
    written   is it written?
    rows      rows that threads own (0: any thread touches anything), where there are `rows_for` threads (0: any number)
    offset    bytes from the start of the base; `nbytes`: of the operand
    is_array  an array in the step's workspace, as a converted copy is: it has its bytes for itself. Plain bytes there,
              like part of any other value, stand for all of it
    """

    base: int
    written: bool
    rows: int
    rows_for: int
    offset: int
    nbytes: int
    is_array: bool


class Layout(NamedTuple):
    """Where the operands of an entry lie.

    bases      values in whose memory they do
    addresses  (argument, number of its base, offset in bytes) of the arguments that are operands
    touches    memory that is read, and behind it what is written
    reads, writes   numbers of the bases that are read, and written, scratch apart
    status     which argument is the address of the status
    """

    bases: list[Value]
    addresses: list[tuple[int, int, int]]
    touches: list[Touch]
    reads: list[int]
    writes: list[int]
    status: int | None


@dataclass(eq=False)
class Entry:
    """A kernel call.

    code       the kernel; in `arguments` operands, arrays and other kernels become pointers, integers stay
    reads, writes   memory it touches
    scratch    memory it also writes, which no other kernel reads
    rows       when not 0: threads share these rows (leading extents) and touch only their own in `by_row` operands
    rows_for   when not 0: only that many threads do
    own_reads  which of `reads` a thread reads only the rows of (leading extents) that it updates, if it is a parameter
    kernel     what the printed plan calls it
    cost       estimated nanoseconds on one thread, for deciding how many threads pay
    in_pieces  can the work of a thread be cut into pieces, which others take over when they have done their own?
               Memory of a thread's own is then that of the one that runs a piece (`code.worker`)
    most_pieces   more of them would cost more than others can save
    streams    what it writes is for other processes
    """

    step: Step
    code: Code
    arguments: list[Argument]
    reads: list[Operand]
    writes: list[Operand]
    rows: int = 0
    by_row: set[int] = field(default_factory=set)
    rows_for: int = 0
    own_reads: set[int] = field(default_factory=set)
    kernel: str = ""
    cost: float = 0.0
    in_pieces: bool = False
    most_pieces: int = 8
    streams: bool = False
    keeps_alive: list[object] = field(default_factory=list)
    scratch: list[Operand] = field(default_factory=list)
    #: Addresses that go somewhere else than into `arguments`: (operand, setter of its address).
    pointers: list[tuple[Operand, Callable[[int], None]]] = field(default_factory=list)
    #: A word that a kernel sets when it fails: all threads stop at the next barrier, before parameters or state change.
    status: Array | None = None
    #: What a status means; without it, the kernel found invalid data, and the step's NumPy meaning says which.
    reason: Callable[[int], str] | None = None

    @functools.cached_property
    def layout(self) -> Layout:
        """Where its operands lie, in numbers."""
        bases: dict[Value, int] = {}

        def number(operand: Operand) -> int:
            return bases.setdefault(operand.base, len(bases))

        addresses, status = [], None
        for place, argument in enumerate(self.arguments):
            if isinstance(argument, Operand):
                addresses.append((place, number(argument), argument.byte_offset))
            elif argument is self.status:
                status = place
        touches = []
        for place, operand in enumerate([*self.reads, *self.writes, *self.scratch]):
            rows = self.rows if place in self.by_row else 0
            nbytes = operand.size * operand.dtype.itemsize
            is_array = operand.dtype != operand.base.dtype  # of a workspace, whose elements are bytes
            written, offset = place >= len(self.reads), operand.byte_offset
            touches.append(Touch(number(operand), written, rows, self.rows_for, offset, nbytes, is_array))
        for operand, _ in self.pointers:
            number(operand)
        read, written_to = len(self.reads), len(self.reads) + len(self.writes)
        return Layout(
            list(bases),
            addresses,
            touches,
            [touch.base for touch in touches[:read]],
            [touch.base for touch in touches[read:written_to]],
            status,
        )

    @property
    def is_shareable(self) -> bool:
        """May steps like its own call it, too? Not where it keeps addresses of its own operands or status elsewhere."""
        return not self.pointers and (self.status is None or self.layout.status is not None)


def always(step: Step) -> bool:
    """Whatever the step: a row of a table of kernels that asks."""
    return True


#: Makes the entries of a step; None when there is no kernel for it (a dtype, a layout).
Maker = Callable[[Step, Operands], Sequence[Entry] | None]
