"""One entry of a program's tape: a kernel, its arguments, and which memory it touches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mlcompute.devices.cpu.codegen.code import Code
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.ops.op import Array, Step

Argument = Operand | int | Code


@dataclass(eq=False)
class Entry:
    """A kernel call.

    code       the kernel; in `arguments` operands and other kernels become pointers, integers stay
    reads, writes   memory it touches
    scratch    memory it also writes, which no other kernel reads
    rows       when not 0: threads share these rows (leading extents) and touch only their own in `by_row` operands
    rows_for   when not 0: only that many threads do
    kernel     what the printed plan calls it
    cost       estimated nanoseconds on one thread, for deciding how many threads pay
    """

    step: Step
    code: Code
    arguments: list[Argument]
    reads: list[Operand]
    writes: list[Operand]
    rows: int = 0
    by_row: set[int] = field(default_factory=set)
    rows_for: int = 0
    kernel: str = ""
    cost: float = 0.0
    keeps_alive: list[object] = field(default_factory=list)
    scratch: list[Operand] = field(default_factory=list)
    #: Addresses that go somewhere else than into `arguments`: (operand, setter of its address).
    pointers: list[tuple[Operand, Callable[[int], None]]] = field(default_factory=list)
    #: A word that a kernel sets when it fails: all threads stop at the next barrier, before parameters or state change.
    status: Array | None = None
    #: What a status means; without it, the kernel found invalid data, and the step's NumPy meaning says which.
    reason: Callable[[int], str] | None = None


#: Makes the entries of a step; None when there is no kernel for it (a dtype, a layout).
Maker = Callable[[Step, Operands], Sequence[Entry] | None]
