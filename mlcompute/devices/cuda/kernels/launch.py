"""What a step becomes on a GPU: launches of generated kernels, and calls of NVIDIA's libraries.

A maker turns a step into a list of these. It decides everything before the first run: grid, block, algorithm,
workspace. At run time they are captured into a CUDA graph once, so nothing in a launch may depend on data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlcompute.devices.cuda.codegen.types import is_element, is_floating
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.ops.op import Step, Value

Extents = tuple[int, int, int]


@dataclass(frozen=True)
class Status:
    """An argument: where a kernel says that it found invalid data (an index out of range, say).

    The kernel gets an `int*` to two zeroed words and stores 1 and the offending index; later kernels that overwrite
    parameters or state then do nothing, and the run raises ExecutionError.

    reason  the message, from the offending index
    """

    reason: Callable[[int], str]


@dataclass(frozen=True, eq=False)
class Rows:
    """An argument: structs one after the other, passed by value. Each field begins at a multiple of 8 bytes.

    writes   which of a row's fields are written (positions)
    """

    rows: Sequence[Sequence[Operand | np.generic]]
    writes: Sequence[int]


#: Operands become addresses (`const float*` and the like), NumPy scalars are passed by value in their own type.
Argument = Operand | np.generic | Status | Rows


@dataclass(eq=False)
class Launch:
    """One kernel launch.

    kernel     what the printed program calls it
    source     CUDA C++ of one kernel, whose name is written `KERNEL`: `extern "C" __global__ void KERNEL(...)`.
               Equal sources are compiled once; what differs between steps of the same form should be an argument
    writes     which of the arguments are written (positions); the others are read
    guarded    does it overwrite parameters or state? Then its first argument is `const int* failed`, added when it is
               launched, and it must do nothing when `*failed` is not 0
    parts      the launches it was made of (`merge_launches`)
    """

    step: Step
    kernel: str
    source: str
    arguments: Sequence[Argument]
    writes: Sequence[int]
    grid: Extents
    block: Extents
    shared_bytes: int = 0
    guarded: bool = False
    parts: Sequence[Launch] = ()

    @property
    def steps(self) -> list[Step]:
        """The steps it carries out, or takes part in."""
        return [part.step for part in self.parts] or [self.step]

    @property
    def touched(self) -> tuple[set[Value], set[Value]]:
        """Whose memory it reads or writes, and what of that it writes."""
        every, written, positions = set(), set(), set(self.writes)
        for number, argument in enumerate(self.arguments):
            if isinstance(argument, Operand):
                every.add(argument.base)
                if number in positions:
                    written.add(argument.base)
            elif isinstance(argument, Rows):
                for row in argument.rows:
                    every |= {field.base for field in row if isinstance(field, Operand)}
                    written |= {field.base for k in argument.writes if isinstance(field := row[k], Operand)}
        return every, written


@dataclass(eq=False)
class LibraryCall:
    """A call of cuBLASLt, cuDNN or the driver that enqueues work on a stream.

    operands   memory it reads and writes; `writes` are positions among them
    enqueue    given a stream and the operands' addresses, in order. It must not allocate, synchronize or read results
    keeps      what must live as long as the program: descriptors, handles
    is_alone   does the library use memory of its own for it, so that two such calls must not run at the same time?
    """

    step: Step
    kernel: str
    operands: Sequence[Operand]
    writes: Sequence[int]
    enqueue: Callable[[int, Sequence[int]], None]
    keeps: list[Any] = field(default_factory=list)
    is_alone: bool = False

    @property
    def steps(self) -> list[Step]:
        """The step it takes part in."""
        return [self.step]

    @property
    def touched(self) -> tuple[set[Value], set[Value]]:
        """Whose memory it reads or writes, and what of that it writes."""
        return {operand.base for operand in self.operands}, {self.operands[k].base for k in self.writes}


Work = Launch | LibraryCall
#: Makes the launches of a step. Only called for steps that `supports` of the table's row accepts.
Maker = Callable[[Step, Operands], Sequence[Work]]


@dataclass(frozen=True)
class Row:
    """One op of the kernel table.

    supports    is there a kernel for this step: its types, shapes and attributes? If not, the compiler expands it
    workspace   bytes of arena it needs while it runs (`Operands.workspace` gives it to the maker)
    is_faster   of a fused step: is it faster than the steps it is made of, where that was not measured? None where that
                is out of the question
    """

    make: Maker
    supports: Callable[[Step], bool] = lambda step: True
    workspace: Callable[[Step], int] = lambda step: 0
    is_faster: Callable[[Step], bool | None] = lambda step: None


def supports_elements(step: Step) -> bool:
    """All types kernels can read and write."""
    return is_element(step.inputs[0].dtype)


def supports_floats(step: Step) -> bool:
    """Floating-point numbers."""
    return is_floating(step.inputs[0].dtype) and is_element(step.inputs[0].dtype)
