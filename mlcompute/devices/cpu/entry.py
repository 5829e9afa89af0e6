"""One entry of a program's tape: a kernel, what it is handed, and which memory it touches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mlcompute.devices.cpu.code import Code
from mlcompute.devices.cpu.operands import Operand, Operands
from mlcompute.ops.op import Array, Step

#: What a kernel is handed in a word: the address of an operand or of another kernel, or a number.
Argument = Operand | int | Code


@dataclass(eq=False)
class Entry:
    """A kernel call.

    code       the kernel; `arguments` its words: operands and other kernels become pointers, integers stay
    reads, writes   memory it touches
    scratch    memory it also writes, for nobody else to read
    rows       when not 0: threads share these rows (leading extents) and touch only their own in `by_row` operands
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
    kernel: str = "loop"
    cost: float = 0.0
    keeps_alive: list[object] = field(default_factory=list)
    scratch: list[Operand] = field(default_factory=list)
    #: Addresses that go somewhere else than into `arguments`: (operand, whom to tell).
    pointers: list[tuple[Operand, Callable[[int], None]]] = field(default_factory=list)
    #: One word that a kernel sets when it failed: all threads stop where they next meet, before lasting memory changes.
    status: Array | None = None
    #: What a status means; without it, the kernel met data it must refuse, and the step's NumPy meaning says which.
    reason: Callable[[int], str] | None = None


#: Makes the entries of a step; None when this kernel cannot do it (a dtype, a layout) and another way is taken.
Maker = Callable[[Step, Operands], Sequence[Entry] | None]
